"""The loop around a model, on models whose every next token is known."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.decoding.generate import generate

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
