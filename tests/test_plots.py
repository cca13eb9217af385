"""Figures and tables from run folders that the tests write."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax.analysis import costs, folders, plots

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
      "seed": 3,
      "model": {"mixer": mixer("she"), "max_length": 32, "num_layers": 2},
      "data": {"path": "books.txt", "split_fractions": [0.9, 0.05, 0.05]},
      "train": {"batch_size": 64, "window": 0},
    }
    for key, value in settings.items():
      section, _, rest = key.partition("__")
      if rest:
        config[section][rest] = value
      else:
        config[section] = value
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


def ended(*arguments):
  """The message that the command exits with."""
  with pytest.raises(SystemExit) as end:
    plots.main([*arguments])
  return end.value.code


def lines(figure):
  """The points of each line, by its name in the legend."""
  (axes,) = figure.axes
  named = [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]
  assert named == [line.get_label() for line in axes.get_lines()]
  return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


@pytest.mark.parametrize("function", [costs.medians, costs.last_median])
def test_windows_longer_than_the_run(function):
  for every in (-1, 0, 9):
    with pytest.raises(ValueError, match=f"^every: expected .* 8 updates .*, got {every}$"):
      function(np.array(COSTS), every)


# Of so many updates: the medians of all windows, and that of the last updates.
MEDIANS = {1: (COSTS, 7.0), 2: ([4.0, 6.5, 2.0, 4.0], 4.0), 3: ([4.0, 5.5], 4.0), 8: ([4.0], 4.0)}


@pytest.mark.parametrize("every", MEDIANS)
def test_medians(folder, every):
  losses, (expected, last) = folders.read_losses(folder("a", COSTS)), MEDIANS[every]
  assert losses.dtype == np.float32
  np.testing.assert_array_equal(costs.medians(losses, every), expected)
  assert costs.last_median(losses, every) == last


def test_medians_of_nothing_known_and_in_double_precision():
  found = costs.medians(np.array([NAN, NAN, 3.0, NAN]), 2)
  np.testing.assert_array_equal(found, [NAN, 3.0])
  assert math.isnan(costs.last_median(np.array([3.0, NAN, NAN]), 2))
  large = np.array([16777214, 16777215], np.float32)
  assert costs.medians(large, 2) == 16777214.5


LABELS = [
  ({"name": "she", "num_heads": 1}, "SHE"),
  ({"name": "me", "adjustment": True}, "ME"),
  ({"name": "attention", "num_heads": 32}, "attention, 32 heads"),
  ({"name": "attention", "num_heads": 1}, "attention, 1 head"),
  ({"name": "dispatcher", "num_heads": 1}, "Dispatcher"),
  ({"name": "dispatcher", "num_heads": 4}, "Dispatcher, 4 heads"),
  ({"name": "dispatcher_multihead", "num_heads": 8}, "multi-head Dispatcher, 8 heads"),
  ({"name": "he", "adjustment": False, "output_projection": False}, "HE, extraction alone"),
  ({"name": "we", "adjustment": False, "output_projection": True}, "WE, no adjustment"),
  ({"name": "she", "output_projection": False}, "SHE, no output projection"),
]


@pytest.mark.parametrize("mixer, expected", LABELS)
def test_labels(mixer, expected):
  assert folders.label({"model": {"mixer": mixer}}) == expected
  # As version 0.1 had it.
  model = {"mixer" if key == "name" else key: value for key, value in mixer.items()}
  assert folders.label({"model": model}) == expected


@pytest.mark.parametrize("config", [{}, {"model": {}}, {"model": {"mixer": 3}}])
def test_a_run_without_a_mixer_has_no_label(config):
  with pytest.raises(ValueError, match="model.mixer: expected the name of a token mixer"):
    folders.label(config)


def test_curves_are_the_medians_at_the_last_batch_of_each_window(folder):
  runs = folders.read_runs(
    [folder("a", COSTS), folder("b", [2, 4, 6, 8], model__mixer=mixer("he"))]
  )
  figure = plots.draw(runs, figure="curves", every=2)
  assert lines(figure) == {"SHE": [[2, 4], [4, 6.5], [6, 2], [8, 4]], "HE": [[2, 3], [4, 7]]}
  (axes,) = figure.axes
  assert axes.get_xlabel() == "batch"
  assert axes.get_ylabel() == "median cost of each 2 batches (nats per token)"
  figure = plots.draw(folders.read_runs([folder("c", [3, 5, 4])]), figure="every_batch")
  assert lines(figure) == {"SHE": [[1, 3], [2, 5], [3, 4]]}
  assert figure.axes[0].get_ylabel() == "training cost (nats per token)"


@pytest.mark.parametrize(
  "figure, key, name",
  [
    ("by_length", "model__max_length", "context window (tokens)"),
    ("by_layers", "model__num_layers", "layers"),
  ],
)
def test_lines_over_a_size_of_the_model(folder, figure, key, name):
  heads, head = (mixer("attention", num_heads=count) for count in (32, 1))
  runs = folders.read_runs(
    [
      folder("long", [9, 9, 1, 3], **{key: 16}),
      folder("short", [9, 9, 9, 4, 6], **{key: 8}),
      folder("seed", [9, 8], seed=5, **{key: 8}),
      folder("attention", [7, 8, 9], model__mixer=heads, **{key: 8}),
      folder("one", [6, 6, 6], model__mixer=head, **{key: 8}),
    ]
  )
  drawn = plots.draw(runs, figure=figure, every=2)
  assert lines(drawn) == {
    # 5 and 8.5 share a place.
    "SHE": [[8, 6.75], [16, 2]],
    "attention, 32 heads": [[8, 8.5]],
    "attention, 1 head": [[8, 6]],
  }
  (axes,) = drawn.axes
  (both,) = axes.collections
  assert both.get_offsets().tolist() == [[8, 5], [8, 8.5]]
  assert axes.get_xlabel() == name
  assert [tick.get_text() for tick in axes.get_xticklabels()] == ["8", "16"]


def test_lines_can_be_told_apart(folder):
  """Past the colours there are, the dash changes."""
  runs = folders.read_runs([folder(f"r{i}", [4, 3]) for i in range(11)])
  drawn = plots.draw(runs, every=1).axes[0].get_lines()
  assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 11
  assert len({line.get_color() for line in drawn}) == 7


def test_runs_of_one_label_are_named_by_their_folders_too(folder):
  runs = folders.read_runs(
    [folder("a", [4]), folder("b", [3]), folder("c", [2], model__mixer=mixer("me"))]
  )
  assert [*lines(plots.draw(runs, every=1))] == ["SHE (a)", "SHE (b)", "ME"]


def test_table(folder):
  runs = folders.read_runs(
    [folder("a", COSTS), folder("b", [2, 4, 6], model__mixer=mixer("he"), model__max_length=7)]
  )
  found = costs.table(runs, 3)
  notes = found.pop("notes")
  common = {"num_layers": 2, "last": 4.0}
  she = {"name": "SHE", "folder": "a", "updates": 8, "unknown": 1, "max_length": 32}
  he = {"name": "HE", "folder": "b", "updates": 3, "unknown": 0, "max_length": 7}
  runs = [{**she, "medians": [4.0, 5.5], **common}, {**he, "medians": [4.0], **common}]
  assert found == {"every": 3, "updates": [3, 6], "runs": runs}
  assert notes == [
    "model.max_length: 32 for SHE | 7 for HE",
    "updates: 8 for SHE | 3 for HE",
    "SHE: 1 of 8 losses are not known, and left out",
  ]


@pytest.mark.parametrize(
  "figure, settings, key",
  [
    ("curves", dict(train__batch_size=7), "train.batch_size"),
    ("every_batch", dict(model__max_length=16), "model.max_length"),
    ("curves", dict(train__window=5), "train.window"),
    ("curves", dict(train__batches="random_windows"), "train.batches"),
    ("curves", dict(data__path="other.txt"), "data.path"),
    ("curves", dict(data__tokenizer="bpe"), "data.tokenizer"),
    ("by_layers", dict(model__max_length=16), "model.max_length"),
    ("by_length", dict(model__num_layers=5), "model.num_layers"),
    ("curves", dict(model__num_layers=5), "model.num_layers"),
    ("every_batch", dict(model__dropout=0.1), "model.dropout"),
    ("by_layers", dict(train__learning_rate=0.1), "train.learning_rate"),
    ("curves", dict(model__boundaries={"name": "none"}), "model.boundaries.name"),
    ("curves", dict(train__optimizer={"b1": 0.8}), "train.optimizer.b1"),
    # What is meant to differ.
    ("curves", dict(seed=4), None),
    ("curves", dict(model__mixer=mixer("attention", num_heads=8)), None),
    (
      "curves",
      dict(model__mixer=mixer("she", implementation="fft"), train__log_every_steps=7),
      None,
    ),
    ("by_layers", dict(model__num_layers=5), None),
    ("by_length", dict(model__max_length=16), None),
  ],
)
def test_what_differs_is_told(folder, figure, settings, key):
  runs = folders.read_runs([folder("a", [4, 3]), folder("b", [2, 1], **settings)])
  notes = costs.table(runs, 2, figure)["notes"]
  assert [note.split(":")[0] for note in notes] == ([key] if key else [])


def test_a_seed_is_told_where_other_settings_differ(folder):
  runs = [folder("a", [4]), folder("b", [4], seed=4, train__batch_size=7)]
  notes = costs.table(folders.read_runs(runs), 1)["notes"]
  assert [note.split(":")[0] for note in notes] == ["seed", "train.batch_size"]
  runs += [folder("c", [4], seed=4), folder("d", [4], train__batch_size=7)]
  notes = costs.table(folders.read_runs(runs), 1)["notes"]
  assert [note.split(":")[0] for note in notes] == ["train.batch_size"]


def old_run(folder, name, **settings):
  """A run of version 0.1, of whose settings the model's are flat."""
  model = {"mixer": "we", "num_heads": 1, "adjustment": True, "num_layers": 2}
  return folder(name, [4, 3], model=model | settings)


