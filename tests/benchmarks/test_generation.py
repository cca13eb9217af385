"""What the benchmark of generation runs is what it says, and so is what it prints."""

import lzma
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))  # As for a script that lies there.
from benchmarks import generation  # noqa: E402

LENGTHS = 16, 64
TINY: dict[str, Any] = dict(num_layers=1, width=6, feed_forward_width=5, num_heads=2)
TINY |= dict(vocab_size=11, model_tokens=3, model_repetitions=4, lengths=LENGTHS)
TINY |= dict(pooled_layers=(1, 1, 1), pooled_length=8, batches=(2,), pooled_repetitions=2)


def outputs_of(program):
  result = program.run(program.begin())
  return np.asarray(result[1] if isinstance(program, generation.Loop) else result)


def test_steps_of_the_dispatcher_are_the_window_that_they_are_compared_with():
  loop, again = generation.dispatcher_programs(13, 5, tokens=17)
  assert loop.tokens == 13
  stepped = outputs_of(loop)[:, 0, 0, 0]
  np.testing.assert_allclose(stepped, outputs_of(again)[0, :, 0], rtol=1e-4, atol=1e-5)


def test_steps_of_a_sum_are_the_window_that_they_are_compared_with():
  programs = generation.extractor_programs(67, 3, 2, with_pass=True)
  assert {name: x.tokens for name, x in programs.items()} == {
    "plain": 67,
    "online": 67,
    "recomputing": 1,
  }
  expected = outputs_of(programs["recomputing"])[0]
  for name in ("plain", "online"):
    for _ in range(2):  # A repetition begins where the first one did.
      np.testing.assert_allclose(
        outputs_of(programs[name])[:, 0, 0], expected, rtol=1e-4, atol=1e-5
      )


def test_a_cache_is_filled_but_for_the_tokens_to_come():
  cache = generation.attention_program("attention", 11, 6, 2, 3).begin()
  np.testing.assert_array_equal(cache.length, [8])
  assert cache.keys.shape == (1, 2, 11, 3) and np.all(np.asarray(cache.keys) != 0)


@pytest.mark.slow
def test_a_row_of_token_pooling():
  text = generation.read_text(None)[:400]
  (row,) = generation.compare_pooling(TINY, text)
  assert row["batch"] == 2 and row["length"] == 8
  ends = generation.pick_rows(text, 8, 2)[:, 4:] == generation.SPACE
  assert row["shortening_factor"] == 8 / ends.sum()
  assert row["middle_steps"] == ends.any(axis=0).mean()
  for name in ("vanilla", "whitespace"):
    found = row[name]
    assert found["tokens"] == 4 and found["repetitions"] == 2
    assert found["tokens_per_second"] == pytest.approx(2e6 / found["microseconds"])


class Clock:
  """Takes as long as it is told, and counts."""

  def __init__(self, monkeypatch):
    self.now = 0.0
    monkeypatch.setattr(generation.time, "perf_counter", lambda: self.now)

  def loop(self, times, carries=False):
    """A loop of two tokens, whose repetitions take so long; the first is the warm-up."""
    loop = object.__new__(generation.Loop)
    loop.tokens, loop.carries, loop._cache = 2, carries, jnp.int32(0)
    loop._constants = loop._inputs = None
    self._take(loop, times)
    return loop

  def again(self, times):
    program = object.__new__(generation.Pass)
    program.tokens, program.carries, program._arguments = 1, False, (None, None)
    self._take(program, times)
    return program

  def _take(self, program, times):
    times = iter(times)

    def run(_, cache, *inputs):
      self.now += next(times)
      return None if cache is None else cache + 1, ()

    program._compiled, program.temporary_mib, program.compile_seconds = run, 0.5, 7.0


def test_measures_pairs_means_of_stretches_and_few_long_passes(monkeypatch):
  clock = Clock(monkeypatch)
  programs = {
    "short": clock.loop([9, 2e-6, 4e-6, 8e-6]),
    "stretches": clock.loop([9, 2e-6, 4e-6, 24e-6], carries=True),
    "long": clock.again([9, 3e-6, 10e-6]),
  }
  found = generation.Measured(programs, 3)
  assert found.micros["short"] == pytest.approx([1, 2, 4])
  assert found.micros["long"] == pytest.approx([3, 10])
  assert found.row("short")["microseconds"] == pytest.approx(2)
  assert found.row("stretches")["microseconds"] == pytest.approx(5)
  assert found.ratio("long", "short") == pytest.approx(4)
  assert found.ratio("stretches", "short") == pytest.approx(2.5)
  # Stretches go on after one another, the warm-up apart; others begin anew.
  assert int(programs["stretches"]._cache) == 3 and int(programs["short"]._cache) == 0


class SomeCache(NamedTuple):
  length: jax.Array
  step: jax.Array


def test_a_cache_that_counts_otherwise_is_not_filled():
  cache = SomeCache(jnp.zeros(1, jnp.int32), jnp.zeros((), jnp.int32))
  with pytest.raises(ValueError, match="expected floats and lengths"):
    generation.filled(cache, 3)


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_reads_text(tmp_path, suffix):
  path = tmp_path / f"text{suffix}"
  path.write_bytes((lzma.compress if suffix else bytes)(b" ab z\n"))
  text = generation.read_text(path)
  np.testing.assert_array_equal(text, [1, 2, 0, 26])
  expected = {"name": path.name, "characters": 4, "shortening_factor": 4.0}
  assert generation.describe_text(path, text) == expected
  for data in (b"a B", b" "):
    path.with_suffix("").write_bytes(data)
    with pytest.raises(ValueError, match="expected letters a to z"):
      generation.read_text(path.with_suffix(""))


