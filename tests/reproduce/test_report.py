"""Reports made of records that the tests write: no run is needed."""

import dataclasses
import itertools
import math
import re
import statistics

import pytest

from dpjax.analysis import significance
from reproduce import figures, pages, papers, report

BITS, FACTOR = papers.BITS, papers.FACTOR
ABOUT = {
  "machine": {"device": "cpu", "devices": 3, "processor": "Abacus", "cores": 2},
  "versions": {"dpjax": "0.1"},
  "command": "python -m reproduce small",
  "date": "2026-11-05",
}
SMALL = papers.Table(
  "pooling-table9",
  "A small table",
  ("Short ones are better.",),
  (BITS, FACTOR),
  (
    papers.Row("x/none", "vanilla", "a.py:none", "X", {BITS: 1.5}),
    papers.Row("x/short", "short", "a.py:short", "X", {BITS: 1.25}, is_starred=True),
    papers.Row("x/long", "long", "a.py:long", "X", {BITS: 1.75}),
    papers.Row("y/none", "vanilla", "b.py:none", "Y", {BITS: 2.5}),
    papers.Row("y/same", "same", "b.py:same", "Y", {BITS: 2.5}),
  ),
  baselines=("none",),
)


def record(config, seed=0, status="done", bits=None, **rest):
  """A run of 7 steps; what ended before has 5."""
  last = {"step": 5, "nats_per_token": 3.5, "perplexity": 33.0, BITS: 5.21}
  there = dict(config=config, seed=seed, status=status, text="text8", minutes=1.5)
  there |= dict(reason="" if status == "done" else f"it is {status}", parameters=1234)
  there |= dict(tokens={"train": 9001, "valid": 311, "test": 313}, vocab_size=29)
  there |= dict(step=7 if status == "done" else 5, num_steps=7, validation=[last])
  there |= dict(scores={} if bits is None else {BITS: bits})
  there |= dict(costs={"every": 2, "medians": [6.0, 5.0, 4.5]})
  return there | dict(changes={"model.width": [512, 64]}) | ABOUT | rest


def records(table, seeds=(0,)):
  """A run of each row and seed, whose scores are the paper's and a little more."""
  for i, (row, seed) in enumerate(itertools.product(table.rows, seeds)):
    scores = {score: 2.0 + 0.1 * i for score in table.scores} | dict(row.paper)
    scores = {score: x + 0.01 * seed + 0.001 * i for score, x in scores.items()}
    yield record(row.config, seed, scores=scores)


def points():
  pairs = ("ours", "theirs"), ("theirs", None)
  for place, dtype, (model, base) in itertools.product((2, 4, 8), ("float32", "bfloat16"), pairs):
    ratios = (0.625, 0.375) if base else (None, None)
    point = dict(model=model, baseline=base, dtype=dtype, place=place, left_out="")
    point |= dict(seconds=0.011 * place, temporary_mib=3.0 * place)
    point |= dict(zip(("ratio", "memory_ratio"), ratios, strict=True))
    point |= dict(settings={"batch": 3, "width": 1100}) | ABOUT
    yield point
  none = dict.fromkeys(("seconds", "temporary_mib", "ratio", "memory_ratio"))
  yield point | none | dict(dtype="float32", place=16, left_out="no memory")


def make(name, scale="cpu", seeds=(0,)):
  table = papers.TABLES[name]
  if table.kind == "counts":
    return report.counts(table, scale)
  if table.kind == "step_times":
    return report.step_times(table, scale, [*points()], 14)
  return report.summarise(table, scale, records(table, seeds))


def named(content, name):
  return next(row for row in content["rows"] if row["name"] == name)


def line(text, start):
  """The line of a table that begins so, as its cells."""
  (found,) = (x for x in text.splitlines() if x.startswith(f"| {start} |"))
  return found.strip("| ").split(" | ")


def column(text, head):
  """What stands below a head, by the first cells."""
  lines = [x.strip("| ").split(" | ") for x in text.splitlines() if x.startswith("| ")]
  return [cells[lines[0].index(head)] for cells in lines[2:]]


