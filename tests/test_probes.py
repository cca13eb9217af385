"""examples/probes.py: rows of tasks, models of equal size, accuracies, the command."""

import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.config import registry
from dpjax.models.build import build_model
from dpjax.models.language_model import LanguageModelOutput
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "examples"))  # as for a script there
import probes  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")
TINY = probes.TINY
CONTENTS = probes.Settings(length=24).contents


def draw(task, seed=(5, probes.TRAINING, 3)):
  return probes.draw(task, (200, 40), CONTENTS, seed)


def read(task, tokens):
  """The answers of a row, by the positions that predict them, and their distances."""
  pairs, first = {}, probes.FIRST_CONTENT
  if task == "copying":
    n = int(np.flatnonzero(tokens == probes.SEPARATOR)[0])
    assert len({*tokens[:n]}) == n and not tokens[2 * n + 1 :].any()
    return {n + i: (tokens[i], n) for i in range(n)}
  if task == "induction":
    before, last = np.flatnonzero(tokens == probes.TRIGGER)
    return {last: (tokens[before + 1], last - before - 1)}
  for position, token in enumerate(tokens[:20]):
    key, value = divmod(token - first - 2 * probes.NUM_KEYS, probes.NUM_KEYS)
    if token:
      assert key not in pairs
      pairs[key] = position, first + probes.NUM_KEYS + value
  queried = {i: pairs[token - first] for i, token in enumerate(tokens[20:], 20)}
  return {i: (value, i - position) for i, (position, value) in queried.items()}


@pytest.mark.parametrize("task", probes.TASKS)
def test_answers_and_distances(task):
  drawn = draw(task)
  for tokens, targets, distances in zip(*drawn, strict=True):
    answers = {i: (targets[i], distances[i]) for i in np.flatnonzero(distances)}
    assert answers == read(task, tokens)
  is_answer = drawn.distances > 0
  assert drawn.distances.max() == {"recall": 39, "copying": 20, "induction": 38}[task]
  assert len({*drawn.targets[is_answer]}) == pytest.approx(1 / probes.chance(task, CONTENTS))
  assert drawn.tokens.max() < probes.FIRST_CONTENT + CONTENTS
  test = draw(task, (5, probes.TEST, 3))
  if task != "copying":  # A copy may be short.
    assert not {row.tobytes() for row in drawn.tokens} & {row.tobytes() for row in test.tokens}


@pytest.mark.parametrize(
  "mixer",
  [helpers.slow_unless(name == "dispatcher", name) for name in helpers.builtin(registry.mixers)],
)
def test_equal_sizes_and_reach(mixer):
  settings = probes.Settings()
  size, of_attention = (probes.equal_model(settings, name)[1] for name in (mixer, "attention"))
  assert size == pytest.approx(of_attention, rel=0.02)
  model = build_model(probes.equal_model(TINY, mixer)[0])
  tokens = np.random.default_rng(2).integers(3, 60, size=(1, 29)).astype(np.int32)
  changed = np.repeat(tokens, 29, axis=0)
  changed[np.arange(29), np.arange(29)] += 1
  rows = np.concatenate([tokens, changed])
  variables = jax.jit(model.init)(jax.random.key(1), jnp.asarray(tokens[:, :2]))
  output = jax.jit(model.apply)(variables, rows, **probes.document_starts(rows, mixer))
  logits = output.logits[:, -1]
  moves = np.abs(logits[1:] - logits[:1]).max(-1) > 1e-6
  reach = TINY.reach if mixer in probes.LIMITED else None
  assert reach == (None if mixer in ("attention", "relative_attention", "mamba2") else 6)
  assert moves.tolist() == [reach is None or 28 - i <= reach for i in range(29)]


def test_score_by_distance():
  def predict(tokens):
    """What followed the trigger within the last 5 tokens."""
    answers = np.zeros(tokens.shape, np.int32)
    for row, ids in enumerate(tokens):
      position = np.flatnonzero(ids == probes.TRIGGER)[0] + 1
      answers[row, -1] = ids[position] if len(ids) - 1 - position <= 5 else 0
    return answers

  batches = [draw("induction", (7, i)) for i in range(2)]
  assert probes.score(predict, batches, reach=5) == [1, 0]
  assert probes.score(predict, batches, reach=38) == [pytest.approx(5 / 38, abs=0.1), None]


def test_the_command_prints_means_and_deviations_and_resumes(tmp_path, monkeypatch, capsys):
  tests = {"me": [{"32": [0.75, 0.5], "16": [0.25, 0.0]}, {"32": [1.0, None], "16": [0.75, 0.0]}]}
  tests["attention"] = [{"32": [1.0, None]}, {"32": [1.0, None]}]
  trained = []

  def trainer(settings, mixer):
    def train(task, seed):
      trained.append((mixer, task, seed))
      return {"parameters": 7000, "loss": 1.5, "tests": tests[mixer][seed]}

    return train

  monkeypatch.setattr(probes, "trainer", trainer)
  words = ["--train", "--tasks=recall", "--mixers=me,attention", "--seeds=2", f"--work={tmp_path}"]
  probes.main([*words, "--tiny"])
  assert len(trained) == 4
  (tmp_path / "recall_me_1.json").unlink()
  capsys.readouterr()
  probes.main([*words, "--tiny"])
  assert trained[4:] == [("me", "recall", 1)]
  assert [line.split() for line in capsys.readouterr().out.splitlines()][2:] == [
    ["16", "recall", "me", "7,000", "6", "0.125", "0.500", "0.354", "0.000", "0.000"],
    ["32", "recall", "me", "7,000", "6", "0.125", "0.875", "0.177", "0.500", "-"],
    ["32", "recall", "attention", "7,000", "-", "0.125", "1.000", "0.000", "-", "-"],
  ]
  assert len(json.loads((tmp_path / "table.json").read_text())["rows"]) == 3
  with pytest.raises(SystemExit, match="^--work: expected a folder with results of these sett"):
    probes.main(words)


@pytest.mark.slow
def test_attention_learns_to_recall():
  sizes = dict(length=16, window=4, width=32, num_steps=260, batch_size=16, num_test_rows=64)
  train = probes.trainer(probes.Settings(**sizes, learning_rate=1e-2), "attention")
  assert min(train("recall", 0)["tests"]["16"]) > 0.9


def test_wrong_arguments():
  with pytest.raises(SystemExit, match="^--run: expected the folder of a run, or --train, got nei"):
    probes.main([])
  with pytest.raises(SystemExit, match="^--mixers: expected one of dispatcher, .*, got wee"):
    probes.main(["--train", "--mixers=we,wee"])


def test_a_run_that_repeats():
  def apply(variables, tokens, rngs):
    """Sure of the token that followed the last one like this, if there was one."""
    i = jnp.arange(tokens.shape[1])
    earlier = (tokens[:, :, None] == tokens[:, None, :]) & (i[:, None] > i[None])[None]
    position = jnp.where(earlier, i[None, None], -1).max(-1)
    following = jnp.take_along_axis(tokens, position + 1, 1)
    logits = jax.nn.one_hot(following, 5003) * (position >= 0)[..., None]
    return LanguageModelOutput(60.0 * logits, logits)

  config = dpjax.config.default()
  config.model.vocab_size = 5003
  model = SimpleNamespace(apply=apply)
  run: Any = SimpleNamespace(model=model, params={}, config=config, window=27)
  rows = probes.repeat(run, 7)  # which draws no token twice
  assert [row["distance"] for row in rows] == [1, 3, 7, 13]
  for row in rows:
    assert row["again"] == pytest.approx(0, abs=1e-5)
    assert row["first time"] == pytest.approx(math.log(5003), rel=1e-3)


def test_a_run_by_its_folder(finished, capsys):
  probes.main([str(finished[0])])
  head, *rows = capsys.readouterr().out.splitlines()
  assert head.split() == ["distance", "first", "time", "again"]
  # Trained on words for 12 steps: random characters come no easier the second time.
  for row in rows:
    _, first, again = map(float, row.split())
    assert abs(first - again) < 1
