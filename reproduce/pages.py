"""Reports for people, in Markdown, of what `reproduce.report` keeps of tables."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpjax.data import catalog
from reproduce import papers
from reproduce.figures import draw

# The comparisons of `headline`: table, group, rows, score.
_HEADLINES = [
  *(
    ("dispatcher-table1", text, ("msa", "dispatcher"), papers.PERPLEXITY)
    for text in ("PTB", "WikiText2")
  ),
  *(
    ("pooling-table1", "text8", (row,), papers.BITS)
    for row in ("none", "fixed2", "fixed3", "fixed4", "gumbel", "entropy", "unigram", "whitespace")
  ),
]
_PREFERRED = ("paper", "cpu")
_PAPERS = "the paper's settings"
_SPLITS = ("train", "valid", "test")


def file_name(table: str, scale: str) -> str:
  """Of a table's files, without their endings: a reduced scale says so.

  >>> file_name("pooling-fig3", "cpu"), file_name("pooling-fig3", "paper")
  ('pooling-fig3_reduced_cpu', 'pooling-fig3')
  """
  return table if scale == "paper" else f"{table}_reduced_{scale}"


def markdown(content: Mapping[str, Any]) -> str:
  """A section of Markdown: what scale it is, the table, and where its numbers are from."""
  kind = content.get("kind", "runs")
  if kind == "counts":
    scale, body = "Counted, so that it is the same at every scale.", _counted(content)
  else:
    scale = "At the paper's scale, but for what is said below."
    if any(_is_stand_in(run) for run in _runs(content) if run.get("text")):
      scale = "With the paper's settings, **but not on its texts** (see below)."
    if content.get("scale") != "paper":
      what = "sizes" if kind == "step_times" else "models and fewer steps"
      scale = (
        f"**Reduced ({content.get('scale')}): smaller {what}, not to be compared "
        "with the paper's numbers.**"
      )
    body = _timed(content) if kind == "step_times" else _trained(content)
  claims = [f"- The paper: {claim}" for claim in _said(content, "claims", ())]
  parts = [
    f"## {_heading(content)}",
    f"{_said(content, 'source')}. {scale}",
    *body,
    "\n".join(claims),
    "\n".join(_origin(_records(content))),
  ]
  return "\n\n".join(part for part in parts if part) + "\n"


def page(contents: Sequence[Mapping[str, Any]]) -> str:
  """docs/reproduce.md: how to run, what there is, and a section for each table."""
  lines = [
    "# The papers' tables and figures, run again",
    "",
    "Made from `results/reproduce` by `python -m reproduce report`; not edited by "
    "hand. A table is run by its name, or all of them:",
    "",
    "```",
    *(
      f"python -m reproduce {name} --scale={scale}{rest}"
      for name, scale, rest in (
        ("all", "tiny", ""),
        ("pooling-table1", "cpu", " --seeds=3 --data=FOLDER --minutes=25 --minutes_each=6"),
        ("pooling-table1", "paper", " --seeds=3 --data=FOLDER"),
      )
    ),
    "```",
    "",
    "`tiny` takes seconds, on Python's manual; `cpu` takes minutes, with small models on "
    "the real texts; `paper` is as the paper has it. Runs of the first two are reduced: "
    "not to be compared with the paper's numbers.",
    "",
    "| table | source | scale | runs done | minutes | |",
    "|---|---|---|---|---|---|",
  ]
  for x in contents:
    done, of_all = _progress_of(x)
    minutes = sum(run.get("minutes") or 0 for run in _runs(x))
    lines.append(
      f"| `{x['table']}` | {_said(x, 'source')} | {x['scale']} | {done} of {of_all} "
      f"| {f'{minutes:.0f}' if minutes else '-'} | [section](#{_anchor(_heading(x))}) |"
    )
  for x in contents:
    lines += ["", markdown(x).rstrip("\n")]
    if draw(x) is not None:
      name = file_name(x["table"], x["scale"])
      lines += ["", f"![{name}](../results/reproduce/{name}.png)"]
  return "\n".join(lines) + "\n"


def headline(contents: Sequence[Mapping[str, Any]]) -> str:
  """The README's table: the paper's numbers and ours where there are both; "" without.

  Runs at the paper's scale come before those of "cpu"; those of "tiny" are left out.
  """
  lines = []
  for name, group, ends, score in _HEADLINES:
    for content in _preferred(contents, name):
      rows = [
        row
        for end in ends
        for row in content.get("rows", ())
        if row.get("group") == group and row.get("name", "").endswith(f"/{end}")
      ]
      done = [row for row in rows if score in (row.get("mean") or {})]
      if done:
        what = f"{group}, {_spaced(score)}: {_slashed(r['label'] for r in rows)}"
        numbers = [
          _slashed(_number(score, row.get(key, {}).get(score)) for row in rows)
          for key in ("paper", "mean")
        ]
        lines.append(f"| {what} | {' | '.join(numbers)} | {_made(content, done)} |")
        break
  for content in _preferred(contents, "extractors-table7"):
    rows = content.get("rows", ())
    agreed = [
      row.get("ours", {}).get(key) == x for row in rows for key, x in row.get("paper", {}).items()
    ]
    lines.append(
      f"| operations and parameters of {len(rows)} layers, d = l = 128 | "
      f"{len(agreed)} numbers | {sum(agreed)} of them agree | counted |"
    )
    break
  head = ["| what | the paper's | ours | how ours was made |", "|---|---|---|---|"]
  return "\n".join([*head, *lines]) + "\n" if lines else ""


def _runs(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
  for row in content.get("rows", ()):
    yield from row.get("runs", ())


def _progress_of(content: Mapping[str, Any]) -> tuple[int, int]:
  """How many runs, or points, or rows that agree, there are of how many."""
  rows, kind = content.get("rows", ()), content.get("kind", "runs")
  if kind == "step_times":
    points = content.get("points", ())
    done = sum(not point.get("left_out") for point in points)
    return done, content.get("planned") or len(points)
  if kind == "counts":
    return sum(bool(row.get("agrees")) for row in rows), len(rows)
  done = sum(run.get("status") == "done" for run in _runs(content))
  return done, len(rows) * max(content.get("seeds") or 0, 1)


def _trained(content: Mapping[str, Any]) -> list[str]:
  """The table of a content of runs, and what is below it."""
  rows = content.get("rows", ())
  axis = _said(content, "axis", "") if any(_has(x, "place") for x in rows) else ""
  has_groups = len({row.get("group") for row in rows}) > 1
  tests = [row["test"] for row in rows if row.get("test")]
  heads = ["group"] * has_groups + ["row"] + [axis] * bool(axis) + ["parameters", "steps"]
  scores = [
    score
    for score in _said(content, "scores", ())
    if any(_has(row, key, score) for row in rows for key in ("paper", "mean"))
  ]
  printed = [score for score in scores if any(_has(row, "paper", score) for row in rows)]
  for score in scores:
    name = _spaced(score)
    heads += [f"{name}, the paper's", f"{name}, ours"] if score in printed else [name]
  heads += ["difference, p"] * bool(tests)
  notes = [_note(row, content) for row in rows]
  heads += ["note"] * any(notes)
  lines = []
  for row, note in zip(rows, notes, strict=True):
    cells = [row.get("group", "")] * has_groups + [row.get("label", "-")]
    cells += [f"{row['place']:g}" if _has(row, "place") else "-"] * bool(axis)
    sizes = [run["parameters"] for run in row.get("runs", ()) if _has(run, "parameters")]
    cells += [f"{sizes[0]:,}" if sizes else "-", _steps(row)]
    for score in scores:
      paper = _number(score, row.get("paper", {}).get(score))
      star = "*" * bool(row.get("is_starred") and score == scores[0])
      own = "*" * bool(row.get("is_better") and score == scores[0])
      cells += [paper + star] * (score in printed) + [_ours(row, score) + own]
    test = row.get("test") or {}
    cell = "-"
    if test:
      cell = f"{_number(test['score'], test['difference'], '+')}, {test['p_value']:.3f}"
      cell = _joined([cell, test.get("verdict")])
    cells += [cell] * bool(tests)
    lines.append(cells + [note or "-"] * any(notes))
  below = _missing(rows) + _order_line(content)
  if any((row.get("seeds") or 0) > 1 for row in rows):
    below.append("- ±: the sample's deviation over seeds, their number in brackets.")
  if tests:
    seeds = " or ".join(str(x) for x in sorted({test["seeds"] for test in tests}))
    first = _joined(f"`{name}`" for name in dict.fromkeys(x["baseline"] for x in tests))
    below.append(
      f"- Difference of {_spaced(tests[0]['score'])} to {first}, of its group, "
      f"and p of a paired t-test over {seeds} seeds. Ours has a * where it is "
      "lower than all rows that the paper tests against, p < 0.05."
    )
  return [_grid(heads, lines), "\n".join(below), _changes(content), _texts(rows)]


def _timed(content: Mapping[str, Any]) -> list[str]:
  points = content.get("points", ())
  columns = list(dict.fromkeys((x.get("model"), x.get("dtype")) for x in points))
  cells, missing = {}, {}
  for point in points:
    key = point.get("model"), point.get("dtype")
    ratios = [
      f"{name} {point[x]:.2f}"
      for name, x in (("time", "ratio"), ("memory", "memory_ratio"))
      if _has(point, x)
    ]
    memory = f", {point['temporary_mib']:,.4g} MiB" if _has(point, "temporary_mib") else ""
    cell = f"{point['seconds']:.3g} s{memory}" if _has(point, "seconds") else "-"
    cells[point.get("place"), key] = cell + f" ({', '.join(ratios)})" * bool(ratios)
    if point.get("left_out"):
      who = f"{_joined(key)} at {point.get('place'):,g}"
      missing.setdefault(point["left_out"], []).append(who)
  places = sorted({place for place, _ in cells})
  lines = [[f"{x:,g}", *(cells.get((x, y), "-") for y in columns)] for x in places]
  grid = _grid([_said(content, "axis", "place"), *map(_joined, columns)], lines)
  below = [f"- Left out: {reason}: {'; '.join(who)}." for reason, who in missing.items()]
  bases = sorted({x["baseline"] for x in points if x.get("baseline")})
  below.append(
    f"- In brackets: over {_joined(bases)}, measured by turns, medians of paired ratios. "
    "Memory is what the compiler plans beside parameters, Adam's moments and the batch. On "
    "a GPU float32 may have the factors of its products rounded to TF32."
  )
  settings = dict.fromkeys(
    _joined(f"{key} {_value(x)}" for key, x in (point.get("settings") or {}).items())
    for point in points
  )
  below += [f"- Settings: {line}." for line in settings if line]
  return [grid, "\n".join(below)]


def _counted(content: Mapping[str, Any]) -> list[str]:
  lines, rows = [], content.get("rows", ())
  for row in rows:
    paper, ours = (
      [f"{row.get(key, {}).get(name, math.nan):,}" for name in papers.COUNTS]
      for key in ("paper", "ours")
    )
    end = "agrees" if row.get("agrees") else "differs"
    lines += [[row.get("label", "-"), "the paper's", *paper, ""], ["", "ours", *ours, end]]
  return [_grid(["layer", "whose", *papers.COUNTS, ""], lines)]


def _grid(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
  lines = [heads, ["---"] * len(heads), *lines]
  return "\n".join(f"| {' | '.join(x.replace('|', '/') for x in line)} |" for line in lines)


def _number(score: str, value: float | None, sign: str = "") -> str:
  """With the digits of its score; "-" for none."""
  if value is None or not math.isfinite(value):
    return "-"
  digits = 3 if score in (papers.BITS, "median_cost", "nats_per_token") else 2
  return f"{value:{sign}.{digits}f}"


def _ours(row: Mapping[str, Any], score: str) -> str:
  cell = _number(score, row.get("mean", {}).get(score))
  if cell != "-" and _has(row, "deviation", score):
    count = sum(_has(run, "scores", score) for run in row.get("runs", ()))
    cell += f" ± {_number(score, row['deviation'][score])} ({count})"
  return cell


def _steps(row: Mapping[str, Any]) -> str:
  cells = []
  for run in row.get("runs", ()):
    status = _spaced(run.get("status", "-"))
    steps = f"{run['step']:,} of {run.get('num_steps') or 0:,}" if run.get("step") else ""
    cells.append(_joined([steps, "" if status == "done" and steps else status]))
  return "; ".join(dict.fromkeys(cells)) or "-"


def _note(row: Mapping[str, Any], content: Mapping[str, Any]) -> str:
  """How far runs came that are not done, and their last validation."""
  notes = []
  for run in row.get("runs", ()):
    if run.get("status") in ("partial", "diverged") and run.get("validation"):
      last = run["validation"][-1]
      first = (*_said(content, "scores", ()), "nats_per_token")
      score = next((x for x in first if _has(last, x)), "")
      of_all = f" of {run['num_steps']:,}" if _has(run, "num_steps") else ""
      notes.append(
        f"step {last.get('step') or 0:,}{of_all}; validation "
        f"{_number(score, last.get(score))} {_spaced(score)}"
      )
  return "; ".join(dict.fromkeys(notes))


def _missing(rows: Sequence[Mapping[str, Any]]) -> list[str]:
  """A line a reason: the rows without any result, and single seeds of the others."""
  found: dict[str, tuple[list[Mapping[str, Any]], list[str]]] = {}
  for row in rows:
    for run in row.get("runs") or [{"status": "not run"}]:
      if run.get("status") != "done":
        reason = _joined([_spaced(run.get("status") or ""), run.get("reason")])
        whole, single = found.setdefault(reason, ([], []))
        if row.get("seeds"):
          single.append(f"`{row.get('name')}`, seed {run.get('seed')}")
        elif row not in whole:
          whole.append(row)
  return [
    f"- Without a result: {'; '.join([_who(whole, rows)] * bool(whole) + single)}: "
    f"{why.rstrip('.')}."
    for why, (whole, single) in found.items()
  ]


def _who(some: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
  """Names rows, or those that are not meant where that is shorter."""
  rest = [row for row in rows if row not in some]
  if not rest:
    return "all rows"
  return min(_named(some, rows), f"all but {_named(rest, rows)}", key=len)


def _named(some: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
  """Names rows by their groups or labels, where all of one are meant, else one by one."""
  left, names = [row.get("name") for row in some], []
  for key, form in (("group", "{}"), ("label", "{}"), ("place", "all at {}")):
    for value in dict.fromkeys(row.get(key) for row in some):
      whole = [row.get("name") for row in rows if row.get(key) == value]
      if len(whole) > 1 and value is not None and {*whole} <= {*left}:
        names.append(form.format(value))
        left = [name for name in left if name not in whole]
  return "; ".join([*names, *(f"`{name}`" for name in left)])


def _order_line(content: Mapping[str, Any]) -> list[str]:
  order = content.get("order")
  if not order:
    return []
  return [
    f"- Of the {order['pairs']} pairs that have a result here (of the paper's "
    f"{order['paper_pairs']}), {order['same']} are in its order, by "
    f"{_spaced(order['score'])}; most differences of single short runs are chance."
  ]


def _changes(content: Mapping[str, Any]) -> str:
  """What differs from the papers' settings, that of all rows once."""
  rows = [
    row
    for row in content.get("rows", ())
    if any(run.get("status") != "left_out" for run in row.get("runs", ()))
  ]
  found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
  for row in rows:
    changes = {k: x for run in row["runs"] for k, x in (run.get("changes") or {}).items()}
    for key, (before, now) in changes.items():
      change = f"{_value(before)} -> {_value(now)}"
      found.setdefault(key, {}).setdefault(change, []).append(row)
  lines = []
  for key, changes in sorted(found.items()):
    cells = [
      f"{x} ({_who(who, rows)})" if len(who) < len(rows) else x for x, who in changes.items()
    ]
    lines.append(f"- `{key}` {'; '.join(cells)}")
  return "\n".join(["The paper's settings -> these:", "", *lines]) if lines else ""


