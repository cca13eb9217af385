"""`dpjax probes`: what it writes, goes on with and refuses; runs that read tokens twice."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax.models.language_model import LanguageModelOutput
from dpjax.probes import __main__ as command
from dpjax.probes import repeats, report, training

pytestmark = pytest.mark.usefixtures("standard_promotion")


def record(mixer, seed, hits, reach=None):
  counts = [0, 4, 0, 4, 4, 4, 0, 4]
  about = {"parameters": 10, "width": 8, "feed_forward_width": 3, "reach": reach}
  tests = {"8": {"hits": hits, "counts": counts}}
  return {"task": "recall", "mixer": mixer, "seed": seed, **about, "tests": tests}


def test_accuracies_are_means_over_seeds():
  records = [
    record("me", 0, [0, 4, 0, 3, 0, 1, 0, 0], reach=3),
    record("me", 1, [0, 4, 0, 1, 2, 1, 0, 0], reach=3),
    record("attention", 0, [0, 4, 0, 4, 4, 4, 0, 4]),
  ]
  settings = {"window": 4, "num_layers": 1, "length": 8}
  content = report.summarise(settings, records, {"recall": 0.125})
  me, attention = content["results"]
  places = {(a, b): mean for a, b, mean in zip(me["from"], me["to"], me["mean"], strict=True)}
  assert places[1, 1] == 1 and places[3, 3] == 0.5 and places[4, 4] == 0.25
  assert places[2, 2] is None
  assert me["near"][0] == 6 / 8 and me["far"][0] == pytest.approx(1 / 6)
  assert me["near"][1] == pytest.approx(np.std([7 / 8, 5 / 8], ddof=1)) and me["seeds"] == 2
  assert attention["near"] == attention["far"] == (1.0, None)
  lines = report.format_table(content).splitlines()
  assert lines[-2].split()[:3] == ["me", "10", "3"] and "0.750 ± 0.177" in lines[-2]
  assert lines[-1].split() == ["attention", "10", "all", "1.000", "1.000"]
  (axes,) = report.draw(content).axes
  assert [text.get_text().strip() for text in axes.texts] == ["reach 3"]
  assert len(axes.get_legend_handles_labels()[1]) == 2


@pytest.mark.slow
def test_the_command_trains_once_and_reads_what_is_there(tmp_path, capsys, monkeypatch):
  usual = ["--work", f"{tmp_path}/work", "--mixers=me,attention", "--seeds=2", "--tasks=induction"]
  more = ["--json", f"{tmp_path}/all.json", "--out", f"{tmp_path}/all.svg"]
  command.main(["--train", "--tiny", "--part=2/3", *usual])
  assert "3 of 4 models are missing" in capsys.readouterr().out
  assert [x.name for x in (tmp_path / "work").glob("i*")] == ["induction_attention_0.json"]
  command.main(["--train", *usual, *more])  # The folder knows that it is tiny.
  assert "missing" not in capsys.readouterr().out
  content = json.loads((tmp_path / "all.json").read_text("utf-8"))
  assert content["settings"]["num_steps"] == command.TINY["num_steps"]
  assert [*content["mixers"]] == ["me", "attention"] and len(content["results"]) == 6
  assert (tmp_path / "all.svg").stat().st_size > 10_000
  monkeypatch.setattr(training.Trainee, "run", lambda *given: pytest.fail("trained again"))
  command.main(["--train", *usual])
  command.main(["--summary", *usual])
  first, second = capsys.readouterr().out.split("Accuracy")[1:]
  assert first == second
  with pytest.raises(SystemExit, match="^--width: expected 16, as for .*, got 24$"):
    command.main(["--train", "--width=24", *usual])


@pytest.mark.parametrize(
  "arguments, message",
  [
    ("", "--run: expected the folder of a run, or --train or --summary, got neither"),
    ("--train some/run", "--run: expected the folder of a run, or --train or --summary, got both"),
    ("--train --mixers=we,wee", "--mixers: expected some of dispatcher, .*, me, got wee"),
    ("--train --tasks=", "--tasks: expected some of recall, copying, induction, got none"),
    ("--train --seeds=0", "--seeds: expected 1 to 1,000, got 0"),
    ("--train --part=3/2", "--part: expected i/n with 1 <= i <= n, got 3/2"),
    ("--train --length=14", "--length: expected an even number from 16 on, got 14"),
    ("--train --window=12", "--window: expected a power of 2 up to 32, got 12"),
    ("--train --width=20", "--width: expected a multiple of 8, got 20"),
    ("--train --num_layers=0", "--num_layers: expected at least 1, got 0"),
    ("--train --num_steps=9", "--num_steps: expected at least 10, got 9"),
    ("--train --batch_size=0", "--batch_size: expected at least 1, got 0"),
    ("--train --learning_rate=1", r"--learning_rate: expected a number in \(0, 1\), got 1.0"),
    ("--train --num_test_rows=32", "--num_test_rows: expected a multiple of .* = 64, got 32"),
    ("some/run --window=3", "--window: expected --train with it, got the folder of a run"),
    ("--summary", "--work: expected a folder with results, got .* without"),
    ("--train --out=a.txt", "--out: expected a file that ends in .png, .pdf, .svg, got a.txt"),
  ],
)
def test_wrong_settings_are_refused_in_a_line(arguments, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit, match=f"^{message}$"):
    command.main(arguments.split())
  assert not [*tmp_path.iterdir()]


class Repeater:
  """Sure of the token behind the last one like this, where there was one."""

  def apply(self, variables, tokens, rngs):
    length = tokens.shape[1]
    same = tokens[:, :, None] == tokens[:, None, :]
    earlier = same & (jnp.arange(length)[:, None] > jnp.arange(length)[None])[None]
    place = jnp.where(earlier, jnp.arange(length)[None, None], -1).max(-1)
    following = jnp.take_along_axis(tokens, jnp.clip(place + 1, 0, length - 1), 1)
    is_known = (place >= 0)[..., None].astype(jnp.float32)
    return LanguageModelOutput(60.0 * jax.nn.one_hot(following, 5003) * is_known)


def test_a_run_that_repeats_is_found_out():
  settings = config_lib.default_model()
  settings.vocab_size = 5003
  config = SimpleNamespace(model=settings)
  run = SimpleNamespace(
    model=Repeater(), params={}, config=config, window=27, name="made up", workdir="no/where"
  )
  content = repeats.score(run, [2, 5, 14], 7, seed=1)  # which draws no token twice
  assert [row["distance"] for row in content["rows"]] == [1, 4, 13]
  for row in content["rows"]:
    assert row["again"] == {"nats": pytest.approx(0, abs=1e-5), "accuracy": 1}
    assert row["first"]["nats"] == pytest.approx(math.log(5003), rel=1e-3)
    assert row["first"]["accuracy"] == 0
  assert repeats.default_periods(27) == [2, 4, 8, 14] and repeats.default_periods(32) == [
    2,
    4,
    8,
    16,
  ]
  for n in (1, 15):
    with pytest.raises(ValueError, match=f"^periods: expected 2 to 14, got {n}$"):
      repeats.score(run, [n], 7, seed=3)


def test_a_run_is_probed_by_its_folder(finished, tmp_path, capsys):
  workdir, run, _ = finished
  command.main([str(workdir), "--num_test_rows=9", "--json", f"{tmp_path}/run.json"])
  content = json.loads((tmp_path / "run.json").read_text("utf-8"))
  assert content["rows"][-1]["distance"] == (run.window + 1) // 2 - 1
  # Trained on words for 12 steps: random characters come no easier the second time.
  for row in content["rows"]:
    assert abs(row["first"]["nats"] - row["again"]["nats"]) < 1
  assert f"{run.name}: random tokens twice" in capsys.readouterr().out