def test_runs_are_found_by_their_configurations():
  config = "configs/pooling_text8.py:fixed2"
  ran = [record(config, 3, bits=1.5), record(config, 1, bits=1.25)]
  rows = [
    named(report.summarise(papers.TABLES[table], "cpu", ran), "text8/fixed2")
    for table in ("pooling-table1", "pooling-table2", "pooling-fig3")
  ]
  for row in rows:
    assert [run["seed"] for run in row["runs"]] == [1, 3]
    assert row["mean"] == {BITS: 1.375} and row["seeds"] == 2
  others = report.summarise(papers.TABLES["pooling-table1"], "cpu", ran)["rows"]
  assert sum(bool(row["runs"]) for row in others) == 1


def test_means_and_tests_are_those_of_significance():
  base = {0: 1.5, 1: 1.625, 2: 1.25, 5: 1.75}
  ours = {1: 1.375, 2: 1.125, 4: 9.0, 5: 1.25}
  ran = [record("a.py:none", seed, bits=x) for seed, x in base.items()]
  ran += [record("a.py:short", seed, bits=x) for seed, x in ours.items()]
  # One seed alone has no deviation, and of one in common there is no test.
  ran += [record("a.py:long", 2, bits=2.0)]
  content = report.summarise(SMALL, "cpu", ran)
  row = named(content, "x/short")
  assert row["mean"][BITS] == statistics.fmean(ours.values())
  assert row["deviation"][BITS] == statistics.stdev(ours.values())
  common = (1, 2, 5)
  scores = {
    "base": {seed: base[seed] for seed in common},
    "ours": {seed: ours[seed] for seed in common},
  }
  expected = significance.compare(scores, "base")[1]
  assert row["test"] == {
    "difference": expected.difference,
    "p_value": expected.p_value,
    "verdict": expected.verdict,
    "score": BITS,
    "baseline": "x/none",
    "seeds": 3,
  }
  assert named(content, "x/long")["deviation"] == {BITS: None}
  for name in ("x/long", "x/none", "y/same"):
    assert named(content, name)["test"] is None
  text = pages.markdown(content)
  mean, deviation = row["mean"][BITS], row["deviation"][BITS]
  assert line(text, "X | short")[4:6] == ["1.250*", f"{mean:.3f} ± {deviation:.3f} (4)"]
  cell = f"{expected.difference:+.3f}, {expected.p_value:.3f}"
  assert column(text, "difference, p") == ["-", cell, "-", "-", "-"]


@pytest.mark.parametrize("status", ["partial", "diverged", "left_out"])
def test_what_is_not_done_is_in_no_mean(status):
  scores = {"scores": {BITS: 100.0, FACTOR: 100.0}}
  ran = [
    record("a.py:none", 0, bits=1.5),
    record("a.py:none", 1, status, **scores),
    record("a.py:short", 1, status, **scores),
  ]
  content = report.summarise(SMALL, "cpu", ran)
  assert named(content, "x/none")["mean"] == {BITS: 1.5}
  assert named(content, "x/none")["seeds"] == 1
  assert named(content, "x/short")["mean"] == {} == named(content, "x/short")["deviation"]
  assert content["order"] is None
  text = pages.markdown(content)
  assert "100.0" not in text
  said = f"`x/short`; `x/none`, seed 1: {status.replace('_', ' ')}, it is {status}."
  assert f"- Without a result: {said}\n" in text
  assert status.replace("_", " ") in line(text, "X | short")[3]


def test_scores_that_are_not_finite_or_missing_are_left_out():
  ran = [
    record("a.py:none", 0, scores={BITS: math.inf, FACTOR: 2.5}),
    record("a.py:none", 1, scores={BITS: None, FACTOR: math.nan}),
    record("a.py:none", 2, scores={BITS: 1.5}),
  ]
  row = named(report.summarise(SMALL, "cpu", ran), "x/none")
  assert row["mean"] == {BITS: 1.5, FACTOR: 2.5} and row["seeds"] == 3


def test_a_partial_run_has_no_score_and_its_last_validation():
  content = report.summarise(SMALL, "cpu", [record("a.py:none", 0, "partial")])
  text = pages.markdown(content)
  cells = line(text, "X | vanilla")
  assert cells[3:5] == ["5 of 7, partial", "1.500"]
  assert cells[-1] == "step 5; validation 5.210 bits per character"


