"""Rows within a time: measured, and stopped where they do not fit."""

import itertools
import math
import time
from types import SimpleNamespace

import pytest

from reproduce import rows
from tests import helpers

PLAN = SimpleNamespace(num_steps=500, num_saves=5, evaluation_updates=35.0)
# After 31 updates of 2 s: 468 updates, evaluations of 35 updates, 5 saves.
REST = (468 + 35) * 2.0 + 5 * rows.SAVE_SECONDS


def tell_times(monkeypatch, first, *begin_and_step):
  times = itertools.chain([first], itertools.count(*begin_and_step))
  monkeypatch.setattr(time, "perf_counter", lambda: next(times))


@pytest.mark.parametrize("end, stops", [(math.inf, False), (130 + REST, False), (110 + REST, True)])
def test_a_run_is_stopped_once_its_updates_are_timed(monkeypatch, end, stops):
  tell_times(monkeypatch, 0.0, 60.0, 2.0)
  measured = []
  clock = rows.Clock(end + rows.LAST_SECONDS, PLAN, 0, lambda: measured.append(1))
  answers = [clock() for _ in range(rows.MEASURED + 2)]
  assert answers == [False] * (rows.MEASURED + 1) + [stops] and measured == [1] * (not stops)
  spent = 60 + 2.0 * (rows.MEASURED + 1)
  expected = {"update_seconds": 2.0, "expected_seconds": spent + REST + rows.LAST_SECONDS}
  assert clock.facts == pytest.approx(expected)
  # Whatever was expected, nothing goes on after the end.
  monkeypatch.setattr(time, "perf_counter", lambda: 1e9)
  assert clock() == math.isfinite(end)


def test_a_resumed_run_needs_the_rest_alone(monkeypatch):
  tell_times(monkeypatch, 0.0, 0.0, 2.0)
  clock = rows.Clock(1e6, PLAN, 400, lambda: None)
  assert not any(clock() for _ in range(rows.MEASURED + 2))
  rest = (68 + 7) * 2.0 + rows.SAVE_SECONDS
  assert clock.facts["expected_seconds"] == pytest.approx(62 + rest + rows.LAST_SECONDS)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_update_of_the_next_run_is_compiled_while_one_trains(tmp_path, monkeypatch):
  monkeypatch.setattr(rows, "MEASURED", 2)
  config = helpers.small_config(helpers.write_text(tmp_path / "text.txt"), num_steps=5)
  asked = []
  end = time.perf_counter() + 1e6
  rows.train(config, tmp_path / "run", end, following=lambda: asked.append(1))
  assert asked == [1]
  rows.Plan.make(config, tmp_path / "other").compile()  # What the thread does.