def test_runs_of_version_0_1_are_compared_with_one_another(folder):
  runs = folders.read_runs(
    [
      old_run(folder, "a"),
      old_run(folder, "b", adjustment=False),
      old_run(folder, "c", mixer="attention", num_heads=8, dropout=0.1),
    ]
  )
  names = ["WE", "WE, no adjustment", "attention, 8 heads"]
  found = costs.table(runs, 1)
  assert [row["name"] for row in found["runs"]] == names
  assert found["notes"] == [f"model.dropout: null for {names[0]}; {names[1]} | 0.1 for {names[2]}"]


def test_a_run_of_version_0_1_is_compared_with_one_of_now(folder):
  now = config_lib.default()
  now.model.mixer = config_lib.mixer("me")
  now.model.num_layers, now.data.path = 2, "books.txt"
  now.train.batch_size = 64
  now = json.loads(json.dumps(now.to_dict()))
  runs = folders.read_runs(
    [
      folder("a", [4, 3], **now | {"seed": 3}),
      old_run(folder, "b"),
      old_run(folder, "c", mixer="she", first_layers=2, boundaries="fixed", boundary_offset=1),
    ]
  )
  assert costs.table(runs, 1)["notes"] == [
    'model.boundaries.name: "none" for ME; WE | "fixed" for SHE',
    "model.boundaries.offset: null for ME; WE | 1 for SHE",
    'model.boundaries.pooling: null for ME; WE | "mean" for SHE',
    "model.boundaries.shortening_factor: null for ME; WE | 2 for SHE",
  ]
  # Another program's settings have no other names.
  runs = folders.read_runs([folder("d", [4, 3]), old_run(folder, "e", mixer="rnn")])
  found = costs.table(runs, 1)["notes"]
  assert found == ["model.max_length: 32 for SHE | null for rnn"]


