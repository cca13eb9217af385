"""What the documentation says is what results/ and the docstrings hold."""

import doctest
import importlib
import json
import pkgutil
import re
import runpy

import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib import text
from scipy import stats

import dpjax
from tests import helpers, test_imports

README = (helpers.ROOT / "README.md").read_text(encoding="utf-8")
DOCS = helpers.ROOT / "docs"
RESULTS = (helpers.ROOT / "docs/results.md").read_text(encoding="utf-8")


def assert_said(*words: str, page: str = RESULTS) -> None:
  said = re.sub(r"\s+", " ", page)
  assert [x for x in words if x not in said] == []


def result(name: str) -> dict:
  return json.loads((helpers.ROOT / f"results/{name}.json").read_text(encoding="utf-8"))


def rows_of_recall():
  found = result("probes")
  cells = {
    (row["mixer"], row["task"], part): row[part]
    for row in found["results"]
    if row["length"] == 2 * found["settings"]["length"]
    for part in ("near", "far")
  }
  tasks = dict.fromkeys(row["task"] for row in found["results"])
  for mixer, about in found["mixers"].items():
    row = [f"{cells[mixer, task, part][0]:.2f}" for task in tasks for part in ("near", "far")]
    reach = about["reach"] or "all"
    yield f"| {mixer.replace('_', ' ')} | {about['parameters']:,} | {reach} | {' | '.join(row)} |"


def test_the_page_on_probes_has_their_accuracies():
  page = (DOCS / "probes.md").read_text(encoding="utf-8")
  assert_said(*rows_of_recall(), page=page)
  found = result("probes")
  assert {row["seeds"] for row in found["results"]} == {3}
  assert_said(*(f"{task} {chance:.3f}" for task, chance in found["chance"].items()), page=page)


@pytest.mark.parametrize("name", ["dispatcher", "msa"])
def test_what_is_said_of_the_papers_size_is_measured(name):
  row = result(f"table1_ptb/{name}")
  epochs, score = f"{row['epochs']:.0f} of 60 epochs", f"{row['test_perplexity']:.2f}"
  assert_said(
    f"{epochs} in {row['hours']:.1f} hours",
    f"validation perplexity {row['best_valid_perplexity']:.2f}, test perplexity {score}",
    f"{row['test_perplexity_authors_protocol']:.2f} by the authors' protocol",
    page=(DOCS / "faithful.md").read_text(encoding="utf-8"),
  )
  header = (helpers.ROOT / f"configs/{name}_ptb.py").read_text(encoding="utf-8")
  minutes = 60 * row["hours"] / row["epochs"]
  assert_said(f"{minutes:.1f} minutes an epoch", f"ours {score} after {epochs}", page=header)


def test_what_is_said_of_the_gain_at_the_papers_size_is_measured():
  dispatcher, msa = (result(f"table1_ptb/{name}") for name in ("dispatcher", "msa"))
  curves = [[point["valid_perplexity"] for point in row["curve"]] for row in (dispatcher, msa)]
  for curve in curves:
    assert curve == sorted(curve, reverse=True)
  ratios = [theirs / ours for ours, theirs in zip(*curves, strict=False)]
  assert ratios[0] < 1 < min(ratios[1:])
  most, last, count = max(ratios), ratios[-1], len(ratios)
  papers = [row["paper_test_perplexity"] for row in (dispatcher, msa)]
  scores = [row["test_perplexity"] for row in (dispatcher, msa)]
  assert np.all(np.divide(scores, papers) < 1.03)
  last = f"{last:.2f} times"
  assert_said(
    f"{dispatcher['epochs']:.0f} of 60 epochs: test perplexity {scores[0]:.2f}; the paper's is "
    f"{papers[0]:.2f}",
    f"was trained for {msa['epochs']:.0f}: {scores[1]:.2f}; the paper's is {papers[1]:.2f}",
    "Both are within 3%",
    f"of the Dispatcher after {dispatcher['epochs']:.0f} of 60 epochs, of attention after "
    f"{msa['epochs']:.0f};",
    f"After epoch {count} the baseline's validation perplexity is {last} the Dispatcher's",
    f"{papers[1] / papers[0]:.2f} times apart",
    page=README,
  )
  assert_said(
    f"{most:.2f} times at most, {last} after epoch {count}",
    f"{papers[1] / papers[0]:.2f} times apart",
    page=(DOCS / "faithful.md").read_text(encoding="utf-8"),
  )


