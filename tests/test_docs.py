"""What the documentation says is what results/ and the docstrings hold."""

import doctest
import importlib
import itertools
import json
import pkgutil
import re
import runpy

import numpy as np
import pytest

import dpjax
import dpjax_papers
import dpjax_relatives
from tests import helpers, test_imports

README = (helpers.ROOT / "README.md").read_text(encoding="utf-8")
DOCS = helpers.ROOT / "docs"
RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")
FAITHFUL = (DOCS / "faithful.md").read_text(encoding="utf-8")


def assert_said(*words: str, page: str) -> None:
  said = re.sub(r"\s+", " ", page)
  assert words and [x for x in words if x not in said] == []


def result(name: str) -> dict:
  return json.loads((helpers.ROOT / f"results/{name}.json").read_text(encoding="utf-8"))


def test_the_page_on_probes_has_their_accuracies():
  found, cells = result("probes"), {}
  for row in found["results"]:
    if row["length"] == 2 * found["settings"]["length"]:
      near, far = row["near"][0], row["far"][0]
      cells[row["mixer"]] = [*cells.get(row["mixer"], []), f"{near:.2f}", f"{far:.2f}"]
  rows = []
  for mixer, about in found["mixers"].items():
    shown = mixer.replace("_", " "), f"{about['parameters']:,}", str(about["reach"] or "all")
    rows.append(f"| {' | '.join([*shown, *cells[mixer]])} |")
  assert_said(*rows, page=(DOCS / "probes.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["dispatcher", "msa"])
def test_what_is_said_of_the_papers_size_is_measured(name):
  row = result("reproduce/dispatcher-table1_paper")["rows"][f"ptb/{name}"]
  scores, paper = row["runs"]["0"]["scores"], f"{row['paper']['perplexity']:.2f}"
  ours, theirs = (f"{scores[score]:.2f}" for score in ("perplexity", "perplexity_authors_protocol"))
  header = (helpers.ROOT / f"configs/{name}_ptb.py").read_text(encoding="utf-8")
  assert_said(f"the paper's {paper}; ours {ours}", page=header)
  assert_said(ours, paper, page=README)
  assert_said(f"| {ours} | {theirs} | {paper} |", page=FAITHFUL)


def over_floor(model, side: str) -> str:
  """A cell of the table of trajectories."""
  if side not in model["most_over_floor_after"]:
    return "-"
  most = model["most_over_floor_after"][side]
  said = f"{most:.1f}" if most < 100 else f"{most:.0f}"
  if side in model["boundaries_differ_at"]:
    until = model["most_over_floor_until_then"][side]
    said += f" ({until:.1f} until update {model['boundaries_differ_at'][side]})"
  return said


def rows_of_trajectories():
  """The tables on faithfulness, cell by cell."""
  for name, model in result("trajectories/same")["models"].items():
    sides = [over_floor(model, side) for side in ("dpjax", "exact_adam")]
    yield name, f"{model['most_of_first_100']:.1e}", *sides
  for name, model in result("trajectories/seeds")["models"].items():
    sides = [
      f"{np.mean(model[side]):.3f} ({np.std(model[side], ddof=1):.3f})"
      for side in ("authors", "dpjax")
    ]
    difference = f"{model['difference']:+.4f} ± {model['half_interval_90']:.4f}"
    yield name, *sides, difference, f"{model['margin']:.4f}", f"{model['p_value']:.1g}"


def test_the_page_on_faithfulness_has_the_tables_of_the_trajectories():
  assert_said(*(f"| {' | '.join(cells)} |" for cells in rows_of_trajectories()), page=FAITHFUL)


def rows_of_steps(name: str):
  """The cells of a table of training steps beside PyTorch, from the first ratio on."""
  parts = result(name)["parts"]
  # Float32 and 16 bits of the paper's step are cases of their own.
  of_paper = [{k: row for case in parts["paper"]["cases"] for k, row in case["rows"].items()}]
  models = "dispatcher", "hourglass", "extractors"
  others = [case["rows"] for x in models for case in parts[x]["cases"]]
  for row in of_paper + others:
    cells = []
    for ours, condition in itertools.product(("dpjax", "dpjax, products"), ("quiet", "busy")):
      theirs = [k for k in row if "PyTorch" in k and ("bfloat16" in k) == (ours != "dpjax")]
      best = min(row[k][condition]["ratio"] for k in theirs if condition in row[k])
      cells.append(row[ours][condition]["ratio"] / best)
    wide, wide_busy, low, low_busy = cells
    own = f"{row['dpjax, products']['quiet']['ratio']:.2f}"
    memory = f"{row['dpjax, products']['temporary_mib'] / row['dpjax']['temporary_mib']:.2f}"
    yield f"{wide:.2f}", f"{low:.2f}", f"{low_busy:.2f} (float32 {wide_busy:.2f})", own, memory


@pytest.mark.parametrize("name", ["step", "step_xeon"])
def test_steps_beside_pytorch_are_those_that_were_measured(name):
  rows = [*rows_of_steps(name)]
  assert_said(*(f"| {' | '.join(cells)} |" for cells in rows), page=RESULTS)
  # Those of the Dispatcher's and the pooling paper.
  columns = [[row[i] for row in rows[:5]] for i in (0, 1)]
  wide, low = (f"{min(column)} to {max(column)}" for column in columns)
  assert f" {low} (float32 {wide})" in RESULTS
  if name == "step":
    assert f"on an AMD EPYC | {low} of the time |" in README


def rows_of_long_rows(part: str, unit: int):
  """The rows of a table of long rows, in milliseconds / unit, with the memory of layers."""
  cases = result("long_rows")["parts"][part]["cases"]
  for name in cases[0]["rows"]:
    cells = []
    for case in cases:
      row = case["rows"][name]
      if "quiet" not in row:
        cells.append("-")
        continue
      time = row["quiet"]["milliseconds"] / unit
      cell = f"{time:.1f}" if time < 100 else f"{time:.0f}"
      if part == "layers" and "temporary_mib" in row:
        cell += f" ({row['temporary_mib']:,.0f})"
      cells.append(cell)
    if set(cells) != {"-"}:
      yield f"| {name} | {' | '.join(cells)} |"


def test_the_costs_of_long_rows_are_those_that_were_measured():
  rows = [*rows_of_long_rows("layers", 1000), *rows_of_long_rows("steps", 1000)]
  assert_said(*rows, *rows_of_long_rows("tokens", 1), page=RESULTS)
  case = result("long_rows")["parts"]["layers"]["cases"][3]
  assert case["case"] == "layers, 1 x 32768"
  ours, we, theirs = (
    f"{case['rows'][name]['quiet']['milliseconds'] / 1000:.1f}"
    for name in ("dispatcher", "WE", "attention, PyTorch")
  )
  assert_said(f"| {ours} s, {we} s | {theirs} s: PyTorch's attention |", page=README)


def sizes_of(case, *names: str) -> str:
  """The sizes in a case's name, e.g. "4, 512" for "B 4 T 512 H 8"."""
  return ", ".join(re.search(rf"\b{name} (\d+)", case["case"])[1] for name in names)


def cases_of_operators(part: str, beginning: str, ending: str):
  """The cases of a part of results/ops.json whose names begin and end so."""
  cases = result("ops")["parts"][part]["cases"]
  return [x for x in cases if x["case"].startswith(beginning) and x["case"].endswith(ending)]


def ratio(row, condition: str = "quiet") -> str:
  return f"{row[condition]['ratio']:.2f}"


def rows_of_shift_and_sum():
  all_forward = cases_of_operators("shift_and_sum", "shift_and_sum, B", "float32, forward")
  all_gradients = cases_of_operators("shift_and_sum", "shift_and_sum, B", "float32, gradient")
  all_dropped = cases_of_operators("shift_and_sum", "shift_and_sum with levels", "gradient")
  for forward, gradient, dropped in zip(all_forward, all_gradients, all_dropped, strict=True):
    default = gradient["rows"]["default"]
    unrolled = gradient["rows"]["unrolled"]
    attention = gradient["rows"]["attention"]
    over_attention = default["quiet"]["milliseconds"] / attention["quiet"]["milliseconds"]
    yield (
      sizes_of(gradient, "B", "T", "D"),
      ratio(forward["rows"]["default"]),
      ratio(default),
      ratio(default, "busy"),
      f"{unrolled['temporary_mib']:.0f} → {default['temporary_mib']:.0f} MiB",
      ratio(dropped["rows"]["p = 0.9"]),
      f"{over_attention:.2f}",
    )


def rows_of_the_overview():
  """What the page's first table on speed has of shift-and-sum and of relative attention."""
  _, middle, long = cases_of_operators("shift_and_sum", "shift_and_sum, B", "float32, gradient")
  (relative,) = cases_of_operators("attention", "relative attention, B 1 T 2048", "0.0, gradient")
  for ours, theirs, case, name in (
    (
      "shift-and-sum, T 4096, D 512, gradient",
      "its levels unrolled, JAX's own gradient",
      middle,
      "unrolled",
    ),
    ("the same", "masked self-attention of one head, in tiles", middle, "attention"),
    ("the same, T 16384, D 256", "likewise", long, "attention"),
    (
      "relative attention in tiles, T 2048, gradient",
      "all weights at once",
      relative,
      "whole",
    ),
  ):
    default = case["rows"]["default"]
    other = case["rows"][name]
    time = default["quiet"]["milliseconds"] / other["quiet"]["milliseconds"]
    memory = default["temporary_mib"] / other["temporary_mib"]
    yield ours, theirs, f"{time:.2f}", f"{memory:.2f}"


def rows_of_attention():
  for case in cases_of_operators("attention", "", "gradient"):
    row = case["rows"]["default"]
    scores, rate = re.search(r"^(\w+) .* dropout ([\d.]+)", case["case"]).groups()
    memory = row["temporary_mib"] / case["rows"]["whole"]["temporary_mib"]
    sizes = sizes_of(case, "B", "T", "H")
    yield scores, sizes, f"{float(rate):g}", ratio(row), ratio(row, "busy"), f"{memory:.2f}"


def rows_of_pooling():
  operators = [
    cases_of_operators("pooling", name, computes)
    for name in ("pool_segments", "upsample_segments")
    for computes in ("forward", "gradient")
  ]
  for cases in zip(*operators, strict=True):
    yield sizes_of(cases[0], "B", "T", "D"), *(ratio(x["rows"]["segments"]) for x in cases)
  for case in cases_of_operators("pooling", "middle layers", "gradient"):
    padded = case["rows"]["padded"]
    known_count = case["rows"]["known"]
    at_capacity = case["rows"]["at capacity"]
    yield (
      sizes_of(case, "B", "T", "D"),
      ratio(at_capacity),
      f"{at_capacity['quiet']['ratio'] / known_count['quiet']['ratio']:.2f}",
      f"{padded['temporary_mib']:,.0f} → {at_capacity['temporary_mib']:,.0f} MiB",
    )


def rows_of_peers():
  for case in result("ops")["parts"]["peers"]["cases"]:
    default = case["rows"]["default"]
    base = case["rows"][case["base"]]
    seconds = [f"{x['quiet']['milliseconds'] / 1000:.2f} s" for x in (default, base)]
    computes = case["case"].rpartition(", ")[2]
    cells = [sizes_of(case, "B", "T"), computes, *seconds, ratio(default), ratio(default, "busy")]
    if case["base"] == "PyTorch":
      cells += [ratio(case["rows"][f"tiles of {size}"]) for size in (128, 512)]
    else:
      cells.append(f"{default['temporary_mib']:,.0f} for {base['temporary_mib']:,.0f} MiB")
    yield cells


@pytest.mark.parametrize(
  "rows",
  [
    rows_of_the_overview,
    rows_of_shift_and_sum,
    rows_of_attention,
    rows_of_pooling,
    rows_of_peers,
  ],
)
def test_the_tables_of_operators_are_those_that_were_measured(rows):
  assert_said(*(f"| {' | '.join(cells)} |" for cells in rows()), page=RESULTS)


def test_the_readme_is_short_and_its_numbers_are_those_of_the_results():
  assert len(README.splitlines()) <= 120
  rows = re.sub(r"\[.*?\]\(.*?\)", "", "\n".join(re.findall(r"^\|.*", README, re.MULTILINE)))
  assert all(len(re.findall(r"\d\.\d", cell)) <= 3 for cell in rows.split("|"))
  agreed = re.search(r"\| (\d+) numbers \| (\d+) of them agree", RESULTS)
  beside = result("trajectories/same")["models"].values()
  most = max(model["most_of_first_100"] for model in beside)
  assert_said(
    f"{agreed[2]} of {agreed[1]} numbers agree", f"differ by at most {most:.2e}", page=README
  )


def matches(name: str, pattern: str) -> list[str]:
  """What the pattern's group matches in a file."""
  return re.findall(pattern, (helpers.ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)


def test_numbers_of_a_version_that_is_excluded_say_so():
  known = [
    (paragraph, name)
    for paragraph in RESULTS.split("\n\n")
    for name in re.findall(r"`results/(\w+)\.json`", paragraph)
    if '"jax": "0.10.2"' in (helpers.ROOT / f"results/{name}.json").read_text(encoding="utf-8")
  ]
  assert known
  assert [name for paragraph, name in known if "JAX 0.10.2" not in paragraph] == []


def test_the_same_pythons_are_tested_and_named():
  ci = {*matches(".ci/run", "for version in (.*);")[0].split()}
  workflow = {*matches(".github/workflows/tests.yml", r'python: "(3\.\d+)"')}
  assert {*matches("pyproject.toml", r"Python :: (3\.\d+)")} == workflow | ci
  assert {*matches("README.md", r"(3\.1\d)(?= \()")} == ci


@pytest.mark.parametrize(
  "name, pattern",
  [
    ("pyproject.toml", '^version = "(.*)"'),
    ("CITATION.cff", "^version: (.*)"),
    ("CHANGELOG.md", "^## (.*)"),
  ],
)
def test_one_version_stands_everywhere(name, pattern):
  assert matches(name, pattern)[0] == dpjax.__version__


# Bound methods, of one entry; and a class of another package.
WITHOUT_ENTRY = {*(name for name in dpjax.__all__ if name.startswith("register_")), "ConfigDict"}


@pytest.mark.parametrize("package", test_imports.FACES)
def test_every_public_name_has_an_entry_and_an_example(package):
  pages = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md"))]
  if package != "dpjax":
    pages = [(DOCS / f"api/{package.partition('.')[2]}.md").read_text(encoding="utf-8")]
  entries = {
    part for name in re.findall(r"^::: (\S+)", "\n".join(pages), re.M) for part in name.split(".")
  }
  code = "\n".join(re.findall(r"^```(?:pycon|python)\n(.*?)^```$", "\n".join(pages), re.M | re.S))
  names = importlib.import_module(package).__all__
  assert [name for name in names if name not in entries | WITHOUT_ENTRY] == []
  assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


def test_the_page_of_settings_is_what_the_code_says():
  generator = runpy.run_path(str(DOCS / "settings_page.py"))

  def ours(page):  # The words of another library are its own matter.
    return re.sub(r"### (adamw?|lion|sgd)\n.*?(?=^### )", "", page, flags=re.DOTALL | re.MULTILINE)

  page = (DOCS / "settings.md").read_text(encoding="utf-8")
  assert ours(page) == ours(generator["page"]())
  assert not re.search(r"\|  \|$", ours(page), re.MULTILINE), "a setting without a meaning"


def test_links_between_pages_hold_and_the_index_names_every_guide():
  for page in [helpers.ROOT / "README.md", *DOCS.rglob("*.md")]:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
      assert (page.parent / link).exists(), f"{page}: {link}"
  named = {*matches("docs/index.md", r"\]\((guides/\w+\.md)\)")}
  assert named == {f"guides/{path.name}" for path in DOCS.glob("guides/*.md")}


def test_every_module_says_what_it_is_and_its_doctests_hold():
  packages = (dpjax, dpjax_papers, dpjax_relatives)
  modules = [pkgutil.walk_packages(each.__path__, f"{each.__name__}.") for each in packages]
  for found in itertools.chain(*modules):
    if found.name.rpartition(".")[2] in ("train", "evaluate", "generate"):
      continue  # Programs, which define flags of one name each.
    module = importlib.import_module(found.name)
    assert module.__doc__, found.name
    assert doctest.testmod(module).failed == 0, found.name
