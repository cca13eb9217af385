"""The README's first command, whole."""

import json

import pytest

import dpjax
from tests import helpers


@pytest.mark.slow
def test_the_quickstart_beats_counting(tmp_path):
  config = helpers.ROOT / "configs/quickstart.py"
  done = helpers.script("train.py", f"--config={config}", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert "The test split" in done.stdout and "A sample:\nThe statement" in done.stdout
  measured = json.loads((helpers.ROOT / "results/quickstart.json").read_text(encoding="utf-8"))
  scores = dpjax.load(tmp_path).score_split("test")
  assert scores["bits_per_character"] < min(measured["witten_bell"].values())
