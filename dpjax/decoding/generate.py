"""Text, token by token. B batch, P position of a prompt, T position, V vocabulary."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.decoding import sampling


def generate(
  next_logits: Callable[[jax.Array], jax.Array],
  prompt: np.ndarray,
  keys: jax.Array,
  *,
  length: int,
  window: int,
  temperature: float | jax.Array = 1.0,
  top_k: int = 0,
  top_p: float | jax.Array = 1.0,
  pad_id: int = 0,
) -> jax.Array:
  """Continues a prompt.

    next token = last + 1, prompt [[3, 4], [7, 8]], length 3  ->  [[5, 6, 7], [9, 10, 11]]

  Every token is drawn from a full pass over the last `window` tokens, which start at
  position 0: what a window of training looks like. One shape serves all tokens, so it
  compiles once under `jax.jit`.

  Args:
    next_logits: [B, T] tokens -> [B, T, V] logits, causal.
    prompt: [B, P] token ids, 1 <= P <= `window`.
    keys: [B], random keys; sample i draws from keys[i] alone.
    length: tokens to add, at least 1.
    window: the longest T that the model takes.
    temperature: of `dpjax.decoding.sampling.sample`, as the following.
    top_k: likewise.
    top_p: likewise.
    pad_id: stands where there is no token yet; no result depends on it.

  Returns:
    [B, length], int32: the new tokens.

  Raises:
    ValueError: the prompt is empty or longer than the window, or `length` < 1.
  """
  batch, prompt_length = prompt.shape
  if not 1 <= prompt_length <= window:
    raise ValueError(
      f"prompt: expected 1 to {window} tokens (the model's window), got {prompt_length}"
    )
  if length < 1:
    raise ValueError(f"length: expected at least 1, got {length}")
  total = prompt_length + length
  window = min(window, total)
  buffer = jnp.full((batch, total), pad_id, jnp.int32)
  buffer = buffer.at[:, :prompt_length].set(jnp.asarray(prompt, jnp.int32))

  def add_token(buffer, position):
    start = jnp.maximum(position - window, 0)
    tokens = jax.lax.dynamic_slice_in_dim(buffer, start, window, axis=1)
    logits = next_logits(tokens)
    last = jax.lax.dynamic_index_in_dim(
      logits, position - 1 - start, axis=1, keepdims=False
    )
    token = sampling.sample(
      last,
      jax.vmap(lambda key: jax.random.fold_in(key, position))(keys),
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
    )
    return jax.lax.dynamic_update_slice(buffer, token[:, None], (0, position)), None

  buffer, _ = jax.lax.scan(add_token, buffer, jnp.arange(prompt_length, total))
  return buffer[:, prompt_length:]


def generate_cached(
  step: Callable[[jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]],
  cache: Any,
  prompt: jax.Array,
  lengths: jax.Array,
  keys: jax.Array,
  *,
  length: int,
  temperature: float | jax.Array = 1.0,
  top_k: int = 0,
  top_p: float | jax.Array = 1.0,
) -> jax.Array:
  """Continues prompts of different lengths, each token at the cost of one.

    next token = last + 1, prompt [[3, 4], [7, -]], lengths [2, 1], length 3
    ->  [[5, 6, 7], [8, 9, 10]]

  The prompts go through the model at once, then every new token by itself, with a cache
  of what came before. Draws are those of `generate`: by a row's key and the position.

  Args:
    step: [B, C] tokens, a cache, and how many of each row's C are real ([B], or None for
      all) -> [B, C, V] logits and the cache after them.
    cache: of rows of which no token has been seen, with room for P + `length` - 1.
    prompt: [B, P], integers, filled up behind each row's own.
    lengths: [B], int32, in 1 .. P: the tokens of each prompt.
    keys: [B], random keys; row i draws from keys[i] alone.
    length: tokens to add, at least 1.
    temperature: of `dpjax.decoding.sampling.sample`, as the following.
    top_k: likewise.
    top_p: likewise.

  Returns:
    [B, length], int32: the new tokens.

  Raises:
    ValueError: `length` < 1.
  """
  if length < 1:
    raise ValueError(f"length: expected at least 1, got {length}")

  def draw(logits_bv: jax.Array, position_b: jax.Array) -> jax.Array:
    return sampling.sample(
      logits_bv,
      jax.vmap(jax.random.fold_in)(keys, position_b),
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
    )

  def add_token(carry, i):
    token_b, cache = carry
    logits_b1v, cache = step(token_b[:, None], cache, None)
    token_b = draw(logits_b1v[:, 0], lengths + i)
    return (token_b, cache), token_b

  logits_bpv, cache = step(prompt, cache, lengths)
  last_b1v = jnp.take_along_axis(logits_bpv, lengths[:, None, None] - 1, axis=1)
  first_b = draw(last_b1v[:, 0], lengths)
  places = jnp.arange(1, length, dtype=lengths.dtype)
  _, rest_tb = jax.lax.scan(add_token, (first_b, cache), places)
  return jnp.concatenate([first_b[:, None], rest_tb.T], axis=1)
