"""The runs on children's books: what they are, and what is told of them."""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.models.build import build_model
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import books  # noqa: E402

ENTRIES = 5_000  # of the vocabulary


def count(config) -> int:
  settings = config.model.copy_and_resolve_references()
  settings.vocab_size = ENTRIES
  if settings.boundaries.name == "whitespace":
    settings.boundaries.space_ids = (1,)
  ids = jnp.zeros((1, 3), jnp.int32)
  shapes = jax.eval_shape(lambda: build_model(settings).init(jax.random.key(0), ids))
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_all_runs_see_as_much_and_equal_ones_have_as_many_parameters(tmp_path):
  sizes, rows = {}, set()
  for name, make in books.runs().items():
    config = books.configure(name, make, tmp_path, books.STEPS)
    config_lib.check(config)
    train = config.train
    window = config.model.max_length / (4 if name.startswith("pooled") else 1)
    rows.add((train.num_steps, train.batch_size, window))
    is_peak, frame = name.startswith("peak"), name.removeprefix("peak-").partition("-")[0]
    factors = (0.5, 2) if is_peak else (1,)
    assert train.learning_rate in [factor * books.PEAK.get(frame, 1e-3) for factor in factors]
    assert config.data.documents == ("isolated" if name.endswith("isolated") else "joined")
    sizes[name] = count(config)
  assert rows == {(books.STEPS, books.ROWS, books.WINDOW)}
  assert sizes["equal-attention"] == pytest.approx(sizes["modern-attention"], rel=0.02)


def test_what_is_done_is_told(tmp_path, monkeypatch, capsys):
  trained = []

  def train(name, config, workdir):
    trained.append(name)
    scores = {"perplexity": 70.5, "bits_per_character": 1.75}
    found = {"name": name, "parameters": 1_400_000, "test": scores}
    found["valid"] = [{"step": x, "bits_per_character": 2.0 - x / 40} for x in (3, 6)]
    return found | ({"by_document": scores} if name.endswith(("joined", "isolated")) else {})

  monkeypatch.setattr(books, "train", train)
  flags = [f"--{x}={tmp_path}" for x in ("books", "work", "out")]
  for only in ("attention", "attention", "dispatcher"):
    books.main([*flags, f"--only={only}", "--steps=6"])
  assert len(trained) == len(set(trained)) == 7
  names = {
    file: [row["name"] for row in json.loads((tmp_path / f"{file}.json").read_text())["runs"]]
    for file in ("books_mixers", "books_documents")
  }
  assert names["books_mixers"] == [
    "modern-attention",
    "modern-dispatcher",
    "equal-attention",
  ]
  assert len(names["books_documents"]) == 4
  assert (tmp_path / "books_mixers.png").stat().st_size > 9_000
  told = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
  assert ["equal-attention", "1,400,000", "perplexity", "70.50"] in told


@pytest.mark.usefixtures("standard_promotion")
def test_what_is_published_names_no_place_of_this_machine(tmp_path, monkeypatch):
  (tmp_path / "books").mkdir()
  for split in ("train", "valid", "test"):
    (tmp_path / f"books/{split}.txt").write_text("a cat sat on a mat\n" * 40)
  config = helpers.small_config(tmp_path / "books", num_steps=2, eval_every_steps=2)
  config.data.data_dir = str(tmp_path / "data")
  run, _ = dpjax.train(config, tmp_path / "work/modern-we")
  monkeypatch.setattr(books, "MODELS", {"we-books": "modern-we"})
  books.publish(tmp_path / "work", tmp_path / "models")
  files = [path for path in (tmp_path / "models").rglob("*") if path.is_file()]
  assert len(files) == 5
  assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]
  shutil.rmtree(tmp_path / "work")
  loaded = dpjax.load(tmp_path / "models/we-books")
  assert loaded.score("a mat")["perplexity"] == pytest.approx(
    run.score("a mat")["perplexity"], 1e-2
  )
