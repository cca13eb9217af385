"""Every kind of boundaries through one contract; and the contract finds what is broken."""

from functools import partial

import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.typing import DTypeLike

import dpjax
from dpjax import layers, ops, testing
from dpjax.config import registry
from dpjax.layers import BoundaryOutput
from tests import helpers

VOCABULARY = 5


KINDS = {
  "fixed": partial(layers.Fixed, shortening_factor=3, offset=1),
  "whitespace": partial(layers.Whitespace, space_ids=(1, 4)),
  "spacebyte": partial(layers.SpaceByte, space_ids=(1, 2), end_ids=(0, 2)),
  "unigram": layers.Unigram,
  "entropy": layers.EntropySpikes,
  "gumbel": layers.Gumbel,
  "flexitokens": layers.FlexiTokens,
  "routing": layers.Routing,
}


def test_all_kinds_are_here():
  assert {"none", "entropy_threshold", *KINDS} == {*helpers.builtin(registry.boundaries)}


@pytest.mark.parametrize("relation", testing.BOUNDARY_RELATIONS)
@pytest.mark.parametrize("name", KINDS)
def test_keeps_the_contract(name, relation):
  testing.check_boundaries(KINDS[name], vocab_size=VOCABULARY, relations=[relation])


@pytest.fixture(scope="module")
def by_a_frozen_model():
  """Boundaries where the entropy of a small model, which is drawn with them, rises."""
  settings = helpers.model_settings("he", positions="sinusoidal", vocab_size=VOCABULARY)
  frozen = dpjax.build_model(settings)
  return partial(layers.EntropyThreshold, run="a", rule="monotonic", theta=0.0, frozen=frozen)


@pytest.mark.parametrize("relation", testing.BOUNDARY_RELATIONS)
def test_boundaries_by_a_frozen_model_keep_the_contract(by_a_frozen_model, relation):
  testing.check_boundaries(by_a_frozen_model, vocab_size=VOCABULARY, relations=[relation])


class EveryThird(layers.Boundaries):
  """A segment ends with every third position; right in all relations."""

  separates_documents = True

  def find(self, hidden, tokens, context, cache, noise):
    return BoundaryOutput(self.ends(hidden, context, cache), cache=cache)

  def ends(self, hidden, context, cache):
    position = jnp.broadcast_to(jnp.arange(hidden.shape[1]), hidden.shape[:2])
    if context.num_before is not None:
      position = position + context.num_before[:, None]
    if context.document_starts is not None:
      position = ops.document_positions(context.document_starts)
    return (position % 3 == 2).astype(jnp.int32)

  def init_cache(self, batch, width):
    return jnp.zeros(batch)


class Halves(EveryThird):
  def ends(self, hidden, context, cache):
    return super().ends(hidden, context, cache) / 2


class LooksAhead(EveryThird):
  def ends(self, hidden, context, cache):
    return (jnp.roll(hidden[..., 0], -1, axis=1) > 0).astype(jnp.int32)


class ReadsOtherRows(EveryThird):
  def ends(self, hidden, context, cache):
    return (hidden[..., 0] > hidden[:1, :, 0]).astype(jnp.int32)


class BeginsLate(EveryThird):
  reader = layers.Smoothing


class CountsChunks(EveryThird):
  def ends(self, hidden, context, cache):
    return super().ends(hidden, context.replace(num_before=None), cache)


class ForgetsItsLogits(EveryThird):
  def find(self, hidden, tokens, context, cache, noise):
    output = super().find(hidden, tokens, context, cache, noise)
    return output._replace(logits=hidden[..., 0]) if cache is None else output


class GrowsItsCache(EveryThird):
  def find(self, hidden, tokens, context, cache, noise):
    output = super().find(hidden, tokens, context, cache, noise)
    return output if cache is None else output._replace(cache=jnp.append(cache, 0))


class JoinsDocuments(EveryThird):
  def ends(self, hidden, context, cache):
    return super().ends(hidden, context.replace(document_starts=None), cache)


class CountsTooFew(EveryThird):
  def max_segments(self, length):
    return length // 3 - 1


