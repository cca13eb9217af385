"""What the loop reads of a step, and when."""

import types

import jax.numpy as jnp
import pytest

from dpjax.training import loop


def test_a_step_is_read_while_the_next_one_runs():
  read, reports = [], []
  reporter = types.SimpleNamespace(
    advance=read.append,
    report=lambda step, split, scores: reports.append((step, scores)),
    median=lambda num_steps: (sorted(read[-num_steps:])[num_steps // 2], num_steps),
  )
  batches = types.SimpleNamespace(batch_size=5, window=7)
  meter = loop._Meter(reporter, batches, log_every_steps=2, median_every=3)
  for step, loss in enumerate((3.0, 2.0, 4.0), 1):
    # The step was just started: only those before it have been read.
    meter.read_previous(step, {"loss": jnp.float32(loss), "grad_norm": jnp.float32(0.5)})
    assert read == [3.0, 2.0, 4.0][: step - 1]
  meter.read_pending()
  assert read == [3.0, 2.0, 4.0] and meter.mean == 4.0
  (step, scores), median = reports
  assert (step, scores["loss"], scores["mean_over_steps"]) == (2, 2.5, 2)
  assert median == (3, {"median_loss": 3.0, "median_over_steps": 3})
  meter.read_previous(4, {"loss": jnp.float32("nan"), "grad_norm": jnp.float32(0.5)})
  with pytest.raises(loop.NonFiniteError, match="Step 4: expected a finite loss, got nan"):
    meter.read_pending()
