"""`dpjax probes`: rows of tasks, models of equal size, hits by distance, the command."""

import json
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax import registry
from dpjax.models.build import build_model
from dpjax.models.language_model import LanguageModelOutput
from dpjax.probes import __main__ as command
from dpjax.probes import tasks, training
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")
TINY = training.Settings(**command.TINY)


def draw(task, seed=(5, tasks.TRAINING, 3)):
  return tasks.draw(task, (200, 40), tasks.num_contents(96), seed)


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
  drawn, contents = draw(task), tasks.num_contents(96)
  for tokens, targets, distances in zip(*drawn, strict=True):
    places = np.flatnonzero(distances)
    assert {i: (targets[i], distances[i]) for i in places} == read(task, tokens)
  is_answer = drawn.distances > 0
  most = {"recall": 39, "copying": 20, "induction": 38}[task]
  assert {*drawn.distances[is_answer]} <= {*range(1, most + 1)}
  assert drawn.distances.max() == most
  assert len({*drawn.targets[is_answer]}) == pytest.approx(1 / tasks.chance(task, contents))
  assert drawn.tokens.max() < tasks.FIRST_CONTENT + contents
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
  logits = jax.jit(model.apply)(variables, rows, **training._is_start(rows, mixer)).logits[:, -1]
  moves = np.abs(logits[1:] - logits[:1]).max(-1) > 1e-6
  reach = training.reach(config)
  assert reach == (None if "attention" in mixer else 6)
  assert moves.tolist() == [reach is None or 28 - i <= reach for i in range(29)]


def test_hits_are_counted_by_distance():
  def predict(tokens):
    """What followed the trigger within the last 5 tokens."""
    found = np.zeros(tokens.shape, np.int32)
    for row, ids in enumerate(tokens):
      place = np.flatnonzero(ids == tasks.TRIGGER)[0] + 1
      found[row, -1] = ids[place] if len(ids) - 1 - place <= 5 else 0
    return found

  scores = training.count_hits(predict, [draw("induction", (7, i)) for i in range(2)])
  assert sum(scores["counts"]) == 400 and len(scores["counts"]) == 40
  assert scores["hits"][:6] == scores["counts"][:6] and not any(scores["hits"][6:])
  assert sum(scores["hits"]) > 0 == scores["counts"][0]


def result(mixer, seed, hits, reach=None):
  about = {"parameters": 10, "width": 8, "feed_forward_width": 3, "reach": reach}
  tests = {"16": {"hits": hits + 8 * [0], "counts": [0, 4, 0, 4, 4, 4, 0, 4] + 8 * [0]}}
  return {"task": "recall", "mixer": mixer, "seed": seed, **about, "tests": tests}


def test_accuracies_are_means_over_seeds():
  models = [
    result("me", 0, [0, 4, 0, 3, 0, 1, 0, 0], reach=3),
    result("me", 1, [0, 4, 0, 1, 2, 1, 0, 0], reach=3),
    result("attention", 0, [0, 4, 0, 4, 4, 4, 0, 4]),
  ]
  content = command.summarise(TINY, models)
  me, attention = content["results"]
  assert me["mean"][:4] == [1, None, 0.5, 0.25] and me["from"] == me["to"] == [*range(1, 17)]
  assert me["near"] == pytest.approx((6 / 8, np.std([7 / 8, 5 / 8], ddof=1)))
  assert me["far"][0] == pytest.approx(1 / 6) and me["seeds"] == 2
  assert attention["near"] == attention["far"] == (1.0, None)
  rows = [line.split() for line in command.format_table(content).splitlines()]
  assert rows[-2][:6] == ["me", "10", "3", "0.750", "±", "0.177"]
  assert rows[-1] == ["attention", "10", "all", "1.000", "1.000"]
  (axes,) = command.draw(content).axes
  assert [text.get_text().strip() for text in axes.texts] == ["reach 3"]


