import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dpjax.training import sharding


def spec(shape, parameters):
  mesh = sharding.make_mesh()
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  return sharding.state_sharding({"x": array}, mesh, parameters)["x"].spec


@pytest.mark.parametrize(
  "shape, axis",
  [
    ((16,), 0),
    ((7, 24), 1),
    ((16, 24, 3), 1),
    ((24, 24), 0),
    ((7, 9), None),
    ((4,), None),
    ((), None),
  ],
)
def test_the_longest_axis_that_can_be_is_cut(shape, axis):
  expected = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")
  assert spec(shape, "sharded") == expected
  assert spec(shape, "replicated") == PartitionSpec()


def test_a_batch_is_split_over_the_rows():
  mesh = sharding.make_mesh()
  rows = np.arange(48, dtype=np.int32).reshape(16, 3)
  array = sharding.put_batch({"tokens": rows}, mesh)["tokens"]
  np.testing.assert_array_equal(array, rows)
  assert {shard.data.shape for shard in array.addressable_shards} == {(2, 3)}


def test_one_process_feeds_every_row():
  assert np.arange(16)[sharding.process_rows(16)].tolist() == list(range(16))
