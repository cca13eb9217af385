"""Data whose length only the device can tell: compiled for a few lengths, capacities."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from dpjax.ops import arrays
from dpjax.ops.arrays import typed


def capacities(longest: int, number: int) -> tuple[int, ...]:
  """The longest, and below it capacities evenly spaced up to its half.

    capacities(9, 4)  ->  (2, 3, 5, 9)

  They are ceil(longest / 2 * i / (number - 1)) for i = 1 .. number - 1, without repetitions: more
  segments than half as many as tokens are rare, and each capacity takes long to compile.
  """
  arrays.integer("longest", longest)
  arrays.integer("number", number, most=2**16)
  below = {-(-longest * i // (2 * number - 2)) for i in range(1, number)}
  return tuple(sorted({*below, longest}))


@typed
def run_at_capacity(
  function: Callable[..., jax.Array],
  sizes: Sequence[int],
  needed: Integer[Array, ""] | None,
  inputs: Float[Array, "B S ..."],
  *others: Any,
) -> Float[Array, "B S ..."]:
  """Runs a function only on the first positions, as many as the data needs.

    output[:, :c] = function(inputs[:, :c], *others),  c the smallest size >= needed
    output[:, c:] = 0

  The function must be causal; its random draws may depend on c. The backward pass recomputes it
  within its branch: plain gradients of `lax.switch` store the residuals of every branch.

  Args:
    function: [B, c, ...] and `others` -> [B, c, ...]; must not close over traced values.
    sizes: increasing capacities up to S; others raise a `ValueError`.
    needed: at most S, the number of outputs that will be read; None computes all.
    inputs: one array for each position.
    *others: further arguments, any pytrees; their floats get gradients.
  """
  if not callable(function):
    raise ValueError(f"function: expected a function, got {function!r}")
  sizes = arrays.ids("sizes", sizes, "rising capacities")
  rises = all(low < high for low, high in zip((0, *sizes), sizes, strict=False))
  if not (sizes and rises and sizes[-1] == inputs.shape[1]):
    raise ValueError(f"sizes: expected rising capacities up to S = {inputs.shape[1]}, got {sizes}")
  if needed is None or len(sizes) == 1:
    return function(inputs, *others)
  index = jnp.searchsorted(jnp.asarray(sizes), needed)
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
