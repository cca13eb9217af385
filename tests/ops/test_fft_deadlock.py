"""Convolutions end on a CPU where FFTs of XLA that run at once wait for each other for ever.

With jaxlib 0.11.1 and 0.11.2 they do; CI runs this file with the latter. Each program runs in a
process of its own, which is ended after a time that it needs only if it hangs.
"""

import os
import subprocess
import sys

import pytest

from tests import helpers

SECONDS = 100
OPERATORS = """
import jax, jax.numpy as jnp
from dpjax import ops

def loss(arrays):
  return sum(jnp.sum(ops.causal_convolution(*xs, implementation=NAME) ** 2) for xs in arrays)

arrays = []
for i in range(9):
  rank = 1 + i % 3
  inputs = jnp.ones((6, 1500 + i, 24))
  filters = jnp.ones((1500 + i, 24, 5)[:rank]) / 1500
  arrays.append((inputs, filters))
gradient = jax.jit(jax.grad(loss))
for _ in range(12):
  jax.block_until_ready(gradient(arrays))
"""
LAYERS = """
import jax, jax.numpy as jnp
from flax import linen as nn
from dpjax import layers

class Branches(nn.Module):
  @nn.compact
  def __call__(self, x):
    mixers = [m(max_length=700) for m in (layers.WE, layers.HE, layers.ME, layers.WE)]
    return x + sum(mixer(nn.LayerNorm()(x)) for mixer in mixers)

model = nn.Sequential([Branches(), Branches()])
x = jax.random.normal(jax.random.key(0), (5, 700, 48))
params = model.init(jax.random.key(1), x)
step = jax.jit(jax.grad(lambda params: jnp.mean(model.apply(params, x) ** 2)))
for _ in range(12):
  params = jax.tree.map(lambda p, g: p - 0.1 * g, params, step(params))
jax.block_until_ready(params)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
  "program",
  [OPERATORS.replace("NAME", repr(name)) for name in ("fft", "dft", None)] + [LAYERS],
  ids=["fft", "dft", "default", "layers"],
)
def test_convolutions_that_run_at_once_end(program):
  # As a user's process is: one device, and programs that are optimised.
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  subprocess.run(
    [sys.executable, "-c", program],
    env=environment | {"JAX_PLATFORMS": "cpu"},
    cwd=helpers.ROOT,
    timeout=SECONDS,
    check=True,
  )
