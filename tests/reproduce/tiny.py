"""Tables run at the scale "tiny": what the tests of each paper share."""

import math

from dpjax.reproduce import papers, work

# By hand from the papers: a row that gets lost there is missed here.
NUM_ROWS = {
  "dispatcher-table1": 13, "dispatcher-fig2": 8, "extractors-table7": 6,
  "extractors-fig7": 8, "extractors-fig8": 6, "extractors-fig10": 24,
  "extractors-fig11": 24, "pooling-table1": 48, "pooling-table2": 6, "pooling-fig3": 15,
  "pooling-fig4": 35, "pooling-fig5": 3,
}


def check_table(name, folder):
  """Runs a table; all of its rows must have a result, and the paper's numbers be there."""
  table = papers.TABLES[name]
  settings = work.Settings("tiny", runs=str(folder / "runs"), out=str(folder / "out"))
  job = work.Work([table], settings)
  job.run()
  (content,) = job.write()
  assert job.without_result() == []
  rows = content["points" if table.kind == "step_times" else "rows"]
  assert len(rows) == NUM_ROWS[name]
  file = folder / f"out/{name}_reduced_tiny.md"
  text = file.read_text(encoding="utf-8")
  assert file.with_suffix(".png").exists() == (table.kind != "counts")
  for row in rows:
    if table.kind == "counts":
      assert row["agrees"] and f"{row['paper']['additions']:,}" in text
    elif table.kind == "step_times":
      assert row["seconds"] > 0 and f"{row['seconds']:.3g}" in text
    else:
      (run,) = row["runs"]
      assert run["status"] == "done" and run["step"] == run["num_steps"] == 4
      assert row["label"] in text
      for score in table.scores[:1]:
        assert math.isfinite(row["mean"][score])
      for score, number in row["paper"].items():
        assert f"{number:.{3 if score == papers.BITS else 2}f}" in text
  # All is there: the second time nothing is left to do.
  before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/config.json")}
  again = work.Work([table], settings)
  if table.kind == "runs":
    again.run()
    again_content = again.write()[0]
    assert again_content == content
  assert before == {
    path: path.stat().st_mtime_ns for path in folder.glob("runs/**/config.json")
  }
