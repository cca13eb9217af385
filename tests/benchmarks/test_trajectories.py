"""Trajectories: our updates are the authors', and the report says what the runs hold."""

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
def test_the_same_run_has_the_losses_of_the_authors(make):
  golden = helpers.golden("J_train_hourglass_fixed")
  settings = {"max_length": 24, "boundaries": "fixed", "shortening_factor": 3}
  batches = (
    {"tokens": stream.T[:, :-1], "targets": stream.T[:, 1:]} for stream in golden["in/stream"]
  )
  found = trajectories.train_dpjax(
    helpers.part(golden, "param/"), settings, batches, golden["out/lrs"], make
  )
  losses, p_ones = np.transpose(found)
  np.testing.assert_allclose(losses, golden["out/losses"], rtol=0, atol=1e-4)
  np.testing.assert_allclose(p_ones, 1 / 3, rtol=1e-6)


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


@pytest.mark.parametrize("shift", [0.0, -0.2])
def test_equivalence_is_two_one_sided_t_tests(shift):
  draw = np.random.default_rng(5)
  here, there = draw.normal(0, 0.03, 5), draw.normal(shift, 0.05, 7)
  found = report.equivalence(here, there, 0.1)
  above = stats.ttest_ind(here + 0.1, there, equal_var=False, alternative="greater")
  below = stats.ttest_ind(here - 0.1, there, equal_var=False, alternative="less")
  expected = max(above.pvalue, below.pvalue)
  assert found["p_value"] == pytest.approx(expected, rel=1e-9)
  assert found["is_equivalent"] == (expected < 0.05)