def test_rows_without_a_result_are_named_with_their_reason_once():
  ran = [
    record("a.py:none", 0, "left_out", reason="no text"),
    record("a.py:short", 0, "left_out", reason="no text"),
    record("a.py:long", 0, "left_out", reason="no text"),
  ]
  text = pages.markdown(report.summarise(SMALL, "cpu", ran))
  assert "- Without a result: X: left out, no text.\n" in text
  assert "- Without a result: Y: not run.\n" in text
  ran[2] = record("a.py:long", 0, "diverged", reason="nan")
  ran.append(record("a.py:short", 1, "left_out", reason="no text"))
  text = pages.markdown(report.summarise(SMALL, "cpu", ran))
  assert "- Without a result: `x/none`; `x/short`: left out, no text.\n" in text
  assert "- Without a result: `x/long`: diverged, nan.\n" in text


def test_order_is_counted_within_groups_where_the_papers_numbers_differ():
  # The paper: short < none < long. Here none < short < long, so 2 of 3; Y has a tie.
  bits = {"a.py:none": 1.0, "a.py:short": 1.5, "a.py:long": 2.0, "b.py:none": 0.5, "b.py:same": 3.0}
  ran = [record(config, bits=x) for config, x in bits.items()]
  content = report.summarise(SMALL, "cpu", ran)
  assert content["order"] == {"score": BITS, "same": 2, "pairs": 3, "paper_pairs": 3}
  text = pages.markdown(content)
  assert "Of the 3 pairs that have a result here (of the paper's 3), 2 are" in text
  content = report.summarise(SMALL, "cpu", ran[1:])
  assert content["order"] == {"score": BITS, "same": 1, "pairs": 1, "paper_pairs": 3}
  text = pages.markdown(content)
  assert "Of the 1 pairs that have a result here (of the paper's 3), 1 are" in text
  # Two that are equal here are not in the paper's order.
  ran[0]["scores"] = ran[1]["scores"]
  assert report.summarise(SMALL, "cpu", ran)["order"]["same"] == 2


@pytest.mark.parametrize("name", papers.TABLES)
@pytest.mark.parametrize("scale", ["paper", "cpu", "tiny"])
def test_a_reduced_scale_is_said_to_be_one(name, scale):
  text, is_counted = pages.markdown(make(name, scale)), name == "extractors-table7"
  is_said = "reduced" in text.lower()
  assert is_said == (scale != "paper" and not is_counted)
  assert is_said == ("not to be compared" in text.split("\n| ")[0])
  figure = figures.draw(make(name, scale))
  assert (figure is None) == is_counted
  if figure is not None:
    title = name if scale == "paper" else f"{name}, reduced ({scale})"
    assert figure.get_suptitle() == title


@pytest.mark.parametrize(
  "name", [name for name, table in papers.TABLES.items() if table.kind == "runs"]
)
def test_every_row_and_every_number_of_a_paper_is_there(name):
  table = papers.TABLES[name]
  for content in (make(name), report.summarise(table, "cpu", [])):
    lines = [x for x in pages.markdown(content).splitlines() if x.startswith("| ")][2:]
    assert len(lines) == len(table.rows)
    for row, text in zip(table.rows, lines, strict=True):
      cells = text.strip("| ").split(" | ")
      assert row.label in cells
      for score, number in row.paper.items():
        digits = 3 if score == BITS else 2
        star = "*" * (row.is_starred and score == BITS)
        assert f"{number:.{digits}f}{star}" in cells, (row, cells)
      if row.place is not None:
        assert f"{row.place:g}" in cells
  text = pages.markdown(content)
  assert table.title in text and table.source in text
  assert all(claim in text for claim in table.claims)


def test_settings_of_all_rows_are_said_once_and_others_of_whom():
  width, length = {"model.width": [512, 64]}, {"model.max_length": [2048, 256]}
  ran = [
    record(row.config, changes=width | (length if "a.py" in row.config else {}))
    for row in SMALL.rows
  ]
  ran[-1]["changes"] = width | {"data.name": ["", None], "train.learning_rate": [1, 0.01]}
  text = pages.markdown(report.summarise(SMALL, "cpu", ran))
  assert text.count("model.width") == 1 and "- `model.width` 512 -> 64\n" in text
  assert "- `model.max_length` 2,048 -> 256 (X)\n" in text
  assert '- `data.name` "" -> null (`y/same`)\n' in text
  assert "- `train.learning_rate` 1 -> 0.01 (`y/same`)\n" in text


