"""Reports for people, in Markdown, of what `reproduce.report` keeps of tables."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reproduce import figures, papers, scales

Content = Mapping[str, Any]
# The rows of `headline`: table, group, ends of the rows' names, score.
_MODELS = ("msa", "dispatcher")
_HEADLINES = [
  *(("dispatcher-table1", x, _MODELS, papers.PERPLEXITY) for x in ("PTB", "WikiText2")),
  *(("pooling-table1", "text8", (end,), papers.BITS) for end in papers.POOLING),
]
_MACHINE = {"device": "{}", "devices": "devices {}", "processor": "{}", "cores": "{} cores"}
_SPLITS = ("train", "valid", "test")
_PAGE = """\
# The papers' tables and figures, run again

Made from `results/reproduce` by `python -m reproduce report`; not edited by hand. A table is \
run by its name, or all of them:

```
python -m reproduce all --scale=tiny
python -m reproduce pooling-table1 --scale=cpu --seeds=3 --data=FOLDER --minutes=25 \
--minutes_each=6
python -m reproduce pooling-table1 --scale=paper --seeds=3 --data=FOLDER
```

`tiny` takes seconds, on Python's manual; `cpu` takes minutes, with small models on the real \
texts; `paper` is as the paper has it. Runs of the first two are reduced: not to be compared \
with the paper's numbers.

| table | source | scale | runs done | minutes | |
|---|---|---|---|---|---|
"""


def file_name(table: str, scale: str) -> str:
  """Of a table's files, without their endings: a reduced scale says so."""
  return table if scale == "paper" else f"{table}_reduced_{scale}"


def markdown(content: Content) -> str:
  """A section of Markdown: what scale it is, the table, and where its numbers are from."""
  kind, scale = content["kind"], content["scale"]
  said = "At the paper's scale, but for what is said below."
  if kind == "counts":
    said = "Counted, so that it is the same at every scale."
  elif scale != "paper":
    what = "sizes" if kind == "step_times" else "models and fewer steps"
    said = f"**Reduced ({scale}): smaller {what}, not to be compared with the paper's numbers.**"
  elif any(map(_is_stand_in, _runs(content))):
    said = "With the paper's settings, **but not on its texts** (see below)."
  parts = [
    f"## {_heading(content)}",
    f"{content['source']}. {said}",
    *{"runs": _trained, "step_times": _timed, "counts": _counted}[kind](content),
    "\n".join(f"- The paper: {claim}" for claim in content["claims"]),
    _origin(_runs(content) + content.get("points", [])),
  ]
  return "\n\n".join(part for part in parts if part) + "\n"


def page(contents: Sequence[Content]) -> str:
  """docs/reproduce.md: how to run, what there is, and a section for each table."""
  overview, sections = _PAGE, ""
  for x in contents:
    rows, runs, points = x.get("rows", ()), _runs(x), x.get("points", ())
    done = [run.get("status") == "done" for run in runs] + [not y["left_out"] for y in points]
    done += [row.get("agrees", False) for row in rows]
    of_all = x.get("planned") or len(rows) * max(x.get("seeds", 1), 1)
    minutes = math.fsum(run["minutes"] for run in runs)
    anchor = re.sub(r"[^\w -]", "", _heading(x).lower()).replace(" ", "-")
    overview += (
      f"| `{x['table']}` | {x['source']} | {x['scale']} | {sum(done)} of {of_all} "
      f"| {f'{minutes:.0f}' if minutes else '-'} | [section](#{anchor}) |\n"
    )
    sections += f"\n{markdown(x)}"
    if figures.draw(x) is not None:
      name = file_name(x["table"], x["scale"])
      sections += f"\n![{name}](../results/reproduce/{name}.png)\n"
  return overview + sections