def test_what_is_said_of_seeds_at_the_papers_size_is_measured():
  names = ("dispatcher_seed1", "dispatcher", "msa")
  curves = [result(f"table1_ptb/{name}")["curve"] for name in names]
  epochs = len(curves[0])
  curves = [[point["valid_perplexity"] for point in curve[:epochs]] for curve in curves]
  second, first, attention = (curve[-1] for curve in curves)
  is_behind = np.greater(curves[0], curves[2])
  assert is_behind[:2].all() and not is_behind[2:].any()
  assert_said(
    f"validation perplexity {second:.2f} after {epochs} epochs, the first {first:.2f}, attention "
    f"{attention:.2f}: {second / first - 1:.1%} between the seeds, {attention / first - 1:.0%} "
    "between the models. That seed was behind attention for two epochs",
    page=(DOCS / "faithful.md").read_text(encoding="utf-8"),
  )


def test_the_page_on_faithfulness_has_the_trajectories_numbers():
  page = (DOCS / "faithful.md").read_text(encoding="utf-8")
  for name, model in result("trajectories/same")["models"].items():
    first = model["most_of_first_100"]
    ours, exact = (over_floor(model, side) for side in ("dpjax", "exact_adam"))
    assert_said(f"| {name} | {first:.1e} | {ours} | {exact} |", page=page)
  entropy = result("trajectories/same")["models"]["entropy"]["boundaries_differ_at"]
  assert_said(f"from update {entropy['again']} on; ours from {entropy['dpjax']}", page=page)


def test_the_page_on_faithfulness_has_the_seeds_numbers():
  page = (DOCS / "faithful.md").read_text(encoding="utf-8")
  models = result("trajectories/seeds")["models"]
  assert models.keys() == {"dispatcher", "msa", "none", "whitespace"}
  for name, model in models.items():
    theirs, ours = (
      f"{np.mean(model[side]):.3f} ({np.std(model[side], ddof=1):.3f})"
      for side in ("authors", "dpjax")
    )
    difference = f"{model['difference']:+.4f} ± {model['half_interval_90']:.4f}"
    assert model["is_equivalent"] and len(model["authors"]) == len(model["dpjax"]) == 5
    assert_said(
      f"| {name} | {theirs} | {ours} | {difference} | {model['margin']:.4f} "
      f"| {model['p_value']:.1g} |",
      page=page,
    )


def test_the_page_on_faithfulness_has_the_differences_over_sizes():
  page = (DOCS / "faithful.md").read_text(encoding="utf-8")
  models = result("trajectories/sizes")["models"]
  assert models.keys() == {"dispatcher", "fixed4", "whitespace", "unigram", "entropy", "gumbel"}
  means = {}
  for name, model in models.items():
    cells = []
    for point in model["points"]:
      values = point["differences"]
      spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
      cells.append(f"{np.mean(values):+.3f}{spread}")
      means.setdefault(name, []).append(np.mean(values))
    slope, interval = model["slope_a_decade"], model["slope_half_interval_90"]
    assert slope > interval
    assert_said(
      f"| {name} | {' | '.join(cells)} | {slope:+.3f} ± {interval:.3f} | {model['paper']:+.3f} |",
      page=page,
    )
  runs = models["dispatcher"]["largest"]
  for run, by_seed in runs.items():
    name, side, rate = run.split(", ")
    losses = ", ".join(f"{x:.2f}" for x in sorted(by_seed.values()))
    assert_said(f"| {name} | {side} | {rate} | {losses} |", page=page)
  ours, theirs = ([*runs[f"dispatcher, {side}, 0.001"].values()] for side in ("dpjax", "authors"))
  assert_said(
    f"medians of {np.median(theirs):.2f} (theirs) and {np.median(ours):.2f}",
    f"p = {stats.mannwhitneyu(ours, theirs).pvalue:.2f}",
    page=page,
  )
  lower = [np.mean([*runs[f"{name}, dpjax, 0.0003"].values()]) for name in ("dispatcher", "msa")]
  assert_said(f"the Dispatcher is {lower[0] - lower[1]:.3f} behind attention", page=page)
  assert min(means.pop("dispatcher")) > 0
  assert np.min(list(means.values())) > models["fixed4"]["paper"]


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


