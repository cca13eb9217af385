"""Figures and tables from run folders that the tests write."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dpjax import files
from dpjax.analysis import curves, plots
from dpjax.commands import plots as plots_command
from dpjax_papers import figures

NAN = float("nan")
COSTS = [5.0, 3.0, 4.0, 9.0, 2.0, NAN, 1.0, 7.0]


def mixer(name, **settings):
  return {"name": name, **settings}


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Writes a run, and gives the name of its folder."""
  monkeypatch.chdir(tmp_path)

  def write(name, losses, **settings):
    config = {
      "seed": settings.pop("seed", 3),
      "model": {"mixer": mixer("she"), "max_length": 32, "num_layers": 2},
      "data": {"path": "books.txt", "split_fractions": [0.9, 0.05, 0.05]},
      "train": {"batch_size": 64, "window": 0},
    }
    for key, value in settings.items():
      section, rest = key.split("__")
      config[section][rest] = value
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / name / "losses.f32").write_bytes(np.array(losses, "<f4").tobytes())
    return name

  return write


def log(run, *lines, end=""):
  """Writes what a run logged; `end` is a last line that is being written."""
  text = "".join(json.dumps({"time": 1.5, **line}) + "\n" for line in lines)
  Path(run, "metrics.jsonl").write_text(text + end)


def evaluated(step, bits, **scores):
  return {"step": step, "split": "valid", "bits_per_character": bits, **scores}


def lines(figure):
  """The points of each line, by its name in the legend."""
  (axes,) = figure.axes
  named = [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]
  assert named == [line.get_label() for line in axes.get_lines()]
  return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_medians(folder):
  losses = curves.read_losses(folder("a", COSTS))
  assert losses.dtype == np.float32
  for every, expected, last in ((1, COSTS, 7), (2, [4, 6.5, 2, 4], 4), (8, [4], 4)):
    np.testing.assert_array_equal(curves.medians(losses, every), expected)
    assert curves.last_median(losses, every) == last
  found = curves.medians(np.array([NAN, NAN, 3.0, NAN]), 2)
  np.testing.assert_array_equal(found, [NAN, 3.0])
  # In double precision.
  assert curves.medians(np.array([16777214, 16777215], np.float32), 2) == 16777214.5
  for every in (0, 9):
    with pytest.raises(ValueError, match=f"^every: expected .* 8 updates .*, got {every}$"):
      curves.medians(losses, every)


def test_medians_are_of_a_tenth_of_the_shortest_run_but_at_most_2000(folder):
  a, b = curves.read_runs([folder("a", COSTS), folder("b", COSTS * 5)])
  c = b._replace(losses=np.zeros(30_000))
  assert [plots.default_every(some) for some in ([a], [b], [c], [a, c])] == [1, 4, 2000, 1]


@pytest.mark.parametrize(
  "settings, expected",
  [
    (mixer("attention", num_heads=1), "attention, 1 head"),
    (mixer("dispatcher", num_heads=1), "Dispatcher"),
    (mixer("dispatcher_multihead", num_heads=8), "multi-head Dispatcher, 8 heads"),
    (mixer("he", adjustment=False, output_projection=False), "HE, extraction alone"),
    ([*[mixer("a")] * 3, mixer("he"), mixer("a")], "3 x a + HE + a"),
  ],
)
def test_names_of_mixers(settings, expected):
  assert curves.mixer_name({"model": {"mixer": settings}}) == expected


def test_curves_are_the_medians_at_the_last_batch_of_each_window(folder):
  he = folder("b", [2, 4, 6, 8], model__mixer=mixer("he"))
  runs = curves.read_runs([folder("a", COSTS), he])
  figure = plots.draw(runs, figure="curves", every=2)
  assert lines(figure) == {"SHE": [[2, 4], [4, 6.5], [6, 2], [8, 4]], "HE": [[2, 3], [4, 7]]}
  assert figure.axes[0].get_ylabel() == "median cost of each 2 batches (nats per token)"
  figure = figures.draw(curves.read_runs([folder("c", [3, 5, 4])]), "every_batch")
  assert lines(figure) == {"SHE": [[1, 3], [2, 5], [3, 4]]}


