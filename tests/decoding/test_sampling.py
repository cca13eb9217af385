"""How a token is chosen: which ones can come, how often, and by whose key."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.decoding.sampling import sample

compiled = jax.jit(sample, static_argnames="top_k")


def draw(logits, count: int, **settings) -> np.ndarray:
  """`count` draws from one row of logits, under `count` keys."""
  rows = jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1))
  keys = jax.random.split(jax.random.key(3), count)
  return np.asarray(compiled(rows, keys, **settings))


def drawn(probabilities, **settings) -> set[int]:
  """The tokens that come at all in 2,000 draws: none of 0.01 or more is missed."""
  with np.errstate(divide="ignore"):
    return set(draw(np.log(np.asarray(probabilities)), 2000, **settings).tolist())


def test_temperature_zero_takes_the_first_of_the_largest():
  logits = jnp.array([[-1.0, 2.5, 2.5, 0.0, -jnp.inf], [-7.0, -9.0, -8.0, -3.0, -5.0]])
  for seed in range(3):
    keys = jax.random.split(jax.random.key(seed), 2)
    tokens = compiled(logits, keys, temperature=0.0, top_k=2, top_p=0.7)
    assert tokens.dtype == jnp.int32 and tokens.tolist() == [1, 3]
  assert sample(logits, keys, temperature=0.0).tolist() == [1, 3]


def test_top_k_keeps_the_k_most_likely_and_ties_with_the_last():
  assert set(draw([2, 1, 0, -1], 2000, top_k=2).tolist()) == {0, 1}
  assert drawn([0.1, 0.4, 0.2, 0.2, 0.1], top_k=2) == {1, 2, 3}
  assert drawn([0.1, 0.4, 0.2, 0.2, 0.1], top_k=1) == {1}
  for everything in (5, 7):
    assert drawn([0.1, 0.4, 0.2, 0.2, 0.1], top_k=everything) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
  ("top_p", "expected"),
  [
    (0.6, {0, 1}),  # .5 < .6 <= .8
    (0.49, {0}),
    (1e-9, {0}),  # the first stays, however small top_p is
    (0.81, {0, 1, 2}),
    (0.96, {0, 1, 2, 3}),
    (1.0, {0, 1, 2, 3}),
  ],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, expected):
  assert drawn([0.5, 0.3, 0.15, 0.05], top_p=top_p) == expected
  # Their order does not matter, nor whether top_p is a number or an array.
  shuffled = {3 - token for token in expected}
  assert drawn([0.05, 0.15, 0.3, 0.5], top_p=jnp.float32(top_p)) == shuffled


def test_top_p_keeps_ties_with_the_last():
  assert drawn([0.2, 0.2, 0.2, 0.2, 0.2], top_p=0.3) == {0, 1, 2, 3, 4}
  assert drawn([0.4, 0.2, 0.2, 0.2], top_p=0.5) == {0, 1, 2, 3}


def test_top_p_is_counted_after_top_k():
  probabilities = [0.4, 0.3, 0.2, 0.1]
  assert drawn(probabilities, top_p=0.75) == {0, 1, 2}
  # Of the first three alone they are .44, .33, .22: two of them reach .75.
  assert drawn(probabilities, top_p=0.75, top_k=3) == {0, 1}


def test_tokens_of_probability_zero_never_come():
  assert drawn([0.5, 0.0, 0.5, 0.0]) == {0, 2}
  assert drawn([0.5, 0.0, 0.5, 0.0], top_k=3, top_p=0.999) == {0, 2}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature):
  logits, count = np.array([1.3, 0.2, -0.4, -1.1, 0.7]), 20_000
  weights = np.exp(logits / temperature)
  expected = weights / weights.sum()
  tokens = draw(logits, count, temperature=temperature)
  found = np.bincount(tokens, minlength=5) / count
  # Five standard deviations of a binomial count; temperatures differ by far more.
  np.testing.assert_array_less(
    np.abs(found - expected), 5 * np.sqrt(expected * (1 - expected) / count)
  )


def test_a_row_depends_on_its_own_key_and_logits_alone():
  logits = jax.random.normal(jax.random.key(1), (7, 53))
  keys = jax.random.split(jax.random.key(2), 7)
  draw_rows = partial(compiled, temperature=1.7, top_k=31, top_p=0.95)
  tokens = draw_rows(logits, keys)
  assert len(set(tokens.tolist())) > 3
  np.testing.assert_array_equal(draw_rows(logits[2:5], keys[2:5]), tokens[2:5])
  np.testing.assert_array_equal(draw_rows(logits[::-1], keys[::-1]), tokens[::-1])


def test_bad_input_is_refused():
  keys = jax.random.split(jax.random.key(0), 2)
  with pytest.raises(ValueError, match=r"logits: expected \[B, V\], got .*\(2, 3, 5\)"):
    sample(jnp.zeros((2, 3, 5)), keys)
  with pytest.raises(ValueError, match="top_k: expected at least 0, got -1"):
    sample(jnp.zeros((2, 5)), keys, top_k=-1)
