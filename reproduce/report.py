"""Our numbers beside a paper's, as a table."""

import statistics
from collections.abc import Mapping
from typing import Any

from dpjax_papers import significance
from reproduce import papers


def values(report: Mapping[str, Any], row: papers.Row, score: str) -> dict[int, float]:
  """A score of a row's runs, by seed."""
  runs = report["rows"][row.name]["runs"]
  found = {int(seed): run["scores"].get(score) for seed, run in runs.items() if "scores" in run}
  return {seed: value for seed, value in found.items() if value is not None}


def markdown(table: papers.Table, report: Mapping[str, Any]) -> str:
  """The report as a table: the paper's numbers, ours, and paired t-tests over seeds."""
  heads = ["group", "row", *[table.axis] * bool(table.axis), "parameters"]
  for score in table.scores:
    name = score.replace("_", " ")
    heads += [f"{name}, the paper's", f"{name}, ours"]
  lines = [f"## {table.name}, {report['scale']}: {table.title}", "", f"{table.source}."]
  lines += ["", f"| {' | '.join([*heads, 'difference, p'])} |", "|---" * (len(heads) + 1) + "|"]
  for row in table.rows:
    runs = report["rows"][row.name]["runs"].values()
    sizes = {f"{run['parameters']:,}" for run in runs if "parameters" in run}
    cells = [row.group, row.label, *[f"{row.place or '-'}"] * bool(table.axis)]
    cells.append(", ".join(sizes) or "-")
    for score in table.scores:
      paper = row.paper.get(score)
      star = "*" * (row.is_starred and score == table.scores[0])
      cells += ["-" if paper is None else f"{paper:g}{star}", _mean(values(report, row, score))]
    lines.append(f"| {' | '.join([*cells, _test(table, report, row)])} |")
  left_out = {
    run["left_out"]
    for row in report["rows"].values()
    for run in row["runs"].values()
    if "left_out" in run
  }
  lines += ["", *(f"- The paper: {claim}" for claim in table.claims)]
  lines += [f"- Left out: {reason}" for reason in sorted(left_out)]
  return "\n".join(lines) + "\n"


def _mean(scores: Mapping[int, float]) -> str:
  if not scores:
    return "-"
  spread = f" ± {statistics.stdev(scores.values()):.3f}" if len(scores) > 1 else ""
  return f"{statistics.fmean(scores.values()):.3f}{spread}"


def _test(table: papers.Table, report: Mapping[str, Any], row: papers.Row) -> str:
  """The difference from the first baseline of the row's group, and p."""
  score = table.scores[0]
  ends = tuple(f"/{name}" for name in table.baselines)
  bases = [x for x in table.rows if ends and x.group == row.group and x.name.endswith(ends)]
  ours, theirs = values(report, row, score), values(report, bases[0], score) if bases else {}
  common = ours.keys() & theirs.keys()
  if len(common) < 2 or bases[0] is row:
    return "-"
  ours, theirs = ({seed: x[seed] for seed in common} for x in (ours, theirs))
  test = significance.compare(ours, theirs)
  return f"{test.difference:+.3f}, p = {test.p:.3f}"
