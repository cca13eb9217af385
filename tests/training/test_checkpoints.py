"""Checkpoints: whole or not at all, and damage is noticed."""

import asyncio
import errno
import json
import logging
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from dpjax.errors import UserError
from dpjax.training import checkpoints
from dpjax.training.checkpoints import Checkpoints
from dpjax.training.trainer import TrainState
from tests import helpers


def make_state(step: int) -> TrainState:
  draw = jax.random.normal(jax.random.key(step), (700, 11))
  params = {"w": draw, "b": jnp.arange(13.0) * step}
  return TrainState(
    jnp.asarray(step, jnp.int32), params, optax.adam(0.1).init(params), jax.random.key(step)
  )


def abstract(**changes):
  shapes = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), make_state(0)
  )
  params = {name: leaf for name, leaf in (shapes.params | changes).items() if leaf}
  return shapes.replace(params=params)


def assert_equal(one: TrainState, other: TrainState):
  chex.assert_trees_all_equal(
    one.replace(key=jax.random.key_data(one.key)), other.replace(key=jax.random.key_data(other.key))
  )


def save(folder, steps, best=0):
  with Checkpoints(folder, keep=2) as saved:
    for step in steps:
      best = step if step == 5 else best
      saved.save(make_state(step), {"note": f"of {step}", "best": {"step": best}})


@pytest.fixture(scope="module")
def saved_steps(tmp_path_factory):
  """Checkpoints of steps 5 and 7, of which 5 is the best."""
  folder = tmp_path_factory.mktemp("made")
  save(folder, [3, 5, 7])
  return folder


@pytest.fixture
def folder(saved_steps, tmp_path):
  """A copy of them."""
  return Path(shutil.copytree(saved_steps, tmp_path / "checkpoints"))


def restored_step(folder) -> int:
  with Checkpoints(folder, keep=2) as saved:
    return int(saved.restore(abstract())[0].step)


def test_the_last_and_the_best_are_kept(tmp_path):
  save(tmp_path, [3, 5, 7, 11])
  save(tmp_path, [13], best=5)
  with Checkpoints(tmp_path) as saved:
    assert saved.steps() == [5, 11, 13] and saved.best_step() == 5
    state, meta = saved.restore(abstract())
    assert meta["note"] == "of 13"
    assert_equal(state, make_state(13))
    for request, step in ((None, 5), (11, 11)):
      restored, params = saved.restore_step(abstract().params, request)
      assert restored == step
      chex.assert_trees_all_equal(params, make_state(step).params)
  save(tmp_path, [17], best=17)
  with Checkpoints(tmp_path) as saved:
    assert saved.steps() == [13, 17] and saved.best_step() == 17


def cut(path: Path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 4
  path.write_bytes(content)


def change_the_fingerprints(path: Path):
  """As if arrays had other values, which OCDBT's own sums do not tell of."""
  meta = json.loads(path.read_text())
  meta["fingerprints"] = [number ^ 4 for number in meta["fingerprints"]]
  path.write_text(json.dumps(meta))


DAMAGE = [
  (flip_a_bit, "state/d/*"),
  (change_the_fingerprints, "meta/metadata"),
  (cut, "meta/metadata"),
  (shutil.rmtree, "meta"),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGE)
def test_a_damaged_one_is_skipped_and_renamed(folder, damage, name, caplog):
  damage(max((folder / "7").glob(name), key=lambda path: path.stat().st_size))
  with Checkpoints(folder, keep=2) as saved:
    with pytest.raises(UserError, match=r"damaged ones of the steps \[7\]"):
      saved.restore_step(abstract().params, 7)
    state, _ = saved.restore(abstract())
    assert_equal(state, make_state(5))
    assert "The checkpoint of step 7 is damaged" in caplog.text
    assert len([*folder.glob("7.damaged-*")]) == 1  # Nothing is lost.
    saved.save(make_state(7), {})
  assert restored_step(folder) == 7


def test_asyncio_is_left_alone_and_damage_prints_one_warning(folder, capfd, monkeypatch):
  # A handler that another test left may have a closed stream.
  monkeypatch.setattr(logging, "raiseExceptions", False)
  new_event_loop = asyncio.new_event_loop
  for path in (folder / "7/state/d").iterdir():
    flip_a_bit(path)
  with Checkpoints(folder, keep=2) as saved:
    assert int(saved.restore(abstract())[0].step) == 5
    saved.save(make_state(11), {})
    assert asyncio.new_event_loop is new_event_loop
  time.sleep(0.5)  # Threads that read the other arrays may still print.
  assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["metadata", "deserialize"])
