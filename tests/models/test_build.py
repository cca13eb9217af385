"""Settings become models: every one arrives, and wrong ones are refused."""

import jax.numpy as jnp
import pytest

import dpjax
from dpjax import layers, models, ops
from dpjax.config import registry
from dpjax.layers import attention
from dpjax.models.build import build_boundaries
from tests import helpers


def settings(mixer="dispatcher", boundaries="none", **changes):
  defaults = dict(max_length=13, positions="sinusoidal", activation="relu")
  return helpers.model_settings(mixer, boundaries, **defaults | changes)


BFLOAT16 = jnp.dtype("bfloat16")
DRAWN = dict(init_std=0.4, dtype=BFLOAT16)
# Of every model here; `norm` and `block` make the modules that they describe.
SETTINGS = dict(
  dtype="bfloat16", init_std=0.4, norm_init_std=0.5, use_bias=False, norm_position="pre"
)
SETTINGS |= dict(norm_type="rms_norm", norm_epsilon=1e-3, activation="swiglu")
SETTINGS |= dict(dropout=0.1, hidden_dropout=0.2)
OPTIONS = dict(num_heads=3, num_levels=2, level_dropout=0.3, dropout=0.3, use_bias=False)
OPTIONS |= dict(rotary_features=2, expand=2, state_width=5, head_width=4)
OPTIONS |= dict(rotary_base=50.0, window=5, num_taps=4, adjustment=False, output_projection=False)
OPTIONS |= dict(state_width=5, head_width=3, expand=3)


def norm():
  return layers.Norm("rms_norm", BFLOAT16, 0.5, False, 1e-3)


def block(mixer, max_length=13, **options):
  """A block as the settings above describe it."""
  layer = registry.mixers.component(mixer)
  if mixer == "relative_attention":
    options["position_dropout"] = 0.1
  feed_forward = layers.FeedForward(10, "swiglu", 0.2, use_bias=False, **DRAWN)
  parts = layer(max_length=max_length, **options, **DRAWN), feed_forward, norm(), norm()
  return layers.Block(*parts, is_pre_norm=True, dropout=0.1)


def positions(num_heads):
  return attention.SharedPositions(num_heads, 0.1, **DRAWN)


@pytest.mark.parametrize("mixer", helpers.builtin(registry.mixers))
def test_every_setting_arrives(mixer):
  names = registry.mixers.settings(mixer).keys() - {"has_feed_forward"}
  forms = ops.CAUSAL_CONVOLUTION if "adjustment" in names or mixer == "me" else ops.SHIFT_AND_SUM
  options = OPTIONS | dict(implementation=next(iter(forms)))
  options = {name: options[name] for name in names}
  changes = dict(positions="learned", tie_embeddings=True, remat=True, scan_layers=False)
  config = settings(dpjax.config.mixer(mixer, **options), num_layers=3, **changes | SETTINGS)
  assert dpjax.build_model(config) == models.LanguageModel(
    *(11, 6, 13),
    models.Hourglass(
      models.Stack(3, (block(mixer, **options),), remat=True, scan_layers=False),
      shared_positions=positions(3) if mixer == "relative_attention" else None,
    ),
    **dict(positions="learned", tie_embeddings=True, dropout=0.1, use_bias=False),
    final_norm=norm(),
    **DRAWN,
  )


@pytest.mark.parametrize(
  "boundaries, options, derived",
  [
    ("fixed", dict(shortening_factor=5, offset=3, pooling="last"), {}),
    ("gumbel", dict(temperature=0.7, sample=True), dict(predictor_width=10, **DRAWN)),
  ],
)
def test_every_setting_of_the_pooling_arrives(boundaries, options, derived):
  last = dict(mixer=dpjax.config.mixer("relative_attention", num_heads=2), num_layers=4)
  first = dict(mixer=dpjax.config.mixer("dispatcher"), num_layers=1)
  section = dpjax.config.boundaries(boundaries, **options)
  config = settings("attention", section, num_layers=3, first=first, last=last, **SETTINGS)
  predictor = registry.boundaries.component(boundaries)(**options, **derived)
  stage = models.Stage(
    width=6,
    first=models.Stack(1, (block("dispatcher"),)),
    boundaries=predictor,
    last=models.Stack(4, (block("relative_attention", num_heads=2),)),
    inner_norm=norm(),
    shared_positions=positions(2),
    **DRAWN,
  )
  layers_within = models.Stack(3, (block("attention", 14, num_heads=2),))
  assert dpjax.build_model(config).core == models.Hourglass(layers_within, (stage,))
  assert build_boundaries(config) == (predictor,)


