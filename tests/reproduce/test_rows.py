"""Rows within a time: measured, compiled ahead, left out with their seconds, and kept."""

import functools
import itertools
import math
import time
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from reproduce import rows
from tests import helpers

PLAN = SimpleNamespace(num_steps=500, num_saves=5, evaluation_updates=35.0)
# After 31 updates of 2 s: 468 updates, evaluations of 35 updates, 5 saves.
REST = (468 + 35) * 2.0 + 5 * rows.SAVE_SECONDS


@pytest.mark.parametrize("end, stops", [(math.inf, False), (130 + REST, False), (110 + REST, True)])
def test_a_run_is_stopped_once_its_updates_are_timed(monkeypatch, end, stops):
  times = itertools.chain([0.0], itertools.count(60.0, 2.0))
  monkeypatch.setattr(time, "perf_counter", lambda: next(times))
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
  times = itertools.chain([0.0], itertools.count(0.0, 2.0))
  monkeypatch.setattr(time, "perf_counter", lambda: next(times))
  clock = rows.Clock(1e6, PLAN, 400, lambda: None)
  assert not any(clock() for _ in range(rows.MEASURED + 2))
  rest = (68 + 7) * 2.0 + rows.SAVE_SECONDS
  assert clock.facts["expected_seconds"] == pytest.approx(62 + rest + rows.LAST_SECONDS)


@pytest.fixture
def standard_everywhere():
  """Standard promotion of types in all threads."""
  before = jax.config.values["jax_numpy_dtype_promotion"]
  jax.config.update("jax_numpy_dtype_promotion", "standard")
  yield
  jax.config.update("jax_numpy_dtype_promotion", before)


@pytest.fixture
def cache(tmp_path):
  """A folder for all that is compiled."""
  settings = {
    "jax_compilation_cache_dir": str(tmp_path / "compiled"),
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: jax.config.values[name] for name in settings}
  (tmp_path / "compiled").mkdir()
  for values in (settings, before):
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the settings once.
    if values is settings:
      yield tmp_path / "compiled"


@pytest.mark.usefixtures("standard_everywhere")
def test_the_next_update_is_compiled_while_a_run_trains(tmp_path, monkeypatch, cache):
  monkeypatch.setattr(rows, "MEASURED", 2)
  text = helpers.write_text(tmp_path / "text.txt")
  config = helpers.small_config(text, num_steps=5)
  other = helpers.small_config(text, num_steps=3, batch_size=2 * config.train.batch_size)

  def compiled():
    return {path.name for path in cache.glob("jit_run-*")}  # updates, not evaluations

  end = time.perf_counter() + 1e6
  plan = functools.partial(rows.Plan.make, other, tmp_path / "other")
  found = rows.train(config, tmp_path / "run", end, (rows.AUTHORS,), plan)
  assert len(before := compiled()) == 2
  assert rows.train(other, tmp_path / "other", end)["step"] == 3 and compiled() == before
  assert found["step"] == 5 and len(found["curve"]["loss"]) == 5
  assert found["expected_seconds"] > found["update_seconds"] > 0
  # All tokens but the first of each row, and what fills no row.
  perplexity, authors = (found["scores"][name] for name in ("perplexity", rows.AUTHORS))
  assert perplexity != authors and authors == pytest.approx(perplexity, rel=0.1)
