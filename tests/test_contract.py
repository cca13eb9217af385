"""The contract of `dpjax.layers.mixer.Mixer`, for every mixer; a new one is a new row."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dpjax import ops, testing
from dpjax.layers import (
  HE,
  ME,
  SHE,
  WE,
  Dispatcher,
  MultiHeadDispatcher,
  RelativeAttention,
  SelfAttention,
)
from tests import helpers

BATCH, LENGTH, WIDTH, MAX_LENGTH = 2, 11, 6, 13
SHIFT_AND_SUM = tuple(ops.SHIFT_AND_SUM)
CAUSAL_CONVOLUTION = tuple(ops.CAUSAL_CONVOLUTION)


class Mixer(NamedTuple):
  """A mixer and what it promises beyond the contract.

  Attributes:
    make: called with `num_heads` (where there are heads), `max_length` and settings,
      gives the module.
    reaches: settings -> positions that an output sees, itself included; None is all
      before it.
    implementations: of its operator, by name; the first is the reference.
    dropout: the setting that drops out; "" where nothing does.
    has_heads: whether it takes a number of heads.
  """

  make: Callable[..., nn.Module]
  reaches: tuple[tuple[dict, int | None], ...] = (({}, None),)
  implementations: tuple[str, ...] = ()
  dropout: str = "dropout"
  has_heads: bool = True

  def __call__(self, num_heads=2, max_length=MAX_LENGTH, **settings) -> nn.Module:
    """Builds it."""
    heads = [num_heads] if self.has_heads else []
    return self.make(*heads, max_length, **settings)

  @classmethod
  def extractor(cls, layer, **settings) -> "Mixer":
    """An Extractor, with the given parts of it."""
    make = partial(layer, **settings)
    return cls(make, implementations=CAUSAL_CONVOLUTION, dropout="", has_heads=False)


LEVELS = (({}, None), ({"num_levels": 1}, 2), ({"num_levels": 3}, 8))
MIXERS = {
  "dispatcher": Mixer(Dispatcher, LEVELS, SHIFT_AND_SUM, "level_dropout"),
  "multihead": Mixer(MultiHeadDispatcher, LEVELS, SHIFT_AND_SUM, "level_dropout"),
  "attention": Mixer(SelfAttention),
  "attention without biases": Mixer(partial(SelfAttention, use_bias=False)),
  "relative attention": Mixer(RelativeAttention),
  "she": Mixer.extractor(SHE),
  "he": Mixer.extractor(HE),
  "we": Mixer.extractor(WE),
  "me": Mixer.extractor(ME),
  "he's extraction": Mixer.extractor(HE, adjustment=False, output_projection=False),
}
HEADS = [
  (name, num_heads)
  for name, mixer in MIXERS.items()
  for num_heads in ((1, 2, 3) if mixer.has_heads else (1,))
]


@pytest.fixture(params=MIXERS.values(), ids=MIXERS.keys())
def mixer(request):
  return request.param


def draw(length=LENGTH, seed=0):
  normal = np.random.default_rng(seed).standard_normal((BATCH, length, WIDTH))
  return jnp.asarray(normal, jnp.float32)


def draw_params(module):
  shapes = jax.eval_shape(module.init, jax.random.key(0), draw())["params"]
  generator = np.random.default_rng(1)

  def normal(x):
    return jnp.asarray(generator.standard_normal(x.shape) / 2, x.dtype)

  return jax.tree.map(normal, shapes)


def effective(grads):
  """Without biases that move every score of a query alike: of all keys, all distances."""
  if "bias" in grads.get("queries_keys_values", {}):
    grads = jax.tree.map(lambda grad: grad, grads)  # new dictionaries
    grads["queries_keys_values"]["bias"] = grads["queries_keys_values"]["bias"][::2]
    grads.get("distances", {}).pop("bias", None)
  return grads


# Of the others, documents and chunks cost more than they add: they share these forms.
DEFAULT = ("dispatcher", "attention", "relative attention", "she", "we")
CASES = [
  helpers.slow_unless(
    name in DEFAULT or relation not in ("documents", "chunks", "document_chunks"),
    *(name, heads, relation),
  )
  for relation in testing.RELATIONS
  for name, heads in HEADS
  if heads == (3 if relation == "causality" else 2) or not MIXERS[name].has_heads
  if relation != "dropout" or MIXERS[name].dropout
]


@pytest.mark.parametrize("name, num_heads, relation", CASES)
def test_keeps_the_contract(name, num_heads, relation):
  mixer = MIXERS[name]
  settings_matter = relation in ("causality", "chunks", "document_chunks")
  for settings, reach in mixer.reaches if settings_matter else mixer.reaches[:1]:
    make = partial(mixer, num_heads, **settings)
    testing.check_mixer(
      make,
      width=WIDTH,
      max_length=MAX_LENGTH,
      reach=reach,
      dropout=mixer.dropout,
      gradients=effective,
      relations=[relation],
    )


@pytest.mark.parametrize(
  "relation",
  [helpers.slow_unless(x not in ("documents", "dropout"), x) for x in testing.RELATIONS],
)
def test_rotary_attention_keeps_the_contract(relation):
  # A base so small that no pair of features is nearly still.
  make = partial(SelfAttention, 3, rotary_base=5.0)
  testing.check_mixer(
    make, width=12, max_length=MAX_LENGTH, dropout="dropout", relations=[relation]
  )


@pytest.mark.parametrize("layer", [SelfAttention, RelativeAttention])
def test_biases_of_all_keys_and_distances_have_no_effect(layer):
  module, weights = layer(2, MAX_LENGTH), draw(seed=5)

  def loss(params):
    return jnp.sum(module.apply({"params": params}, draw()) * weights)

  grads = jax.jit(jax.grad(loss))(draw_params(module))
  np.testing.assert_allclose(grads["queries_keys_values"]["bias"][1], 0, atol=1e-4)
  if layer is RelativeAttention:
    np.testing.assert_allclose(grads["distances"]["bias"], 0, atol=1e-4)


def test_refusals(mixer):
  def refused(module, inputs, message):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(module.init, jax.random.key(0), inputs)

  refused(mixer(), draw(MAX_LENGTH + 1), "max_length = 13, got T = 14")
  if mixer.has_heads:
    refused(mixer(num_heads=4), draw(), "num_heads: expected a divisor of the width 6")
  refused(mixer(), draw()[0], r"inputs: expected floats \[B, T, D\] .* got float32 \(11, 6\)")


@pytest.mark.parametrize(
  "name, num_heads",
  [
    helpers.slow_unless(heads == 3 or name not in ("dispatcher", "multihead"), name, heads)
    for name, heads in HEADS
    if MIXERS[name].implementations and heads != 2 and name != "me"
  ],
)
def test_implementations_agree(name, num_heads):
  mixer, inputs, weights = MIXERS[name], draw(), draw(seed=5)

  def run(**settings):
    module = mixer(num_heads, **settings)
    params = draw_params(module)

    def loss(params, x):
      output = module.apply({"params": params}, x)
      return jnp.sum(output * weights), output

    gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(gradient)(params, inputs)

  reference = run(implementation=mixer.implementations[0])
  others = [dict(implementation=other) for other in mixer.implementations[1:]]
  for settings in [{}, *others]:
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
      run(**settings),
      reference,
    )
  with pytest.raises(ValueError, match="implementation: expected"):
    run(implementation="fastest")


@pytest.mark.parametrize("layer", [Dispatcher, MultiHeadDispatcher])
def test_only_the_later_dispatcher_never_skips_level_0(layer):
  module = layer(2, MAX_LENGTH, level_dropout=0.9)
  params = draw_params(module)

  @jax.jit
  def derivatives(seeds):
    def by_the_past(seed):
      def output(x):
        rngs = {"dropout": jax.random.key(seed)}
        y_btd = module.apply({"params": params}, x, deterministic=False, rngs=rngs)
        return jnp.sum(y_btd[:, 8])

      return jnp.abs(jax.grad(output)(draw())).max(axis=(0, 2))

    return jax.lax.map(by_the_past, seeds)

  seen = derivatives(jnp.arange(41)) != 0
  # Position 7 comes to position 8 by level 0, position 4 by level 2.
  assert 0 < seen[:, 4].sum() < 20
  assert seen[:, 7].all() if layer is MultiHeadDispatcher else 0 < seen[:, 7].sum() < 20


@pytest.mark.parametrize("layer", [Dispatcher, MultiHeadDispatcher])
def test_given_levels_are_the_kept_ones(layer):
  three, module = layer(2, MAX_LENGTH, num_levels=3), layer(2, MAX_LENGTH)
  params = draw_params(module)
  keep = np.array([True, True, True, False])
  output = module.apply({"params": params}, draw(), level_keep=keep)
  gates = params["gates"]["kernel"]
  first = gates.reshape(gates.shape[0], -1, 4)[..., :3].reshape(gates.shape[0], -1)
  expected = three.apply({"params": params | {"gates": {"kernel": first}}}, draw())
  np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
