"""The README's first command, whole."""

import numpy as np
import pytest

import dpjax
from benchmarks import witten_bell
from tests import helpers


@pytest.mark.slow
def test_the_quickstart_beats_counting(tmp_path):
  config = helpers.ROOT / "configs/quickstart.py"
  done = helpers.script("train.py", f"--config={config}", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  assert "The test split" in done.stdout and "A sample:\nThe statement" in done.stdout
  run = dpjax.load(tmp_path)
  counted = [
    -np.log2(
      witten_bell.probabilities(
        np.asarray(run.data.splits["train"]),
        np.asarray(run.data.splits["test"]),
        vocab_size=run.tokenizer.vocab_size,
        order=order,
        start_id=run.tokenizer.start_id,
      )
    ).mean()
    for order in (1, 2)
  ]
  assert run.score_split("test")["bits_per_character"] < min(counted)
