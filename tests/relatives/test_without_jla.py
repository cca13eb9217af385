"""`dpjax_relatives` where jax-linear-attention is not installed."""

import re
import subprocess
import sys
import tomllib

import pytest

import dpjax
from dpjax.config import registry
from dpjax_relatives import MIXERS, GatedDeltaNet, LogLinearMamba2, plugin
from tests import helpers

REFUSAL = (
  r"\w+: expected the package jax-linear-attention, got none "
  r"\(pip install 'dpjax\[relatives\]', on Python 3.12 or newer\)$"
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
  """The mixers by name, and no `jla`, installed or not."""
  monkeypatch.setattr(registry.mixers, "_registered", dict(registry.mixers._registered))
  for name, mixer in MIXERS.items():
    dpjax.register_mixer(name, mixer)
  monkeypatch.setitem(sys.modules, "jla", None)


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_is_refused_in_one_line(name, tmp_path):
  mixer = f"--config.model.mixer=attention,{name}"
  workdir = tmp_path / "run"
  message = helpers.command("train", "--config=quickstart", mixer, f"--workdir={workdir}")
  assert re.match(rf"model.mixer.1: {REFUSAL}", message)
  assert not workdir.exists()


def test_settings_are_known_and_checked():
  for name in MIXERS:
    assert "implementation" in registry.mixers.settings(name)
  with pytest.raises(ValueError, match="^num_taps: expected at least 0, got -1"):
    GatedDeltaNet(max_length=3, num_taps=-1)
  with pytest.raises(ValueError, match="^key_width: expected at least 1, got 0"):
    GatedDeltaNet(max_length=3, key_width=0)
  with pytest.raises(ValueError, match="^implementation: expected one of None, reference, chunked"):
    LogLinearMamba2(max_length=3, implementation="mosaic_gpu")


CODE = """
import contextlib, io, sys
import dpjax
from dpjax.__main__ import main
sys.argv = ["dpjax", "--help"]
main()
import dpjax_relatives.plugin
from pathlib import Path
from tests import helpers
path = Path(sys.argv.pop())
dpjax.train(helpers.small_config(helpers.write_text(path / "text.txt"), num_steps=1,
  eval_every_steps=1, checkpoint_every_steps=1), path / "run")
assert "kda" in dpjax.config.registry.mixers.names()
assert "jla" not in sys.modules and "equinox" not in sys.modules
"""


def test_the_package_is_imported_only_where_a_mixer_runs(tmp_path):
  code = CODE.replace("sys.argv.pop()", repr(str(tmp_path)))
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=helpers.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr


def test_the_wheel_has_the_plugin():
  project = tomllib.loads((helpers.ROOT / "pyproject.toml").read_text())
  wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
  plugins = project["project"]["entry-points"]["dpjax.plugins"]
  assert plugins["relatives"] == plugin.__name__ and "dpjax_relatives" in wheel["packages"]
  (requirement,) = project["project"]["optional-dependencies"]["relatives"]
  assert requirement.startswith("jax-linear-attention") and "3.12" in requirement
