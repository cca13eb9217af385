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
  helpers.set_model(
    config.model, num_layers=2, width=16, feed_forward_width=24, num_heads=1, max_length=16
  )
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
  # It has no folder to write into.
  run.write_scores("test", scores)


def test_token_pooling_is_refused(torch, config, tmp_path):
  """Their characters are numbered by how often a text has them, which no file tells."""
  helpers.set_model(config.model, mixer="relative_attention", boundaries="whitespace")
  with pytest.raises(ValueError, match="model.mixer: .*dpjax.interop.from_torch reads it"):
    run_lib.load_torch("model.pt", config, tmp_path)


def test_another_mixer_or_vocabulary_is_refused(torch, config, tmp_path):
  config.model.mixer = config_lib.mixer("attention")
  with pytest.raises(ValueError, match="model.mixer: expected the file's dispatcher"):
    run_lib.load_torch("model.pt", config, tmp_path / "one")
  config.model.mixer = config_lib.mixer("dispatcher")
  config.data.tokenizer = "bytes"
  with pytest.raises(ValueError, match="model.vocab_size: .* tokenizer's 256, got 31"):
    run_lib.load_torch("model.pt", config, tmp_path / "other")


def test_what_cannot_be_read_is_refused(torch, config, tmp_path, monkeypatch):
  monkeypatch.setattr(torch, "load", lambda *_, **__: [3])
  with pytest.raises(ValueError, match="state_dict: expected a mapping .* got list"):
    run_lib.load_torch("model.pt", config, tmp_path)
  monkeypatch.setattr(torch, "load", lambda *_, **__: 1 / 0)
  with pytest.raises(ValueError, match="torch_checkpoint: expected a file of the"):
    run_lib.load_torch("model.pt", config, tmp_path)
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ValueError, match="torch_checkpoint: expected PyTorch"):
    run_lib.load_torch("model.pt", config, tmp_path)
