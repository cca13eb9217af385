"""The loop around a model, on models whose every next token is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.generation.decode import advance, begin, init_window, sliding_window

VOCAB = 13


def window_sum(tokens, num_before):
  """Next token = the sum of all tokens in the window, each times its place, + 1."""
  places = jnp.arange(1, tokens.shape[1] + 1)
  totals = jnp.cumsum(tokens * places[None, :], axis=1) + 1
  return jax.nn.one_hot(totals % VOCAB, VOCAB)


def row_sum(tokens, cache, lengths):
  """`window_sum` with a cache, of the whole row: how many tokens came, and their sum."""
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


def even(tokens, cache, lengths):
  """All of 101 tokens are as likely."""
  return jnp.zeros((*tokens.shape, 101)), cache


def by_hand(row, length: int, window: int) -> list[int]:
  """What `window_sum` continues a row with."""
  row = list(map(int, row))
  for _ in range(length):
    seen = row[-window:]
    row.append((sum(index * token for index, token in enumerate(seen, 1)) + 1) % VOCAB)
  return row[-length:]


def keys_of(batch):
  return jax.random.split(jax.random.key(7), batch)


start = jax.jit(begin, static_argnums=0, static_argnames="chunk")
run = jax.jit(advance, static_argnums=0, static_argnames=("num_tokens", "top_k"))


def write(step, cache, prompt, lengths, *sizes, chunk=0, keys=None, **settings):
  """The tokens of chunks of so many, all compiled."""
  prompt, lengths = np.asarray(prompt), np.asarray(lengths, np.int32)
  keys = keys_of(len(prompt)) if keys is None else keys
  state, texts = start(step, cache, prompt, lengths, chunk=chunk), []
  for size in sizes:
    state, tokens = run(step, state, keys, num_tokens=size, **settings)
    assert tokens.dtype == jnp.int32 and tokens.shape == (len(prompt), size)
    texts.append(np.asarray(tokens))
  np.testing.assert_array_equal(state.length, lengths + sum(sizes))
  np.testing.assert_array_equal(state.token, texts[-1][:, -1])
  return np.concatenate(texts, axis=1).tolist()


@pytest.mark.parametrize("chunk", [0, 3])
def test_prompts_of_different_lengths_go_on_by_themselves(chunk):
  lengths = [3, 7, 1]
  prompt = np.random.default_rng(6).integers(VOCAB, size=(3, 7))
  settings = dict(chunk=chunk, temperature=0.0)
  texts = write(row_sum, empty(3), prompt, lengths, 5, 6, **settings)
  for row, length, tokens in zip(prompt, lengths, texts, strict=True):
    assert tokens == by_hand(row[:length], 11, 100)
  # What fills up a prompt does not matter.
  is_own = np.arange(7)[None] < np.array(lengths)[:, None]
  filled = np.where(is_own, prompt, 12)
  assert write(row_sum, empty(3), filled, lengths, 5, 6, **settings) == texts


@pytest.mark.parametrize("lengths", [[0, 2, 5], [3, 2, 6]])
def test_a_prompt_has_at_least_one_token(lengths):
  prompt = np.ones((3, 5), np.int32)
  with pytest.raises(ValueError, match="^lengths: expected 1 .. 5, got [06]"):
    begin(row_sum, empty(3), prompt, np.asarray(lengths))


@pytest.mark.parametrize(
  ("prompt_length", "length", "window"),
  [
    (3, 17, 7),  # leaves the window while it writes
    (7, 11, 7),  # from the first token on
    (1, 2, 1),  # sees nothing but the last
  ],
)
def test_a_sliding_window_sees_exactly_the_last_tokens(prompt_length, length, window):
  prompt = np.random.default_rng(5).integers(VOCAB, size=(3, prompt_length))
  lengths = [prompt_length, max(1, prompt_length - 1), max(1, prompt_length - 2)]
  begins = []

  def spy(tokens, num_before):
    jax.debug.callback(lambda x: begins.append(x.tolist()), num_before, ordered=True)
    return window_sum(tokens, num_before)

  step, cache = sliding_window(spy), init_window(3, window, pad_id=9)
  texts = write(step, cache, prompt, lengths, length, temperature=0.0)
  for row, own, tokens in zip(prompt, lengths, texts, strict=True):
    assert tokens == by_hand(row[:own], length, window)
  jax.effects_barrier()
  # At the end each row has `own` + length - 1 tokens, and the window its last ones.
  assert begins[-1] == [max(0, own + length - 1 - window) for own in lengths]


def test_a_row_depends_on_its_own_key_alone():
  prompt, lengths = np.array([[3, 1], [4, 1], [5, 9]]), np.array([2, 2, 1])
  keys = keys_of(3)
  tokens = write(even, None, prompt, lengths, 23)
  assert len(np.unique(tokens, axis=0)) == 3
  # Each token has a key of its own: 23 draws of 101 rarely meet.
  assert all(len(set(row)) > 15 for row in tokens)
  assert write(even, None, prompt, lengths, 2, 20, 1) == tokens  # however it is cut
  assert write(even, None, prompt[1:], lengths[1:], 23, keys=keys[1:]) == tokens[1:]
  # A shorter prompt draws by its own places: those of the longer ones, one later.
  same = write(even, None, prompt, lengths, 23, keys=keys[jnp.array([2, 1, 2])])
  assert same[0][:22] == same[2][1:]
