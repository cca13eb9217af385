"""Dropout with a quarter of the usual random bits."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from dpjax.ops import arrays
from dpjax.ops.arrays import typed
from dpjax.ops.backend import opaque
from dpjax.ops.products import as_factor

_STEPS = 2**16
_TURNS = 13, 15, 26, 6, 17, 29, 16, 24


@typed
def dropout(
  inputs: Float[Array, "*B"], rate: float, key: PRNGKeyArray | None
) -> Float[Array, "*B"]:
  """Sets elements to zero at random, and scales the others to keep the mean.

    output = inputs / (1 - rate)   with probability 1 - rate, else 0

  An element uses 16 random bits from `threefry`, so the rate is rounded to the nearest multiple of
  2**-16 in [0, 1). `jax.random` would use 64 per element, a tenth of a training step on a CPU.

  Raises:
    ValueError: `rate` is outside of [0, 1), the inputs are not floats, or a key is missing.

  Source: Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html, Sec. 10.
  """
  _check(rate, key)
  if not rate or not inputs.size:
    return inputs
  assert key is not None
  *lead, last = inputs.shape or (1,)
  # The four elements of a block of two words lie a quarter of the last axis apart.
  blocks = *lead, -(-last // 4)
  counts = lax.iota(jnp.uint32, math.prod(blocks)).reshape(blocks)
  words = threefry(jax.random.bits(key, (2,), jnp.uint32), jnp.zeros_like(counts), counts)
  words = opaque(words)  # Four operations read them.
  bits = [(word >> shift).astype(jnp.uint16) for word in words for shift in (0, 16)]
  bits = jnp.concatenate(bits, axis=-1)[..., :last].reshape(inputs.shape)
  is_kept = bits >= jnp.uint16(_num_dropped(rate))
  return jnp.where(is_kept, inputs / _kept_share(rate), jnp.zeros((), inputs.dtype))


def _num_dropped(rate: float) -> int:
  """How many of the 2**16 bit values drop; rates that would round to 1 drop all but one."""
  return min(round(rate * _STEPS), _STEPS - 1)


def _kept_share(rate: float) -> float:
  return 1 - _num_dropped(rate) / _STEPS


@partial(jax.jit, static_argnames="rounds")
def threefry(
  key: UInt32[Array, "2"], high: UInt32[Array, "*B"], low: UInt32[Array, "*B"], *, rounds: int = 13
) -> tuple[UInt32[Array, "*B"], UInt32[Array, "*B"]]:
  """Threefry-2x32, the generator of `jax.random`: two random words for each count.

  The counts are high * 2**32 + low. With 20 rounds JAX computes the same, on a CPU in a loop whose
  results go through memory. Its authors know of no flaw with 13 or more rounds; the other 7, a
  third of the work, are a safety margin.

  Source: Salmon et al. 2011, doi.org/10.1145/2063384.2063405, Sec. 4.2; Random123.
  """
  keys = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
  x = high + keys[0]
  y = low + keys[1]
  for step in range(1, rounds + 1):
    turn = _TURNS[(step - 1) % len(_TURNS)]
    x += y
    y = x ^ ((y << turn) | (y >> (32 - turn)))
    if step % 4 == 0:
      number = step // 4
      x += keys[number % 3]
      y += keys[(number + 1) % 3] + np.uint32(number)
  return x, y


@typed
def relu_dropout(
  inputs: Float[Array, "*B"], rate: float, key: PRNGKeyArray | None
) -> Float[Array, "*B"]:
  """`dropout` of relu(inputs), as a factor (`as_factor`); stores only this for the gradient.

  Supports only reverse-mode derivatives.
  """
  _check(rate, key)
  return _relu_dropout(rate, inputs.dtype, inputs, key)


def _check(rate, key):
  arrays.rate("rate", rate)
  arrays.key("key", key, rate)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _relu_dropout(rate, dtype, inputs, key):
  return as_factor(dropout(jax.nn.relu(inputs), rate, key))


def _backward(rate, dtype, output, grad):
  by_inputs = jnp.where(output > 0, grad / _kept_share(rate), jnp.zeros((), grad.dtype))
  return by_inputs.astype(dtype), None


_relu_dropout.defvjp(lambda *x: (y := _relu_dropout(*x), y), _backward)
