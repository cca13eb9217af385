"""What these tests run under: `jla` mixes dtypes and ranks, which other tests forbid."""

import jax
import pytest


@pytest.fixture(autouse=True)
def promotion():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield
