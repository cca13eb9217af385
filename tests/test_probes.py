"""`dpjax probes`: rows of tasks, models of equal size, accuracies, the command."""

import json
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax.config import registry
from dpjax.models.build import build_model
from dpjax.models.language_model import LanguageModelOutput
from dpjax.probes import tasks, training
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")
TINY = training.TINY
CONTENTS = training.Settings(length=24).contents


def draw(task, seed=(5, tasks.TRAINING, 3)):
  return tasks.draw(task, (200, 40), CONTENTS, seed)


def read(task, tokens):
  """The answers of a row, by the positions that predict them, and their distances."""
  found, first = {}, tasks.FIRST_CONTENT
  if task == "copying":
    n = int(np.flatnonzero(tokens == tasks.SEPARATOR)[0])
    assert len({*tokens[:n]}) == n and not tokens[2 * n + 1 :].any()
    return {n + i: (tokens[i], n) for i in range(n)}
  if task == "induction":
    before, last = np.flatnonzero(tokens == tasks.TRIGGER)
    return {last: (tokens[before + 1], last - before - 1)}
  for place, token in enumerate(tokens[:20]):
    key, value = divmod(token - first - 2 * tasks.NUM_KEYS, tasks.NUM_KEYS)
    if token:
      assert key not in found
      found[key] = place, first + tasks.NUM_KEYS + value
  places = {i: found[token - first] for i, token in enumerate(tokens[20:], 20)}
  return {i: (value, i - place) for i, (place, value) in places.items()}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_answers_and_distances_are_what_a_reader_finds(task):
  drawn = draw(task)
  for tokens, targets, distances in zip(*drawn, strict=True):
    places = np.flatnonzero(distances)
    assert {i: (targets[i], distances[i]) for i in places} == read(task, tokens)
  is_answer = drawn.distances > 0
  most = {"recall": 39, "copying": 20, "induction": 38}[task]
  assert {*drawn.distances[is_answer]} <= {*range(1, most + 1)}
  assert drawn.distances.max() == most
  assert len({*drawn.targets[is_answer]}) == pytest.approx(1 / tasks.chance(task, CONTENTS))
  assert drawn.tokens.max() < tasks.FIRST_CONTENT + CONTENTS
  test = draw(task, (5, tasks.TEST, 3))
  if task != "copying":  # A copy may be short.
    assert not {row.tobytes() for row in drawn.tokens} & {row.tobytes() for row in test.tokens}


@pytest.mark.parametrize(
  "mixer", [helpers.slow_unless(name == "dispatcher", name) for name in registry.mixers.names()]
)
def test_sizes_are_equal_and_reach_is_what_a_change_reaches(mixer):
  settings = training.Settings()
  size, usual = (training.equal_model(settings, name)[1] for name in (mixer, "attention"))
  assert size == pytest.approx(usual, rel=0.02)
  config, _ = training.equal_model(TINY, mixer)
  model = build_model(config)
  tokens = np.random.default_rng(2).integers(3, 60, size=(1, 29)).astype(np.int32)
  changed = np.repeat(tokens, 29, axis=0)
  changed[np.arange(29), np.arange(29)] += 1
  rows = np.concatenate([tokens, changed])
  variables = jax.jit(model.init)(jax.random.key(1), jnp.asarray(tokens[:, :2]))
  logits = jax.jit(model.apply)(variables, rows, **training.document_starts(rows, mixer)).logits[
    :, -1
  ]
  moves = np.abs(logits[1:] - logits[:1]).max(-1) > 1e-6
  reach = TINY.reach if mixer in training.LIMITED else None
  assert reach == (None if mixer in ("attention", "relative_attention") else 6)
  assert moves.tolist() == [reach is None or 28 - i <= reach for i in range(29)]


def test_hits_are_counted_by_distance():
  def predict(tokens):
    """What followed the trigger within the last 5 tokens."""
    found = np.zeros(tokens.shape, np.int32)
    for row, ids in enumerate(tokens):
      place = np.flatnonzero(ids == tasks.TRIGGER)[0] + 1
      found[row, -1] = ids[place] if len(ids) - 1 - place <= 5 else 0
    return found

  near, far = training.score(predict, [draw("induction", (7, i)) for i in range(2)], reach=5)
  assert (near, far) == (1, 0)
  near, far = training.score(predict, [draw("induction")], reach=10)
  assert near == pytest.approx(0.5, abs=0.2) and far == 0
  assert training.score(predict, [draw("induction")], reach=38) == [
    pytest.approx(5 / 38, abs=0.1),
    None,
  ]


