"""What drafts of the outer layers have right."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import speculation  # noqa: E402

SPACE, UNKNOWN, BATCH, LENGTH = 2, 0, 3, 8


def make():
  sizes = dict(boundaries="whitespace", space_ids=(SPACE,), first_layers=1, last_layers=1)
  config = helpers.tiny_model(num_layers=1, num_capacities=2, max_length=25, **sizes)
  model = dpjax.build_model(config)
  return SimpleNamespace(
    config=SimpleNamespace(model=config),
    model=model,
    params=helpers.draw_params(model, 5, 4.0),
    tokenizer=SimpleNamespace(unknown_id=UNKNOWN),
  )


def greedy(model, params, known, times):
  """The tokens after `known`, by full passes; the model has no cache here."""
  for _ in range(times):
    logits = jax.jit(model.apply)({"params": params}, known).logits
    known = jnp.concatenate([known, logits[:, -1:].argmax(-1)], axis=1)
  return np.asarray(known[:, -times:])


def test_drafts_are_greedy_decoding_that_ends_no_segment(monkeypatch):
  monkeypatch.setattr(speculation, "LENGTHS", (1, 4))
  run = make()
  rows = np.random.default_rng(0).integers(3, 11, size=(BATCH, LENGTH)).astype(np.int32)
  rows[:, [3, 6]] = SPACE
  found = np.asarray(speculation.right_tokens(run, rows))
  config = run.config.model.copy_and_resolve_references()
  assert config.boundaries.space_ids == (SPACE,)
  config.boundaries.space_ids = (UNKNOWN,)
  drafter = dpjax.build_model(config)
  # Up to the first boundary, the drafter's cache is one that it made itself.
  for t in range(4):
    own, drafted = (greedy(x, run.params, rows[:, : t + 1], 4) for x in (run.model, drafter))
    np.testing.assert_array_equal(found[:, t], (own == drafted).cumprod(1).sum(1))
  assert {0, 4} < {*found[:, :4].flat} and found.shape == rows.shape


def test_costs_are_layers_read():
  found = speculation.costs({1: 0.5, 3: 3}, 4.0, 2, 8)
  assert found["greedy"] == 4.0
  assert found["drafts"] == {1: pytest.approx(12 / 1.5), 3: 4.0}