def test_of_many_runs_some_are_named(folder):
  losses = [[4, 3]] * 5 + [[2]]
  runs = folders.read_runs([folder(f"r{i}", losses[i]) for i in range(6)])
  expected = "updates: 2 for SHE (r0); SHE (r1); 3 more | 1 for SHE (r5)"
  assert costs.table(runs, 1)["notes"] == [expected]


def test_the_command_prints_and_writes(folder, tmp_path, capsys):
  a, b = folder("a", [NAN, NAN, 5, 3]), folder("b", [2, 4, 6], train__batch_size=7)
  plots.main(
    [
      a,
      b,
      "--out=made/figure.png",
      "--figure=curves",
      "--every=2",
      "--labels=one,the other",
      "--json=tables/medians.json",
    ]
  )
  printed = capsys.readouterr().out.splitlines()
  rows = [line.split("  ") for line in printed]
  rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
  assert rows[0] == ["Median training cost of 2 batches, nats per token; up to batch:"]
  assert ["2", "4", "last"] in rows
  assert ["one", "-", "4.0000", "4.0000"] in rows
  assert ["the other", "3.0000", "5.0000"] in rows
  assert ["train.batch_size: 64 for one | 7 for the other"] in rows
  assert (tmp_path / "made/figure.png").read_bytes().startswith(b"\x89PNG")
  found = json.loads((tmp_path / "tables/medians.json").read_text())
  assert found["runs"][0]["medians"] == [None, 4.0]
  assert found["runs"][1]["name"] == "the other"