def _texts(rows: Sequence[Mapping[str, Any]]) -> str:
  places: dict[str, list[str]] = {}
  for row in rows:
    for run in row.get("runs", ()):
      if run.get("text"):
        sizes = [f"{(run.get('tokens') or {}).get(x) or 0:,}" for x in _SPLITS]
        kinds = f" of {run['vocab_size']:,} kinds" if _has(run, "vocab_size") else ""
        line = f"{' / '.join(sizes)} tokens{kinds} ({' / '.join(_SPLITS)})"
        group = [row.get("group") or "the paper's"] * _is_stand_in(run)
        places.setdefault(f"`{run['text']}`: {line}", []).extend(group)
  return "\n".join(
    f"- Text: {line}{', in the place of ' * bool(x)}{_joined(dict.fromkeys(x))}."
    for line, x in places.items()
  )


def _origin(records: Sequence[Mapping[str, Any]]) -> list[str]:
  """Where and when the numbers were made, and by which commands."""
  lines = []
  for key, name in (("machine", "Machine"), ("versions", "Versions")):
    values = dict.fromkeys(_joined(_words(x[key])) for x in records if x.get(key))
    lines += [f"- {name}: {value}." for value in values]
  dates = sorted({str(x["date"]) for x in records if x.get("date")})
  ends = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
  lines += [f"- Date: {ends}."] * bool(dates)
  lines += [
    f"- Command: `{x}`" for x in dict.fromkeys(x["command"] for x in records if x.get("command"))
  ]
  minutes = sum(x.get("minutes") or 0 for x in records)
  return lines + [f"- {minutes:.1f} minutes in all."] * bool(minutes)


