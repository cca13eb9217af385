"""How many parameters the Extractors have."""

import jax
import jax.numpy as jnp
import pytest

from dpjax.layers import attention, extractors


# Table 7.
@pytest.mark.parametrize(
  "module, expected",
  [
    (extractors.SHE(128), 2_129_920),
    (extractors.HE(128), 65_536),
    (extractors.WE(128), 49_152),
    (extractors.ME(128), 128),
    (attention.SelfAttention(32, 128, use_bias=False), 65_536),
    (attention.SelfAttention(1, 128, use_bias=False), 65_536),
  ],
)
def test_parameters_of_table_7(module, expected):
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((2, 5, 128)))
  assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected
