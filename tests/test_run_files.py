"""No file of a run's folder makes a command wait, fill the memory, or write over another file."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

import dpjax
from dpjax.analysis import curves
from dpjax.errors import UserError
from dpjax.runs import run_files
from tests import helpers, test_hostile

pytestmark = pytest.mark.usefixtures("standard_promotion")


def settings(text):
  config = helpers.small_config(text, num_steps=4, checkpoint_every_steps=2, eval_every_steps=4)
  config.model.max_length = 9
  return config


@pytest.fixture(scope="module")
def made(text, tmp_path_factory):
  """A finished run that compiles at once, with two checkpoints."""
  folder = tmp_path_factory.mktemp("made") / "run"
  dpjax.train(settings(text), folder, model=helpers.bigrams)
  return folder


def kinds_of(folder):
  """The files of a run, one of each kind."""
  found = {}
  for path in sorted(x for x in folder.rglob("*") if x.is_file()):
    name = path.relative_to(folder).as_posix()
    kind = "tensorboard" if "tfevents" in name else str(Path(name).with_suffix(""))
    found.setdefault("d" if "/d/" in name else kind, name)
  return [*found.values()]


def put_a_pipe(path, outside):
  os.mkfifo(path)


def put_a_device(path, outside):
  path.symlink_to("/dev/zero")


def put_a_hard_link(path, outside):
  os.link(outside, path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes")
@pytest.mark.parametrize(
  "put",
  [helpers.slow_unless(x is put_a_pipe, x) for x in (put_a_pipe, put_a_device, put_a_hard_link)],
)
def test_what_is_no_plain_file_is_refused_or_left_alone(put, made, text, tmp_path):
  for number, name in enumerate(kinds_of(made)):
    folder = Path(shutil.copytree(made, tmp_path / f"run{number}"))
    path, outside = folder / name, tmp_path / f"outside{number}"
    before = path.read_bytes() + b"\n" * 8
    outside.write_bytes(before)
    path.unlink()
    put(path, outside)
    is_link = pytest.raises(UserError, match=f"{path}: expected a file with one name, got a hard")
    refused = is_link if put is put_a_hard_link else contextlib.suppress(UserError)
    with test_hostile.limited(20), refused:
      dpjax.load(folder, model=helpers.bigrams)
    with test_hostile.limited(20), contextlib.suppress(UserError):
      curves.read_runs([folder])
    with test_hostile.limited(20), refused:
      dpjax.train(settings(text), folder, model=helpers.bigrams)
    assert outside.read_bytes() == before, name
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
  """An export of it."""
  folder = tmp_path_factory.mktemp("exported") / "out"
  dpjax.load(made, model=helpers.bigrams).save(folder)
  return folder


@pytest.mark.parametrize("put", [put_a_pipe, put_a_device])
@pytest.mark.parametrize("name", ["config.json", *run_files.CHECKED[:3]])
def test_an_export_is_read_from_plain_files_alone(put, name, exported, tmp_path):
  folder = Path(shutil.copytree(exported, tmp_path / "out"))
  (folder / name).unlink()
  put(folder / name, None)
  with test_hostile.limited(20), pytest.raises(UserError, match=f"{name}: expected a"):
    dpjax.load(folder, model=helpers.bigrams)