def test_minutes_are_summed_exactly():
  # The built-in sum of Python 3.11 gives a little less, shown as 0.3.
  ran = [record("a.py:none", seed, bits=1.5, minutes=0.05) for seed in range(7)]
  content = report.summarise(SMALL, "cpu", ran)
  assert "- 0.4 minutes in all." in pages.markdown(content)
  ran = [record("a.py:none", seed, bits=1.5, minutes=x) for seed, x in enumerate([1e16, 3, -1e16])]
  assert "| 3 | [section]" in pages.page([report.summarise(SMALL, "cpu", ran)])


def test_texts_machines_and_times_are_said():
  ran = [
    record("a.py:none", 0, bits=1.5),
    record("b.py:none", 0, bits=1.5, text="part"),
    record("b.py:none", 2, bits=1.75, text="part", minutes=2.25, date="2026-11-04"),
  ]
  text = pages.markdown(report.summarise(SMALL, "cpu", ran))
  sizes = "9,001 / 311 / 313 tokens of 29 kinds (train / valid / test)"
  assert f"- Text: `text8`: {sizes}.\n" in text
  assert f"- Text: `part`: {sizes}, in the place of Y.\n" in text
  for words in (
    "cpu, devices 3, Abacus, 2 cores",
    "dpjax 0.1",
    "2026-11-04 to 2026-11-05",
    "`python -m reproduce small`",
    "5.2 minutes",
  ):
    assert text.count(words) == 1
  assert line(text, "X | vanilla")[2:4] == ["1,234", "7 of 7"]


def test_step_times_stand_by_place_and_model():
  text = pages.markdown(make("dispatcher-fig2"))
  lines = [x for x in text.splitlines() if x.startswith("| ")]
  assert lines[0] == (
    "| tokens | ours, float32 | theirs, float32 | ours, bfloat16 | theirs, bfloat16 |"
  )
  assert column(text, "tokens") == ["2", "4", "8", "16"]
  assert line(text, "4")[1:3] == ["0.044 s, 12 MiB (time 0.62, memory 0.38)", "0.044 s, 12 MiB"]
  assert line(text, "16")[1:] == ["-"] * 4
  assert "no memory: theirs, float32 at 16" in text
  assert text.count("batch 3, width 1,100") == 1


def test_what_is_written_is_read(tmp_path):
  names = "dispatcher-table1 dispatcher-fig2 extractors-table7 extractors-fig8 pooling-fig3".split()
  contents = [make(name, seeds=(0, 2)) for name in names]
  contents[0]["rows"][0]["runs"][0]["scores"] = {BITS: math.nan}
  for content in [*contents, make("pooling-fig3", "paper"), make("pooling-fig3", "tiny")]:
    report.write(content, tmp_path / "new")
  read = report.read(tmp_path / "new")
  contents[0]["rows"][0]["runs"][0]["scores"] = {BITS: None}
  assert [x for x in read if x["scale"] == "cpu"] == contents
  assert report.read(tmp_path / "new", "tiny") == [make("pooling-fig3", "tiny")]
  assert report.read(tmp_path / "none") == []
  files = {path.name for path in (tmp_path / "new").iterdir()}
  for content in read:
    name, has_image = (
      pages.file_name(content["table"], content["scale"]),
      content["kind"] != "counts",
    )
    files -= {f"{name}.json", f"{name}.md", f"{name}.png" if has_image else ""}
    text = (tmp_path / f"new/{name}.md").read_text(encoding="utf-8")
    assert text.startswith(pages.markdown(content)) and (f"]({name}.png)" in text) == has_image
  assert not files


@pytest.mark.parametrize("content", ['{"table": ', "[1, 2]", "\ufeff"])
def test_a_broken_file_is_named(tmp_path, content):
  path = tmp_path / f"{pages.file_name('pooling-fig4', 'cpu')}.json"
  path.write_text(content, encoding="utf-8")
  with pytest.raises(ValueError, match=rf"folder: expected .*{re.escape(str(path))}"):
    report.read(tmp_path)


def axes(figure):
  """The points of each line, by its label, of each set of axes."""
  return [
    {x.get_label(): x.get_xydata().tolist() for x in each.get_lines()} for each in figure.axes
  ]