def test_lines_over_a_size_of_the_model(folder, capsys):
  short, heads = dict(model__num_layers=8), mixer("attention", num_heads=32)
  names = [
    folder("long", [9, 9, 1, 3], model__num_layers=16),
    folder("short", [9, 9, 9, 4, 6], **short),
    folder("seed", [9, 8], seed=5, **short),
    folder("attention", [7, 8, 9], model__mixer=heads, **short),
  ]
  drawn = figures.draw(curves.read_runs(names), "by_layers", every=2)
  (axes,) = drawn.axes
  assert lines(drawn) == {"SHE": [[8, 6.75], [16, 2]], "attention, 32 heads": [[8, 8.5]]}
  assert axes.get_xlabel() == "layers"
  assert [tick.get_text() for tick in axes.get_xticklabels()] == ["8", "16"]
  figures.main(["by_layers", *names, "--every=2", "--out=layers.png"])
  printed = capsys.readouterr().out
  # The number of layers is meant to differ.
  assert "updates: 4 for SHE" in printed and "num_layers:" not in printed
  assert Path("layers.png").read_bytes().startswith(b"\x89PNG")


def test_what_differs_is_told_unless_it_is_meant_to(folder):
  meant = dict(model__mixer=mixer("he"), train__log_every_steps=7, model__num_layers=5, seed=4)
  runs = curves.read_runs([folder("a", [4, 3]), folder("b", [2, 1], **meant)])
  assert curves.notes(runs, ["model.mixer", "model.num_layers"]) == []
  assert curves.notes(runs, ["model.mixer"]) == ["model.num_layers: 2 for SHE | 5 for HE"]


def test_runs_on_different_texts_say_so(folder):
  """Also of one path, whose content has changed."""
  names = [folder(name, [4, 3]) for name in "abc"]
  for name, text in zip(names, ("one", "one", "two"), strict=True):
    about = {"name": "books", "splits": {"valid": {"sha256": text * 9}}}
    files.write_json(Path(name, "data/data.json"), about)
  runs = curves.read_runs(names, [*"abc"])
  (note,) = curves.notes(runs)
  assert note.startswith("different texts, so their scores do not compare: books (oneoneone) for a")
  assert curves.notes(runs[:2]) == []


def test_the_command_prints_a_table_with_notes_and_writes_a_figure(folder, tmp_path, capsys):
  a = folder("a", [NAN, NAN, 5, 3, 7])
  b = folder("b", [2, 4], model__mixer=mixer("he"), model__max_length=7)
  plots_command.main(
    [a, b, "--figure=curves", "--every=2", r"--labels=$\frac{1}$,the other", "--out=made/x.png"]
  )
  rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
  assert rows == [
    ["Median training cost of 2 batches, nats per token; up to batch:"],
    [""],
    ["2", "4", "last"],
    [r"$\frac{1}$", "-", "4.0000", "5.0000"],
    ["the other", "3.0000", "3.0000"],
    [""],
    ["Compare these runs with care:"],
    ["model.max_length: 32 for $\\frac{1}$ | 7 for the other"],
    ["updates: 5 for $\\frac{1}$ | 2 for the other"],
    ["$\\frac{1}$: 2 of 5 losses are not known, and left out"],
    [""],
    ["The figure: made/x.png"],
  ]
  assert (tmp_path / "made/x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  "text, message",
  [
    ("\xff", "workdir: expected a readable a/config.json, got: "),
    ("[3]", "workdir: expected a readable a/config.json, got: list for a dict of settings"),
    ('{"model": 3}', "model.mixer: expected the name of a token mixer, got None"),
  ],
)
def test_a_damaged_configuration_is_refused(folder, text, message):
  run = folder("a", COSTS)
  Path(run, "config.json").write_bytes(text.encode("latin-1"))
  with pytest.raises(SystemExit, match=f"^{message}"):
    plots_command.main([run, "--out=x.png", "--every=1", "--figure=curves"])
  assert not Path("x.png").exists()