@pytest.mark.parametrize(
  "figure, suffix, begin",
  [
    *((figure, "png", b"\x89PNG") for figure in plots.FIGURES),
    ("curves", "pdf", b"%PDF"),
    # As many as the paper's longest runs have, up and down, where it is the hardest.
    pytest.param("every_batch", "pdf", b"%PDF", marks=pytest.mark.slow),
  ],
)
def test_every_figure_is_written(folder, tmp_path, figure, suffix, begin):
  is_long = (figure, suffix) == ("every_batch", "pdf")
  run = folder("a", [5, 4, 3, NAN, 2] * (12000 if is_long else 800))
  log(run, {"step": 7, "split": "valid", "perplexity": 5.0})
  plots.main([run, f"--out=figure.{suffix}", f"--figure={figure}"])
  assert (tmp_path / f"figure.{suffix}").read_bytes().startswith(begin)


def test_medians_are_of_as_many_as_the_runs_report(folder, capsys):
  runs = [folder("a", COSTS, train__median_every_steps=3), folder("b", COSTS)]
  plots.main([runs[0], "--figure=curves"])
  assert "Median training cost of 3 batches" in capsys.readouterr().out
  # 2,000 as by default do not fit one of them.
  plots.main([*runs, "--figure=curves"])
  assert "Median training cost of 3 batches" in capsys.readouterr().out
  plots.main([runs[1], folder("c", COSTS * 5, train__median_every_steps=9), "--figure=curves"])
  assert "Median training cost of 1 batches" in capsys.readouterr().out
  # A tenth, as of the quickstart's 400 updates.
  plots.main([folder("d", COSTS * 5), "--figure=curves"])
  assert "Median training cost of 4 batches" in capsys.readouterr().out
  # Every batch is drawn of a run of any length.
  plots.main([*runs, "--figure=every_batch"])
  assert "Median training cost of 8 batches" in capsys.readouterr().out


def test_wrong_flags_and_settings(folder, tmp_path):
  run, flags = folder("a", COSTS), ["--out=x.png", "--every=1"]
  message = "--every: expected at least 1 and at most the 8 updates of a, got 9"
  assert ended(run, "--out=x.png", "--every=9") == message
  assert not [*tmp_path.glob("x.*")]
  for text, message in (
    ("\xff", "workdir: expected JSON in a/config.json, got: "),
    ('{"data": 3}', "workdir: expected the settings of a run in a/config.json, got oth"),
    ("{}", "model.mixer: expected the name of a token mixer, got None"),
    (
      '{"model": {"mixer": "me"}}',
      "model.max_length: expected an integer of at least 1 in the settings of a, got None",
    ),
  ):
    (tmp_path / run / "config.json").write_bytes(text.encode("latin-1"))
    assert ended(run, *flags, "--figure=by_length").startswith(message)


def test_an_unknown_figure(folder):
  runs = folders.read_runs([folder("a", [4, 3])])
  with pytest.raises(ValueError, match="figure: expected one of progress, .*, got pie"):
    plots.draw(runs, figure="pie")
  with pytest.raises(ValueError, match="every: expected .* updates of a, got 2000"):
    plots.draw(runs)


