"""How the next token is chosen. B batch, V vocabulary."""

import jax
import jax.numpy as jnp


def sample(
  logits: jax.Array,
  keys: jax.Array,
  *,
  temperature: float | jax.Array = 1.0,
  top_k: int = 0,
  top_p: float | jax.Array = 1.0,
) -> jax.Array:
  """Draws a token for each row from softmax(logits / temperature), cut to its top.

    logits [2, 1, 0, -1], top_k = 2            draws from tokens 0 and 1
    probabilities [.5, .3, .15, .05], top_p=.6 draws from tokens 0 and 1 (.5 < .6 <= .8)

  Args:
    logits: [B, V], floats; -inf where a token must not come.
    keys: [B], a random key for each row, so that a row does not depend on the others.
    temperature: at least 0; 0 takes the largest logit (the first of equals).
    top_k: only the k most likely tokens; 0 is all. Ties with the k-th stay.
    top_p: only the most likely tokens that together reach this probability, in (0, 1]
      (nucleus sampling, Holtzman et al. 2020), counted after `top_k`. Ties with the last
      of them stay, too.

  Returns:
    [B], int32.

  Raises:
    ValueError: `logits` is not [B, V], or `top_k` is negative.
  """
  if logits.ndim != 2:
    raise ValueError(f"logits: expected [B, V], got the shape {logits.shape}")
  if top_k < 0:
    raise ValueError(f"top_k: expected at least 0, got {top_k}")
  greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  is_greedy = jnp.equal(temperature, 0)
  scaled = logits.astype(jnp.float32) / jnp.where(is_greedy, 1.0, temperature)
  if 0 < top_k < logits.shape[-1]:
    least = jax.lax.top_k(scaled, top_k)[0][:, -1:]
    scaled = jnp.where(scaled < least, -jnp.inf, scaled)
  ordered = -jnp.sort(-scaled, axis=-1)
  probabilities = jax.nn.softmax(ordered, axis=-1)
  # A token stays if those before it have not reached top_p: the first always does.
  stays = jnp.cumsum(probabilities, axis=-1) - probabilities < top_p
  least = jnp.min(jnp.where(stays, ordered, jnp.inf), axis=-1, keepdims=True)
  scaled = jnp.where((scaled < least) & (jnp.asarray(top_p) < 1), -jnp.inf, scaled)
  drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
  return jnp.where(is_greedy, greedy, drawn)
