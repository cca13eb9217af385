"""Which parameters a function reads only after a cast."""

import jax
import jax.numpy as jnp
import pytest

from dpjax.generation.precision import only_cast

LOW = jnp.bfloat16
X = jax.ShapeDtypeStruct((3, 4), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((4, 5), jnp.float32)


def layer(p, x):
  return x.astype(LOW) @ p.astype(LOW)


def in_loop(p, x):
  return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, layer(p, x)), (0, layer(p, x)))


def over_steps(use):
  """A scan that reads the parameter at each step."""
  return lambda p, x: jax.lax.scan(lambda s, x: (s, use(p, x[None])), 0, x)[1]


def from_step_to_step(use):
  """A scan that hands the parameter on."""

  def run(p, x):
    return jax.lax.scan(lambda p, x: (p[::-1], use(p, x[None])), p, x)[1]

  return run


def in_condition(use):
  def run(p, x):
    def goes_on(count):
      return use(p, x).sum().astype(jnp.float32) < count

    return jax.lax.while_loop(goes_on, lambda count: count - 1, jnp.float32(3))

  return run


@jax.custom_vjp
def custom(p, x):
  return layer(p, x)


custom.defvjp(lambda p, x: (custom(p, x), (p, x)), lambda saved, grad: saved)


@jax.custom_jvp
def custom_forward(p, x):
  return layer(p, x)


custom_forward.defjvp(lambda values, rates: (custom_forward(*values), custom_forward(*rates)))

CASES = {
  "a cast": (layer, True),
  "none": (lambda p, x: x @ p, False),
  "a cast to another dtype": (lambda p, x: x @ p.astype(jnp.float16).astype(x.dtype), False),
  "two uses": (lambda p, x: layer(p, x).astype(x.dtype) + x @ p, False),
  "two casts": (lambda p, x: layer(p, x) + layer(2 * p.astype(LOW), x), True),
  "a sum first": (lambda p, x: layer(p + 1, x), False),
  "a layout first": (lambda p, x: layer(p.T[::-1].reshape(5, 4).T, x), True),
  "a slice first": (lambda p, x: layer(jax.lax.dynamic_slice(p, (0, 1), (4, 2)), x), True),
  "rows first": (lambda p, x: jnp.take(p, jnp.arange(3), axis=0).astype(LOW), True),
  "an index": (lambda p, x: x.astype(LOW)[p[0, 0].astype(jnp.int32)], False),
  "returned": (lambda p, x: (p, layer(p, x)), False),
  "never": (lambda p, x: x, True),
  "jit": (jax.jit(layer), True),
  "jit without a cast": (jax.jit(lambda p, x: x @ p), False),
  "jit of a layout": (lambda p, x: layer(jax.jit(lambda p: p[:, :2])(p), x), True),
  "jit of a layout alone": (lambda p, x: x @ jax.jit(lambda p: p[:, :2])(p), False),
  "checkpoint": (jax.checkpoint(layer), True),
  "custom_vjp": (custom, True),
  "custom_jvp": (custom_forward, True),
  "cond": (lambda p, x: jax.lax.cond(x[0, 0] > 0, layer, layer, p, x), True),
  "one branch": (
    lambda p, x: jax.lax.cond(x[0, 0] > 0, layer, lambda p, x: (x @ p).astype(LOW), p, x),
    False,
  ),
  "a loop": (in_loop, True),
  "a scan": (over_steps(layer), True),
  "a scan without a cast": (over_steps(lambda p, x: x @ p), False),
  "a scan that hands it on": (from_step_to_step(layer), False),
  "a scan over its rows": (
    lambda p, x: jax.lax.scan(lambda s, p: (s, p.astype(LOW)), 0, p)[1],
    True,
  ),
  "a scan that returns its rows": (
    lambda p, x: jax.lax.scan(lambda s, p: (s, p), 0, p)[1],
    False,
  ),
  "a condition": (in_condition(layer), True),
  "a condition without a cast": (in_condition(lambda p, x: x @ p), False),
}


@pytest.mark.parametrize("case", CASES)
def test_only_casts_are_found(case):
  function, expected = CASES[case]
  found = only_cast(lambda tree, x: function(tree["p"], x), {"p": KERNEL}, X, dtype=LOW)
  assert found == {"p": expected}