def test_made_up_words_are_as_long_as_those_of_text8():
  text = generation.read_text(None)
  assert set(np.unique(text)) == set(range(27))
  assert len(text) / (text == 0).sum() == pytest.approx(5.9, abs=0.05)
  assert not np.any((text[1:] == 0) & (text[:-1] == 0))


def test_picks_the_rows_that_are_most_like_the_text():
  windows = [[0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
  text = np.asarray(windows).ravel()
  # 6 of 16 are spaces; of the second halves none, one, two and one of two.
  np.testing.assert_array_equal(generation.pick_rows(text, 4, 2), [windows[1], windows[3]])
  with pytest.raises(ValueError, match="expected 20 characters, got 16"):
    generation.pick_rows(text, 4, 5)


def test_says_from_where_on_blocks_pay():
  for ratios, start in (
    ({2: 1.5, 4: 0.9, 8: 0.5}, 4),
    ({2: 0.9, 4: 1.0, 8: 0.5}, 8),
    ({2: 0.5, 4: 1.2}, None),
  ):
    sweep = [{"length": x, "online_over_plain": y} for x, y in ratios.items()]
    assert generation.pays_from(sweep) == start


def made_up(microseconds):
  return {
    "microseconds": microseconds,
    "tokens_per_second": 1e6 / microseconds,
    "temporary_mib": 0.25,
    "cache_mib": 3.0,
  }


def made(microseconds, recomputing=None, **more):
  again = {"recomputing": made_up(recomputing)} if recomputing else {}
  return {**more, **made_up(microseconds), **again}


def make_report():
  ring = dict(name="dispatcher", cache="ring", width=6, over_attention=0.01)
  we = dict(name="we", width=7, length=32, times_faster=12.5)
  operators = [
    made(5.0, 4e3, length=16, times_faster=99.0, over_shortest=1.0, **ring),
    made(5.0, 4e3, length=64, times_faster=1234.0, over_shortest=3.5, **ring),
    made(80.0, 70.0, cache="plain", **we),
    made(80.0, 70.0, cache="online", over_plain=0.08, **we),
  ]
  micros = dict(width=9, plain_microseconds=30.0, online_microseconds=33.0)
  sweep = [dict(micros, length=x, online_over_plain=y) for x, y in ((16, 1.1), (32, 0.7))]
  models = [
    made(2e4, 6e6, name=name, length=length, times_faster=50.0, over_attention=0.5)
    for length in LENGTHS
    for name in generation.MODELS
  ]
  pooling = [
    dict(
      dict(batch=batch, over_vanilla=ratio, shortening_factor=5.9, middle_steps=0.17),
      vanilla=made_up(1e4),
      whitespace=made_up(1e4 * ratio),
    )
    for batch, ratio in ((1, 0.45), (2, 0.8))
  ]
  report = {
    "settings": TINY,
    "models": models,
    "pooling": pooling,
    "operators": {"rows": operators, "sweep": sweep, "online_pays_from": 32},
    "text": {"name": "words", "characters": 2000, "shortening_factor": 5.85},
  }
  return report | {"bars": generation.make_bars(report)}


def test_bars_are_those_of_their_rows():
  bars = generation.make_bars(make_report())
  assert [(x["value"], x["kind"], x["bar"], x["met"]) for x in bars] == [
    (1234.0, "at least", 400, True),
    (3.5, "at most", 3, False),
    (0.08, "at most", 0.15, True),
    (0.45, "at most", 0.55, True),
  ]


def test_prints_tables_and_draws(tmp_path):
  generation.draw_figure(make_report(), tmp_path / "figure.png")
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
  lines = generation.make_tables(make_report()).splitlines()
  for line in (
    "| Dispatcher, ring | 64 | 6 | 5.00 | 4,000 | 1,234 | 0.0100 | - | 3.00 | 0.250 |",
    "| WE, online | 32 | 7 | 80.0 | 70.0 | 12.5 | - | 0.0800 | 3.00 | 0.250 |",
    "| 16 | 9 | 30.0 | 33.0 | 1.10 |",
    "The online cache costs less from L = 32 on.",
    "| relative attention | 16 | 20,000 | 50.0 | 6,000 | 50.0 | 0.500 | 3.00 | 0.250 |",
    "| 2 | 10,000 | 8,000 | 0.800 | 5.90 | 0.170 | 3.00 / 3.00 |",
    "Text: words, 2,000 characters, shortening factor 5.85.",
    "| Dispatcher, T = 64 over T = 16 | 3.50 | at most 3 | no |",
  ):
    assert line in lines, f"expected the line {line}"
  # Every row has as many cells as its head.
  heads = 0
  for line in lines:
    heads = line.count("|") if not heads else heads
    assert line.count("|") in (0, heads)
    heads = heads if line else 0


def test_settings_of_the_small_run_are_those_of_the_whole():
  assert generation.QUICK.keys() == generation.SETTINGS.keys()
  # The cases of --quick have both caches of a model of Extractors.
  from dpjax.layers import extractors

  for settings in (generation.QUICK, generation.SETTINGS):
    first, last = settings["lengths"]
    assert first < extractors.ONLINE_LENGTH <= last
    assert last % settings["model_repetitions"] == 0
