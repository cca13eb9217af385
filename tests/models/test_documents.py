"""Packed documents in whole models: each gives what it gives alone."""

import jax
import numpy as np
import pytest

import dpjax
from dpjax.models import PoolingHints
from dpjax.models.build import build_boundaries
from dpjax.training import losses
from tests import helpers

BATCH, LENGTH, LONGEST, VOCAB, SPACE = 2, 23, 16, 11, 2
DOCUMENTS = [(1, 13, 1, 2, 6), (4, 3, 16)]
STARTS = np.zeros((BATCH, LENGTH), np.int32)
PARTS = []
for row, sizes in enumerate(DOCUMENTS):
  ends = np.cumsum(sizes)
  STARTS[row, ends - sizes] = 1
  PARTS += [(row, slice(end - n, end)) for end, n in zip(ends, sizes, strict=True)]
DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(VOCAB, size=(BATCH, LENGTH))
BATCH_OF = dict(
  tokens=TOKENS,
  targets=DRAW.integers(VOCAB, size=(BATCH, LENGTH)),
  weights=(DRAW.uniform(size=(BATCH, LENGTH)) < 0.9).astype(np.float32),
  boundaries=(DRAW.uniform(size=(BATCH, LENGTH)) < 0.4).astype(np.int32),
)
NOISE = DRAW.uniform(0.1, 0.9, (BATCH, LENGTH)).astype(np.float32)


def split(x, fill=0):
  """Documents as rows of their own, filled up behind."""
  rows = np.full((len(PARTS), LONGEST), fill, x.dtype)
  for index, (row, part) in enumerate(PARTS):
    rows[index, : part.stop - part.start] = x[row, part]
  return rows


def join(rows):
  packed = np.zeros((BATCH, LENGTH, *rows.shape[2:]), rows.dtype)
  for index, (row, part) in enumerate(PARTS):
    packed[row, part] = rows[index, : part.stop - part.start]
  return packed


def pooled(boundaries, mixer="relative_attention", inner=None):
  one = dict(num_layers=1)
  config = helpers.model_settings(mixer, boundaries, first=one, last=one, **one)
  if inner is not None:
    config.middle = dpjax.config.middle(inner, width=10)
    config.middle.first.num_layers = config.middle.last.num_layers = 1
  return config


section = dpjax.config.boundaries
SPACES = dict(space_ids=(SPACE, 3, 4), num_buckets=2)
CASES = {
  "dispatcher": helpers.model_settings("dispatcher", positions="sinusoidal", num_layers=1),
  "learned positions": helpers.model_settings("relative_attention", positions="learned"),
  "fixed": pooled(section("fixed", shortening_factor=3, offset=0, pooling="last")),
  "unigram": pooled(section("unigram", num_buckets=2)),
  "entropy": pooled(section("entropy", num_buckets=2), "attention"),
  "gumbel": pooled(section("gumbel", **SPACES)),
  "entropy_threshold": pooled(
    section("entropy_threshold", run="a", rule="monotonic", theta=0.0, num_buckets=2), "dispatcher"
  ),
  "two stages": pooled(section("whitespace", **SPACES), inner=section("gumbel", num_buckets=3)),
}


def build(config):
  """The model; BLT's boundaries read with another one."""
  frozen = None
  if config.boundaries.name == "entropy_threshold":
    sizes = dict(width=4, feed_forward_width=7, max_length=31)
    frozen = dpjax.build_model(helpers.model_settings("he", positions="sinusoidal", **sizes))
  return dpjax.build_model(config, frozen)


@pytest.mark.parametrize(
  "case", [helpers.slow_unless(case == "dispatcher", case) for case in CASES]
)
def test_documents_are_as_alone(case):
  config = CASES[case]
  model, objective = build(config), losses.Objective(build_boundaries(config))
  params, is_noisy = helpers.draw_params(model, 3, 1 / 2), case == "gumbel"

  @jax.jit
  def run(params, batch, noise):
    def total(params):
      inputs = {"document_starts": batch["document_starts"]} if "document_starts" in batch else {}
      inputs |= {"pooling": PoolingHints(noise=noise)} if is_noisy else {}
      output = model.apply({"params": params}, batch["tokens"], **inputs)
      sums = objective.sums(output, batch)
      return sums["nats"] + sums.get("boundary_nats", 0.0), (output.logits, sums)

    return jax.value_and_grad(total, has_aux=True)(params)

  (loss, (logits, sums)), grads = run(params, BATCH_OF | {"document_starts": STARTS}, NOISE)
  separate = {name: split(x) for name, x in BATCH_OF.items()}
  (expected, (rows, of_rows)), by_rows = run(params, separate, split(NOISE, 0.5))
  np.testing.assert_allclose(logits, join(np.asarray(rows)), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  # But for what is told of rows, of which there are other ones.
  for name in {*sums} - {"segments_max", "rows", "positions", "slots"}:
    np.testing.assert_allclose(sums[name], of_rows[name], rtol=2e-5, err_msg=name)
  scale = max(abs(x).max() for x in jax.tree.leaves(by_rows))
  grads, by_rows = (jax.tree.map(lambda x: x / scale, tree) for tree in (grads, by_rows))
  helpers.assert_trees_close(grads, by_rows, rtol=1e-4, atol=1e-5)


def test_refusals():
  model = dpjax.build_model(CASES["dispatcher"])
  params = helpers.draw_params(model, 3, 1 / 2)
  for document_starts, message in (
    (STARTS[:, 1:], r"expected .*2 23.*, got int32\[2, 22\]"),
    (2 * STARTS, "expected zeros and ones, got 2"),
    (np.roll(STARTS, 1, axis=1), "expected every row to begin with 1, got 0 in row 0"),
  ):
    with pytest.raises(ValueError, match=f"^document_starts: {message}"):
      model.apply({"params": params}, TOKENS, document_starts=document_starts)
