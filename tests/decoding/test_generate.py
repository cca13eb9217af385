"""The loop around a model, on models whose every next token is known."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.decoding.generate import generate, generate_cached

VOCAB = 13


def counter(tokens):
  """Next token = last + 1, on the circle of the vocabulary."""
  return jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB)


def window_sum(tokens):
  """Next token = the sum of all tokens in the window, each times its place, + 1."""
  places = jnp.arange(1, tokens.shape[1] + 1)
  totals = jnp.cumsum(tokens * places[None, :], axis=1) + 1
  return jax.nn.one_hot(totals % VOCAB, VOCAB)


def by_hand(prompt, length: int, window: int) -> list[list[int]]:
  """What `window_sum` continues each row with."""
  rows = [list(map(int, row)) for row in prompt]
  for row in rows:
    for _ in range(length):
      seen = row[-window:]
      row.append((sum(place * token for place, token in enumerate(seen, 1)) + 1) % VOCAB)
  return [row[len(prompt[0]) :] for row in rows]


def greedy(next_logits, prompt, length: int, window: int) -> list[list[int]]:
  keys = jax.random.split(jax.random.key(0), len(prompt))
  run = partial(generate, next_logits, length=length, window=window, temperature=0.0)
  tokens = jax.jit(run)(np.asarray(prompt), keys)
  assert tokens.dtype == jnp.int32
  return tokens.tolist()


def test_the_counter_counts():
  assert greedy(counter, [[3, 4], [7, 8]], 3, 11) == [[5, 6, 7], [9, 10, 11]]
  # Over the end of the vocabulary, and of the window.
  expected = [[(last + i) % VOCAB for i in range(1, 18)] for last in (10, 2)]
  assert greedy(counter, [[0, 0, 10], [5, 5, 2]], 17, 5) == expected


@pytest.mark.parametrize(
  ("prompt_length", "length", "window"),
  [
    (3, 17, 7),  # leaves the window while it writes
    (7, 11, 7),  # from the first token on
    (2, 5, 7),  # the window holds just all
    (2, 3, 19),  # and more
    (1, 2, 1),  # sees nothing but the last
  ],
)
def test_the_model_sees_exactly_the_last_window_tokens(prompt_length, length, window):
  prompt = np.random.default_rng(5).integers(VOCAB, size=(3, prompt_length))
  expected = by_hand(prompt, length, window)
  assert greedy(window_sum, prompt, length, window) == expected


def test_one_shape_serves_all_tokens():
  shapes = []

  def model(tokens):
    shapes.append(tokens.shape)
    return counter(tokens)

  greedy(model, [[1, 2, 3], [4, 5, 6]], 17, 5)
  assert set(shapes) == {(2, 5)}
  shapes.clear()
  greedy(model, [[1, 2, 3], [4, 5, 6]], 4, 100)
  assert set(shapes) == {(2, 7)}  # no longer than what there will be


def test_a_sample_depends_on_its_own_key_alone():
  def even(tokens):
    return jnp.zeros((*tokens.shape, 101))

  prompt = np.array([[3, 1], [4, 1], [5, 9]])
  keys = jax.random.split(jax.random.key(7), 3)
  run = jax.jit(partial(generate, even, length=23, window=11))
  tokens = np.asarray(run(prompt, keys))
  assert len(np.unique(tokens, axis=0)) == 3
  # Each token has a key of its own: 23 draws of 101 rarely meet.
  assert all(len(set(row)) > 15 for row in tokens.tolist())
  np.testing.assert_array_equal(run(prompt[1:], keys[1:]), tokens[1:])
  np.testing.assert_array_equal(run(prompt, keys), tokens)
  top = jax.jit(partial(generate, counter, length=5, window=11, top_k=1))
  assert top(prompt, keys).tolist()[2] == [10, 11, 12, 0, 1]


@pytest.mark.parametrize(
  ("prompt_length", "length", "message"),
  [
    (0, 3, r"prompt: expected 1 to 7 tokens \(the model's window\), got 0"),
    (8, 3, r"prompt: expected 1 to 7 tokens \(the model's window\), got 8"),
    (2, 0, "length: expected at least 1, got 0"),
    (2, -5, "length: expected at least 1, got -5"),
  ],
)
def test_bad_input_is_refused(prompt_length, length, message):
  prompt = np.zeros((2, prompt_length), np.int32)
  keys = jax.random.split(jax.random.key(0), 2)
  with pytest.raises(ValueError, match=message):
    generate(counter, prompt, keys, length=length, window=7)


def cached_window_sum(tokens, cache, lengths):
  """`window_sum` with a cache: how many tokens came, and their sum."""
  seen, total = cache
  size = tokens.shape[1]
  lengths = jnp.full(len(tokens), size) if lengths is None else lengths
  is_real = jnp.arange(size)[None] < lengths[:, None]
  places = seen[:, None] + jnp.arange(1, size + 1)[None]
  totals = total[:, None] + jnp.cumsum(jnp.where(is_real, tokens * places, 0), axis=1)
  # What a model says at padding means nothing, so here it is wrong.
  logits = jax.nn.one_hot(jnp.where(is_real, totals + 1, totals + 2) % VOCAB, VOCAB)
  return logits, (seen + lengths, totals[:, -1])


def empty(batch):
  return jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)


def test_prompts_of_different_lengths_go_on_by_themselves():
  generator = np.random.default_rng(6)
  lengths = np.array([3, 7, 1], np.int32)
  prompt = generator.integers(VOCAB, size=(3, 7))
  keys = jax.random.split(jax.random.key(0), 3)
  run = jax.jit(partial(generate_cached, cached_window_sum, length=11, temperature=0.0))
  found = run(empty(3), prompt, lengths, keys)
  assert found.dtype == jnp.int32
  for row, length in enumerate(lengths):
    own = prompt[row : row + 1, :length]
    assert found[row].tolist() == by_hand(own, 11, 100)[0]
  # What fills up a prompt does not matter.
  filled = np.where(np.arange(7)[None] < lengths[:, None], prompt, 12)
  np.testing.assert_array_equal(run(empty(3), filled, lengths, keys), found)


def test_draws_are_those_without_a_cache():
  def even(tokens):
    return jnp.zeros((*tokens.shape, 101))

  def even_cached(tokens, cache, lengths):
    return even(tokens), cache

  prompt = np.array([[3, 1], [4, 1], [5, 9]])
  keys = jax.random.split(jax.random.key(7), 3)
  expected = generate(even, prompt, keys, length=23, window=30, top_p=0.7)
  lengths = np.full(3, 2, np.int32)
  run = partial(generate_cached, even_cached, None, length=23, top_p=0.7)
  np.testing.assert_array_equal(run(prompt, lengths, keys), expected)
  # A shorter prompt draws as one of its length, whatever stands beside it.
  expected = generate(even, prompt[:1, :1], keys[:1], length=5, window=30)
  run = partial(generate_cached, even_cached, None, length=5)
  found = run(prompt, np.array([1, 2, 2], np.int32), keys)
  np.testing.assert_array_equal(found[:1], expected)


@pytest.mark.parametrize("length", [1, 2])
def test_the_prompt_goes_through_the_model_at_once(length):
  calls = []

  def model(tokens, cache, lengths):
    calls.append(tokens.shape)
    return cached_window_sum(tokens, cache, lengths)

  keys = jax.random.split(jax.random.key(0), 2)
  prompt, lengths = np.ones((2, 5), np.int32), np.array([5, 2], np.int32)
  tokens = generate_cached(model, empty(2), prompt, lengths, keys, length=length)
  assert tokens.shape == (2, length)
  # A scan traces its step once, however many there are.
  assert calls[0] == (2, 5) and set(calls[1:]) <= {(2, 1)}


def test_no_length_is_refused():
  keys = jax.random.split(jax.random.key(0), 2)
  prompt, lengths = np.ones((2, 5), np.int32), np.array([5, 2], np.int32)
  with pytest.raises(ValueError, match="length: expected at least 1, got 0"):
    generate_cached(cached_window_sum, empty(2), prompt, lengths, keys, length=0)