def test_rows_with_places_are_drawn_over_them():
  (lines,) = axes(figures.draw(make("extractors-fig10")))
  content = make("extractors-fig10")
  for label, drawn in lines.items():
    assert drawn == [
      [row["place"], row["mean"]["median_cost"]] for row in content["rows"] if row["label"] == label
    ]
  assert len(lines) == 6 and all(len(drawn) == 4 for drawn in lines.values())


def test_bits_are_drawn_over_the_measured_factor():
  content = make("pooling-fig3")
  del content["rows"][0]["mean"][FACTOR]  # Without pooling there is none to measure.
  (lines,) = axes(figures.draw(content))
  assert [*lines] == ["vanilla", "fixed", "Unigram", "Gumbel"]
  assert lines["vanilla"] == [[1, content["rows"][0]["mean"][BITS]]]
  assert lines["fixed"] == [
    [row["mean"][FACTOR], row["mean"][BITS]] for row in content["rows"][1:4]
  ]


def test_costs_are_drawn_run_by_run():
  table = papers.TABLES["extractors-fig8"]
  she, he, attention, *_ = (row.config for row in table.rows)
  ran = [
    record(she, 0, bits=1.0, costs={"every": 3, "medians": [6.0, 4.0]}),
    record(she, 1, bits=1.0, costs={"every": 3, "medians": [5.0, 3.0]}),
    record(he, 0, "partial", costs={"every": 3, "medians": [2.0]}),
    record(attention, 0, "left_out", costs=None),
  ]
  (lines,) = axes(figures.draw(report.summarise(table, "cpu", ran)))
  assert lines == {
    "SHE (seed 0)": [[3, 6.0], [6, 4.0]],
    "SHE (seed 1)": [[3, 5.0], [6, 3.0]],
    "HE (partial)": [[3, 2.0]],
  }


def test_ours_is_drawn_beside_the_papers():
  content = make("pooling-table1", seeds=(0, 1))
  for row in content["rows"][8:16]:
    row["mean"] = {}  # A group that has not been run has no panel.
  figure = figures.draw(content)
  assert len(figure.axes) == 2 * 5
  rows = content["rows"][16:24]
  left, right = figure.axes[2:4]
  for panel, key in ((left, "paper"), (right, "mean")):
    drawn = panel.get_lines()[0].get_xydata().tolist()
    assert drawn == [[row[key][BITS], j] for j, row in enumerate(rows)]
  assert [x.get_text() for x in left.get_yticklabels()] == [x["label"] for x in rows]


def test_step_times_are_drawn():
  figure = figures.draw(make("dispatcher-fig2"))
  (lines,) = axes(figure)
  assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"
  assert lines["ours, float32"] == [[x, 0.011 * x] for x in (2, 4, 8)]
  time, memory = axes(figures.draw(make("pooling-fig5")))
  assert [*time] == [*memory] == ["ours, float32", "ours, bfloat16"]
  assert time["ours, bfloat16"] == [[x, 0.625] for x in (2, 4, 8)]
  assert memory["ours, bfloat16"] == [[x, 0.375] for x in (2, 4, 8)]


def test_the_page_has_an_overview_and_links_that_lead_somewhere():
  contents = [make(name) for name in papers.TABLES]
  contents[0]["rows"][0]["runs"][0]["status"] = "partial"
  text = pages.page(contents)
  paper = "Cetoli, CLASP 2022"
  assert f"| `dispatcher-table1` | {paper}, Table 1 | cpu | 12 of 13 | 20 " in text
  assert f"| `dispatcher-fig2` | {paper}, Fig. 2 | cpu | 12 of 14 | - " in text
  # As GitHub makes them.
  heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
  anchors = {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in heads}
  linked = re.findall(r"\(#([^)]*)\)", text)
  assert len(linked) == len(heads) == len(contents) and {*linked} == anchors
  names = [pages.file_name(x["table"], "cpu") for x in contents if x["kind"] != "counts"]
  images = re.findall(r"\]\((.*\.png)\)", text)
  assert images == [f"../results/reproduce/{name}.png" for name in names]
  assert all(pages.markdown(content) in text for content in contents)
  # Where nothing was run there is nothing to draw.
  for name in ("extractors-fig8", "pooling-table1", "pooling-fig4"):
    config = papers.TABLES[name].rows[0].config
    ran = [record(config, 0, "left_out", costs=None)]
    assert "](../" not in pages.page([report.summarise(papers.TABLES[name], "cpu", ran)])


