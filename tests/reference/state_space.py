"""The recurrence of Mamba-2 (arXiv:2405.21060), position by position."""

import jax
import jax.numpy as jnp


def selective_state_space(x, dt, a, b, c, starts=None):
  """[B, T, H, P]: s = exp(dt a) s + dt x b^T, read as s c; s is 0 where a document starts."""
  repeats = x.shape[2] // b.shape[2]
  keep = jnp.ones(x.shape[:2]) if starts is None else 1.0 - starts

  def step(s, now):
    x, dt, b, c, keep = now
    b, c = (jnp.repeat(z, repeats, axis=1) for z in (b, c))
    decay = jnp.exp(dt * a) * keep[:, None]
    s = decay[..., None, None] * s + (dt[..., None] * x)[..., None] * b[:, :, None]
    return s, jnp.einsum("bhpn,bhn->bhp", s, c)

  first = jnp.zeros((*x.shape[::2], x.shape[3], b.shape[3]))
  _, y = jax.lax.scan(step, first, [jnp.moveaxis(z, 1, 0) for z in (x, dt, b, c, keep)])
  return jnp.moveaxis(y, 0, 1)