class MiscountsRows(EveryThird):
  def count_segments(self, tokens):
    return tokens.sum(axis=1)


class AveragesRows(EveryThird):
  def loss(self, stage, batch, logits=None):
    return jnp.mean(batch["weights"]), None


class LosesByRow(EveryThird):
  def loss(self, stage, batch, logits=None):
    return jnp.sum(batch["weights"], axis=1), None


class CountsPadding(EveryThird):
  def loss(self, stage, batch, logits=None):
    return jnp.sum(stage.boundaries.astype(jnp.float32)), None


class LosesDigits(EveryThird):
  def find(self, hidden, tokens, context, cache, noise):
    output = super().find(hidden, tokens, context, cache, noise)
    return output._replace(logits=hidden[..., 0] + 256 - 256)


class Scales(EveryThird):
  """Its logits are a vector's first number, scaled by a parameter."""

  init_std: float = 0.0
  dtype: DTypeLike = jnp.float32

  def find(self, hidden, tokens, context, cache, noise):
    output = super().find(hidden, tokens, context, cache, noise)
    return output._replace(logits=self.scale().astype(self.dtype) * hidden[..., 0])

  @nn.compact
  def scale(self):
    return self.param("scale", nn.initializers.normal(self.init_std), (1, 1))


class HasSmallParameters(Scales):
  @nn.compact
  def scale(self):
    return self.param("scale", nn.initializers.ones, (1, 1), self.dtype)


class ChangesItsCachesDtype(Scales):
  def find(self, hidden, tokens, context, cache, noise):
    output = super().find(hidden, tokens, context, cache, noise)
    return output if cache is None else output._replace(cache=hidden[:, -1, 0])


class BeginsWithOnes(Scales):
  @nn.compact
  def scale(self):
    return self.param("scale", nn.initializers.ones, (1, 1))


BROKEN = [
  ("outputs", Halves, "expected boundaries of 0 and 1"),
  ("causality", LooksAhead, "boundaries, with another end from position"),
  ("causality", ReadsOtherRows, "boundaries, with another row beside it"),
  ("first_token", BeginsLate, "the first token of a row is no boundary"),
  ("chunks", CountsChunks, "boundaries, row 0 from position 5 on"),
  ("chunks", ForgetsItsLogits, "logits: not always given, row 0"),
  ("chunks", GrowsItsCache, "expected a cache"),
  ("documents", JoinsDocuments, "the document of row 0 from position 1 on"),
  ("counts", CountsTooFew, "max_segments: expected at least 5, got 4"),
  ("counts", MiscountsRows, "count_segments"),
  ("bfloat16", LosesDigits, "logits"),
  ("bfloat16", HasSmallParameters, "expected parameters of float32, got {'bfloat16'}"),
  ("bfloat16", ChangesItsCachesDtype, "expected a cache"),
  ("initial_values", BeginsWithOnes, "init_std has no effect"),
  ("loss", LosesByRow, r"expected one number, got the shape \(2,\)"),
  ("loss", AveragesRows, "the two rows apart"),
  ("loss", CountsPadding, "without padding"),
]


@pytest.mark.parametrize("relation, broken, message", BROKEN)
def test_the_contract_finds_what_is_broken(relation, broken, message):
  with pytest.raises(AssertionError, match=rf"(?s)^{relation}: .*{message}"):
    testing.check_boundaries(broken, relations=[relation])


def test_a_breakage_is_known_of_every_relation():
  assert {relation for relation, *_ in BROKEN} == {*testing.BOUNDARY_RELATIONS}
  testing.check_boundaries(EveryThird)
  testing.check_boundaries(Scales)


def test_wrong_arguments_are_refused():
  with pytest.raises(ValueError, match="^make: expected a subclass of dpjax.layers.Boundaries"):
    testing.check_boundaries(lambda: layers.WE(max_length=3))
  with pytest.raises(ValueError, match="^relations: expected one of .*got 'chunk'"):
    testing.check_boundaries(EveryThird, relations=["chunk"])
