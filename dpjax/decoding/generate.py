"""Text, each token from the window before it. B batch, T position, V vocabulary."""

from collections.abc import Callable

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