def two_stages(inner="fixed", width=10, **changes):
  changes |= {name: dict(num_layers=1) for name in ("first", "last")}
  stage = dpjax.config.middle(inner, width=width)
  stage.first.num_layers = stage.last.num_layers = 1
  return settings("relative_attention", "routing", middle=stage, **changes)


def test_the_settings_of_the_frame_arrive():
  frame = dict(stack_norms=True, residual_dtype="float32", middle_resize="padding")
  frame |= dict(scale_outputs=True, embedding_std=0.7)
  config = two_stages(width=15)
  config.update(**frame, norm_position="pre", mixer=dpjax.config.mixer("attention", num_heads=3))
  bare = dpjax.config.mixer("dispatcher", has_feed_forward=False)
  config.first.update(mixer=(dpjax.config.mixer("me"), bare), num_layers=3)
  model = dpjax.build_model(config)
  outer, inner = model.core.stages
  innermost = model.core.layers
  assert (model.final_norm, model.embedding_std) == (None, 0.7)
  for stage in (outer, inner):
    assert stage.first.out_norm and stage.last.out_norm
    assert stage.first.residual_dtype == stage.last.residual_dtype == jnp.float32
  assert innermost.out_norm
  assert (outer.pads, outer.inner_width, inner.inner_width) == (True, 15, None)
  # Branches: 2 + 1 + 2 and 2 in the outer stage, 2 and 2 in the inner one, 4 innermost.
  network, none = (block.feed_forward for block in outer.first.blocks)
  within = [stack.blocks[0].mixer.out_scale for stack in (inner.first, innermost)]
  assert none is None and network.out_scale == 7**-0.5 and within == [11**-0.5, 15**-0.5]
  assert [mixer.out_scale for mixer in outer.first.mixers] == [7**-0.5] * 2
  plain = settings(norm_position="pre", stack_norms=True, residual_dtype="float32")
  assert dpjax.build_model(plain).final_norm is not None


def threshold(**changes):
  section = dpjax.config.boundaries("entropy_threshold", **dict(run="a", theta=1.0) | changes)
  return settings(boundaries=section)


def rotary(features):
  return settings(dpjax.config.mixer("attention", num_heads=3, rotary_features=features))


# tests/test_config.py and tests/test_hostile.py have those of single settings.
REFUSED = [
  (settings(vocab_size=0), "vocab_size: expected the tokenizer's size, got 0"),
  (
    settings(boundaries=dpjax.config.boundaries("routing", weight=-0.1)),
    "boundaries.weight: expected at least 0",
  ),
  (threshold(run=""), "boundaries.run: expected the folder of a run, got ''"),
  (threshold(theta=None), "boundaries.theta: expected a number, which dpjax calibrate"),
  (threshold(rule="globl"), "boundaries.rule: expected one of global, .*; did you mean global"),
  (threshold(theta_add=0.1), "boundaries.theta_add: expected 0 with the rule global, got 0.1"),
  (
    two_stages(inner="whitespace"),
    "middle.boundaries: .* none, fixed, gumbel, flexitokens, routing",
  ),
  (
    two_stages(inner=dpjax.config.boundaries("gumbel", sample=True)),
    "middle.boundaries: .* in evaluation, got gumbel",
  ),
  (two_stages(width=9), "m.*num_heads: expected a divisor of the width 9"),
  (
    two_stages(width=4, middle_resize="padding"),
    "middle.width: expected 0 or at least the 6 around it",
  ),
  (settings(stack_norms=True), "stack_norms: expected False with model.norm_position = p"),
  (settings(residual_dtype="float32"), "residual_dtype: expected model with model.norm_p"),
  (
    rotary(4),
    "mixer.rotary_features: expected None or at most the 2 features of a head, got 4",
  ),
  (
    rotary(3),
    "mixer.rotary_features: expected None or an even number from 2 on, got 3",
  ),
]


@pytest.mark.parametrize("config, message", REFUSED)
def test_refusals(config, message):
  with pytest.raises(ValueError, match=f"^model.{message}"):
    dpjax.build_model(config)


def test_layers_that_cannot_share_their_positions_are_named():
  mixers = [dpjax.config.mixer("relative_attention", num_heads=heads) for heads in (2, 3)]
  message = r"equal ones, got SharedPositions\(num_heads=2, .*SharedPositions\(num_heads=3, "
  with pytest.raises(ValueError, match=message):
    dpjax.build_model(settings(tuple(mixers)))