def test_what_a_run_logged_while_it_goes_on(folder):
  run = folder("a", COSTS)
  assert folders.read_scores(run) == {}
  damaged = '{"step": 9, "spl\n[3]\n{"step": 6}\n'
  loss = {"step": 2, "split": "train", "loss": 4.0, "grad_norm": None}
  log(run, loss, evaluated(5, 3.5), evaluated(7, 2), end=damaged + '{"step": 9, "split": "va')
  scores = {"train/loss": {2: 4.0}, "valid/bits_per_character": {5: 3.5, 7: 2}}
  assert folders.read_scores(run) == scores
  (record,) = folders.read_runs([run])
  assert record.scores == scores


def seeds(folder):
  """Three seeds of SHE, the last one still going on, and one of HE."""
  for i in range(3):
    losses = [5 - i, 3, 4 + 2 * i, 2][: 3 if i == 2 else 4]
    log(folder(f"s{i}", losses, seed=i), evaluated(2, 4.0 + i * i), evaluated(4, 3.0 + i))
  log("s2", evaluated(2, 8.0))
  log(folder("h", [6, 5, 4, 3], seed=1, model__mixer=mixer("he")), evaluated(2, 7.5))
  return folders.read_runs(["s0", "h", "s1", "s2"])


def test_seeds_are_a_mean_in_a_band(folder):
  """At the batches that all of them have, beside a loop over them."""
  runs = seeds(folder)
  drawn = plots.draw(runs, every=1)
  assert lines(drawn) == {
    "SHE, 3 seeds": [[1, 4], [2, 3], [3, 6]],
    "HE": [[1, 6], [2, 5], [3, 4], [4, 3]],
  }
  (band,) = drawn.axes[0].collections
  edges = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
  assert edges == {(1, 3), (1, 5), (2, 3), (3, 4), (3, 8)}
  drawn = plots.draw(runs, figure="metric", metric="valid/bits_per_character")
  assert lines(drawn) == {"SHE, 3 seeds": [[2, 17 / 3]], "HE": [[2, 7.5]]}
  deviation = math.sqrt(((4 - 17 / 3) ** 2 + (5 - 17 / 3) ** 2 + (8 - 17 / 3) ** 2) / 2)
  heights = drawn.axes[0].collections[0].get_paths()[0].vertices[:, 1]
  np.testing.assert_allclose(
    [heights.min(), heights.max()], [17 / 3 - deviation, 17 / 3 + deviation]
  )
  assert drawn.axes[0].get_ylabel() == "validation bits per character"
  apart = lines(plots.draw(runs, every=1, seeds="separate"))
  assert [*apart] == ["SHE, seed 0", "HE", "SHE, seed 1", "SHE, seed 2"]
  assert apart["SHE, seed 2"] == [[1, 3], [2, 3], [3, 8]]


def test_only_different_seeds_of_the_same_settings_are_put_together(folder):
  runs = folders.read_runs(
    [
      folder("a", [4]),
      folder("copy", [4]),
      folder("rate", [4], seed=5, train__learning_rate=0.1),
      folder("other", [4], seed=6, train__learning_rate=0.1),
    ]
  )
  groups = [[run.folder for run in group] for group in folders.by_seed(runs)]
  assert groups == [["a"], ["copy"], ["rate", "other"]]


