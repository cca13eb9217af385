"""The mixers of `dpjax_relatives` keep the contract of `dpjax.layers.Mixer`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import testing
from dpjax_relatives import MIXERS
from dpjax_relatives.log_linear_mamba2 import LogLinearMamba2
from tests import helpers

pytest.importorskip("jla")

SMALL = {name: dict(num_heads=2) for name in MIXERS}
SMALL["log_linear_mamba2"] = dict(state_width=5, head_width=4)
WIDTH = 6
WIDTH_OF_MAMBA2 = 12
# With three features in a head, the norms of their sums amplify the rounding to bfloat16.
WIDTH_IN_BFLOAT16 = 64
RELATIONS = [name for name in testing.RELATIONS if name != "dropout"]  # These mixers have none.
# What gates can break; the rest is slow for mixers that differ from others only in their gates.
BY_GATES = {"bfloat16", "gradients", "chunks", "documents"}


def width_of(name, relation):
  if name == "log_linear_mamba2":
    return WIDTH_OF_MAMBA2
  return WIDTH_IN_BFLOAT16 if relation == "bfloat16" else WIDTH


def check(name, relation, **settings):
  testing.check_mixer(
    partial(MIXERS[name], **SMALL[name], **settings),
    width=width_of(name, relation),
    rounding_between_documents=2e-6,
    relations=[relation],
  )


@pytest.mark.parametrize(
  "name, relation",
  [
    helpers.slow_unless(name not in ("deltanet", "gdn2") or relation in BY_GATES, name, relation)
    for name in MIXERS
    for relation in RELATIONS
  ],
)
def test_keeps_the_contract(name, relation):
  check(name, relation)


@pytest.mark.parametrize("relation", ["causality", "tokens", "documents"])
def test_linear_attention_without_a_convolution_keeps_the_contract(relation):
  check("gated_deltanet", relation, num_taps=0)
  check("gla", relation, num_taps=3, key_width=2, value_width=4)


@pytest.mark.parametrize("name", ["gated_deltanet", "log_linear_mamba2"])
def test_documents_do_not_change_each_other_position_by_position(name):
  make = partial(MIXERS[name], **SMALL[name], implementation="reference")
  testing.check_mixer(make, width=width_of(name, "documents"), relations=["documents"])


@pytest.mark.parametrize("name", MIXERS)
def test_documents_of_many_chunks_do_not_change_each_other(name):
  module = MIXERS[name](max_length=200, **SMALL[name])
  draw = np.random.default_rng(0).standard_normal
  inputs = jnp.asarray(draw((2, 150, WIDTH_OF_MAMBA2)), jnp.float32)
  variables = jax.jit(module.init)(jax.random.key(0), inputs)
  starts = jnp.zeros((2, 150), jnp.int32).at[:, jnp.array([0, 70])].set(1)
  run = jax.jit(partial(module.apply, variables, document_starts=starts))
  whole = run(inputs)[:, 70:]
  atol = 2e-6 * np.abs(whole).max()
  alone = jax.jit(module.apply)(variables, inputs[:, 70:])
  np.testing.assert_allclose(whole, alone, atol=atol)
  changed = run(inputs.at[:, :70].add(1.0))[:, 70:]
  np.testing.assert_allclose(whole, changed, atol=atol)


@pytest.mark.parametrize("name", MIXERS)
def test_a_document_of_a_single_position(name):
  module = MIXERS[name](max_length=5, **SMALL[name])
  inputs = jnp.ones((2, 1, WIDTH_OF_MAMBA2))
  output, variables = module.init_with_output(jax.random.key(0), inputs)
  starts = jnp.ones((2, 1), jnp.int32)
  np.testing.assert_array_equal(module.apply(variables, inputs, document_starts=starts), output)


@pytest.mark.parametrize("max_length", [2, 3, 150])
def test_steps_of_any_size_add_up_the_states_of_the_levels(max_length):
  module = LogLinearMamba2(max_length=max_length, state_width=3, head_width=4, expand=1)
  inputs = jnp.asarray(np.random.default_rng(0).standard_normal((2, max_length, 8)), jnp.float32)
  whole, variables = jax.jit(module.init_with_output)(jax.random.key(0), inputs)
  step = jax.jit(partial(module.apply, method="step"))
  cache = module.init_cache(2, 8)
  outputs = []
  for chunk in jnp.split(inputs, [1, 2], axis=1):
    if chunk.size:
      output, cache = step(variables, chunk, cache)
      outputs.append(output)
  atol = 1e-5 * jnp.abs(whole).max()
  np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=atol)
  assert cache.state.num_before.tolist() == [max_length] * 2
