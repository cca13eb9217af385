"""Where the scripts keep what they compile. Each start is a process of its own."""

import json
import os
import subprocess
import sys

import pytest

from tests import helpers

pytestmark = pytest.mark.slow

# A script that compiles one function, and says what of JAX's cache was used.
SCRIPT = """
import collections, json, sys
import jax
from jax import monitoring
from dpjax.commands import command_line

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
events = collections.Counter()
monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
if sys.argv[1] == "accelerator":
  jax.default_backend = lambda: "gpu"
del sys.argv[1]

def main(_):
  value = jax.jit(lambda x: x * 3 + 1)(2.0)
  print(json.dumps(dict(
    value=float(value),
    hits=events["cache_hits"],
    folder=jax.config.jax_compilation_cache_dir,
    max_size=jax.config.jax_compilation_cache_max_size,
  )))

command_line.start(command_line.Parser("test", ""), main)
"""


def start(*flags, variant="cpu", **environment):
  """What the script said; its environment has no settings of JAX's cache but the given."""
  clean = {name: value for name, value in helpers.environment().items() if "CACHE" not in name}
  result = subprocess.run(
    [sys.executable, "-W", "error", "-c", SCRIPT, variant, *flags],
    env=clean | {name: str(value) for name, value in environment.items()},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  said = json.loads(result.stdout)
  assert said["value"] == 7
  return said, result.stderr


def programs(folder):
  return {name for name in os.listdir(folder) if name.endswith("-cache")}


def test_a_second_start_finds_what_the_first_compiled_in_the_folder_of_the_flag(tmp_path):
  folder, others = tmp_path / "new" / "cache", [tmp_path / "jax", tmp_path / "home"]
  # Before that of JAX and the user's own.
  places = dict(JAX_COMPILATION_CACHE_DIR=others[0], XDG_CACHE_HOME=others[1])
  first, errors = start(f"--compilation_cache={folder}", variant="accelerator", **places)
  assert (first["hits"], first["folder"], errors) == (0, str(folder), "")
  assert first["max_size"] == 2**31 and not any(path.exists() for path in others)
  kept = programs(folder)
  assert kept and folder.stat().st_mode & 0o077 == 0
  second, _ = start(f"--compilation_cache={folder}")
  assert second["hits"] == len(kept) and programs(folder) == kept


def test_without_a_flag_the_folder_is_that_of_jax_or_the_users_own(tmp_path):
  of_user = dict(XDG_CACHE_HOME=tmp_path, variant="accelerator")
  assert start(**of_user)[0]["folder"] == str(tmp_path / "dpjax/compiled")
  said, _ = start(**of_user, JAX_COMPILATION_CACHE_DIR=tmp_path / "jax")
  assert (said["folder"], said["max_size"]) == (str(tmp_path / "jax"), -1)  # as the user has set it


def test_an_empty_flag_means_none_and_so_does_a_cpu(tmp_path):
  kept = dict(XDG_CACHE_HOME=tmp_path / "home", JAX_COMPILATION_CACHE_DIR=tmp_path / "jax")
  start("--compilation_cache=", variant="accelerator", **kept)
  said, _ = start(XDG_CACHE_HOME=tmp_path, HOME=tmp_path)
  assert said["folder"] is None and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_stops_no_run(tmp_path):
  (tmp_path / "file").write_text("x")
  folder = tmp_path / "file" / "cache"
  _, errors = start(f"--compilation_cache={folder}")
  assert errors == (
    f"compilation_cache: expected a folder that can be written, got {folder} "
    "(Not a directory); what is compiled is not kept\n"
  )