def test_what_a_run_logged_while_it_goes_on(folder):
  run = folder("a", COSTS)
  assert curves.read_scores(run) == {}
  damaged = '{"step": 9, "spl\n[3]\n{"step": 6}\n{"step": [1], "split": "valid", "x": 1.5}\n'
  loss = {"step": 2, "split": "train", "loss": 4.0, "grad_norm": None}
  log(run, loss, evaluated(5, 3.5), evaluated(7, 2), end=damaged + '{"step": 9, "split": "va')
  scores = {"train/loss": {2: 4.0}, "valid/bits_per_character": {5: 3.5, 7: 2}}
  assert curves.read_scores(run) == scores


def test_seeds_are_a_mean_in_a_band(folder):
  """At the batches that all of them have: the last one is still going on."""
  for i, bits in enumerate((4.0, 5.0, 8.0)):
    losses = [5 - i, 3, 4 + 2 * i, 2][: 3 if i == 2 else 4]
    log(folder(f"s{i}", losses, seed=i), evaluated(2, bits), *[evaluated(4, 3.0 + i)] * (i < 2))
  log(folder("h", [6, 5, 4, 3], seed=1, model__mixer=mixer("he")), evaluated(2, 7.5))
  runs = curves.read_runs(["s0", "h", "s1", "s2"])
  drawn = plots.draw(runs, every=1)
  he = [[1, 6], [2, 5], [3, 4], [4, 3]]
  assert lines(drawn) == {"SHE, 3 seeds": [[1, 4], [2, 3], [3, 6]], "HE": he}
  (band,) = drawn.axes[0].collections
  edges = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
  assert edges == {(1, 3), (1, 5), (2, 3), (3, 4), (3, 8)}
  drawn = plots.draw(runs, figure="metric", metric="valid/bits_per_character")
  assert lines(drawn) == {"SHE, 3 seeds": [[2, 17 / 3]], "HE": [[2, 7.5]]}
  labelled = [run._replace(label=label) for run, label in zip(runs, "abcb", strict=True)]
  assert [*lines(plots.draw(labelled, every=1))] == ["a", "b, 2 seeds", "c"]
  assert curves.names(runs) == ["SHE, seed 0", "HE", "SHE, seed 1", "SHE, seed 2"]


NAMES = [
  (
    [dict(seed=1), dict(seed=2), dict(seed=1, model__width=5)],
    ["width unset, seed 1", "width unset, seed 2", "width 5"],
  ),
  # How it reports is no difference where there is another.
  ([dict(model__width=x, train__num_steps=x) for x in (3, 5)], ["width 3", "width 5"]),
  ([dict(train__num_steps=x) for x in (3, 5)], ["num steps 3", "num steps 5"]),
  # The name of a component says more than its settings, until two are of one name.
  (
    [
      dict(model__boundaries={"name": name, "prior": prior, "tau": 2})
      for name, prior in (("gumbel", 0.2), ("gumbel", 0.3), ("fixed", None))
    ],
    ["boundaries gumbel, boundaries prior 0.2", "boundaries gumbel, boundaries prior 0.3"]
    + ["boundaries fixed"],
  ),
  ([dict(model__mixer=mixer("she", lag=x)) for x in (3, 5)], ["lag 3", "lag 5"]),
  # Values that read the same.
  ([dict(data__tokenizer=x) for x in ("7", 7)], ["tokenizer 7 (0)", "tokenizer 7 (1)"]),
]


@pytest.mark.parametrize("settings, names", NAMES)
def test_runs_are_named_after_what_differs(folder, settings, names):
  runs = curves.read_runs([folder(str(i), [4], **given) for i, given in enumerate(settings)])
  assert curves.names(runs) == [f"SHE, {name}" for name in names]