def test_the_table_has_means_and_deviations_over_seeds():
  about = {"task": "recall", "parameters": 7000}
  models = [
    {"mixer": "me", "tests": {"32": [0.75, 0.5], "16": [0.25, 0.0]}, **about},
    {"mixer": "me", "tests": {"32": [1.0, None], "16": [0.75, 0.0]}, **about},
    {"mixer": "attention", "tests": {"32": [1.0, None]}, **about},
  ]
  rows = [
    line.split() for line in training.format_table(training.summarise(TINY, models)).splitlines()
  ]
  assert rows[1:] == [
    ["16", "recall", "me", "7,000", "6", "0.125", "0.500", "0.354", "0.000", "0.000"],
    ["32", "recall", "me", "7,000", "6", "0.125", "0.875", "0.177", "0.500", "-"],
    ["32", "recall", "attention", "7,000", "-", "0.125", "1.000", "-", "-", "-"],
  ]


@pytest.mark.slow
def test_the_command_trains_each_model_once_and_the_same_again(tmp_path, monkeypatch):
  usual = ["--train", "--tasks=induction", "--mixers=me", "--seeds=2", f"--work={tmp_path}"]
  training.main([*usual, "--tiny"])
  content = (tmp_path / "table.json").read_text()
  assert len(json.loads(content)["rows"]) == 3
  (tmp_path / "induction_me_1.json").unlink()
  training.main([*usual, "--tiny"])
  assert (tmp_path / "table.json").read_text() == content
  monkeypatch.setattr(training, "trainer", lambda *given: pytest.fail("trained again"))
  training.main([*usual, "--tiny"])
  with pytest.raises(SystemExit, match="^--work: expected a folder with results of these sett"):
    training.main(usual)


@pytest.mark.slow
def test_attention_learns_to_recall():
  sizes = dict(length=16, window=4, width=32, num_steps=260, batch_size=16, num_test_rows=64)
  train = training.trainer(training.Settings(**sizes, learning_rate=1e-2), "attention")
  assert min(train("recall", 0)["tests"]["16"]) > 0.9


@pytest.mark.parametrize(
  "arguments, message",
  [
    ("", "--run: expected the folder of a run, or --train, got neither"),
    ("--train some/run", "--run: expected the folder of a run, or --train, got both"),
    ("--train --mixers=we,wee", "--mixers: expected one of dispatcher, .*, me, got wee; .*"),
    ("--train --tasks=", "--tasks: expected one of recall, copying, induction, got ''"),
    ("--train --seeds=0", "--seeds: expected at least 1, got 0"),
  ],
)
def test_wrong_settings_are_refused_in_a_line(arguments, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match=f"^{message}$"):
    training.main(arguments.split())
  assert not [*tmp_path.iterdir()]


def test_a_run_that_repeats_is_found_out():
  def apply(variables, tokens, rngs):
    """Sure of the token behind the last one like this, where there was one."""
    i = jnp.arange(tokens.shape[1])
    earlier = (tokens[:, :, None] == tokens[:, None, :]) & (i[:, None] > i[None])[None]
    place = jnp.where(earlier, i[None, None], -1).max(-1)
    following = jnp.take_along_axis(tokens, place + 1, 1)
    logits = jax.nn.one_hot(following, 5003) * (place >= 0)[..., None]
    return LanguageModelOutput(60.0 * logits)

  config = config_lib.default()
  config.model.vocab_size = 5003
  model = SimpleNamespace(apply=apply)
  run: Any = SimpleNamespace(model=model, params={}, config=config, window=27)
  rows = training.repeat(run, 7)  # which draws no token twice
  assert [row["distance"] for row in rows] == [1, 3, 7, 13]
  for row in rows:
    assert row["again"] == pytest.approx(0, abs=1e-5)
    assert row["first time"] == pytest.approx(math.log(5003), rel=1e-3)


def test_a_run_is_probed_by_its_folder(finished, capsys):
  training.main([str(finished[0])])
  head, *rows = capsys.readouterr().out.splitlines()
  assert head.split() == ["distance", "first", "time", "again"]
  # Trained on words for 12 steps: random characters come no easier the second time.
  for row in rows:
    _, first, again = map(float, row.split())
    assert abs(first - again) < 1
