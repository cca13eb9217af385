"""Norms over the features that store one array of the input's size for the gradient."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dpjax.ops.arrays import typed
from dpjax.ops.placement import pvary_like
from dpjax.ops.products import sum_dtype


@typed
def layer_norm(
  inputs: Float[Array, "*B D"],
  scale: Float[Array, "D"],
  bias: Float[Array, "D"] | None = None,
  *,
  epsilon: float = 1e-5,
) -> Float[Array, "*B D"]:
  """Normalises every vector along the last axis.

    scale (x - mean(x)) / sqrt(var(x) + epsilon) + bias

  The variance is that of the deviations, so that a large mean costs no precision, in float32, or in
  float64 for float64 inputs. Supports only reverse-mode derivatives, which store the inputs and two
  numbers per vector.

  Source: Ba et al. 2016, arXiv:1607.06450.
  """
  return _norm(True, epsilon, *pvary_like((inputs, scale, bias)))


@typed
def rms_norm(
  inputs: Float[Array, "*B D"], scale: Float[Array, "D"], *, epsilon: float = 1e-5
) -> Float[Array, "*B D"]:
  """`layer_norm` without mean and bias: scale x / sqrt(mean(x**2) + epsilon).

  Source: Zhang and Sennrich 2019, arXiv:1910.07467.
  """
  return _norm(False, epsilon, *pvary_like((inputs, scale, None)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(is_centred, epsilon, inputs, scale, bias):
  return _forward(is_centred, epsilon, inputs, scale, bias)[0]


def _forward(is_centred, epsilon, inputs, scale, bias):
  x = inputs.astype(sum_dtype(inputs))
  mean = jnp.mean(x, axis=-1, keepdims=True) if is_centred else jnp.zeros((), x.dtype)
  deviation = x - mean if is_centred else x
  variance = jnp.mean(lax.square(deviation), axis=-1, keepdims=True)
  over_std = lax.rsqrt(variance + epsilon)
  y = deviation * (over_std * _row(scale, x))
  if bias is not None:
    y += _row(bias, x)
  return y.astype(inputs.dtype), (inputs, mean, over_std, scale, bias)


def _backward(is_centred, epsilon, residuals, grad):
  # With n = (x - mean) / std:  dx = (g - mean(g) - n mean(g n)) / std,  g = scale dy
  inputs, mean, over_std, scale, bias = residuals
  dy = grad.astype(over_std.dtype)
  x = inputs.astype(over_std.dtype)
  normal = (x - mean if is_centred else x) * over_std
  g = dy * _row(scale, dy)
  dx = g - normal * jnp.mean(g * normal, axis=-1, keepdims=True)
  if is_centred:
    dx -= jnp.mean(g, axis=-1, keepdims=True)
  leading = tuple(range(dy.ndim - 1))
  of_scale = jnp.sum(dy * normal, axis=leading).astype(scale.dtype)
  of_bias = None if bias is None else jnp.sum(dy, axis=leading).astype(bias.dtype)
  return (dx * over_std).astype(inputs.dtype), of_scale, of_bias


_norm.defvjp(_forward, _backward)


def _row(x_d, like) -> jax.Array:
  return x_d.astype(like.dtype).reshape((1,) * (like.ndim - 1) + x_d.shape)