@pytest.mark.slow
def test_the_command_trains_each_model_once_and_the_same_again(tmp_path, monkeypatch):
  usual = f"--train --tasks=induction --work={tmp_path}/a --json={tmp_path}/a.json --mixers=me"
  usual = [*usual.split(), "--tiny", "--seeds=2"]
  command.main([*usual, f"--out={tmp_path}/a.svg"])
  content = (tmp_path / "a.json").read_text()
  assert len(json.loads(content)["results"]) == 3 and (tmp_path / "a.svg").exists()
  (tmp_path / "a/induction_me_1.json").unlink()
  command.main(usual)
  assert (tmp_path / "a.json").read_text() == content
  monkeypatch.setattr(training, "trainer", lambda *given: pytest.fail("trained again"))
  command.main(usual)
  with pytest.raises(SystemExit, match="^--work: expected a folder with results of these sett"):
    command.main([*usual, "--width=24"])


@pytest.mark.slow
def test_attention_learns_to_recall():
  sizes = dict(length=16, window=4, width=32, num_steps=260, batch_size=16, num_test_rows=64)
  train = training.trainer(training.Settings(**sizes, learning_rate=1e-2), "attention")
  scores = train("recall", 0)["tests"]["16"]
  assert sum(scores["hits"]) > 0.9 * sum(scores["counts"])


@pytest.mark.parametrize(
  "arguments, message",
  [
    ("", "--run: expected the folder of a run, or --train, got neither"),
    ("--train some/run", "--run: expected the folder of a run, or --train, got both"),
    ("--train --mixers=we,wee", "--mixers: expected one of dispatcher, .*, me, got wee; .*"),
    ("--train --tasks=", "--tasks: expected one of recall, copying, induction, got "),
    ("--train --seeds=0", "--seeds: expected at least 1, got 0"),
    ("--train --length=14", "--length: expected an even number from 16 on, got 14"),
    ("--train --window=12", "--window: expected a power of 2 up to 32, got 12"),
    ("--train --width=20", "--width: expected a multiple of 8, got 20"),
    ("--train --num_layers=0", "--num_layers: expected at least 1, got 0"),
    ("--train --num_steps=9", "--num_steps: expected at least 10, got 9"),
    ("--train --batch_size=0", "--batch_size: expected at least 1, got 0"),
    ("--train --learning_rate=1", r"--learning_rate: expected a number in \(0, 1\), got 1.0"),
    ("--train --num_test_rows=32", "--num_test_rows: expected a multiple of .* = 64, got 32"),
    ("some/run --window=3", "--window: expected --train with it, got the folder of a run"),
    ("--train --out=a.txt", "--out: expected a file that ends in .png, .pdf, .svg, got a.txt"),
  ],
)
def test_wrong_settings_are_refused_in_a_line(arguments, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match=f"^{message}$"):
    command.main(arguments.split())
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
  made_up = dict(model=SimpleNamespace(apply=apply), params={}, config=config, window=27)
  run: Any = SimpleNamespace(**made_up, name="made up", workdir="no/where")
  content = command.repeat(run, 7, seed=0)  # which draws no token twice
  assert [row["distance"] for row in content["rows"]] == [1, 3, 7, 13]
  for row in content["rows"]:
    assert row["again"] == {"nats": pytest.approx(0, abs=1e-5), "accuracy": 1}
    assert row["first"] == {"nats": pytest.approx(math.log(5003), rel=1e-3), "accuracy": 0}


def test_a_run_is_probed_by_its_folder(finished, tmp_path, capsys):
  workdir, run, _ = finished
  files = ["--json", f"{tmp_path}/run.json", "--out", f"{tmp_path}/run.svg"]
  command.main([str(workdir), "--num_test_rows=9", *files])
  content = json.loads((tmp_path / "run.json").read_text("utf-8"))
  # Trained on words for 12 steps: random characters come no easier the second time.
  for row in content["rows"]:
    assert abs(row["first"]["nats"] - row["again"]["nats"]) < 1
  assert f"{run.name}: random tokens twice" in capsys.readouterr().out
  assert (tmp_path / "run.svg").exists()
