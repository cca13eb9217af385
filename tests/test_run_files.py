"""No file of a run's folder makes a command wait, fill the memory, or write over another file."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

import dpjax
from dpjax.errors import UserError
from dpjax.run import workdir as workdir_lib
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


def put_a_pipe(path, outside):
  os.mkfifo(path)


def put_a_device(path, outside):
  path.symlink_to("/dev/zero")


def test_no_hard_link_is_written_through(made, text, tmp_path):
  outside, names = tmp_path / "outside", ("metrics.jsonl", "losses.f32", "lock", "config.json")
  for name in names:
    folder = Path(shutil.copytree(made, tmp_path / name))
    outside.write_bytes(before := (folder / name).read_bytes() + b"\n" * 8)
    (folder / name).unlink()
    os.link(outside, folder / name)
    with contextlib.suppress(UserError):
      dpjax.train(settings(text), folder, model=helpers.bigrams)
    assert outside.read_bytes() == before, name
    outside.unlink()


@pytest.mark.parametrize("put", [put_a_pipe, put_a_device])
@pytest.mark.parametrize("name", ["config.json", *workdir_lib.CHECKED[:3]])
def test_an_export_is_read_from_plain_files_alone(put, name, made, tmp_path):
  dpjax.load(made, model=helpers.bigrams).save(tmp_path / "out")
  (tmp_path / "out" / name).unlink()
  put(tmp_path / "out" / name, None)
  with test_hostile.limited(20), pytest.raises(UserError, match=f"{name}: expected a"):
    dpjax.load(tmp_path / "out", model=helpers.bigrams)