def _words(value: Any) -> Iterator[str]:
  for key, x in value.items() if isinstance(value, Mapping) else [("", value)]:
    known = {"device": "{}", "processor": "{}", "cores": "{} cores"}
    yield known.get(key, f"{key} {{}}").format(x).strip()


def _said(content: Mapping[str, Any], key: str, default: Any = "-") -> Any:
  """Of the content or, where an older one lacks it, of its table."""
  table = papers.TABLES.get(content.get("table", ""))
  return content.get(key) or getattr(table, key, None) or default


def _heading(content: Mapping[str, Any]) -> str:
  return f"{content.get('table')}, {content.get('scale')}: {_said(content, 'title')}"


def _anchor(text: str) -> str:
  return re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")


def _has(content: Mapping[str, Any], *keys: str) -> bool:
  """Whether there is something at the end of the keys."""
  value: Any = content
  for key in keys:
    value = value.get(key) if isinstance(value, Mapping) else None
  return value is not None


def _is_stand_in(run: Mapping[str, Any]) -> bool:
  """Whether the text is another than the paper's, or a part that has a name."""
  is_named = any(
    run.get("text") in (name, *(f"{name}_{language}" for language in entry.languages))
    for name, entry in catalog.ENTRIES.items()
  )
  return not is_named or "data.name" in (run.get("changes") or {})