def test_an_error_of_one_array_waits_for_the_others(folder, name, monkeypatch):
  # Orbax closes its event loop, of which they would each print that it is closed.
  read = []

  async def read_slowly():
    await asyncio.sleep(0.1)
    read.append(name)

  async def fail(*_, **__):
    read_others = asyncio.ensure_future(read_slowly())
    await asyncio.sleep(0)
    raise ValueError(f"damaged, while {read_others} reads")

  handler = ocp.type_handlers.get_type_handler(jax.Array)
  monkeypatch.setattr(type(handler), name, fail)
  with pytest.raises(UserError, match="expected an intact checkpoint"):
    Checkpoints(folder).restore_step(abstract().params, 7)
  assert read == [name]


def test_an_error_of_the_file_system_is_no_damage(folder, monkeypatch):
  def restore(*_, **__):
    raise OSError(errno.ESTALE, "Stale file handle", "a file")

  with monkeypatch.context() as patch, Checkpoints(folder, keep=2) as saved:
    patch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    with pytest.raises(OSError, match="Stale file handle"):
      saved.restore(abstract())
  assert restored_step(folder) == 7


def test_an_error_of_the_first_process_ends_the_others(folder, monkeypatch):
  (folder / "7/state/_METADATA").unlink()
  gather = checkpoints._gather
  gathered = []

  def refuse(path, target):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))

  monkeypatch.setattr(Path, "rename", refuse)
  monkeypatch.setattr(checkpoints, "_gather", lambda x: gathered.append(x) or gather(x))
  message = "^workdir: expected a folder that can be written, got .* .Permission denied"
  with pytest.raises(UserError, match=message), Checkpoints(folder, keep=2) as saved:
    saved.restore(abstract())
  assert gathered[-1] == 1
  # Another process renames nothing, and hears of it.
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  with pytest.raises(UserError, match="^workdir: process 0 could not rename checkpoints; see "):
    monkeypatch.setattr(checkpoints, "_gather", lambda _: [1, 0])
    Checkpoints(folder, keep=2)._clean([folder / "7"], 2, {})


def test_the_checkpoint_of_another_model_is_refused(folder):
  vector, matrix = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((17,), (3, 5)))
  target = abstract(w=None, b=vector, v=matrix)
  message = (
    r"^workdir: expected a checkpoint of this model, got another in \S+/7: params.b is "
    r"float32 \[13\], in the model bfloat16 \[17\]; params.v is None, .*; params.w is float32"
  )
  with Checkpoints(folder, keep=2) as saved:
    with pytest.raises(UserError, match=message):
      saved.restore(target)
    with pytest.raises(UserError, match=message):
      saved.restore_step(target.params, 7)


def test_what_must_not_be_used_is_refused(folder, monkeypatch):
  with Checkpoints(folder, keep=2) as saved:
    with pytest.raises(UserError, match="workdir: expected the text that its checkpoints"):
      saved.restore(abstract(), {"text": "x"})
    with monkeypatch.context() as patch:
      patch.setattr(checkpoints, "FORMAT", 0)
      with pytest.raises(UserError, match="format up to 0, got 1"):
        saved.restore(abstract())
    for step in (5, 7):
      (folder / f"{step}/state/_METADATA").unlink()
    with pytest.raises(UserError, match=r"intact .* the steps \[7, 5\]\. R.* backup"):
      saved.restore(abstract())
  assert {"5", "7"} <= {path.name for path in folder.iterdir()}