def headline(contents: Sequence[Content]) -> str:
  """The first table of docs/results.md: the papers' numbers beside ours; "" without any.

  Runs at the paper's scale come before those of "cpu"; those of "tiny" are left out.
  """
  by_name = {(x["table"], x["scale"]): x for x in contents}
  lines = []
  for name, group, ends, score in _HEADLINES:
    for scale in ("paper", "cpu"):
      content = by_name.get((name, scale), {})
      of_group = [row for row in content.get("rows", ()) if row["group"] == group]
      rows = [row for end in ends for row in of_group if row["name"].endswith(f"/{end}")]
      if done := [row for row in rows if score in row["mean"]]:
        what = f"{group}, {_spaced(score)}: {' / '.join(row['label'] for row in rows)}"
        cells = [
          " / ".join(_number(score, row[key].get(score)) for row in rows)
          for key in ("paper", "mean")
        ]
        lines.append(f"| {what} | {' | '.join(cells)} | {_made(scale, done)} |")
        break
  for content in (x for x in contents if x["kind"] == "counts"):
    rows = content["rows"]
    agreed = [row["ours"][key] == x for row in rows for key, x in row["paper"].items()]
    lines.append(
      f"| operations and parameters of {len(rows)} layers, d = l = 128 | "
      f"{len(agreed)} numbers | {sum(agreed)} of them agree | counted |"
    )
  head = ["| what | the paper's | ours | how ours was made |", "|---|---|---|---|"]
  return "\n".join([*head, *lines]) + "\n" if lines else ""


def _trained(content: Content) -> list[str]:
  """The table of a content of runs, and what is below it."""
  rows, first = content["rows"], content["scores"][0]
  columns = [("row", [row["label"] for row in rows])]
  if len({row["group"] for row in rows}) > 1:
    columns.insert(0, ("group", [row["group"] for row in rows]))
  places = ["-" if row["place"] is None else f"{row['place']:g}" for row in rows]
  sizes = [[f"{x['parameters']:,}" for x in row["runs"] if "parameters" in x] for row in rows]
  columns += [(content["axis"], places), ("parameters", [(x or ["-"])[0] for x in sizes])]
  columns.append(("steps", ["; ".join(dict.fromkeys(map(_steps, x["runs"]))) for x in rows]))
  for score in content["scores"]:
    name, is_first = _spaced(score), score == first
    paper = [
      _number(score, row["paper"].get(score)) + "*" * (row["is_starred"] and is_first)
      for row in rows
    ]
    ours = [_ours(row, score) + "*" * (row["is_better"] and is_first) for row in rows]
    is_printed = any(score in row["paper"] for row in rows)
    columns.append((f"{name}, the paper's", paper))
    columns.append((f"{name}, ours" if is_printed else name, ours))
  tests = [row["test"] for row in rows if row["test"]]
  cells = [
    x and (f"{_number(first, x['difference'], '+')}", f"{x['p_value']:.3f}", x["verdict"])
    for x in (row["test"] for row in rows)
  ]
  columns.append(("difference, p", [_joined(x or ["-"]) for x in cells]))
  columns.append(("note", [_note(row, first) for row in rows]))
  below = _missing(rows)
  if order := content["order"]:
    below.append(
      f"- Of the {order['pairs']} pairs that have a result here (of the paper's "
      f"{order['paper_pairs']}), {order['same']} are in its order, by "
      f"{_spaced(order['score'])}; most differences of single short runs are chance."
    )
  if any(row["seeds"] > 1 for row in rows):
    below.append("- ±: the sample's deviation over seeds, their number in brackets.")
  if tests:
    seeds = " or ".join(str(x) for x in sorted({test["seeds"] for test in tests}))
    bases = _joined(f"`{name}`" for name in dict.fromkeys(x["baseline"] for x in tests))
    below.append(
      f"- Difference of {_spaced(first)} to {bases}, of its group, and p of a paired t-test "
      f"over {seeds} seeds. Ours has a * where it is lower than all rows that the paper tests "
      "against, p < 0.05."
    )
  return [_grid(columns), "\n".join(below), _changes(rows), _texts(rows)]


def _timed(content: Content) -> list[str]:
  points = content["points"]
  places = sorted({x["place"] for x in points})
  columns = {key: ["-"] * len(places) for key in [(x["model"], x["dtype"]) for x in points]}
  for x in (x for x in points if not x["left_out"]):
    cell = f"{x['seconds']:.3g} s, {x['temporary_mib']:,.4g} MiB"
    if x["ratio"] is not None:
      cell += f" (time {x['ratio']:.2f}, memory {x['memory_ratio']:.2f})"
    columns[x["model"], x["dtype"]][places.index(x["place"])] = cell
  who = [(x["left_out"], f"{x['model']}, {x['dtype']} at {x['place']:,}") for x in points]
  missing = figures.grouped(pair for pair in who if pair[0])
  bases = _joined(sorted({x["baseline"] for x in points if x["baseline"]}))
  settings = [_joined(f"{k} {_value(x)}" for k, x in point["settings"].items()) for point in points]
  below = [
    *(f"- Left out: {reason}: {'; '.join(names)}." for reason, names in missing.items()),
    f"- In brackets: over {bases}, measured by turns, medians of paired ratios. "
    "Memory is what the compiler plans beside parameters, Adam's moments and the batch. On "
    "a GPU float32 may have the factors of its products rounded to TF32.",
    *(f"- Settings: {line}." for line in dict.fromkeys(settings)),
  ]
  grid = [(content["axis"], [f"{x:,}" for x in places])]
  return [_grid(grid + [(_joined(key), x) for key, x in columns.items()]), "\n".join(below)]


