"""Trajectories: our updates are the authors', and the report says what the runs hold."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
from scipy import stats

from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import trajectories  # noqa: E402
import trajectories_report as report  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("make", [trajectories.optimizer_of_dpjax, trajectories.exact_adam])
@pytest.mark.parametrize(
  ("case", "settings"),
  [
    ("dispatcher", {"max_length": 16}),
    ("hourglass_fixed", {"max_length": 24, "boundaries": "fixed", "shortening_factor": 3}),
  ],
)
def test_the_same_run_has_the_losses_of_the_authors(case, settings, make):
  golden = helpers.golden(f"J_train_{case}")
  batches = (
    {"tokens": stream.T[:, :-1], "targets": stream.T[:, 1:]} for stream in golden["in/stream"]
  )
  found = trajectories.train_dpjax(
    helpers.part(golden, "param/"), settings, batches, golden["out/lrs"], make
  )
  losses, p_ones = np.transpose(found)
  np.testing.assert_allclose(losses, golden["out/losses"], rtol=0, atol=1e-4)
  expected = 1 / settings["shortening_factor"] if "boundaries" in settings else 0
  np.testing.assert_allclose(p_ones, expected, rtol=1e-6)


def test_every_run_has_a_file_and_is_done_once(tmp_path, capsys):
  for small in (False, True):
    cells = trajectories.cells(small)
    assert len({cell.stem for cell in cells}) == len(cells)
  flags = [f"--{x}={tmp_path}" for x in ("reference", "ptb", "vocabulary", "text8", "work")]
  flags += ["--only=same-msa", "--list"]
  trajectories.main(flags)
  todo = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
  assert len(todo) == 3
  (tmp_path / f"{todo[1]}.json").write_text("{}")
  trajectories.main(flags)
  left = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
  assert left == [todo[0], todo[2]]


def test_differences_are_of_each_window():
  draw = np.random.default_rng(3)
  here, there = draw.uniform(2, 3, 47), draw.uniform(2, 3, 53)
  found = report.differences(here, there, window=10)
  expected = [
    np.mean([((here[i] - there[i]) / there[i]) ** 2 for i in range(10 * n, 10 * n + 10)]) ** 0.5
    for n in range(4)
  ]
  np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_where_boundaries_differ():
  positions = trajectories.BATCH * trajectories.LENGTH
  there = np.array([210, 190, 205, 197]) / positions
  rounded = there * (1 + 1e-7)
  assert report.first_apart(rounded, there) is None
  other = rounded + np.array([0, 0, 1, -2]) / positions
  assert report.first_apart(other, there) == 2


@pytest.mark.parametrize("shift", [0.0, 0.07, -0.2])
def test_equivalence_is_two_one_sided_t_tests(shift):
  draw = np.random.default_rng(5)
  here, there = draw.normal(0, 0.03, 5), draw.normal(shift, 0.05, 7)
  found = report.equivalence(here, there, 0.1)
  above = stats.ttest_ind(here + 0.1, there, equal_var=False, alternative="greater")
  below = stats.ttest_ind(here - 0.1, there, equal_var=False, alternative="less")
  expected = max(above.pvalue, below.pvalue)
  assert found["p_value"] == pytest.approx(expected, rel=1e-9)
  assert found["is_equivalent"] == (expected < 0.05)


def write_cells(folder, draw) -> None:
  """Of every run what it would write, from numbers that are drawn."""
  for cell in trajectories.cells():
    row = {**dataclasses.asdict(cell), "seconds": 1.5}
    if cell.experiment == "same":
      scale = {"authors": 0, "again": 1e-7, "dpjax": 3e-7}.get(cell.side, 1e-3)
      noise = 1 + scale * draw.uniform(0.9, 1.1, cell.num_steps)
      row["losses"] = (
        np.linspace(6, 3, trajectories.SAME_STEPS)[: cell.num_steps] * noise
      ).tolist()
      row["p_ones"] = [0.2] * cell.num_steps
      if (cell.name, cell.side) == ("gumbel", "exact_adam"):
        row["p_ones"][345] += 1 / (trajectories.BATCH * trajectories.LENGTH)
    else:
      better = 0.1 if cell.name == "dispatcher" and cell.experiment == "sizes" else 0.0
      is_lower = cell.peak != trajectories.OWN_PEAK
      other = 0.5 * (cell.side == "authors") + is_lower * (1.0 + 2 * better)
      is_size = cell.experiment == "sizes"
      row["valid"] = 2.0 - better + is_size * other + 1e-4 * draw.standard_normal()
      row["parameters"] = cell.width**2 * cell.num_layers
    (folder / f"{cell.stem}.json").write_text(json.dumps(row))


def test_the_report_has_every_experiment_and_keeps_models_whose_runs_are_gone(tmp_path):
  write_cells(tmp_path, np.random.default_rng(7))
  out = tmp_path / "out"
  report.main([str(tmp_path), f"--out={out}"])
  same, seeds, sizes = (
    json.loads((out / f"{x}.json").read_text())["models"] for x in ("same", "seeds", "sizes")
  )
  names = {*trajectories.ATTENTION, *trajectories.POOLING}
  assert same.keys() == names and sizes.keys() == names - {"msa", "none"}
  for name, model in same.items():
    assert 2 < model["most_over_floor_after"]["dpjax"] < 5
    assert model["boundaries_differ_at"] == ({"exact_adam": 345} if name == "gumbel" else {})
  assert all(model["is_equivalent"] for model in seeds.values()) and len(seeds) == 4
  assert sizes["dispatcher"]["at_one_million"] == pytest.approx(-0.1, abs=1e-3)
  fit = stats.linregress(
    [math.log10(x["parameters"]) for x in sizes["gumbel"]["points"] for _ in x["differences"]],
    [y for x in sizes["gumbel"]["points"] for y in x["differences"]],
  )
  assert sizes["gumbel"]["slope_a_decade"] == pytest.approx(fit.slope)
  interval = sizes["gumbel"]["slope_half_interval_90"]
  assert interval == pytest.approx(fit.stderr * stats.t.ppf(0.95, 6))
  for path in tmp_path.glob("*.json"):
    if json.loads(path.read_text())["name"] != "msa":
      path.unlink()
  report.main([str(tmp_path), f"--out={out}"])
  later = json.loads((out / "same.json").read_text())["models"]
  assert list(later) == list(same) and later["gumbel"] == same["gumbel"]


def test_wrong_folders_end_in_one_message(tmp_path, capsys):
  flags = [f"--{x}={tmp_path / x}" for x in ("reference", "ptb", "vocabulary", "text8", "work")]
  with pytest.raises(SystemExit, match=r"data\.path: expected .*, got .*ptb"):
    trajectories.main([*flags, "--only=sizes-msa-dpjax-0-48x3-1000"])
  with pytest.raises(SystemExit):
    report.main([str(tmp_path / "none"), f"--out={tmp_path / 'out'}"])
  assert "expected a folder with runs" in capsys.readouterr().err
  assert not (tmp_path / "out").exists()
