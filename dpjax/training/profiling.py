"""Compares the speed of training with that of the machine's matrix products."""

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend import core

_SECONDS = 0.5  # spent on the largest product


def count_products(function: Callable, *arguments: Any) -> int:
  """Counts the operations of a function's matrix products by its arguments' shapes.

  A product of [p, q] and [q, r] takes p q r multiplications and as many additions. A loop
  counts all iterations, or one if their number is unknown; of branches, the largest counts.
  """
  return count_products_in(jax.make_jaxpr(function)(*arguments).jaxpr)


def count_products_in(jaxpr: Any) -> int:
  """`count_products` of what JAX has traced."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (sums, _), _ = equation.params["dimension_numbers"]
      summed = math.prod(equation.invars[0].aval.shape[axis] for axis in sums)
      total += 2 * summed * math.prod(equation.outvars[0].aval.shape)
    else:
      inner = [count_products_in(part) for part in core.jaxprs_in_params(equation.params)]
      is_branch = equation.primitive.name == "cond"
      total += max(inner) if is_branch else sum(inner) * equation.params.get("length", 1)
  return total


class Utilisation:
  """The speed of training as a share of the speed of the machine's matrix products.

  A step counts as three forward passes, with parts hidden by a causal mask, without recomputation,
  and of matrix products alone. With token pooling (`has_pooling`), it counts at its number of
  segments, interpolated from three lengths (a second pooling counts like the first). `rate` is the
  operations per second of the largest product, on all devices.
  """

  def __init__(self, model: nn.Module, params: Any, window: int, has_pooling: bool, rate: float):
    tokens, key = jax.ShapeDtypeStruct((1, window), jnp.int32), jax.random.key(0)

    def count(**known) -> float:
      def forward(params, tokens):
        rngs = {"dropout": key}
        return model.apply({"params": params}, tokens, deterministic=True, rngs=rngs, **known)

      return 3 * count_products(forward, params, tokens) / window

    lengths = sorted({1 + window // 4, 1 + window // 2, 1 + window}) if has_pooling else []
    self._known = {length: count(capacity=length) for length in lengths} or {0: count()}
    self._rate = rate

  def operations(self, segments: float = 0.0) -> float:
    """The operations of training on one token, for a mean number of segments in a row."""
    # Lagrange's polynomial through the known counts.
    return sum(
      value * math.prod((segments - x) / (length - x) for x in self._known if x != length)
      for length, value in self._known.items()
    )

  def scores(self, tokens_per_second: float, boundaries: Mapping[str, float]) -> dict[str, float]:
    """The speed in operations per second, and its share of the largest product's."""
    speed = tokens_per_second * self.operations(boundaries.get("segments_mean", 0.0))
    return {"model_flops_per_second": speed, "model_flops_utilisation": speed / self._rate}


def product_rate(dtype: Any = jnp.float32) -> float:
  """Operations per second of a large matrix product on one device, the maximum of a few runs.

  The size of the square matrices doubles from 1,024 until a product takes 20 ms, or to 8,192.
  """
  multiply = jax.jit(lambda x: x @ x)

  def seconds(x) -> float:
    start = time.perf_counter()
    multiply(x).block_until_ready()
    return time.perf_counter() - start

  for size in (1024, 2048, 4096, 8192):
    x = jnp.ones((size, size), dtype)
    seconds(x)  # It is compiled.
    if seconds(x) > 0.02:
      break
  times, begin = [], time.perf_counter()
  while not times or time.perf_counter() - begin < _SECONDS:
    times.append(seconds(x))
  return 2 * size**3 / min(times)


def machine_memory() -> int:
  """The bytes of this machine's memory; 0 if the system does not tell."""
  if not hasattr(os, "sysconf"):
    return 0
  return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
