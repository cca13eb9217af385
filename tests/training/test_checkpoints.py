"""Checkpoints: whole or not at all, and damage is noticed."""

import errno
import os
import resource
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

from dpjax.errors import UserError
from dpjax.training import checkpoints, sharding
from dpjax.training.checkpoints import Checkpoints
from dpjax.training.step import TrainState
from tests import helpers


def make_state(step: int) -> TrainState:
  draw = jax.random.normal(jax.random.key(step), (700, 11))
  params = {"w": draw, "b": jnp.arange(13.0) * step}
  return TrainState(
    jnp.asarray(step, jnp.int32), params, optax.adam(0.1).init(params), jax.random.key(step)
  )


def abstract():
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), make_state(0)
  )


def assert_equal(one: TrainState, other: TrainState):
  chex.assert_trees_all_equal(
    one.replace(key=jax.random.key_data(one.key)), other.replace(key=jax.random.key_data(other.key))
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
    best = saved.restore_step(abstract().params)
    assert (best.step, best.meta["note"]) == (5, "of 5")
    chex.assert_trees_all_equal(best.params, make_state(5).params)
    other = saved.restore_step(abstract().params, 7)
    chex.assert_trees_all_equal(other.params, make_state(7).params)
    with pytest.raises(ValueError, match=r"step: expected one of \[5, 7, 11\], got 4"):
      saved.restore_step(abstract().params, 4)


def test_nothing_saved(tmp_path):
  with Checkpoints(tmp_path, keep=2) as saved:
    assert saved.restore(abstract()) is None
    with pytest.raises(ValueError, match="workdir: expected a run with a checkpoint"):
      saved.restore_step(abstract().params)


def test_parameters_are_read_without_the_moments_and_onto_any_devices(tmp_path):
  with Checkpoints(tmp_path, keep=2) as saved:
    params = make_state(5).params | {"u": jnp.arange(24.0)}
    opt_state = optax.adam(0.1).init(params)
    saved.save(make_state(5).replace(params=params, opt_state=opt_state), {})
  places = sharding.state_sharding(params, sharding.make_mesh(), "sharded")
  target = jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), params, places
  )
  with Checkpoints(tmp_path) as saved:
    found = saved.restore_step(target).params
  chex.assert_trees_all_equal(found, params)
  shapes = {
    name: {shard.data.shape for shard in leaf.addressable_shards} for name, leaf in found.items()
  }
  assert shapes == {"w": {(700, 11)}, "b": {(13,)}, "u": {(3,)}}
  # Another optimiser's checkpoint has the same parameters.
  with Checkpoints(tmp_path) as saved:
    with pytest.raises(UserError, match="a checkpoint of this model"):
      saved.restore(abstract())