NAMES = [
  (
    [dict(train__learning_rate=x) for x in (0.1, 0.02)],
    ["learning rate 0.1", "learning rate 0.02"],
  ),
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
  runs = folders.read_runs([folder(str(i), [4], **given) for i, given in enumerate(settings)])
  assert folders.distinct_labels(runs) == [f"SHE, {name}" for name in names]


def test_the_metric_that_is_drawn(folder):
  a, b, c = (folder(name, [4, 3]) for name in "abc")
  log(a, evaluated(1, 3.0, perplexity=5.0), {"step": 2, "split": "train", "loss": 3.5})
  log(b, {"step": 1, "split": "valid", "perplexity": 6.0})
  first, second, third = folders.read_runs([a, b, c])
  assert plots.find_metric([first, third]) == "valid/bits_per_character"
  assert plots.find_metric([first, second]) == "valid/perplexity"
  assert plots.find_metric([third]) is None
  assert plots.find_metric([first], "train/loss") == "train/loss"
  known = "train/loss, valid/bits_per_character, valid/perplexity"
  with pytest.raises(ValueError, match=f"metric: expected one of {known}, got loss"):
    plots.find_metric([second, first], "loss")


def test_progress_of_a_short_run_and_of_one_that_has_begun(folder, tmp_path, capsys):
  short = folder("short", range(57, 0, -1), train__median_every_steps=20)
  begun = folder("begun", [9.0, 8.0])
  log(short, evaluated(20, 4.5), evaluated(40, 2.5), evaluated(57, 3.5))
  plots.main([short])
  text = capsys.readouterr().out
  assert text.startswith("Median cost of the last 6 batches, nats per token; valid/bits_per_ch")
  printed = [line.split() for line in text.splitlines()]
  assert ["batches", "cost", "last", "lowest", "at", "batch"] in printed
  assert ["SHE", "57", "3.5000", "3.5000", "2.5000", "40"] in printed
  assert ["The", "figure:", "progress.png"] in printed
  assert (tmp_path / "progress.png").exists()
  plots.main([begun])  # Nothing was evaluated.
  assert ["SHE", "2", "8.0000"] in [x.split() for x in capsys.readouterr().out.splitlines()]
  plots.main([short, begun, "--metric=valid/bits_per_character", "--json=x.json"])
  content = json.loads((tmp_path / "x.json").read_text())
  assert content["metric"] == "valid/bits_per_character"
  assert [row["scores"] for row in content["runs"]] == [[[20, 4.5], [40, 2.5], [57, 3.5]], []]
  assert (tmp_path / "metric.png").exists()


def test_progress_has_both_panels_of_one_legend(folder):
  runs = seeds(folder)
  drawn = plots.draw(runs, figure="progress", every=1, metric="valid/bits_per_character")
  costs_axes, scores_axes = drawn.axes
  for axes in (costs_axes, scores_axes):
    assert [line.get_label() for line in axes.get_lines()] == ["SHE, 3 seeds", "HE"]
  (legend,) = drawn.legends
  assert len(legend.get_texts()) == 2


@pytest.mark.parametrize(
  "width, inches, font_size", [("3.3in", 3.3, 8), ("8.4cm", 3.307, 8), ("150mm", 5.906, 10)]
)
def test_widths_for_papers(folder, tmp_path, width, inches, font_size):
  run = folder("a", COSTS)
  plots.main([run, f"--width={width}", "--out=x.svg", "--log=y"])
  found = (tmp_path / "x.svg").read_text().partition('width="')[2].partition("pt")[0]
  np.testing.assert_allclose(float(found) / 72, inches, rtol=1e-3)
  drawn = plots.draw(folders.read_runs([run]), every=1, width=inches)
  assert drawn.axes[0].yaxis.label.get_size() == font_size
  plots.write(drawn, "x.pdf")  # Matplotlib makes more ticks then.
  ticks = [*drawn.axes[0].get_xticklabels(), *drawn.axes[0].get_yticklabels()]
  assert {text.get_size() for text in ticks} == {font_size}


@pytest.mark.parametrize(
  "log, losses, expected",
  [
    ("y", [0.58, 0.94], ["0.6", "0.7", "0.8", "0.9"]),
    ("y", [0.3, 20], ["0.5", "1", "2", "5", "10", "20"]),
    ("y", [0.001, 20000], ["0.01", "1", "100", "10,000"]),
    ("", [1000, 30000], ["10,000", "20,000", "30,000"]),
  ],
)
def test_ticks_are_plain_numbers(folder, log, losses, expected):
  run = folders.read_runs([folder("a", losses)])
  (axes,) = plots.draw(run, every=1, log=log).axes
  low, high = axes.get_ylim()
  ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
  shown = [text.get_text() for at, text in ticks if low <= at <= high]
  assert {*expected} <= {*shown} and not any("$" in text for text in shown)
