"""What None stands for in `causal_convolution` is what its benchmark measured as fast."""

import json

import pytest

from dpjax.ops.causal_convolution import choose_implementation
from tests import helpers

REPORT = json.loads(
  (helpers.ROOT / "results" / "causal_convolution.json").read_text(encoding="utf-8")
)
CASES = REPORT["cases"] + REPORT["sweep"]
# Rows of a run differ by about as much between two runs.
SLACK = 1.35


def allowed(case):
  """Milliseconds of what may be chosen, by name."""
  rows = case["gradient"]["implementations"]
  # "conv" is slow within a loop over layers, and "plain" is the benchmark's own.
  return {x: rows[x]["milliseconds"] for x in rows if x not in ("conv", "plain")}


def choose(case):
  return choose_implementation(case["rank"], case["batch"], case["length"], "cpu", 1)


def name_of(case):
  return "{extractors}-{batch}-{length}-{width}".format(**case).replace(", ", "-")


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_choice_was_measured_and_is_fast(case):
  rows, name = allowed(case), choose(case)
  assert name in rows, f"{name} was not measured: {case['gradient']['left_out']}"
  assert rows[name] <= SLACK * min(rows.values()), (name, rows)
