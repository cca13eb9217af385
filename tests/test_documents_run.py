"""Runs on documents that do not see each other: train, stop, go on, score."""

import dataclasses
import json

import numpy as np
import pytest

import dpjax
from dpjax.errors import UserError
from tests import helpers

pytestmark = [pytest.mark.usefixtures("standard_promotion")]


def write_documents(path, number=120):
  """Documents of random words, of one to eight lines."""
  draw = np.random.default_rng(3)

  def write():
    lines = draw.choice(helpers.WORDS, size=(draw.integers(1, 9), 4))
    return "".join(" ".join(line) + "\n" for line in lines)

  texts = [write() for _ in range(number)]
  if path.suffix == ".jsonl":
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  else:
    path.write_text("--\n".join(texts))
  return path


def documents_of(run, split):
  tokens = run.tokens(split)
  return [run.tokenizer.decode(x) for x in np.split(tokens, run.data.documents[split][1:])]


def score_alone(run, split, **size):
  """The nats per token of a split, from the score of each of its documents."""
  texts = documents_of(run, split)
  counts = [len(run.tokenizer.encode(text)) for text in texts]
  scores = [run.score(text, **size)["nats_per_token"] for text in texts]
  return np.dot(scores, counts) / sum(counts)


@pytest.fixture(scope="module")
def isolated(tmp_path_factory):
  """A run on documents, and its test scores."""
  folder = tmp_path_factory.mktemp("isolated")
  config = helpers.small_config(
    write_documents(folder / "texts.jsonl"), num_steps=4, eval_every_steps=4
  )
  config.model.mixer, config.data.isolate_documents = "short_convolution", True
  return folder, config, *dpjax.train(config, folder / "run")


def test_a_model_without_documents_is_refused_before_anything_is_trained(isolated, tmp_path):
  _, config, *_ = isolated
  message = "data.isolate_documents: expected False, got True .*takes no `document_starts`"
  with pytest.raises(UserError, match=message):
    dpjax.train(config, tmp_path / "run", model=helpers.bigrams)
  assert not (tmp_path / "run/config.json").exists()


def test_scores_are_those_of_each_document_alone(isolated):
  folder, _, run, scores = isolated
  assert scores["nats_per_token"] == pytest.approx(score_alone(run, "test"), rel=1e-5)
  written = json.loads((folder / f"run/scores_test_{run.step}.json").read_text())
  assert written["isolate_documents"] and written["scores"] == scores
  assert written["counts"]["documents"] == len(run.data.documents["test"])
  # By context, too.
  size = dict(window=17, stride=5)
  result = run.score_split("test", **size)["nats_per_token"]
  assert result == pytest.approx(score_alone(run, "test", **size), rel=1e-5)


def test_scores_of_a_joined_text_are_others_and_have_a_file_of_their_own(isolated):
  folder, _, run, scores = isolated
  joined = run.score_split("test", isolate_documents=False, folder=folder / "run")
  text = "".join(documents_of(run, "test"))
  assert joined["nats_per_token"] == pytest.approx(run.score(text)["nats_per_token"], rel=1e-6)
  assert abs(joined["nats_per_token"] - scores["nats_per_token"]) > 1e-4
  written = json.loads((folder / f"run/scores_test_{run.step}_joined.json").read_text())
  assert not written["isolate_documents"] and written["scores"] == joined


@pytest.mark.slow
def test_the_command_scores_a_joined_run_by_documents(tmp_path, capsys):
  config = helpers.small_config(write_documents(tmp_path / "texts.txt", 40), num_steps=2)
  config.data.separator = "--"
  run, _ = dpjax.train(config, tmp_path / "run")
  assert run.data.documents is None
  assert not helpers.command("evaluate", f"--workdir={tmp_path}/run", "--isolate_documents")
  assert ", each document by itself:" in capsys.readouterr().out
  file = tmp_path / f"run/scores_test_{run.step}_isolated.json"
  result = json.loads(file.read_text())["scores"]["nats_per_token"]
  # The joined texts have the same tokens.
  config.data.isolate_documents = True
  run = dataclasses.replace(run, data=dpjax.runs.tokenize_only(config, tmp_path / "isolated"))
  assert result == pytest.approx(score_alone(run, "test"), rel=1e-5)
