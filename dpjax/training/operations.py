"""How many operations the matrix products of training take, and how fast they could be."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend import core

_SECONDS = 0.5  # spent on the largest product


def count_products(function: Callable, *arguments: Any) -> int:
  """Counts the operations of a function's matrix products, without running it.

  A product of [p, q] and [q, r] takes p q r multiplications and as many additions. A loop
  counts each time round, one of an unknown number once; of branches, the largest counts.

  Args:
    function: of arrays; may hold anything that JAX traces.
    *arguments: arrays, or their shapes as `jax.ShapeDtypeStruct`.
  """
  return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr) -> int:
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (sums, _), _ = equation.params["dimension_numbers"]
      summed = math.prod(equation.invars[0].aval.shape[axis] for axis in sums)
      total += 2 * summed * math.prod(equation.outvars[0].aval.shape)
      continue
    inner = [_count(part) for part in _inner(equation.params.values())]
    if equation.primitive.name == "cond":
      total += max(inner)
    else:
      total += sum(inner) * equation.params.get("length", 1)
  return total


def _inner(values):
  for value in values:
    if isinstance(value, tuple | list):
      yield from _inner(value)
    elif isinstance(value, core.ClosedJaxpr):
      yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
      yield value


class Utilisation:
  """What share of the machine's matrix products the products of training take.

  A step counts as three times the forward pass: as the model computes it, what a causal
  mask hides included, but nothing that is computed again for the gradient, and nothing that
  is no matrix product. A model with token pooling is counted at the segments that it had:
  the counts at three lengths give those between (a second pooling counts as the first's).

  Args:
    model: called as in training.
    params: its parameters, or their shapes.
    window: tokens of a row.
    has_pooling: whether the model takes `capacity`.
    rate: operations a second of the largest product, on all devices.
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
    """Of training on one token.

    Args:
      segments: segments of a row, on average; 0 without token pooling.
    """
    # Lagrange's polynomial through the known counts.
    return sum(
      value * math.prod((segments - x) / (length - x) for x in self._known if x != length)
      for length, value in self._known.items()
    )

  def scores(self, tokens_per_second: float, boundaries: Mapping[str, float]) -> dict[str, float]:
    """The speed in operations, and its share of the largest product's.

    Args:
      tokens_per_second: the speed of training.
      boundaries: from `dpjax.training.metrics.boundary_scores`.
    """
    speed = tokens_per_second * self.operations(boundaries.get("segments_mean", 0.0))
    return {"model_flops_per_second": speed, "model_flops_utilisation": speed / self._rate}


def product_rate(dtype: Any = jnp.float32) -> float:
  """Operations a second of a large matrix product on one device: the most of a few runs.

  Args:
    dtype: the dtype of the square matrices. Their size doubles from 1,024 on until a product
      takes 20 ms, or to 8,192.
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
