"""Data whose length only the device knows, compiled for a few lengths, its buckets."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import typed


def bucket_sizes(longest: int, num_buckets: int) -> tuple[int, ...]:
  """The longest length, and below it lengths evenly spaced up to its half.

    bucket_sizes(9, 4)  ->  (2, 3, 5, 9)

  For i = 1 .. num_buckets - 1 they are ceil(longest / 2 * i / (num_buckets - 1)), without
  repetitions: rows with more segments than half their tokens are rare, and each length takes long
  to compile.
  """
  arrays.integer("longest", longest)
  arrays.integer("num_buckets", num_buckets, most=2**16)
  below = {-(-longest * i // (2 * num_buckets - 2)) for i in range(1, num_buckets)}
  return tuple(sorted({*below, longest}))


@typed
def run_in_bucket(
  function: Callable[..., jax.Array],
  bucket_sizes: Sequence[int],
  required_length: Integer[Array, ""] | None,
  inputs: Float[Array, "B S ..."],
  *others: Any,
) -> Float[Array, "B S ..."]:
  """Runs a function only on the first positions, as many as the data needs.

    output[:, :c] = function(inputs[:, :c], *others),  c the smallest size >= required_length
    output[:, c:] = 0

  The function must be causal; its random draws may depend on c. The backward pass recomputes it
  within its branch: plain gradients of `lax.switch` store the residuals of every branch.

  Args:
    function: [B, c, ...] and `others` -> [B, c, ...]; must not close over traced values.
    bucket_sizes: increasing lengths up to S; others raise a `ValueError`.
    required_length: at most S, the number of outputs that will be read; None computes all.
    inputs: one array for each position.
    *others: further arguments, any pytrees; their floats get gradients.
  """
  if not callable(function):
    raise ValueError(f"function: expected a function, got {function!r}")
  sizes = arrays.ids("bucket_sizes", bucket_sizes, "increasing lengths")
  rises = all(low < high for low, high in zip((0, *sizes), sizes, strict=False))
  if not (sizes and rises and sizes[-1] == inputs.shape[1]):
    raise ValueError(
      f"bucket_sizes: expected increasing lengths up to S = {inputs.shape[1]}, got {sizes}"
    )
  if required_length is None or len(sizes) == 1:
    return function(inputs, *others)
  index = jnp.searchsorted(jnp.asarray(sizes), required_length)
  leaves, structure = jax.tree.flatten(others)
  is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
  floats = [x if of_floats else None for x, of_floats in zip(leaves, is_float, strict=True)]
  fixed = [None if of_floats else x for x, of_floats in zip(leaves, is_float, strict=True)]

  def call(inputs, floats, fixed):
    leaves = [y if x is None else x for x, y in zip(floats, fixed, strict=True)]
    return function(inputs, *jax.tree.unflatten(structure, leaves))

  return _switch(call, sizes, index, inputs, floats, fixed)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _switch(call, sizes, index, inputs, floats, fixed):
  branches = [partial(_run_first, call, size) for size in sizes]
  return jax.lax.switch(index, branches, inputs, floats, fixed)


def _switch_backward(call, sizes, arguments, cotangent):
  index, *arguments = arguments

  def branch(size, inputs, floats, fixed, cotangent):
    _, backward = jax.vjp(
      lambda inputs, floats: _run_first(call, size, inputs, floats, fixed), inputs, floats
    )
    return backward(cotangent)

  branches = [partial(branch, size) for size in sizes]
  return None, *jax.lax.switch(index, branches, *arguments, cotangent), None


_switch.defvjp(lambda *x: (_switch(*x), x[2:]), _switch_backward)


def _run_first(call, size: int, inputs, floats, fixed):
  outputs = call(inputs[:, :size], floats, fixed)
  rest = ((0, 0), (0, inputs.shape[1] - size)) + ((0, 0),) * (outputs.ndim - 2)
  return jnp.pad(outputs, rest)