def test_the_readme_is_short_and_its_numbers_are_those_of_the_results():
  assert len(README.splitlines()) <= 150
  agreed = re.search(r"\| (\d+) numbers \| (\d+) of them agree", RESULTS)
  assert_said(f"{agreed[2]} of {agreed[1]} numbers agree", page=README)
  beside = result("trajectories/same")["models"].values()
  most = max(model["most_of_first_100"] for model in beside)
  assert_said(f"equal to {most:.2e}", page=README)


def test_one_version_stands_everywhere():
  def found(name: str, pattern: str) -> str:
    return re.search(pattern, (helpers.ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)[1]

  assert found("pyproject.toml", '^version = "(.*)"') == dpjax.__version__
  assert found("CITATION.cff", "^version: (.*)") == dpjax.__version__
  assert found("CHANGELOG.md", "^## (.*)") == dpjax.__version__


def test_the_first_commands_begin_with_pip_install():
  commands = re.search(r"```\n(.*?)```", README, re.DOTALL)[1].splitlines()
  assert [command.split(" && ")[0] for command in commands] == [
    "pip install -e .",
    "pip install -e '.[dev]'",
  ]
  assert commands[1].endswith("&& pytest")


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
  said = generator["meanings"]()
  flat = dpjax.config.flatten(dpjax.config.default())
  held = tuple(f"{key}." for key in dpjax.config.COMPONENTS)
  assert [key for key in flat if not key.startswith(held) and not said.get(key)] == []

  def ours(page):  # The words of another library are its own matter.
    return re.sub(r"### (adamw?|lion|sgd)\n.*?(?=^### )", "", page, flags=re.DOTALL | re.MULTILINE)

  page = (DOCS / "settings.md").read_text(encoding="utf-8")
  assert ours(page) == ours(generator["page"]())
  assert not re.search(r"\|  \|$", ours(page), re.MULTILINE), "a setting without a meaning"


def test_a_long_command_wraps_between_its_flags():
  pytest.importorskip("mkdocs")
  block = '<div class="{} highlight"><pre><code>dpjax a-b --c=d\n--e -f\n</code></pre></div>'
  page = block.format("language-text") + block.format("language-python")
  found = runpy.run_path(str(DOCS / "hooks.py"))["on_page_content"](page, None, None, None)
  assert re.findall('<span class="flag">(.*?)</span>', found) == ["--c=d", "--e"]
  style = re.search(r"extra_css: \[(.*)\]", (helpers.ROOT / "mkdocs.yml").read_text())[1]
  assert ".flag {" in (DOCS / style).read_text(encoding="utf-8")


@pytest.mark.usefixtures("standard_promotion")
def test_the_pictures_can_be_read_on_a_telephone():
  drawing = runpy.run_path(str(DOCS / "draw_pictures.py"))
  for draw in drawing["PICTURES"]:
    figure = draw()
    letters = [x for x in figure.findobj(text.Text) if x.get_text() and x.get_visible()]
    pixels = 360 / figure.get_figwidth() / 72
    assert min(x.get_fontsize() for x in letters) * pixels > 8, draw.__name__
    plt.close(figure)
    width, _ = plt.imread(DOCS / f"pictures/{draw.__name__}.png").shape[1::-1]
    assert width == pytest.approx(200 * drawing["WIDTH"], abs=1)


def test_links_between_pages_hold():
  for page in [helpers.ROOT / "README.md", *DOCS.rglob("*.md")]:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
      assert (page.parent / link).exists(), f"{page}: {link}"


def test_every_module_says_what_it_is_and_its_doctests_hold():
  for found in pkgutil.walk_packages(dpjax.__path__, "dpjax."):
    if found.name.rpartition(".")[2] in ("train", "evaluate", "generate"):
      continue  # Programs, which define flags of one name each.
    module = importlib.import_module(found.name)
    assert module.__doc__, found.name
    assert doctest.testmod(module).failed == 0, found.name