def test_the_headline_has_what_both_have():
  table, small = papers.TABLES["dispatcher-table1"], {"model.num_layers": [6, 2]}
  ran = [record("configs/msa_ptb.py", scores={"perplexity": 101.5}, changes=small)]
  ran += [record("configs/dispatcher_ptb.py", 0, "partial")]
  ran += [record("configs/msa_lm1b.py", scores={"perplexity": 7.0})]
  cpu, tiny = (report.summarise(table, scale, ran) for scale in ("cpu", "tiny"))
  start = "| PTB, perplexity: masked self-attention / plain Dispatcher | 40.58 / 35.40 "
  line = f"{start}| 101.50 / - | reduced (cpu): 2 layers, 7 steps |"
  assert pages.headline([tiny, cpu]).splitlines()[2:] == [line]
  assert pages.headline([tiny]) == "" == pages.headline([])
  # The paper's scale comes first, and where it has no result the other stays.
  scores = [{"perplexity": 36.0}, {"perplexity": 37.0}]
  ran = [record("configs/dispatcher_ptb.py", i, scores=scores[i], changes={}) for i in (0, 1)]
  whole = report.summarise(table, "paper", ran)
  line = f"{start}| - / 36.50 | the paper's settings: 7 steps, 2 seeds |"
  assert pages.headline([cpu, whole]).splitlines()[2:] == [line]
  empty = report.summarise(table, "paper", [])
  assert pages.headline([empty, cpu]) == pages.headline([cpu])
  settings = dict(text="text8_prefix", scores={BITS: 2.25, FACTOR: 2.0}, changes=small)
  pooled = record("configs/pooling_text8.py:fixed2", **settings)
  content = report.summarise(papers.TABLES["pooling-table1"], "cpu", [pooled])
  assert pages.headline([content, make("extractors-table7")]).splitlines()[2:] == [
    "| text8, bits per character: fixed, 2 | 1.149 | 2.250 | reduced (cpu): 2 middle "
    "layers, text8_prefix, 7 steps |",
    "| operations and parameters of 6 layers, d = l = 128 | 30 numbers | 30 of them agree "
    "| counted |",
  ]


def test_ours_has_a_star_where_it_is_below_all_baselines():
  # Below "none" by the same in every seed; of "long" and of itself that holds for one each.
  table = dataclasses.replace(SMALL, baselines=("none", "long"))
  scores = {"a.py:none": (1.5, 1.75, 1.625), "a.py:long": (1.25, 1.5, 1.375)}
  runs = [record(config, i, bits=x) for config, by in scores.items() for i, x in enumerate(by)]
  for less, is_better in ((0.125, True), (-0.0625, False)):
    ours = [record("a.py:short", i, bits=x - less) for i, x in enumerate(scores["a.py:long"])]
    content = report.summarise(table, "paper", runs + ours)
    row = named(content, "x/short")
    assert (row["test"]["baseline"], row["test"]["verdict"]) == ("x/none", "lower")
    assert row["is_better"] == is_better
    (cell,) = (x for x in line(pages.markdown(content), "X | short") if "±" in x)
    assert cell.endswith("(3)*") == is_better
  # The seeds of one baseline are not there: there is no such claim.
  content = report.summarise(table, "paper", runs[:4] + ours)
  assert not named(content, "x/short")["is_better"]


def test_what_began_with_another_run_is_not_put_in_order():
  rows = [*SMALL.rows[:2], dataclasses.replace(SMALL.rows[2], after="x/none")]
  table = dataclasses.replace(SMALL, rows=tuple(rows))
  ran = [record(row.config, bits=x) for row, x in zip(rows, (3.0, 2.0, 1.0), strict=True)]
  assert report.summarise(SMALL, "paper", ran)["order"]["pairs"] == 3
  content = report.summarise(table, "paper", ran)
  assert content["order"] == {"score": BITS, "same": 1, "pairs": 1, "paper_pairs": 1}


def test_the_papers_scale_on_another_text_says_so():
  ran = [record("a.py:none", bits=1.25)]
  assert "At the paper's scale" in pages.markdown(report.summarise(SMALL, "paper", ran))
  ran.append(record("a.py:long", bits=1.5, text="text8_prefix"))
  text = pages.markdown(report.summarise(SMALL, "paper", ran))
  assert "At the paper's scale" not in text and "**but not on its texts**" in text
