"""The `dpjax` command, and experiments by name."""

import logging
import ntpath
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dpjax
from dpjax import __main__ as command
from tests import helpers

ROOT = Path(__file__).parents[1]


def test_help_names_every_command_and_wrong_ones_are_refused(capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["dpjax", "--help"])
  command.main()
  shown = capsys.readouterr().out
  assert all(f"  {name} " in shown for name in command.COMMANDS)
  for arguments, got in ((["trian"], "trian; did you mean train"), ([], "none")):
    monkeypatch.setattr(sys, "argv", ["dpjax", *arguments])
    with pytest.raises(SystemExit, match=f"command: expected one of train, .*, got {got}"):
      command.main()


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_shows_its_own_help(name, capsys):
  assert helpers.command(name, "--help") in (None, 0)
  shown = capsys.readouterr().out
  assert "--" in shown and (name in shown or f"--{name}" in shown)


def test_each_module_with_a_main_is_a_command_and_only_commands_read_arguments():
  modules = {path.stem: path.read_text() for path in (ROOT / "dpjax/commands").glob("*.py")}
  assert {name for name, code in modules.items() if "\ndef main(" in code} == {*command.COMMANDS}
  for path in (ROOT / "dpjax/analysis").glob("*.py"):
    assert not re.search(r"argparse|sys\.argv", path.read_text(encoding="utf-8")), path


UNKNOWN = helpers.cases("""
  generate x --promt=a | --promt: expected a flag of dpjax generate, .*; did you mean --prompt
  generate x -prompt=a | -prompt: .* a flag of dpjax generate, .*; did you mean --prompt
  generate x --num-samples=3 | --num-samples: .*; did you mean --num_samples
  calibrate x --fctor=4 | --fctor: expected a flag of dpjax calibrate, .*; did you mean --factor
  generate x --temp=1 | --temp: expected a flag of dpjax generate, .*; did you mean --temperature
  evaluate x --xyz | --xyz: expected a flag of dpjax evaluate, .*dpjax evaluate --help lists them
  plots x --1=2 | flags: expected --name=value, got --1=2
  train --workdir=x --config.seed=3 | --config: expected an experiment, .* --config.seed=3, got none
  compile --config.seed=3 | --config: expected an experiment, .* --config.seed=3, got none
  data list --config=x | --config: expected a flag of dpjax data, got an unknown one
""")


@pytest.mark.parametrize("words, message", UNKNOWN)
def test_an_unknown_flag_is_named_with_the_nearest_one(words, message, capsys):
  said = helpers.command(*words.split())
  assert re.match(message, said) and "\n" not in said
  assert [*capsys.readouterr()] == ["", ""]


def test_an_experiment_has_one_configuration_by_name_and_by_file():
  for name in ("quickstart", "dispatcher_ptb:tiny"):
    by_name, (stem, _, variant) = dpjax.config.load(name), name.partition(":")
    assert by_name == dpjax.config.load(f"{ROOT}/configs/{stem}.py:{variant}")
    assert by_name == dpjax.config.load(f"configs/{stem}.py:{variant}")


def test_what_is_no_experiment_is_refused(tmp_path, monkeypatch):
  with pytest.raises(dpjax.UserError, match="quickstart, got quickstrat; did you mean quickstart"):
    dpjax.config.load("quickstrat:tiny")
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(dpjax.UserError, match="^--config: .* without a variant, got .*:tiny$"):
    dpjax.config.load(f"{tmp_path}:tiny")
  # The letter of a drive begins no variant.
  monkeypatch.setattr("os.path.splitdrive", ntpath.splitdrive)
  with pytest.raises(dpjax.UserError, match=r"got D:\\mine\.py$"):
    dpjax.config.load(r"D:\mine.py:tiny")


def test_files_of_the_user_come_first_and_hide_no_packaged_experiment(tmp_path, monkeypatch):
  expected = dpjax.config.load("dispatcher_ptb:tiny")
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  for folder in ("dispatcher_ptb", "configs"):
    Path(folder).mkdir()
  Path("configs/__init__.py").touch()
  # Theirs comes first for their files, ours for packaged ones.
  Path("configs/dispatcher_wikitext2.py").write_text("raise ValueError('theirs')\n")
  assert dpjax.config.load("dispatcher_ptb:tiny") == expected
  Path("mine.py").write_text("from configs import dispatcher_wikitext2\n")
  with pytest.raises(dpjax.UserError, match="theirs"):
    dpjax.config.load("mine.py")
  # A name is never a file of the working folder; a path or a suffix is.
  for name in ("quickstart", "quickstart.py", "mine"):
    Path(name).write_text("from configs.modern_we import get_config\n")
  assert dpjax.config.load("quickstart:tiny").model.mixer.name == "dispatcher_multihead"
  for path in ("./quickstart", "quickstart.py", "./mine"):
    assert dpjax.config.load(f"{path}:tiny") == dpjax.config.load("modern_we:tiny")
  with pytest.raises(dpjax.UserError, match="got mine; a file is named by its path, ./mine$"):
    dpjax.config.load("mine")


def test_packaged_experiments_are_found_in_a_wheel(tmp_path):
  # The layout that it leaves behind, without an installation.
  ignored = shutil.ignore_patterns("__pycache__")
  shutil.copytree(ROOT / "dpjax", tmp_path / "dpjax", ignore=ignored)
  shutil.copytree(ROOT / "configs", tmp_path / "dpjax/configs", ignore=ignored)
  (tmp_path / "elsewhere").mkdir()
  (tmp_path / "elsewhere" / "mine.py").write_text(
    "def get_config():\n  from configs import msa_ptb\n  return msa_ptb.get_config('tiny')\n"
  )
  code = f"""
import sys
sys.path = [path for path in sys.path if path != {str(ROOT)!r}]  # of an editable installation
from dpjax import config
for name in ("msa_ptb:tiny", "mine.py"):
  print(config.load(name).model.mixer.name)
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    cwd=tmp_path / "elsewhere",
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": str(tmp_path)},
  )
  assert done.stdout == "attention\n" * 2, done.stderr


@pytest.mark.parametrize("words", ["evaluate", "data list"])
def test_warnings_are_sentences(words):
  logging.basicConfig(format="%(name)s", force=True)
  helpers.command(*words.split())
  line = logging.LogRecord("dpjax", logging.WARNING, "file.py", 3, "%s is odd", ("It",), None)
  assert logging.getLogger().handlers[0].format(line) == "WARNING: It is odd"


def test_libtpu_is_quiet(monkeypatch):
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # as JAX does where it sees no TPU
  monkeypatch.setenv("TPU_WORKER_ID", "7")
  monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
  assert helpers.command("evaluate").startswith("RUN, ")
  assert os.environ["TPU_ACCELERATOR_TYPE"] == "v5litepod-4"
  assert os.environ["TPU_WORKER_ID"] == "7"
