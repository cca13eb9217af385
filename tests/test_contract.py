"""The contract of `dpjax.layers.mixer.Mixer`, for every mixer; a new one is a new row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import layers, ops, testing
from dpjax.config import registry
from dpjax.layers import (
  Dispatcher,
  LocalAttention,
  MultiHeadDispatcher,
  RelativeAttention,
  SelfAttention,
)
from tests import helpers

BATCH, LENGTH, WIDTH, HEADS, MAX_LENGTH = 2, 11, 6, 2, 13
LEVELS = dict(dropout="level_dropout")
WEIGHTS = dict(dropout="dropout")
# The mixers, and the arguments of `check_mixer` that they need. By default, all relations of each
# are checked.
MIXERS = {
  "dispatcher": (partial(Dispatcher, num_heads=HEADS), LEVELS),
  "dispatcher_multihead": (partial(MultiHeadDispatcher, num_heads=HEADS), LEVELS),
  "attention": (partial(SelfAttention, num_heads=HEADS), WEIGHTS),
  "relative_attention": (partial(RelativeAttention, num_heads=HEADS), WEIGHTS),
  "local_attention": (partial(LocalAttention, num_heads=HEADS, window=4), WEIGHTS | {"reach": 4}),
  "short_convolution": (layers.ShortConvolution, {"reach": 3}),
  # A width at which no sum of gradients cancels to little more than its rounding.
  "mamba2": (partial(layers.Mamba2, state_width=5, head_width=4), {"width": 12}),
  **{name: (getattr(layers, name.upper()), {}) for name in ("she", "he", "we", "me")},
}
# A base so small that no pair of features is nearly still.
ROTARY = dict(num_heads=3, rotary_base=5.0)
# Other settings of them; with -m slow.
VARIANTS = {
  "dispatcher of three levels": (partial(Dispatcher, num_heads=HEADS, num_levels=3), {"reach": 8}),
  "attention without biases": (partial(SelfAttention, num_heads=HEADS, use_bias=False), {}),
  "rotary attention": (partial(SelfAttention, **ROTARY), {"width": 12}),
  "rotary local attention": (
    partial(LocalAttention, **ROTARY, window=4),
    {"width": 12, "reach": 4},
  ),
  "extraction of he": (partial(layers.HE, adjustment=False, output_projection=False), {}),
}


def effective(grads):
  """Without biases that move every score of a query alike: of all keys, all distances."""
  if "bias" in grads.get("queries_keys_values", {}):
    grads = jax.tree.map(lambda grad: grad, grads)  # new dictionaries
    grads["queries_keys_values"]["bias"] = grads["queries_keys_values"]["bias"][::2]
    grads.get("distances", {}).pop("bias", None)
  return grads


@pytest.mark.parametrize(
  "name, relation",
  [
    helpers.slow_unless(name in MIXERS, name, relation)
    for name, (_, settings) in (MIXERS | VARIANTS).items()
    for relation in testing.RELATIONS
    if relation != "dropout" or "dropout" in settings
  ],
)
def test_keeps_the_contract(name, relation):
  make, settings = (MIXERS | VARIANTS)[name]
  settings = dict(width=WIDTH, max_length=MAX_LENGTH, gradients=effective) | settings
  testing.check_mixer(make, relations=[relation], **settings)


def test_the_table_of_built_in_mixers_is_complete():
  makers = {name: getattr(make, "func", make) for name, (make, _) in MIXERS.items()}
  names = helpers.builtin(registry.mixers)
  assert makers == {name: registry.mixers.component(name) for name in names}


def draw():
  return jnp.float32(np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)))


def draw_params(module):
  shapes = jax.eval_shape(module.init, jax.random.key(0), draw())["params"]
  generator = np.random.default_rng(1)
  return jax.tree.map(lambda x: jnp.float32(generator.standard_normal(x.shape) / 2), shapes)


@pytest.mark.parametrize("name", MIXERS)
def test_a_batch_may_be_empty(name):
  make, settings = MIXERS[name]
  module, inputs = make(max_length=MAX_LENGTH), jnp.zeros((3, LENGTH, settings.get("width", WIDTH)))
  params = jax.eval_shape(module.init, jax.random.key(0), inputs)
  assert jax.eval_shape(module.apply, params, inputs[:0]).shape == (0, *inputs.shape[1:])


def test_starts_of_documents_with_a_cache_are_refused():
  module = Dispatcher(num_heads=HEADS, max_length=MAX_LENGTH)
  cache = module.init_cache(BATCH, WIDTH)
  context = layers.Context(document_starts=jnp.eye(LENGTH, dtype=jnp.int32)[:BATCH])
  with pytest.raises(ValueError, match="document_starts: expected None with a cache"):
    module.init(jax.random.key(0), draw(), cache, context, method="step")


@pytest.mark.parametrize(
  "layer, table",
  [
    *((layer, ops.SHIFT_AND_SUM) for layer in (Dispatcher, MultiHeadDispatcher)),
    *((layer, ops.CAUSAL_CONVOLUTION) for layer in (layers.SHE, layers.HE, layers.WE, layers.ME)),
  ],
)
def test_a_layer_runs_the_chosen_implementation(layer, table, monkeypatch):
  runs = []

  def stub(name):
    return lambda x, *_: runs.append(name) or x

  for name in table:
    monkeypatch.setitem(table, name, stub(name))
  for name in table:
    module = layer(max_length=MAX_LENGTH, implementation=name)
    jax.eval_shape(module.init, jax.random.key(0), draw())
  assert runs == [*table]


@pytest.mark.parametrize("layer", [Dispatcher, MultiHeadDispatcher])
def test_only_the_later_dispatcher_never_skips_level_0(layer):
  module = layer(num_heads=HEADS, max_length=MAX_LENGTH, level_dropout=0.9)
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


def test_heads_divide_the_width():
  with pytest.raises(ValueError, match="^num_heads: expected a divisor of the width 6, got 4"):
    layers.Dispatcher(num_heads=4, max_length=MAX_LENGTH).init(jax.random.key(0), draw())