def test_reading_changes_nothing(folder):
  unfinished = folder / "11.orbax-checkpoint-tmp"
  unfinished.mkdir()
  with Checkpoints(folder) as saved:
    assert saved.steps() == [5, 7]
  assert unfinished.exists()
  save(folder, [11])  # What a kill left is in nobody's way.
  assert restored_step(folder) == 11


def test_what_a_kill_left_is_removed_by_the_next_run(folder):
  shutil.copytree(folder / "5", folder / "3")
  (folder / "11.orbax-checkpoint-tmp").mkdir()
  with Checkpoints(folder, keep=1) as saved:
    saved.restore(abstract())
    assert saved.steps() == [5, 7]  # the best and the last
  assert {path.name for path in folder.iterdir()} == {"5", "7"}


@pytest.mark.parametrize("name", ["[x]", "a*", "a?"])
def test_a_path_that_orbax_takes_for_a_pattern_is_read_but_not_written(folder, tmp_path, name):
  moved = tmp_path / name / "checkpoints"
  shutil.copytree(folder, moved)
  with Checkpoints(moved) as saved:
    assert_equal(saved.restore(abstract())[0], make_state(7))
  with pytest.raises(UserError, match=r"^workdir: expected a path without \*, \? and \[, which "):
    Checkpoints(moved, keep=2)


def test_fingerprints_read_all_bits_of_every_dtype_and_their_order():
  with jax.enable_x64(True):
    for dtype in "float64 int64 complex128 float32 bfloat16 int4 bool".split():
      bits = np.zeros(7 * jnp.dtype(dtype).itemsize, np.uint8)
      arrays = [bits.copy() for _ in range(len(bits) + 1)]
      for i, array in enumerate(arrays[1:]):
        array[i] = 1
      sums = [int(checkpoints.fingerprints(jnp.asarray(x.view(dtype)))[0]) for x in arrays]
      assert len({*sums}) == len(sums), dtype
  x = jnp.arange(13.0) * 3
  one, same, swapped = map(int, checkpoints.fingerprints((x, x + 0, x[::-1])))
  assert one == same != swapped


def test_what_does_not_fit_on_the_disk_is_told_in_one_line_and_removed(folder, capfd, caplog):
  resource = pytest.importorskip("resource")
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limits[1]))  # less than one of its files
    with pytest.raises(UserError) as error, Checkpoints(folder, keep=3) as saved:
      saved.save(make_state(11), {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert str(error.value) == (
    f"workdir: expected a folder that can be written, got {folder} (File too large)"
  )
  assert capfd.readouterr() == ("", "")
  assert not [record for record in caplog.records if record.exc_info]
  assert not [*folder.glob("*tmp*")]
  assert restored_step(folder) == 7


FULL_DISK = """
import errno, os, sys
from pathlib import Path
from dpjax.errors import exit_on_user_error
from dpjax.training.checkpoints import Checkpoints
from tests.training.test_checkpoints import make_state

mkdir = os.mkdir

def make(path, *rest, **options):
  if "7.orbax" in str(path):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))
  mkdir(path, *rest, **options)

with exit_on_user_error(), Checkpoints(Path(sys.argv[1]), keep=2) as saved:
  saved.save(make_state(5), {})
  saved._manager.wait_until_finished()
  os.mkdir = make
  saved.save(make_state(7), {})
"""


def test_a_full_disk_is_told_in_one_line_and_ends_the_process(tmp_path):
  # Threads of Orbax that wait for one another would keep it for 300 seconds.
  options = dict(env=helpers.environment(), capture_output=True, text=True, timeout=200)
  done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], **options)
  (line,) = (done.stdout + done.stderr).splitlines()
  assert re.search("workdir: expected a folder that can be written, got .*No space", line)
  assert done.returncode == 1 and not [*tmp_path.glob("*tmp*")]


def test_the_logs_of_others_are_left_alone(caplog):
  for name in ("absl", "asyncio"):
    assert not logging.getLogger(name).filters
    try:
      raise ValueError("of tensorstore, which the user's program uses, too")
    except ValueError:
      logging.getLogger(name).exception("mine")
  assert len(caplog.records) == 2
