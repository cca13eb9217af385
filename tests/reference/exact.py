"""Equations in float64, with JAX's own gradients."""

import jax
import jax.numpy as jnp
import numpy as np


def run(function, arguments, cotangent=None):
  """The result in float64, and after it the gradients of sum(cotangent * result)."""
  with (
    jax.enable_x64(True),
    jax.numpy_rank_promotion("allow"),
    jax.numpy_dtype_promotion("standard"),
    jax.default_matmul_precision("highest"),
  ):
    wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arguments)
    if cotangent is None:
      return np.asarray(jax.jit(function)(*wide))

    @jax.jit
    def both(arguments, cotangent):
      result, pull = jax.vjp(function, *arguments)
      return result, *pull(cotangent)

    return jax.tree.map(np.asarray, both(wide, np.asarray(cotangent, np.float64)))
