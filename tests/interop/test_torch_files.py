"""A file of the authors' code, scored as evaluate.py does, by a stand-in for PyTorch."""

import string
import sys
import types

import jax
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax import run as run_lib
from tests import helpers

GOLDEN = helpers.ROOT / "tests/golden/A_dispatcher_nhead1_L16.npz"


@pytest.fixture
def content():
  """What torch.load gives: a checkpoint of 31 tokens and 16 positions."""
  arrays = np.load(GOLDEN)
  names = [name for name in arrays if name.startswith("param/")]
  state = {name.removeprefix("param/"): arrays[name] for name in names}
  return {"epoch": 7, "model_state_dict": state}


@pytest.fixture
def torch(monkeypatch, content):
  stand_in = types.SimpleNamespace(load=lambda *_, **__: content)
  monkeypatch.setitem(sys.modules, "torch", stand_in)
  return stand_in


@pytest.fixture
def config(tmp_path):
  """30 characters and the unknown one make the 31 tokens."""
  letters = np.random.default_rng(5).choice(list(string.ascii_lowercase + " .,\n"), 3000)
  (tmp_path / "text.txt").write_text("".join(letters))
  config = helpers.small_config(tmp_path / "text.txt")
  config.model.mixer = config_lib.mixer("dispatcher")
  config.model.update(num_layers=2, width=16, feed_forward_width=24, max_length=16)
  return config


@pytest.mark.slow
def test_a_file_is_scored(torch, config, tmp_path):
  config.model.scan_layers = False
  run = run_lib.load_torch("model.pt", config, tmp_path)
  assert run.config.model.scan_layers is False
  scores = run.score_split("test")
  # The model by hand, on the first window.
  ids = np.asarray(run.data.splits["test"])[:16].astype(np.int32)
  inputs = np.concatenate([[run.tokenizer.start_id], ids[:-1]])
  logits = run.model.apply({"params": run.params}, inputs[None]).logits[0]
  nats = -jax.nn.log_softmax(logits)[np.arange(16), ids].mean()
  text = run.tokenizer.decode(ids)
  assert run.score(text)["nats_per_token"] == pytest.approx(float(nats), rel=1e-5)
  assert scores["perplexity"] > 1


def test_refusals(torch, config, tmp_path, monkeypatch):
  def refused(message):
    with pytest.raises(ValueError, match=message):
      run_lib.load_torch("model.pt", config, tmp_path)

  # Their characters are numbered by how often a text has them, which no file tells.
  config.model.mixer = config_lib.mixer("relative_attention")
  config.model.boundaries = config_lib.boundaries("whitespace")
  refused("model.mixer: .*dpjax.interop.from_torch reads it")
  config.model.boundaries = config_lib.boundaries("none")
  config.model.mixer = config_lib.mixer("attention")
  refused("model.mixer: expected the file's dispatcher")
  config.model.mixer = config_lib.mixer("dispatcher")
  config.data.tokenizer = "bytes"
  refused("model.vocab_size: .* tokenizer's 256, got 31")
  monkeypatch.setattr(torch, "load", lambda *_, **__: [3])
  refused("state_dict: expected a mapping .* got list")
  monkeypatch.setattr(torch, "load", lambda *_, **__: 1 / 0)
  refused("torch_checkpoint: expected a file of the")
  monkeypatch.setitem(sys.modules, "torch", None)
  refused("torch_checkpoint: expected PyTorch")
