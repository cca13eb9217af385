"""Packed documents in whole models: each gives what it gives alone."""

import jax
import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax.config import registry
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
  for place, (row, part) in enumerate(PARTS):
    rows[place, : part.stop - part.start] = x[row, part]
  return rows


def join(rows):
  packed = np.zeros((BATCH, LENGTH, *rows.shape[2:]), rows.dtype)
  for place, (row, part) in enumerate(PARTS):
    packed[row, part] = rows[place, : part.stop - part.start]
  return packed


def pooled(boundaries, mixer="dispatcher", **own):
  one = dict(num_layers=1)
  kind = helpers.component(registry.boundaries, boundaries, num_buckets=2, **own)
  return helpers.model_settings(mixer, kind, first=one, last=one, **one)


def two_stages(outer, inner):
  config = helpers.model_settings("relative_attention", outer, feed_forward_width=14, num_layers=1)
  config.middle = config_lib.middle(inner, width=10)
  for section in (config, config.middle):
    section.first.num_layers = section.last.num_layers = 1
  return config


def build(config):
  """The model; BLT's boundaries read with another one."""
  frozen = None
  if config.boundaries.name == "entropy_threshold":
    sizes = dict(width=4, feed_forward_width=7, max_length=31)
    frozen = dpjax.build_model(helpers.model_settings("he", positions="sinusoidal", **sizes))
  return dpjax.build_model(config, frozen)


plain, kind = helpers.model_settings, config_lib.boundaries
CASES = {
  "dispatcher": lambda: plain("dispatcher", positions="sinusoidal"),
  "multihead": lambda: plain("dispatcher_multihead", positions="learned"),
  "attention": lambda: plain("attention", positions="learned"),
  "rotary": lambda: plain(config_lib.mixer("attention", num_heads=2, rotary_base=50.0), width=8),
  **{name: lambda name=name: plain(name) for name in ("relative_attention", "she", "he", "we")},
  "me": lambda: plain("me"),
  "in turn": lambda: plain(("local_attention", "short_convolution"), num_layers=3),
  "fixed": lambda: pooled("fixed", "he", shortening_factor=3),
  "fixed, offset 0": lambda: pooled(
    "fixed", "relative_attention", shortening_factor=3, offset=0, pooling="last"
  ),
  "whitespace": lambda: pooled("whitespace", space_ids=(SPACE, 3, 4)),
  "spacebyte": lambda: pooled("spacebyte", space_ids=(SPACE, 5, 9), end_ids=(SPACE, 7)),
  "unigram": lambda: pooled("unigram", "relative_attention"),
  "entropy": lambda: pooled("entropy", "attention"),
  "gumbel": lambda: pooled("gumbel", "relative_attention", space_ids=(SPACE,)),
  "routing": lambda: pooled("routing", "relative_attention"),
  "entropy_threshold": lambda: pooled("entropy_threshold", run="a", rule="monotonic", theta=0.0),
  "two stages of routing": lambda: two_stages(
    kind("routing", num_buckets=2), kind("routing", factor=2.0, num_buckets=2)
  ),
  "whitespace, gumbel": lambda: two_stages(
    kind("whitespace", space_ids=(SPACE, 3, 4)), kind("gumbel", num_buckets=3)
  ),
}


@pytest.mark.parametrize(
  "case", [helpers.slow_unless(case == "dispatcher", case) for case in CASES]
)
def test_documents_are_as_alone(case):
  config = CASES[case]()
  model, objective = build(config), losses.Objective(build_boundaries(config))
  params, is_noisy = helpers.draw_params(model, 3, 1 / 2), case == "gumbel"

  @jax.jit
  def run(params, batch, noise):
    def total(params):
      given = {"document_starts": batch["document_starts"]} if "document_starts" in batch else {}
      given |= {"boundary_noise": noise} if is_noisy else {}
      output = model.apply({"params": params}, batch["tokens"], **given)
      sums = objective.sums(output, batch)
      return sums["nats"] + sums.get("boundary_nats", 0.0), (output.logits, sums)

    return jax.value_and_grad(total, has_aux=True)(params)

  (loss, (logits, sums)), grads = run(params, BATCH_OF | {"document_starts": STARTS}, NOISE)
  alone = {name: split(x) for name, x in BATCH_OF.items()}
  (expected, (rows, of_rows)), by_rows = run(params, alone, split(NOISE, 0.5))
  np.testing.assert_allclose(logits, join(np.asarray(rows)), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  # But for what is told of rows, of which there are other ones.
  for name in {*sums} - {"segments_max", "rows", "positions", "slots"}:
    np.testing.assert_allclose(sums[name], of_rows[name], rtol=1e-5, err_msg=name)
  scale = max(abs(x).max() for x in jax.tree.leaves(by_rows))
  grads, by_rows = (jax.tree.map(lambda x: x / scale, tree) for tree in (grads, by_rows))
  helpers.assert_trees_close(grads, by_rows, rtol=1e-4, atol=1e-5)


def test_refusals():
  model = dpjax.build_model(CASES["dispatcher"]())
  params = helpers.draw_params(model, 3, 1 / 2)
  for document_starts, message, given in (
    (STARTS[:, 1:], r"expected .*2 23.*, got int32\[2, 22\]", {}),
    (2 * STARTS, "expected zeros and ones, got 2", {}),
    (np.roll(STARTS, 1, axis=1), "expected every row to begin with 1, got 0 in row 0", {}),
    (STARTS, "expected none with a cache, got some", dict(cache=model.init_cache(BATCH))),
  ):
    with pytest.raises(ValueError, match=f"^document_starts: {message}"):
      model.apply({"params": params}, TOKENS, document_starts=document_starts, **given)
