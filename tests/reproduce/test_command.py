"""Tables at the scale "tiny": every row is trained, reported, and resumes."""

import dataclasses
import json
import re
import runpy

import pytest

from dpjax.commands import command_line as _flags  # noqa: F401  (those of all commands)
from reproduce import papers, rows
from reproduce import report as report_lib
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")


def run(*words):
  """Runs `python -m reproduce WORDS` here; gives what it exits with."""
  with helpers.arguments("reproduce", *words):
    try:
      runpy.run_path(str(helpers.ROOT / "reproduce/__main__.py"), run_name="__main__")
      return None
    except SystemExit as end:
      return end.code


def start(name, folder, *flags):
  places = [f"--runs={folder / 'runs'}", f"--out={folder / 'out'}"]
  return run(name, "--scale=tiny", *places, *flags)


def test_all_rows_of_a_table_are_trained_and_resume(tmp_path, monkeypatch, capsys):
  name = "dispatcher-table1"
  table = papers.TABLES[name]
  finetuned = next(row for row in table.rows if row.after)
  before = next(row for row in table.rows if row.name == finetuned.after)
  table = dataclasses.replace(table, rows=(finetuned, before))
  monkeypatch.setitem(papers.TABLES, name, table)
  assert start(name, tmp_path) is None
  file = tmp_path / f"out/{name}_tiny.json"
  report, text = json.loads(file.read_text()), file.with_suffix(".md").read_text(encoding="utf-8")
  assert text in capsys.readouterr().out and all(claim in text for claim in table.claims)
  for row in table.rows:
    found = report["rows"][row.name]
    run, scores = found["runs"]["0"], found["runs"]["0"]["scores"]
    assert run["step"] == len(run["curve"]["loss"]) == 4
    assert found["changes"]["train.num_steps"][1] == 4
    # All tokens but the first of each row, and what fills no row.
    perplexity, authors = (scores[name] for name in table.scores[:2])
    assert perplexity != authors and authors == pytest.approx(perplexity, rel=0.1)
    numbers = [f"{number:g}" for number in row.paper.values()]
    assert all(number in text for number in [row.label, *numbers])
  assert start(name, tmp_path) is None
  assert "Resuming from the checkpoint of step 4" in capsys.readouterr().out
  resumed = json.loads(file.read_text())["rows"]
  for row in report["rows"].values():
    assert row["runs"]["0"].pop("seconds") > 0  # not of a resumed run
  assert resumed == report["rows"]


def test_a_time_ends_what_does_not_fit_and_keeps_what_is_done(tmp_path, monkeypatch, capsys):
  tokens = tmp_path / "tokens"
  wanted = "--rows=he_2,ptb/msa"
  tables = "dispatcher-table1,extractors-fig11"
  assert start(tables, tmp_path, wanted, f"--tokenize={tokens}") is None
  assert {path.name for path in (tokens / "python_manual").iterdir()} == {"bpe", "wordpiece"}
  monkeypatch.setattr(rows, "LAST_SECONDS", 1e6)
  end = start("dispatcher-table1", tmp_path, "--rows=ptb/msa", "--minutes=9")
  assert end == "1 runs have no result: ptb/msa, seed 0"
  assert "needs about 1000000 seconds; 5" in capsys.readouterr().err
  monkeypatch.undo()
  (tmp_path / "runs").rename(tmp_path / "elsewhere")
  assert start(tables, tmp_path, wanted, "--minutes=9", f"--data={tokens}") is None
  shown = capsys.readouterr().out
  assert shown.index("\nhe_2, seed 0") < shown.index("\nptb/msa, seed 0")
  assert list((tmp_path / "runs/tiny").iterdir()) == [tmp_path / "runs/tiny/python_manual"]
  more = ["--rows=he_2", "--minutes=9", "--seeds=0,1", f"--data={tokens}"]
  assert start("extractors-fig11", tmp_path, *more) is None
  shown = capsys.readouterr().out
  assert shown.count("seed 0\nThe report has it.") == 1 and "he_2, seed 1\n" in shown
  report = json.loads((tmp_path / "out/extractors-fig11_tiny.json").read_text())
  assert [*report["rows"]["he_2"]["runs"]] == ["0", "1"]


def test_a_row_without_its_text_is_left_out(tmp_path):
  (tmp_path / "texts").mkdir()
  done = start("pooling-table2", tmp_path, f"--data={tmp_path / 'texts'}", "--scale=cpu")
  assert done.startswith("6 runs have no result: ")
  text = (tmp_path / "out/pooling-table2_cpu.md").read_text(encoding="utf-8")
  assert text.count("- Left out: data: expected a folder text8 or text8.txt in") == 1


@pytest.mark.parametrize(
  ("words", "message"),
  [
    ("", "TABLE: expected a name"),
    ("pooling-tabel1", "did you mean pooling-table1"),
    ("all --scale=large", "--scale: invalid choice: .large"),
    ("all --seeds=-1", "seeds: expected"),
    ("all --minutes=-1", "--minutes: invalid minutes value: .-1"),
    ("dispatcher-table1 --rows=ptb/dispacher", "rows: .* did you mean ptb/dispatcher"),
    ("extractors-fig10,extractors-fig11 --rows=she_8", "rows: expected a row of one table"),
    ("all --data=no_such", "data: expected a fold"),
  ],
)
def test_wrong_words_are_named(words, message, capsys):
  code = run(*words.split())
  assert code not in (None, 0)
  assert re.search(message, f"{code} {capsys.readouterr().err}")


def test_the_table_has_means_and_paired_tests_over_seeds():
  table = papers.TABLES["pooling-table1"]
  table = dataclasses.replace(table, rows=table.rows[:2])
  runs = [{"0": 1.25, "1": 1.5, "2": 1.0}, {"0": 1.0, "1": 1.0, "2": 0.75}]
  found = {}
  for row, by_seed in zip(table.rows, runs, strict=True):
    scores = {seed: {papers.BITS: bits} for seed, bits in by_seed.items()}
    found[row.name] = {
      "runs": {seed: {"scores": x, "parameters": 7_000} for seed, x in scores.items()}
    }
  text = report_lib.markdown(table, {"scale": "cpu", "rows": found})
  assert "| vanilla | 7,000 | 1.143 | 1.250 ± 0.250 |" in text
  assert "| fixed, 2 | 7,000 | 1.149 | 0.917 ± 0.144 |" in text
  assert "| -0.333, p = 0.057 |" in text
