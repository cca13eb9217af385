"""Checkpoints: whole or not at all, and damage is noticed."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from dpjax.training import checkpoints
from dpjax.training.checkpoints import Checkpoints
from dpjax.training.step import TrainState


def make_state(step: int) -> TrainState:
  draw = jax.random.normal(jax.random.key(step), (700, 11))
  params = {"w": draw, "b": jnp.arange(13.0) * step}
  return TrainState(
    jnp.asarray(step, jnp.int32), params, optax.adam(0.1).init(params), jax.random.key(step)
  )


def abstract():
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
    make_state(0),
  )


def assert_equal(one: TrainState, other: TrainState):
  chex.assert_trees_all_equal(
    one.replace(key=jax.random.key_data(one.key)),
    other.replace(key=jax.random.key_data(other.key)),
  )


def save(folder, steps, best=()):
  with Checkpoints(folder, keep=2) as saved:
    for step in steps:
      saved.save(make_state(step), {"note": f"of {step}"}, best=step in best)


def largest_file(folder: Path) -> Path:
  return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def test_the_last_and_the_best_are_kept(tmp_path):
  save(tmp_path, [3, 5, 7, 11], best=[3, 5])
  with Checkpoints(tmp_path) as saved:
    assert saved.steps() == [5, 7, 11]
    assert saved.best_step() == 5
    found = saved.restore(abstract())
    assert (found.step, found.meta["note"]) == (11, "of 11")
    assert_equal(found.state, make_state(11))
    assert_equal(saved.restore_step(abstract()).state, make_state(5))
    assert_equal(saved.restore_step(abstract(), 7).state, make_state(7))
    with pytest.raises(ValueError, match=r"step: expected one of \[5, 7, 11\], got 4"):
      saved.restore_step(abstract(), 4)


def test_nothing_saved(tmp_path):
  with Checkpoints(tmp_path, keep=2) as saved:
    assert saved.restore(abstract()) is None
    with pytest.raises(ValueError, match="workdir: expected a run with a checkpoint"):
      saved.restore_step(abstract())


def cut(path: Path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 4
  path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink])
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(tmp_path, damage, caplog):
  save(tmp_path, [5, 7])
  damage(largest_file(tmp_path / "last" / "7"))
  with Checkpoints(tmp_path, keep=2) as saved:
    assert saved.restore_step(abstract()).step == 5
    with pytest.raises(ValueError, match="damaged one of step 7"):
      saved.restore_step(abstract(), 7)
    found = saved.restore(abstract())
    assert_equal(found.state, make_state(5))
    assert "The checkpoint of step 7 is damaged" in caplog.text
    # Nothing is lost, and the step can be saved again.
    assert [path.name.split("_")[:2] for path in (tmp_path / "damaged").iterdir()] == [
      ["last", "7"]
    ]
    saved.save(make_state(7), {"note": "again"})
  with Checkpoints(tmp_path) as saved:
    assert saved.restore(abstract()).meta["note"] == "again"


def test_all_damaged_is_refused(tmp_path):
  save(tmp_path, [5])
  cut(largest_file(tmp_path / "last" / "5"))
  with Checkpoints(tmp_path, keep=2) as saved:
    with pytest.raises(ValueError, match=r"expected a whole checkpoint .* steps \[5\]"):
      saved.restore(abstract())
  assert (tmp_path / "last" / "5").exists()


def test_a_later_format_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoints, "FORMAT", 2)
  save(tmp_path, [5])
  monkeypatch.setattr(checkpoints, "FORMAT", 1)
  with Checkpoints(tmp_path, keep=2) as saved:
    with pytest.raises(ValueError, match="format up to 1, got 2"):
      saved.restore(abstract())


def test_reading_changes_nothing(tmp_path):
  save(tmp_path, [5])
  unfinished = tmp_path / "last" / "7.orbax-checkpoint-tmp"
  unfinished.mkdir()
  with Checkpoints(tmp_path) as saved:
    assert saved.steps() == [5]
  assert unfinished.exists()
  # What a kill left is in nobody's way.
  with Checkpoints(tmp_path, keep=2) as saved:
    saved.save(make_state(7), {"note": "of 7"})
  with Checkpoints(tmp_path) as saved:
    assert saved.restore(abstract()).meta["note"] == "of 7"


def test_a_better_one_at_an_earlier_step_takes_the_place_of_the_best(tmp_path):
  save(tmp_path, [7], best=[7])
  save(tmp_path, [5], best=[5])
  with Checkpoints(tmp_path) as saved:
    assert saved.best_step() == 5


def test_fingerprints_notice_a_bit_and_a_swap():
  state = make_state(3)
  bit = state.replace(params=state.params | {"b": state.params["b"].at[4].add(1e-6)})
  swap = state.replace(params=state.params | {"b": state.params["b"][::-1]})
  own = checkpoints.fingerprints(state)
  assert own == checkpoints.fingerprints(make_state(3))
  assert own != checkpoints.fingerprints(bit)
  assert own != checkpoints.fingerprints(swap)