def _counted(content: Content) -> list[str]:
  lines = []
  for row in content["rows"]:
    paper, ours = ([f"{row[key][x]:,}" for x in papers.COUNTS] for key in ("paper", "ours"))
    end = "agrees" if row["agrees"] else "differs"
    lines += [[row["label"], "the paper's", *paper, ""], ["", "ours", *ours, end]]
  heads = ["layer", "whose", *papers.COUNTS, ""]
  return [_grid([*zip(heads, zip(*lines, strict=True), strict=True)])]


def _grid(columns: Sequence[tuple[str, Sequence[str]]]) -> str:
  """A table of the columns that have any cell other than "-"."""
  kept = [(head, "---", *cells) for head, cells in columns if {*cells} - {"-"}]
  lines = zip(*kept, strict=True)
  return "\n".join(f"| {' | '.join(x.replace('|', '/') for x in line)} |" for line in lines)


def _number(score: str, value: float | None, sign: str = "") -> str:
  """With the digits of its score; "-" for none."""
  digits = 3 if score in (papers.BITS, "median_cost", "nats_per_token") else 2
  return "-" if value is None else f"{value:{sign}.{digits}f}"


def _ours(row: Content, score: str) -> str:
  cell, deviation = _number(score, row["mean"].get(score)), row["deviation"].get(score)
  return cell if deviation is None else f"{cell} ± {_number(score, deviation)} ({row['seeds']})"


def _steps(run: Content) -> str:
  steps = f"{run['step']:,} of {run.get('num_steps', 0):,}" if run["step"] else ""
  return _joined([steps, "" if run["status"] == "done" else _spaced(run["status"])])


def _note(row: Content, score: str) -> str:
  """The last validation of runs that are not done."""
  ended = [run.get("validation") for run in row["runs"] if run["status"] != "done"]
  notes = []
  for last in (points[-1] for points in ended if points):
    name = score if score in last else "nats_per_token"
    value = f"{_number(name, last[name])} {_spaced(name)}"
    notes.append(f"step {last['step']:,}; validation {value}")
  return "; ".join(dict.fromkeys(notes)) or "-"


def _missing(rows: Sequence[Content]) -> list[str]:
  """A line a reason: the rows without any result, and single seeds of the others."""
  not_run = [{"status": "not run", "reason": "", "seed": 0}]
  found = figures.grouped(
    (_joined([_spaced(run["status"]), run["reason"]]).rstrip("."), (row, run["seed"]))
    for row in rows
    for run in row["runs"] or not_run
    if run["status"] != "done"
  )
  lines = []
  for why, pairs in found.items():
    whole = {row["name"]: row for row, _ in pairs if not row["seeds"]}
    names = [_who([*whole.values()], rows)] * bool(whole)
    names += [f"`{row['name']}`, seed {seed}" for row, seed in pairs if row["seeds"]]
    lines.append(f"- Without a result: {'; '.join(names)}: {why}.")
  return lines


def _who(some: Sequence[Content], rows: Sequence[Content]) -> str:
  """Names rows, or those that are not meant where that is shorter."""
  rest = [row for row in rows if row not in some]
  if not rest:
    return "all rows"
  return min(_named(some, rows), f"all but {_named(rest, rows)}", key=len)


def _named(some: Sequence[Content], rows: Sequence[Content]) -> str:
  """Names rows by their groups or labels, where all of one are meant, else one by one."""
  left, names = [row["name"] for row in some], []
  for key, form in (("group", "{}"), ("label", "{}"), ("place", "all at {}")):
    for value in dict.fromkeys(row[key] for row in some):
      whole = [row["name"] for row in rows if row[key] == value]
      if len(whole) > 1 and value is not None and {*whole} <= {*left}:
        names.append(form.format(value))
        left = [name for name in left if name not in whole]
  return "; ".join([*names, *(f"`{name}`" for name in left)])


