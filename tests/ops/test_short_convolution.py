"""What the gradient of a short convolution keeps; `test_all_operators.py` compares its values."""

import jax
import jax.numpy as jnp
import pytest

from dpjax import ops


@pytest.mark.parametrize("has_documents", [False, True])
def test_the_gradient_keeps_the_inputs_once(has_documents):
  inputs = jnp.ones((2, 9, 5))
  taps = jnp.ones((4, 5))
  starts = jnp.zeros((2, 9), jnp.int32).at[:, (0, 3)].set(1) if has_documents else None
  convolve = jax.jit(lambda *x: ops.short_convolution(*x, document_starts=starts))
  _, pull = jax.vjp(convolve, inputs, taps)
  kept = sum(x.size for x in jax.tree.leaves(pull))
  assert kept <= inputs.size + taps.size + inputs.shape[0] * inputs.shape[1]