def cut(path: Path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 4
  path.write_bytes(content)


def put_a_folder(path: Path):
  path.unlink()
  path.mkdir()


@pytest.mark.parametrize("damage", [cut, pytest.param(flip_a_bit, marks=pytest.mark.slow)])
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(tmp_path, damage, caplog):
  save(tmp_path, [5, 7])
  damage(largest_file(tmp_path / "last" / "7"))
  with Checkpoints(tmp_path, keep=2) as saved:
    assert saved.restore_step(abstract().params).step == 5
    with pytest.raises(ValueError, match="damaged one of step 7"):
      saved.restore_step(abstract().params, 7)
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


FILES = "meta/metadata", "state/_METADATA", "state/manifest.ocdbt", "state/d"
DAMAGE = [
  *((cut, name) for name in FILES),
  *((Path.unlink, name) for name in (*FILES, "state", "meta")),
  *((put_a_folder, name) for name in FILES[:2]),
]


@pytest.mark.parametrize(
  ("damage", "name"),
  [helpers.slow_unless(i % 3 == 0, *each) for i, each in enumerate(DAMAGE)],
)
def test_damage_of_every_file_is_noticed(tmp_path, damage, name):
  save(tmp_path, [5, 7])
  path = tmp_path / "last" / "7" / name
  if path.is_dir() and path.name == "d":
    (path,) = path.iterdir()
  if path.is_dir():
    path.rename(tmp_path / "gone")
  else:
    damage(path)
  with Checkpoints(tmp_path, keep=2) as saved:
    assert saved.restore(abstract()).step == 5
  assert len([*(tmp_path / "damaged").iterdir()]) == 1


def of_the_system(number):
  """As Python tells it."""
  return lambda: OSError(number, os.strerror(number))


def of_tensorstore(code, number):
  text = f'{code}: Error opening "zarr" driver: Failed to open: {os.strerror(number)} [x]'
  return lambda: ValueError(text)


def of_orbax(code, number):
  def make():
    try:
      raise of_tensorstore(code, number)()
    except ValueError as error:
      wrapped = Exception("Encountered error while reading array index: 3")
      wrapped.__cause__ = error
      return wrapped

  return make


@pytest.mark.parametrize(
  "make, number",
  [
    (of_the_system(errno.ESTALE), errno.ESTALE),
    (of_the_system(errno.EACCES), errno.EACCES),
    (of_tensorstore("RESOURCE_EXHAUSTED", errno.EMFILE), errno.EMFILE),
    (of_orbax("UNKNOWN", errno.EIO), errno.EIO),
  ],
)
def test_an_error_of_the_file_system_is_no_damage(tmp_path, monkeypatch, make, number):
  save(tmp_path, [5, 7])
  read = ocp.PyTreeCheckpointHandler.restore

  def restore(self, directory, *arguments, **settings):
    if Path(directory).parent.name == "7":
      raise make()
    return read(self, directory, *arguments, **settings)

  with monkeypatch.context() as patch, Checkpoints(tmp_path, keep=2) as saved:
    patch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    for call in (lambda: saved.restore(abstract()), lambda: saved.restore_step(abstract().params)):
      with pytest.raises(OSError, match=os.strerror(number)) as caught:
        call()
      assert caught.value.errno == number and "/7" in caught.value.filename
  assert not (tmp_path / "damaged").exists()
  with Checkpoints(tmp_path, keep=2) as saved:
    assert saved.restore(abstract()).step == 7


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that gives EIO")
@pytest.mark.parametrize("name", ["meta/metadata", "commit_success.txt"])
def test_a_file_that_cannot_be_read_is_no_damage(tmp_path, name):
  save(tmp_path, [5, 7])
  last = tmp_path / "last" / "7"
  (last / name).unlink()
  (last / name).symlink_to("/proc/self/mem")
  if name == "commit_success.txt":  # Nobody reads it, but to find what is wrong elsewhere.
    cut(last / "meta" / "metadata")
  with Checkpoints(tmp_path, keep=2) as saved:
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
      saved.restore(abstract())
  assert last.exists() and not (tmp_path / "damaged").exists()


def changed(**changes) -> TrainState:
  state = abstract()
  params = {name: leaf for name, leaf in (state.params | changes).items() if leaf}
  return state.replace(params=params)


@pytest.mark.parametrize(
  "changes, message",
  [
    (
      dict(w=None, v=jax.ShapeDtypeStruct((3, 5), jnp.float32)),
      r"in \S+/last/7: params.v is missing; params.w is not the model's$",
    ),
    (
      dict(b=jax.ShapeDtypeStruct((17,), jnp.bfloat16)),
      r"in \S+: params.b is float32 \[13\] and not bfloat16 \[17\]$",
    ),
  ],
)
def test_the_checkpoint_of_another_model_is_told_as_such(tmp_path, changes, message):
  save(tmp_path, [5, 7])
  with Checkpoints(tmp_path, keep=2) as saved:
    message = f"^workdir: expected a checkpoint of this model, got another .*{message}"
    with pytest.raises(UserError, match=message):
      saved.restore(changed(**changes))
    with pytest.raises(UserError, match=message):
      saved.restore_step(changed(**changes).params)
  assert not (tmp_path / "damaged").exists()


def test_all_damaged_is_refused(tmp_path):
  save(tmp_path, [5])
  cut(largest_file(tmp_path / "last" / "5"))
  with Checkpoints(tmp_path, keep=2) as saved:
    with pytest.raises(ValueError, match=r"whole .* the steps \[5\]\. R.* backup"):
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
    assert saved.steps() == [5] == checkpoints.saved_steps(tmp_path, "last")
  assert unfinished.exists()
  assert not any(checkpoints.saved_steps(folder, "best") for folder in (tmp_path, "none"))
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


def test_the_best_of_the_same_step_is_used_where_the_last_is_damaged(tmp_path):
  save(tmp_path, [3, 5], best=[5])
  largest_file(tmp_path / "last" / "5").unlink()
  with Checkpoints(tmp_path, keep=2) as saved:
    found = saved.restore(abstract())
    assert found.step == 5
    assert_equal(found.state, make_state(5))
    saved.save(make_state(7), {"note": "of 7"})
  with Checkpoints(tmp_path) as saved:
    assert saved.steps() == [3, 5, 7] and saved.best_step() == 5


def test_a_folder_that_cannot_be_listed_is_no_damage(tmp_path, monkeypatch):
  save(tmp_path, [3])
  largest_file(tmp_path / "last" / "3").unlink()

  def walk(folder, onerror):
    onerror(OSError(errno.EIO, "Input/output error", str(folder)))
    return iter(())

  monkeypatch.setattr(os, "walk", walk)
  with Checkpoints(tmp_path, keep=2) as saved:
    with pytest.raises(OSError, match="Input/output error"):
      saved.restore(abstract())
  assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("best", [(), (7, 9)])
def test_what_does_not_fit_on_the_disk_is_told_in_one_line_and_removed(
  tmp_path, capfd, caplog, best
):
  save(tmp_path, [5])
  saved, limits = Checkpoints(tmp_path, keep=3), resource.getrlimit(resource.RLIMIT_FSIZE)
  with Checkpoints(tmp_path):  # As of the run that training starts from.
    pass
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limits[1]))  # less than one of its files
    with pytest.raises(UserError) as error:
      for step in (7, 9):  # The error of the first is found at the second, or at the end.
        saved.save(make_state(step), {}, best=step in best)
      saved.wait()
    saved.close()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert str(error.value) == (
    f"workdir: expected a folder that can be written, got {tmp_path} (File too large)"
  )
  assert capfd.readouterr() == ("", "")
  assert not [record for record in caplog.records if record.exc_info]
  assert not [*tmp_path.glob("*/*tmp*")]
  with Checkpoints(tmp_path) as saved:
    assert saved.restore(abstract()).step == 5


def test_a_folder_that_is_removed_is_missed_at_the_next_save(tmp_path):
  saved = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
  saved.save(make_state(5), {})
  saved.wait()
  shutil.rmtree(tmp_path / "run")
  with pytest.raises(UserError, match="^workdir: expected the run's folder to stay, got .* remov"):
    saved.save(make_state(7), {})
  saved.close()
  assert not (tmp_path / "run").exists()