def _changes(rows: Sequence[Content]) -> str:
  """What differs from the papers' settings, that of all rows once."""
  rows = [row for row in rows if any(run["status"] != "left_out" for run in row["runs"])]
  found = figures.grouped(
    (key, (f"{_value(before)} -> {_value(now)}", row))
    for row in rows
    for key, (before, now) in row["runs"][-1]["changes"].items()
  )
  lines = []
  for key, pairs in sorted(found.items()):
    whose = figures.grouped(pairs)
    cells = [f"{x} ({_who(y, rows)})" if len(y) < len(rows) else x for x, y in whose.items()]
    lines.append(f"- `{key}` {'; '.join(cells)}")
  return "\n".join(["The paper's settings -> these:", "", *lines]) if lines else ""


def _texts(rows: Sequence[Content]) -> str:
  pairs = []
  for row, run in [(x, run) for x in rows for run in x["runs"] if run.get("text")]:
    sizes = [f"{run.get('tokens', {}).get(split, 0):,}" for split in _SPLITS]
    kinds = f" of {run['vocab_size']:,} kinds" if "vocab_size" in run else ""
    line = f"- Text: `{run['text']}`: {' / '.join(sizes)} tokens{kinds} ({' / '.join(_SPLITS)})"
    pairs.append((line, row["group"] if _is_stand_in(run) else ""))
  lines = {line: _joined(dict.fromkeys(x)) for line, x in figures.grouped(pairs).items()}
  return "\n".join(f"{line}{', in the place of ' * bool(x)}{x}." for line, x in lines.items())


def _origin(records: Sequence[Content]) -> str:
  """Where and when the numbers were made, and by which commands."""
  lines = []
  for x in records:
    machine = [form.format(x["machine"][key]) for key, form in _MACHINE.items()]
    lines.append(f"- Machine: {_joined(machine)}.")
  lines += [f"- Versions: {_joined(map(' '.join, x['versions'].items()))}." for x in records]
  dates = sorted({x["date"] for x in records})
  lines += [f"- Date: {' to '.join(dict.fromkeys(dates[:1] + dates[-1:]))}."] * bool(dates)
  lines += [f"- Command: `{x['command']}`" for x in records]
  minutes = math.fsum(x.get("minutes", 0) for x in records)
  return "\n".join(dict.fromkeys(lines + [f"- {minutes:.1f} minutes in all."] * bool(minutes)))


def _is_stand_in(run: Content) -> bool:
  """Whether the text is another than the paper's, or a part that has a name."""
  is_other = run.get("text") not in scales.TEXTS or "data.name" in run["changes"]
  return bool(run.get("text")) and is_other


def _made(scale: str, rows: Sequence[Content]) -> str:
  """How the runs of some rows were made: "reduced (cpu): 2 layers of width 64, ..."."""
  runs = [run for row in rows for run in row["runs"] if run["status"] == "done"]
  now = {key: x for key, (_, x) in runs[0]["changes"].items()}
  middle = "middle " * (papers.FACTOR in runs[0]["scores"])
  layers, width = now.get("model.num_layers"), now.get("model.width")
  sizes = [f"{layers} {middle}layers" * bool(layers), f"width {width}" * bool(width)]
  steps = " or ".join(f"{x:,}" for x in sorted({run["num_steps"] for run in runs}))
  seeds = max(row["seeds"] for row in rows)
  text = runs[0]["text"] if _is_stand_in(runs[0]) else ""
  words = [" of ".join(filter(None, sizes)), text, f"{steps} steps", f"{seeds} seeds" * (seeds > 1)]
  how = "the paper's settings" if scale == "paper" else "reduced (cpu)"
  return f"{how}: {_joined(words)}"


def _runs(content: Content) -> list[Content]:
  return [run for row in content.get("rows", ()) for run in row.get("runs", ())]


def _heading(content: Content) -> str:
  return f"{content['table']}, {content['scale']}: {content['title']}"


def _value(x: Any) -> str:
  if isinstance(x, int) and not isinstance(x, bool):
    return f"{x:,}"
  return json.dumps(x) if x in ("", None) or isinstance(x, (bool, list)) else f"{x}"


def _spaced(name: str) -> str:
  return name.replace("_", " ")


def _joined(words: Iterable[str]) -> str:
  return ", ".join(word for word in words if word)
