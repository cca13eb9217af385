"""Models with a cache: logits by chunks are those of the parallel pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax.models.build import build_model
from tests import helpers

VOCAB, LENGTH, MAX_LENGTH = 31, 19, 23
TOKENS = jnp.asarray(np.random.default_rng(0).integers(VOCAB, size=(2, LENGTH)))


def make(mixer, **settings):
  config = dict(config_lib.default_model())
  config |= dict(mixer=mixer, vocab_size=VOCAB, num_layers=3, width=12,
                 feed_forward_width=20, max_length=MAX_LENGTH)
  config |= helpers.own_settings(mixer, num_heads=3) | settings
  model = build_model(config)
  params = model.init(jax.random.key(1), TOKENS[:, :3])["params"]
  return model, jax.tree.map(lambda x: x * 2, params)


WAYS = (
  dict(positions="sinusoidal", norm="post", scan_layers=True),
  dict(positions="learned", norm="pre", scan_layers=False),
)


# Each way with every other mixer: what they are made of is the same for all.
@pytest.mark.parametrize(
  "mixer, way", [(mixer, i % 2) for i, mixer in enumerate(config_lib.MIXERS)]
)
def test_chunks_are_the_whole(mixer, way):
  model, params = make(mixer, **WAYS[way])
  whole = jax.jit(model.apply)({"params": params}, TOKENS).logits

  @jax.jit
  def step(tokens, cache, lengths):
    return model.apply({"params": params}, tokens, cache=cache, lengths=lengths)

  cache, seen = model.init_cache(2), [0, 0]
  # A prompt, tokens, a longer chunk; the second row is behind the first.
  for size, lengths in ((7, (7, 4)), (1, (1, 1)), (1, (1, 1)), (7, (3, 7)), (1, (1, 0))):
    chunk = np.zeros((2, size), np.int32)
    for row, length in enumerate(lengths):
      chunk[row, :length] = TOKENS[row, seen[row] : seen[row] + length]
    output = step(chunk, cache, jnp.asarray(lengths, jnp.int32))
    for row, length in enumerate(lengths):
      np.testing.assert_allclose(
        output.logits[row, :length], whole[row, seen[row] :][:length], atol=1e-5
      )
      seen[row] += length
    cache = output.cache
    assert cache.length.tolist() == seen
  assert step._cache_size() == 2  # one program a size


def test_a_cache_does_not_grow_and_can_be_donated():
  model, params = make("dispatcher")

  def step(tokens, cache):
    return model.apply({"params": params}, tokens, cache=cache).cache

  compiled = jax.jit(step, donate_argnums=1)
  cache = model.init_cache(2)
  shapes = jax.tree.map(jnp.shape, cache)
  for place in range(3):
    before = cache
    cache = compiled(TOKENS[:, place : place + 1], cache)
    assert jax.tree.map(jnp.shape, cache) == shapes
    assert all(layer.ring.is_deleted() for layer in before.layers)


def test_the_dispatcher_goes_on_beyond_its_window():
  """As a Dispatcher with a longer window and as many levels would."""
  short, params = make("dispatcher", positions="none", max_length=8, num_levels=3)
  long, _ = make("dispatcher", positions="none", max_length=LENGTH, num_levels=3)
  whole = jax.jit(long.apply)({"params": params}, TOKENS).logits
  cache, found = short.init_cache(2), []
  step = jax.jit(lambda x, cache: short.apply({"params": params}, x, cache=cache))
  for begin in range(0, LENGTH, 8):
    output = step(TOKENS[:, begin : begin + 8], cache)
    found.append(output.logits)
    cache = output.cache
  np.testing.assert_allclose(jnp.concatenate(found, 1), whole, atol=1e-5)


@pytest.mark.parametrize("boundaries", ["none", "whitespace"])
def test_parameters_by_layer_say_the_same(boundaries):
  settings = {}
  if boundaries != "none":
    settings = dict(boundaries=boundaries, space_ids=(3, 5), first_layers=1, last_layers=2)
  model, params = make("dispatcher", **settings)
  cache = model.init_cache(2)
  expected = model.apply({"params": params}, TOKENS[:, :1], cache=cache).logits
  by_layer = {"params": model.unstack(params)}
  found = model.apply(by_layer, TOKENS[:, :1], cache=cache).logits
  np.testing.assert_array_equal(found, expected)
