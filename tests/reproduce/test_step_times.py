"""Points of the figures of step times: what is asked of the benchmark, and what is kept."""

import json
import math

import pytest

from dpjax import config as config_lib
from reproduce import scales, step_times

training_step = step_times.training_step
FIG2, FIG5 = "dispatcher-fig2", "pooling-fig5"


def measure(name, scale="tiny", known=(), seconds=lambda: math.inf):
  points = []
  step_times.measure(name, scale, known, put=points.append, seconds=seconds)
  return json.loads(json.dumps(points))


def row(name, seconds, mib, **rest):
  return dict(name=name, dtype="float32", seconds=seconds, temporary_mib=mib) | rest


@pytest.fixture
def asked(monkeypatch):
  """What is asked of the benchmark, which answers at once; the longest attention has no room."""
  calls = []

  def lengths(self):
    calls.append(self.sizes)
    rows = [row("dispatcher", [1.0, 3.0, 2.0], 6.0, length=x) for x in self.sizes["lengths"]]
    rows[0]["over_attention"] = 0.5
    first, second, *_ = self.sizes["lengths"]
    rows.append(row("attention", [4.0, 4.0, 5.0], 8.0, length=first))
    out = dict(name="attention", dtype="float32", length=second, left_out="no room")
    return {"rows": [*rows, out]}

  def hourglass(sizes, run):
    calls.append(sizes)
    if sizes["factor"] == 3:
      raise training_step.WorkerError("jax: ended with status 9")
    sides = {"jax": dict(seconds=[2.0, 4.0, 3.0], temporary_mib=2.0 * sizes["factor"])}
    pooled = dict(name="fixed", dtype="float32", sides=sides, over_baseline={"jax": 0.75})
    whole = dict(seconds=[5.0], temporary_mib=16.0)
    none = dict(name="vanilla", dtype="float32", sides={"jax": whole}, over_baseline={"jax": 1.0})
    return [none, pooled]

  monkeypatch.setattr(training_step.Lengths, "measure", lengths)
  monkeypatch.setattr(training_step, "compare_hourglass", hourglass)
  return calls


def test_lengths_become_points(asked):
  points = measure(FIG2, "cpu", seconds=lambda: 70.0)
  assert asked[0]["most_seconds"] == 70.0
  assert [x["place"] for x in points] == [512, 512, 1024, 1024, 2048, 2048, 4096, 4096]
  first, attention, second = points[:3]
  assert (first["model"], first["baseline"]) == ("Dispatcher", "masked self-attention")
  assert (first["seconds"], first["repetitions"], first["left_out"]) == (2.0, 3, "")
  assert (first["ratio"], first["memory_ratio"]) == (0.5, 0.75)
  assert first["settings"]["tokens"] == 512
  assert (attention["model"], attention["baseline"]) == ("masked self-attention", None)
  # Beside an attention without room there is no ratio; nor has it any further on.
  assert second["seconds"] == 2.0 and second["ratio"] is second["memory_ratio"] is None
  for point in points[3::2]:
    assert (point["left_out"], point["seconds"]) == ("no room", None)
    assert point["settings"]["tokens"] == point["place"]


def test_factors_become_points_until_the_time_is_over(asked):
  left = iter([3.0, 2.0, 1.0, 0.0])
  points = measure(FIG5, "cpu", known={4}, seconds=lambda: next(left))
  assert [sizes["factor"] for sizes in asked] == [2, 3, 6]
  assert [(x["model"], x["place"]) for x in points] == [
    ("no pooling", 1),
    ("fixed segments", 2),
    ("fixed segments", 3),
    ("no pooling", 1),
    ("fixed segments", 6),
  ]
  none, two, three, _, six = points
  assert (none["baseline"], none["ratio"], none["memory_ratio"]) == (None, None, None)
  assert (two["seconds"], two["ratio"], two["memory_ratio"]) == (3.0, 0.75, 0.25)
  assert six["memory_ratio"] == 0.75 and six["settings"] == none["settings"]
  assert three["left_out"] == "jax: ended with status 9" and three["seconds"] is None


@pytest.mark.parametrize("scale, dtypes", [("tiny", 1), ("cpu", 1), ("paper", 2)])
def test_as_many_points_as_planned(asked, scale, dtypes):
  points = measure(FIG5, scale, known={3})
  places = {(x["model"], x["place"]) for x in points} | (
    {("fixed segments", 3)} if scale != "tiny" else set()
  )
  assert step_times.planned(FIG5, scale) == dtypes * len(places)
  assert step_times.planned(FIG2, scale) == {"tiny": 8, "cpu": 8, "paper": 32}[scale]


@pytest.mark.parametrize(
  "name, file, names",
  [
    (FIG2, "dispatcher_wikitext2.py", dict(mixer="dispatcher", max_length=512)),
    (FIG2, "msa_wikitext2.py", dict(mixer="attention", max_length=512)),
    (FIG5, "pooling_text8.py:none", dict(num_layers=12)),
    (FIG5, "pooling_text8.py:fixed4", dict(num_layers=8, boundaries="fixed", shortening_factor=4)),
  ],
)
def test_the_models_are_those_of_the_papers_configurations(name, file, names):
  sizes = step_times._SIZES[name]["paper"]
  rate = training_step.dropouts(sizes["dropout"]) if name == FIG2 else {}
  told = training_step.settings_of(sizes["model"] | rate | names, sizes, "cpu", "float32")
  ours = config_lib.from_dict({"model": told["model"]}).model
  theirs = scales.load(f"configs/{file}").model
  theirs.vocab_size = ours.vocab_size
  if name == FIG5:
    # Of how a step is computed alone, which changes no size.
    assert (told["batch"], told["length"]) == (8, 2048)
  assert config_lib.flatten(ours) == config_lib.flatten(theirs)
