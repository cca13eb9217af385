"""The contract of `dpjax.layers.mixer.Mixer`, for every mixer; a new one is a new row."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dpjax import ops
from dpjax.layers.attention import RelativeAttention, SelfAttention
from dpjax.layers.dispatcher import Dispatcher, MultiHeadDispatcher
from dpjax.layers.extractors import HE, ME, SHE, WE

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
  """Normal numbers in the place of the initial ones, so that no bias is zero."""
  shapes = jax.eval_shape(module.init, jax.random.key(0), draw())["params"]
  generator = np.random.default_rng(1)

  def normal(x):
    return jnp.asarray(generator.standard_normal(x.shape) / 2, x.dtype)

  return jax.tree.map(normal, shapes)


@pytest.mark.parametrize("name, num_heads", HEADS)
def test_causal_and_of_the_promised_reach(name, num_heads):
  mixer = MIXERS[name]
  distance_ts = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
  for settings, reach in mixer.reaches:
    module = mixer(num_heads, **settings)
    params = draw_params(module)
    forward = jax.jacrev(lambda x: module.apply({"params": params}, x))  # noqa: B023
    # The largest derivative of an output position by an input position, row by row.
    depends_btcs = np.abs(jax.jit(forward)(draw())).max(axis=(2, 5))
    is_seen_ts = (distance_ts >= 0) & (distance_ts < (reach or LENGTH))
    for row in range(BATCH):
      np.testing.assert_array_equal(depends_btcs[row, :, row] != 0, is_seen_ts)
      assert (depends_btcs[row, :, row][is_seen_ts] > 1e-7).all()
      assert (np.delete(depends_btcs[row], row, axis=1) == 0).all()


def test_rows_of_a_batch_do_not_meet(mixer):
  module = mixer()
  params = draw_params(module)
  apply = jax.jit(lambda x: module.apply({"params": params}, x))
  inputs = draw()
  output, changed = apply(inputs), apply(inputs.at[1].set(draw(seed=2)[1]))
  np.testing.assert_array_equal(output[0], changed[0])
  assert (output[1] != changed[1]).any()


def test_any_length_gives_the_beginning_of_the_longest(mixer):
  module, inputs = mixer(), draw(MAX_LENGTH)
  params = draw_params(module)
  lengths = (1, 2, 5, 8, MAX_LENGTH)

  @jax.jit
  def run(inputs):
    return [module.apply({"params": params}, inputs[:, :length]) for length in lengths]

  outputs = run(inputs)
  for length, output in zip(lengths, outputs, strict=True):
    assert output.shape == (BATCH, length, WIDTH)
    np.testing.assert_allclose(output, outputs[-1][:, :length], rtol=1e-5, atol=1e-5)


def test_parameters_do_not_depend_on_the_length(mixer):
  module = mixer()
  short, long = (
    jax.eval_shape(module.init, jax.random.key(0), draw(length)) for length in (1, LENGTH)
  )
  assert short == long


def test_a_mixer_of_a_single_position(mixer):
  module = mixer(max_length=1)
  output, variables = module.init_with_output(jax.random.key(0), draw(1))
  assert output.shape == (BATCH, 1, WIDTH) and np.isfinite(output).all()
  assert all(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def test_refusals(mixer):
  def refused(module, inputs, message):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(module.init, jax.random.key(0), inputs)

  refused(mixer(), draw(MAX_LENGTH + 1), "max_length = 13, got T = 14")
  if mixer.has_heads:
    refused(mixer(num_heads=4), draw(), "num_heads: expected a divisor of the width 6")
  refused(mixer(), draw()[0], r"expected \[B, T, D\], got the shape \(11, 6\)")


# jax.nn.dot_product_attention mixes the two dtypes itself.
@jax.numpy_dtype_promotion("standard")
def test_bfloat16_computes_what_float32_does(mixer):
  exact, rounded = mixer(), mixer(dtype=jnp.bfloat16)
  params = draw_params(rounded)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}

  def run(module, x):
    def loss(params):
      output = module.apply({"params": params}, x.astype(module.dtype))
      return jnp.sum(output.astype(jnp.float32) ** 2), output

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

  (_, expected), expected_grads = run(exact, draw())
  (_, output), grads = run(rounded, draw())
  assert output.dtype == jnp.bfloat16 and expected.dtype == jnp.float32
  if "bias" in grads.get("queries_keys_values", {}):
    # The gradient by the keys' bias is zero but for rounding.
    for tree in (grads, expected_grads):
      tree["queries_keys_values"]["bias"] = tree["queries_keys_values"]["bias"][::2]
      # So is that by the bias of all distances.
      tree.get("distances", {}).pop("bias", None)
  for got, want in zip(
    jax.tree.leaves((output, grads)),
    jax.tree.leaves((expected, expected_grads)),
    strict=True,
  ):
    # A bfloat16 has 8 bits: 0.4% each, over a few roundings.
    tolerance = 0.03 * np.abs(want).max()
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
  "name, num_heads",
  [(name, heads) for name, heads in HEADS if MIXERS[name].implementations and heads != 2],
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


@pytest.mark.parametrize("name", [name for name in MIXERS if MIXERS[name].dropout])
def test_dropout_is_drawn_from_its_key_and_in_training_alone(name):
  mixer = MIXERS[name]
  module = mixer(**{mixer.dropout: 0.5})
  params = draw_params(module)

  @jax.jit
  def train(seed):
    rngs = {"dropout": jax.random.key(seed)}
    return module.apply({"params": params}, draw(), deterministic=False, rngs=rngs)

  expected = mixer().apply({"params": params}, draw())
  np.testing.assert_array_equal(module.apply({"params": params}, draw()), expected)
  draws = [train(seed) for seed in range(17)]
  np.testing.assert_array_equal(draws[0], train(0))
  assert any(not np.allclose(other, expected, atol=1e-3) for other in draws)
  assert any(not np.allclose(other, draws[0], atol=1e-3) for other in draws)
  # A forgotten key is an error, not a constant mask.
  with pytest.raises(flax.errors.InvalidRngError, match="dropout"):
    module.apply({"params": params}, draw(), deterministic=False)


def test_without_dropout_training_needs_no_key(mixer):
  module = mixer()
  params = draw_params(module)
  output = module.apply({"params": params}, draw(), deterministic=False)
  np.testing.assert_array_equal(output, module.apply({"params": params}, draw()))


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


def test_every_parameter_has_a_gradient(mixer):
  module = mixer()
  params = draw_params(module)

  def loss(params):
    output = module.apply({"params": params}, draw(MAX_LENGTH))
    return jnp.sum(output * draw(MAX_LENGTH, seed=5))

  grads = jax.jit(jax.grad(loss))(params)
  if "bias" in grads.get("queries_keys_values", {}):
    # A bias of all keys moves every score of a query alike: no effect.
    bias = grads["queries_keys_values"]["bias"]
    np.testing.assert_allclose(bias[1], 0, atol=1e-4)
    grads["queries_keys_values"]["bias"] = bias[::2]
  for path, grad in jax.tree.leaves_with_path(grads):
    assert jnp.isfinite(grad).all() and (grad != 0).all(), jax.tree_util.keystr(path)


# Chunks of the rows, as many real tokens of each; the rest is padding.
CHUNKS = [(4, (4, 2)), (1, (1, 1)), (3, (0, 3)), (1, (1, 1)), (5, (5, 4))]


def test_chunks_with_a_cache_give_what_the_whole_rows_give(mixer):
  for settings, _ in mixer.reaches:
    module = mixer(**settings)
    params = draw_params(module)
    inputs = draw()
    whole = module.apply({"params": params}, inputs)

    @jax.jit
    def step(chunk, cache, lengths, module=module, params=params):
      return module.apply({"params": params}, chunk, cache=cache, lengths=lengths)

    cache = module.init_cache(BATCH, WIDTH)
    structure, seen = jax.tree.structure(cache), [0] * BATCH
    for size, lengths in CHUNKS:
      chunk = np.full((BATCH, size, WIDTH), 1e3, np.float32)
      for row, length in enumerate(lengths):
        chunk[row, :length] = inputs[row, seen[row] : seen[row] + length]
      output, cache = step(chunk, cache, jnp.asarray(lengths, jnp.int32))
      assert output.shape == chunk.shape and np.isfinite(output).all()
      assert jax.tree.structure(cache) == structure
      for row, length in enumerate(lengths):
        found, expected = output[row, :length], whole[row, seen[row] :][:length]
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
        seen[row] += length
    assert seen == [LENGTH, LENGTH]


def test_a_cache_needs_no_lengths_where_all_is_real(mixer):
  module = mixer()
  params = draw_params(module)
  inputs = draw()
  whole = module.apply({"params": params}, inputs)
  step = jax.jit(lambda x, cache: module.apply({"params": params}, x, cache=cache))
  cache, outputs = module.init_cache(BATCH, WIDTH), []
  for place in range(LENGTH):
    output, cache = step(inputs[:, place : place + 1], cache)
    outputs.append(output)
  assert step._cache_size() == 1  # one program for all tokens
  np.testing.assert_allclose(jnp.concatenate(outputs, 1), whole, atol=1e-5, rtol=1e-5)