def _made(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
  """How the runs of some rows were made: "reduced (cpu): 2 layers of width 64, ..."."""
  runs = [run for row in rows for run in row["runs"] if run.get("status") == "done"]
  words = []
  for run in runs[:1]:
    now = {key: x[1] for key, x in (run.get("changes") or {}).items()}
    middle = "middle " * _has(run, "scores", papers.FACTOR)
    layers, width = now.get("model.num_layers"), now.get("model.width")
    sizes = [f"{layers} {middle}layers"] if layers else []
    sizes += [f"width {width}"] if width else []
    words += [" of ".join(sizes), run.get("text", "") if _is_stand_in(run) else ""]
  steps = sorted({run["num_steps"] for run in runs if _has(run, "num_steps")})
  words += [f"{' or '.join(f'{x:,}' for x in steps)} steps"] if steps else []
  seeds = max(row.get("seeds") or 1 for row in rows)
  words += [f"{seeds} seeds"] if seeds > 1 else []
  is_whole = content["scale"] == "paper"
  return f"{_PAPERS if is_whole else 'reduced (cpu)'}: {_joined(words)}"


def _value(x: Any) -> str:
  if isinstance(x, int) and not isinstance(x, bool):
    return f"{x:,}"
  return json.dumps(x) if x in ("", None) or isinstance(x, (bool, list, tuple)) else f"{x}"


def _spaced(name: str) -> str:
  return name.replace("_", " ")


def _joined(words: Iterable[Any]) -> str:
  return ", ".join(str(word) for word in words if word)


def _records(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  """The runs or points, or the content itself: whatever says where it was made."""
  return [*_runs(content), *content.get("points", ())] or [content]


def _preferred(contents: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
  found = [x for x in contents if x["table"] == name and x["scale"] in _PREFERRED]
  return sorted(found, key=lambda x: _PREFERRED.index(x["scale"]))


def _slashed(words: Iterable[str]) -> str:
  return " / ".join(words)
