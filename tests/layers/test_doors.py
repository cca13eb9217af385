"""Mixers and blocks in somebody's own Linen model: keywords, contexts and steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dpjax import layers
from tests.test_contract import MAX_LENGTH, MIXERS

WIDTH, LENGTH = 12, 11
X = np.float32(np.random.default_rng(0).standard_normal((2, LENGTH, WIDTH)))
STARTS = np.int32([[1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]])


def make_block(mixer):
  norms = layers.Norm(), layers.Norm()
  return layers.Block(mixer, layers.FeedForward(7), *norms, is_pre_norm=True, dropout=0.5)


MAKERS = {name: make for name, (make, _) in MIXERS.items()}
MAKERS["block"] = lambda max_length: make_block(layers.WE(max_length=max_length))


def make(name):
  return MAKERS[name](max_length=MAX_LENGTH)


class Model(nn.Module):
  """A user's model of two layers of the same kind."""

  layer: str

  @nn.compact
  def __call__(self, x, deterministic=True, document_starts=None):
    for _ in range(2):
      x = x + make(self.layer)(x, deterministic=deterministic, document_starts=document_starts)
    return nn.Dense(5)(x)


class Stepping(nn.Module):
  """The same model, position by position."""

  layer: str

  @nn.compact
  def __call__(self, x, caches, lengths=None):
    new = []
    for cache in caches:
      y, cache = make(self.layer).step(x, cache, lengths=lengths)
      x = x + y
      new.append(cache)
    return nn.Dense(5)(x), new


class WithContext(nn.Module):
  """The same model, which hands on a context."""

  layer: str

  @nn.compact
  def __call__(self, x, context):
    for _ in range(2):
      x = x + make(self.layer)(x, context)
    return nn.Dense(5)(x)


@pytest.mark.parametrize("name", MAKERS)
def test_a_users_model_calls_and_steps_a_layer(name):
  model, stepping, with_context = Model(name), Stepping(name), WithContext(name)
  variables = jax.jit(model.init)(jax.random.key(0), X)
  rngs = {"dropout": jax.random.key(1)}
  layer = make(name)
  mixer = layer.mixer if name == "block" else layer
  lengths = np.int32([4, 2])

  @jax.jit
  def run(variables):
    evaluated = model.apply(variables, X)
    trained = model.apply(variables, X, deterministic=False, rngs=rngs)
    apart = model.apply(variables, X, document_starts=STARTS)
    context = layers.Context(deterministic=False, document_starts=jnp.asarray(STARTS))
    both = model.apply(variables, X, False, STARTS, rngs=rngs)
    as_context = with_context.apply(variables, X, context, rngs=rngs)
    caches = [mixer.init_cache(2, WIDTH)] * 2
    first, caches = stepping.apply(variables, X[:, :4], caches, lengths)
    rest = np.stack([X[0, 4:6], X[1, 2:4]])
    second, _ = stepping.apply(variables, rest, caches)
    return evaluated, trained, apart, both, as_context, first, second

  evaluated, trained, apart, both, as_context, first, second = run(variables)
  # Only the block drops anything here.
  assert np.allclose(evaluated, trained, atol=1e-5) == (name != "block")
  assert not np.allclose(evaluated, apart, atol=1e-3)
  np.testing.assert_allclose(both, as_context, rtol=1e-5, atol=1e-5)
  for got, row, part in (
    (first[0], 0, slice(4)),
    (first[1, :2], 1, slice(2)),
    (second[0], 0, slice(4, 6)),
    (second[1], 1, slice(2, 4)),
  ):
    np.testing.assert_allclose(got, evaluated[row, part], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dispatcher", "block"])
@pytest.mark.parametrize(
  "keywords",
  [
    *(dict(deterministic=x) for x in (True, False)),
    dict(document_starts=STARTS),
    dict(lengths=np.ones(2)),
  ],
)
def test_a_context_and_a_keyword_are_refused(name, keywords):
  layer = make(name)
  arguments = [X, layers.Context()]
  options = dict(keywords)
  if "lengths" in keywords:
    options["method"] = "step"
    arguments.insert(1, layers.ME(max_length=MAX_LENGTH).init_cache(2, WIDTH))
  (keyword,) = keywords
  with pytest.raises(ValueError, match=f"^{keyword}: expected a field of the context"):
    layer.init(jax.random.key(0), *arguments, **options)


def test_all_keywords_beside_a_context_are_named():
  keywords = dict(deterministic=False, document_starts=STARTS)
  with pytest.raises(ValueError, match="^deterministic, document_starts: expected a field"):
    make("we").init(jax.random.key(0), X, layers.Context(), **keywords)


@pytest.mark.parametrize("name", ["dispatcher", "block"])
def test_a_misspelled_keyword_is_refused(name):
  layer = make(name)
  with pytest.raises(TypeError, match="unexpected keyword argument 'determinstic'"):
    layer.init(jax.random.key(0), X, determinstic=False)
  with pytest.raises(TypeError, match="unexpected keyword argument 'length'"):
    layer.init(jax.random.key(0), X, None, length=[2, 3], method="step")
  with pytest.raises(TypeError, match="unexpected keyword argument 'document_start'"):
    layers.Context(document_start=STARTS)
