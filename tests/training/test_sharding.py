import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dpjax.training import sharding


def spec(shape, parameters):
  mesh = sharding.make_mesh()
  array = jax.ShapeDtypeStruct(shape, jnp.float32)
  return sharding.state_sharding({"x": array}, mesh, parameters)["x"].spec


def test_the_longest_axis_that_can_be_is_cut():
  axes = {(16,): 0, (7, 24): 1, (16, 24, 3): 1, (24, 24): 0, (7, 9): None, (4,): None, (): None}
  for shape, axis in axes.items():
    expected = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")
    assert spec(shape, "fsdp") == expected
    assert spec(shape, "replicated") == PartitionSpec()


def test_a_batch_is_split_over_the_rows():
  mesh = sharding.make_mesh()
  rows = np.arange(48, dtype=np.int32).reshape(16, 3)
  array = sharding.put_batch({"tokens": rows}, mesh)["tokens"]
  np.testing.assert_array_equal(array, rows)
  assert {shard.data.shape for shard in array.addressable_shards} == {(2, 3)}


def test_processes_share_the_rows(monkeypatch):
  assert np.arange(16)[sharding.process_rows(16)].tolist() == list(range(16))
  monkeypatch.setattr(jax, "process_count", lambda: 3)
  fed = []
  for number in range(3):
    monkeypatch.setattr(jax, "process_index", lambda number=number: number)
    fed.append(np.arange(15)[sharding.process_rows(15)].tolist())
  assert fed == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
