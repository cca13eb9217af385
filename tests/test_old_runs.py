"""Runs of version 0.1, whose settings were flat: read, scored, continued.

tests/golden/runs_0.1.tar.xz was written by that version, with what it said of them.
"""

import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.run import workdir as workdir_lib
from tests import helpers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("old")
  with tarfile.open(helpers.ROOT / "tests/golden/runs_0.1.tar.xz") as archive:
    archive.extractall(folder, filter="data")
  return folder


@pytest.mark.parametrize("name", ["plain", pytest.param("pooled", marks=pytest.mark.slow)])
def test_an_old_run_says_what_it_said(folder, name):
  run = dpjax.load(folder / name)
  expected = json.loads((folder / f"{name}.json").read_text())
  assert run.step == expected["step"]
  tokens = run.tokenizer.encode("the cat sat on a mat")[None, :17]
  logits = run.model.apply({"params": run.params}, tokens).logits[0, -1]
  np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-6)
  if name == "plain":
    assert run.generate("the ", length=9, temperature=0.0) == [expected["text"]]
  scores = run.score_split("test")
  for key, value in expected["scores"].items():
    if value is not None:
      assert scores[key] == pytest.approx(value, rel=1e-5), key


def test_every_setting_is_found_again(folder):
  plain, pooled = (workdir_lib.read_config(folder / name) for name in ("plain", "pooled"))
  assert plain.model.mixer == config_lib.mixer(
    "dispatcher_multihead", num_heads=2, num_levels=3, level_dropout=0.1, implementation="unrolled"
  )
  assert plain.train.optimizer == config_lib.optimizer("adamw", b2=0.99, weight_decay=0.02)
  assert plain.train.schedule == config_lib.schedule("cosine", warmup_steps=2)
  model = pooled.model
  assert model.mixer == config_lib.mixer("he", adjustment=False)
  assert model.first.mixer == config_lib.mixer("attention", num_heads=2, use_bias=False)
  assert model.last.mixer == config_lib.mixer("relative_attention", num_heads=2)
  assert (model.first.num_layers, model.last.num_layers) == (1, 1)
  assert model.boundaries == config_lib.boundaries(
    "gumbel", temperature=0.7, prior=0.3, num_capacities=2
  )


GO_ON = """
from pathlib import Path
import dpjax
from dpjax.run import workdir
config = workdir.read_config(Path("pooled"))
config.train.num_steps = 10
dpjax.train(config, "pooled")
print(dpjax.load("pooled", step=10).step)
"""


@pytest.mark.slow
def test_an_old_run_goes_on(folder):
  # From there its text is named, and its 6 rows are for one device.
  done = subprocess.run(
    [sys.executable, "-c", GO_ON],
    cwd=folder,
    capture_output=True,
    text=True,
    env=helpers.environment(),
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith("10\n") and "Going on from the checkpoint of step 8" in (
    done.stdout + done.stderr
  )
