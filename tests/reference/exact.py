"""Equations in float64, and operators beside them, with JAX's own gradients."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0):
  """Normal numbers, the same for a shape and a seed."""
  draw = np.random.default_rng([seed, *shape]).standard_normal(shape)
  return jnp.asarray(draw, jnp.float32)


def with_gradients(function, arguments, cotangent):
  """The result, and after it the gradients of sum(cotangent * result)."""

  @jax.jit
  def run(arguments, cotangent):
    result, pull = jax.vjp(function, *arguments)
    return result, *pull(cotangent)

  return run(arguments, cotangent)


def run(function, arguments, cotangent=None):
  """The result in float64, with a cotangent followed by the gradients."""
  with (
    jax.enable_x64(True),
    jax.numpy_rank_promotion("allow"),
    jax.numpy_dtype_promotion("standard"),
    jax.default_matmul_precision("highest"),
  ):
    arguments, cotangent = jax.tree.map(
      lambda x: jnp.asarray(np.asarray(x), jnp.float64), (arguments, cotangent)
    )
    if cotangent is None:
      return np.asarray(jax.jit(function)(*arguments))
    return jax.tree.map(np.asarray, with_gradients(function, arguments, cotangent))


def both(operator, equation, arguments):
  """The results and gradients of the operator, and of the equation in float64."""
  result = jax.eval_shape(operator, *arguments)
  cotangent = normal(*result.shape).astype(result.dtype)
  return with_gradients(operator, arguments, cotangent), run(equation, arguments, cotangent)
