"""Generates text token by token with any model.

A model is a step: a function of tokens and a cache of earlier tokens.

  logits_bcv, cache = step(tokens_bc, cache, lengths_b)

`lengths` is the number of real tokens in each row of C; None means all. The padding after them
does not change the cache.

  state = begin(step, cache, prompt, lengths)                 reads the prompt
  state, tokens = advance(step, state, keys, num_tokens=16)   adds a chunk of text

B batch, P position of a prompt, C position of a chunk, W window, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer, PyTree

from dpjax.generation import sampling
from dpjax.ops import arrays
from dpjax.ops.arrays import typed
from dpjax.ops.documents import check_lengths

Step = Callable[[jax.Array, PyTree, jax.Array | None], tuple[jax.Array, PyTree]]


class State(NamedTuple):
  """Rows of text: the last token and the number of tokens, [B], and a cache of those before it."""

  token: jax.Array
  length: jax.Array
  cache: PyTree


@typed
def begin(
  step: Step,
  cache: PyTree,
  prompt: Integer[Array, "B P"],
  lengths: Integer[Array, "B"],
  *,
  chunk: int = 0,
) -> State:
  """Reads prompts of different lengths, all but the last token of each.

  Args:
    step: the model.
    cache: an empty cache.
    prompt: P >= 1, each row padded at its end.
    lengths: in 1 .. P: the number of tokens in each prompt.
    chunk: the maximum number of positions in one call of the model; 0 means all.

  Raises:
    ValueError: an argument is not as above.
  """
  arrays.check_not_empty(prompt=prompt)
  prompt = prompt.astype(jnp.int32)
  lengths = check_lengths(lengths, prompt.shape[1], least=1)
  last_b1 = jnp.take_along_axis(prompt, lengths[:, None] - 1, axis=1)
  batch, length = prompt.shape
  size = min(chunk or length, length)
  count = -(-length // size)

  def read(cache, inputs):
    tokens, begin_of_chunk = inputs
    # The logits are not used, and so not computed under `jax.jit`.
    return step(tokens, cache, jnp.clip(lengths - 1 - begin_of_chunk, 0, size))[1], None

  prompt = jnp.pad(prompt, ((0, 0), (0, count * size - length)))
  chunks = prompt.reshape(batch, count, size).swapaxes(0, 1)
  begins = size * jnp.arange(count, dtype=jnp.int32)
  cache, _ = jax.lax.scan(read, cache, (chunks, begins))
  return State(last_b1[:, 0], lengths, cache)


def advance(
  step: Step, state: State, keys: jax.Array, *, num_tokens: int, **settings: Any
) -> tuple[State, jax.Array]:
  """Adds tokens to each row, in one scan.

    next token = last + 1, state.token [4, 7], num_tokens 3  ->  [[5, 6, 7], [8, 9, 10]]

  A row's draws depend only on its key and the position in the row. Returns the state after the new
  tokens, and the tokens, [B, num_tokens], int32.

  Args:
    step: the model.
    state: from `begin`, or from the previous call.
    keys: [B], random keys, the same in every call.
    num_tokens: the number of tokens to add, at least 1.
    **settings: the temperature, top_k and top_p of `dpjax.generation.sample`.
  """
  arrays.integers(num_tokens=num_tokens)

  def add_token(state: State, _):
    logits_b1v, cache = step(state.token[:, None], state.cache, None)
    keys_b = jax.vmap(jax.random.fold_in)(keys, state.length)
    token_b = sampling.sample(logits_b1v[:, 0], keys_b, **settings)
    return State(token_b, state.length + 1, cache), token_b

  state, tokens_tb = jax.lax.scan(add_token, state, None, length=num_tokens)
  return state, tokens_tb.T


class WindowCache(NamedTuple):
  """The last tokens of each row, for a model without a cache."""

  tokens: jax.Array  # [B, W], the oldest first, padded at the end
  count: jax.Array  # [B], the number of tokens without padding
  num_before: jax.Array  # [B], the position of the first of them in the row


def init_window(batch: int, window: int, pad_id: int = 0) -> WindowCache:
  """An empty cache for B rows and a window of W tokens, filled with padding."""
  arrays.integers(batch=batch, window=window)
  tokens_bw = jnp.full((batch, window), pad_id, jnp.int32)
  return WindowCache(tokens_bw, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))


def sliding_window(next_logits: Callable[[jax.Array, jax.Array], jax.Array]) -> Step:
  """Turns any causal model into a step: a full pass over the last W tokens for each token.

  The window starts at position 0 wherever it lies in the row, as in training. With W = 3 and
  the tokens 1 2 3 4 one by one, the passes are over [1 . .], [1 2 .], [1 2 3] and [2 3 4].

  `next_logits` maps [B, W] tokens and the position of the first in the row, [B], to [B, W, V].
  The cache of the step comes from `init_window`; all logits of a chunk come from one pass.
  """

  def step(tokens: jax.Array, cache: WindowCache, lengths: jax.Array | None):
    chunk = tokens.shape[1]
    window = cache.tokens.shape[1]
    num_new_b = jnp.full_like(cache.count, chunk) if lengths is None else lengths
    count_b = jnp.minimum(cache.count + num_new_b, window)
    num_dropped_b = cache.count + num_new_b - count_b
    position_w = jnp.arange(window, dtype=jnp.int32)
    old_position_bw = position_w[None] + num_dropped_b[:, None]
    old_bw = jnp.take_along_axis(cache.tokens, old_position_bw.clip(0, window - 1), axis=1)
    new_position_bw = (old_position_bw - cache.count[:, None]).clip(0, chunk - 1)
    new_bw = jnp.take_along_axis(tokens, new_position_bw, axis=1)
    tokens_bw = jnp.where(old_position_bw < cache.count[:, None], old_bw, new_bw)
    # Padding after the tokens stays.
    tokens_bw = jnp.where(position_w[None] < count_b[:, None], tokens_bw, cache.tokens)
    cache_after = WindowCache(tokens_bw, count_b, cache.num_before + num_dropped_b)
    logits_bwv = next_logits(tokens_bw, cache_after.num_before)
    read_bc = (count_b - num_new_b)[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None]
    logits_bcv = jnp.take_along_axis(logits_bwv, read_bc.clip(0, window - 1)[..., None], axis=1)
    return logits_bcv, cache_after

  return step
