"""Dropout with half as many random bits as usual."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.ops import checks
from dpjax.ops.products import as_factor

_STEPS = 2**16


def dropout(inputs: jax.Array, rate: float, key: jax.Array) -> jax.Array:
  """Sets elements to zero at random, and scales the others to keep the mean.

    output = inputs / (1 - rate)   with probability 1 - rate, else 0

  An element takes 16 random bits, half of a draw of `jax.random`, which is a large part of a
  training step on CPU. So the probability is the multiple of 2**-16 nearest to `rate`, in [0, 1).

  Raises:
    ValueError: `rate` is outside of [0, 1), the inputs are no floats, or a key is missing.

  Source: Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html, Sec. 10.
  """
  inputs = _check(inputs, rate, key)
  if not rate or not inputs.size:
    return inputs
  *rest, last = inputs.shape or (1,)
  words = jax.random.bits(key, (*rest, -(-last // 2)), jnp.uint32)
  halves = lax.bitcast_convert_type(words, jnp.uint16)
  bits = halves.reshape(*rest, -1)[..., :last].reshape(inputs.shape)
  # Rates that would round to 1 drop all but one of 2**16.
  is_kept = bits >= jnp.uint16(min(round(rate * _STEPS), _STEPS - 1))
  return jnp.where(is_kept, inputs / (1 - rate), jnp.zeros((), inputs.dtype))


def relu_dropout(inputs: jax.Array, rate: float, key: jax.Array) -> jax.Array:
  """`dropout` of relu(inputs), as a factor (`as_factor`); stores only this for the gradient.

  Derivatives are in reverse mode alone.
  """
  inputs = _check(inputs, rate, key)
  return _relu_dropout(rate, inputs.dtype, inputs, key)


def _check(inputs, rate, key):
  checks.rate("rate", rate)
  if rate:
    checks.key("key", key)
  return checks.array("inputs", inputs, "...")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _relu_dropout(rate, dtype, inputs, key):
  return as_factor(dropout(jax.nn.relu(inputs), rate, key))


def _forward(rate, dtype, inputs, key):
  output = _relu_dropout(rate, dtype, inputs, key)
  return output, output


def _backward(rate, dtype, output, grad):
  by_inputs = jnp.where(output > 0, grad / (1 - rate), jnp.zeros((), grad.dtype))
  return by_inputs.astype(dtype), None


_relu_dropout.defvjp(_forward, _backward)