def test_the_metric_that_is_drawn(folder):
  a, b, c = (folder(name, [4, 3]) for name in "abc")
  log(a, evaluated(1, 3.0, perplexity=5.0), {"step": 2, "split": "train", "loss": 3.5})
  log(b, {"step": 1, "split": "valid", "perplexity": 6.0})
  first, second, third = curves.read_runs([a, b, c])
  assert plots.find_metric([first, third]) == "valid/bits_per_character"
  assert plots.find_metric([first, second]) == "valid/perplexity"
  assert plots.find_metric([third]) is None
  assert plots.find_metric([first], "train/loss") == "train/loss"
  known = "train/loss, valid/bits_per_character, valid/perplexity"
  with pytest.raises(ValueError, match=f"metric: expected one of {known}, got loss"):
    plots.find_metric([second, first], "loss")


def test_progress_of_a_short_run_and_of_one_that_has_begun(folder, tmp_path, capsys):
  short = folder("short", range(57, 0, -1))
  begun = folder("begun", [9.0, 8.0])
  log(short, evaluated(20, 4.5), evaluated(40, 2.5), evaluated(57, 3.5))
  plots_command.main([short])
  text = capsys.readouterr().out
  assert text.startswith("Median cost of the last 6 batches, nats per token; valid/bits_per_ch")
  printed = [line.split() for line in text.splitlines()]
  assert ["batches", "cost", "last", "lowest", "at", "batch"] in printed
  assert ["SHE", "57", "3.5000", "3.5000", "2.5000", "40"] in printed
  assert (tmp_path / "progress.png").exists()
  plots_command.main([begun])  # Nothing was evaluated.
  assert ["SHE", "2", "8.0000"] in [x.split() for x in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("width", [3.3, 9])
def test_nothing_is_cut_and_panels_have_most_of_the_figure(folder, width):
  names = [folder(str(i), range(19000, 0, -1), train__learning_rate=i / 7) for i in range(5)]
  for name in names:
    log(name, evaluated(2000, 3.5), evaluated(4000, 2.5))
  runs = curves.read_runs(names)
  drawn = plots.draw(runs, figure="progress", metric="valid/bits_per_character", width=width)
  drawn.draw_without_rendering()
  inside, size = drawn.bbox.padded(2), drawn.bbox.width * drawn.bbox.height
  panels = [axes.get_window_extent() for axes in drawn.axes]
  texts = [text for axes in drawn.axes for text in (axes.yaxis.label, axes.xaxis.label)]
  for box in [text.get_window_extent() for text in texts] + [drawn.legends[0].get_window_extent()]:
    assert inside.x0 <= box.x0 and box.x1 <= inside.x1, (box, inside)
    assert inside.y0 <= box.y0 and box.y1 <= inside.y1, (box, inside)
  for axes, panel in zip(drawn.axes, panels, strict=True):  # A label is no longer than its axis.
    assert axes.yaxis.label.get_window_extent().height < 1.05 * panel.height
    low, high = axes.get_xlim()
    places = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    ticks = [text.get_window_extent() for at, text in places if low <= at <= high]
    assert all(x.x1 < y.x0 for x, y in itertools.pairwise(ticks))
  assert sum(x.width * x.height for x in panels) > 0.4 * size
  assert drawn.get_figwidth() == width
  assert drawn.axes[0].yaxis.label.get_size() == (8 if width < 5 else 10)


@pytest.mark.parametrize(
  "log, losses, expected",
  [
    ("y", [0.3, 20], ["0.5", "1", "2", "5", "10", "20"]),
    ("y", [0.001, 20000], ["0.01", "1", "100", "10,000"]),
    ("", [1000, 30000], ["10,000", "20,000", "30,000"]),
  ],
)
def test_ticks_are_plain_numbers(folder, log, losses, expected):
  run = curves.read_runs([folder("a", losses)])
  (axes,) = plots.draw(run, every=1, log=log).axes
  low, high = axes.get_ylim()
  ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
  shown = [text.get_text() for at, text in ticks if low <= at <= high]
  assert {*expected} <= {*shown} and not any("$" in text for text in shown)
