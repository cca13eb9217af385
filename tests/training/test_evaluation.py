import numpy as np
import pytest

from dpjax.training import evaluation, metrics, sharding


class Numbers:
  """Three batches of 8 rows of 5; batch i is full of i + 1."""

  batch_size = 8

  def __len__(self):
    return 3

  def batch(self, index, rows):
    return {"tokens": np.full((8, 5), index + 1, np.int32)[rows]}


def sums_of(number):
  sums = dict(nats=2.0 * number, count=8.0, boundary_nats=0.5 * number, boundaries=1.0 * number)
  sums |= dict(segments=2.0 * number, segments_max=(3.0, 7.0, 5.0)[number - 1], rows=8.0)
  return sums | dict(positions=5.0, slots=1.0 + number)


def test_sums_and_capacities_of_all_batches(monkeypatch):
  calls = []

  def eval_step(params, batch, index, capacity):
    calls.append((params, int(batch["tokens"][0, 0]), index, capacity))
    return sums_of(index + 1)

  def capacity(boundaries, batch):
    assert boundaries == ("outer",)
    return 4 + int(batch["tokens"].max())

  monkeypatch.setattr(evaluation, "batch_capacity", capacity)
  found = evaluation.evaluate(
    eval_step, "params", Numbers(), sharding.make_mesh(), boundaries=("outer",)
  )
  assert calls == [("params", i + 1, i, 5 + i) for i in range(3)]
  sums = dict(nats=12.0, count=24.0, boundary_nats=3.0, boundaries=6.0, segments=12.0)
  sums |= dict(segments_max=7.0, rows=24.0, positions=15.0, slots=9.0)
  assert found == sums


@pytest.mark.parametrize(
  ("changes", "warning"),
  [
    (dict(drawn=4.8, rounded=3.0), None),
    (dict(drawn=4.8, rounded=0.0), "20.0% of the tokens, rounding gives 0.0%"),
    (dict(drawn=1.2, rounded=7.2), "5.0% of the tokens, rounding gives 30.0%"),
    (
      dict(drawn_2=1.5, rounded_2=0.5, segments_in_2=6.0, boundaries_2=0.5),
      "25.0% of the segments in stage 2, rounding gives 8.3%",
    ),
  ],
)
def test_rounding_that_finds_other_boundaries_than_drawing_is_told(changes, warning, caplog):
  def eval_step(params, batch, index, capacity):
    return sums_of(2) | {name: x / 3 for name, x in changes.items()}

  sums = evaluation.evaluate(eval_step, {}, Numbers(), sharding.make_mesh())
  scores = metrics.boundary_scores(sums)
  for name in ("drawn", "rounded"):
    (key,) = (key for key in changes if key.startswith(name))
    assert scores[f"p_ones_{key}"] == pytest.approx(changes[key] / changes.get("segments_in_2", 24))
  already = set()
  for _ in range(2):  # once for all evaluations of a run
    evaluation._warn_of_rounding(scores, already)
  messages = [record.getMessage() for record in caplog.records]
  assert len(messages) == (warning is not None) and all(warning in message for message in messages)
