"""What is minimised. B batch, T position, V vocabulary."""

import jax
import jax.numpy as jnp
import optax


def cross_entropy(
  logits: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Sums the nats of the targets that count.

    nats  = sum over b, t of -weights[b, t] log softmax(logits[b, t])[targets[b, t]]
    count = sum over b, t of weights[b, t]

  Sums, and not their quotient, so that parts of a batch add up to the whole.

  Args:
    logits: [B, T, V], floats; the softmax is taken in float32.
    targets: [B, T], integers in [0, V).
    weights: [B, T], 1 where a target counts and 0 where it does not.

  Returns:
    nats and count, float32 scalars.

  Raises:
    ValueError: the shapes do not match.
  """
  if not logits.shape[:-1] == targets.shape == weights.shape:
    raise ValueError(
      "logits, targets, weights: expected [B, T, V], [B, T], [B, T], got "
      f"{logits.shape}, {targets.shape}, {weights.shape}"
    )
  nats_bt = optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), targets
  )
  return jnp.sum(nats_bt * weights), jnp.sum(weights)
