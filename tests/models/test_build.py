"""Settings become models: every one arrives, and wrong ones are refused."""

import jax.numpy as jnp
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import ops
from dpjax.config import registry
from dpjax.models.build import build_boundaries
from tests import helpers


def settings(mixer="dispatcher", boundaries="none", **changes):
  usual = dict(max_length=13, positions="sinusoidal", activation="relu")
  return helpers.model_settings(mixer, boundaries, **usual | changes)


def check_attributes(component, expected):
  assert {name: getattr(component, name) for name in expected} == expected


@pytest.mark.parametrize("mixer", registry.mixers.names())
def test_every_setting_arrives(mixer):
  known = registry.mixers.settings(mixer)
  forms = ops.CAUSAL_CONVOLUTION if "adjustment" in known or mixer == "me" else ops.SHIFT_AND_SUM
  other = dict(num_heads=3, num_levels=2, level_dropout=0.3, dropout=0.3, use_bias=False)
  other |= dict(rotary_base=50.0, window=5, num_taps=4)
  other |= dict(adjustment=False, output_projection=False, implementation=next(iter(forms)))
  own = {name: other[name] for name in known}
  init = dict(init_std=0.4, norm_init_std=0.5)
  modern = dict(norm_type="rms_norm", use_bias=False)
  shared = dict(
    norm_position="pre", activation="swiglu", dropout=0.1, hidden_dropout=0.2, **init, **modern
  )
  layers = dict(num_layers=3, scan_layers=False, remat=True)
  changes = dict(positions="learned", dtype="bfloat16", tie_embeddings=True, **shared, **layers)
  model = dpjax.build_model(settings(config_lib.mixer(mixer, **own), **changes))
  bfloat16 = dict(dtype=jnp.bfloat16)
  sizes = dict(vocab_size=11, width=6, max_length=13, positions="learned", dropout=0.1)
  sizes |= modern | dict(tie_embeddings=True, final_norm=True, make_hourglass=None)
  check_attributes(model, sizes | init | bfloat16)
  assert model.layers is not None
  check_attributes(model.layers, layers)
  has_positions = mixer == "relative_attention"
  assert model.layers.has_positions == (model.make_positions is not None) == has_positions
  if model.make_positions is not None:
    positions = model.make_positions()
    check_attributes(positions, dict(num_heads=3, dropout=0.1, init_std=0.4) | bfloat16)
  check_attributes(model.layers.make_block(), dict(hidden_width=10) | shared | bfloat16)
  (layer,) = model.layers.make_mixers()
  assert type(layer) is registry.mixers.component(mixer)
  check_attributes(layer, dict(max_length=13, init_std=0.4) | bfloat16 | own)


@pytest.mark.parametrize(
  "kind, own, filled",
  [
    ("fixed", dict(shortening_factor=5, offset=3, pooling="last"), {}),
    ("whitespace", dict(space_ids=(4, 7), num_buckets=3, pooling="last"), {}),
    (
      "gumbel",
      dict(temperature=0.7, sample=True),
      dict(predictor_width=10, init_std=0.4, dtype=jnp.bfloat16),
    ),
  ],
)
def test_every_setting_of_the_pooling_arrives(kind, own, filled):
  stacks = dict(
    first=dict(num_layers=1, mixer=config_lib.mixer("dispatcher")),
    last=dict(
      num_layers=4, mixer=helpers.component(registry.mixers, "relative_attention", num_heads=2)
    ),
  )
  init = dict(init_std=0.4, norm_init_std=0.5, dtype="bfloat16")
  modern = dict(norm_type="rms_norm", use_bias=False)
  config = settings(
    "attention", config_lib.boundaries(kind, **own), num_layers=3, **stacks, **init, **modern
  )
  model = dpjax.build_model(config)
  assert model.layers is None and model.make_positions is None
  built = model.make_hourglass()
  check_attributes(built, dict(norm_init_std=0.5, dtype=jnp.bfloat16) | modern)
  (boundaries,) = build_boundaries(config)
  assert type(boundaries) is registry.boundaries.component(kind)
  check_attributes(boundaries, own | filled)
  stacks = (built.first, built.middle, built.last)
  assert [stack.num_layers for stack in stacks] == [1, 3, 4]
  assert [stack.has_positions for stack in stacks] == [False, False, True]
  assert built.make_positions().num_heads == 2
  layers = [layer for stack in stacks for layer in stack.make_mixers()]
  names = ("dispatcher", "attention", "relative_attention")
  assert [type(layer) for layer in layers] == [registry.mixers.component(x) for x in names]
  assert [layer.max_length for layer in layers] == [13, 14, 13]


def two_stages(outer=None, inner=None, **middle):
  first = dict(num_layers=1)
  stage = config_lib.middle(inner or config_lib.boundaries("fixed"), **dict(width=10) | middle)
  stage.first.num_layers = stage.last.num_layers = middle.get("layers", 1)
  return settings("relative_attention", outer or "routing", middle=stage, first=first, last=first)


THRESHOLD = dict(run="a", theta=1.0)


def kind(name, **own):
  return lambda: settings("dispatcher", config_lib.boundaries(name, **own))


def threshold(**own):
  return kind("entropy_threshold", **THRESHOLD | own)


def stage(name, **own):
  return lambda: two_stages(inner=config_lib.boundaries(name, **own))


# tests/test_config.py and tests/test_hostile.py have those of single settings.
@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: settings(vocab_size=0), "vocab_size: expected the tokenizer's size, got 0"),
    (kind("routing", weight=-0.1), "boundaries.weight: expected at least 0"),
    (threshold(run=""), "boundaries.run: expected the folder of a run, got ''"),
    (threshold(theta=None), "boundaries.theta: expected a number, which dpjax calibrate"),
    (threshold(rule="globl"), "boundaries.rule: expected one of global, .*; did you mean global"),
    (threshold(theta_add=0.1), "boundaries.theta_add: expected 0 with the rule global, got 0.1"),
    (threshold(pooling="max"), "boundaries.pooling: expected one of"),
    (stage("whitespace"), "middle.boundaries: .* none, fixed, gumbel, flexitokens, routing"),
    (stage("gumbel", sample=True), "middle.boundaries: .* in evaluation, got gumbel"),
    (lambda: two_stages(width=9), "m.*num_heads: expected a divisor of model.middle.width = 9"),
    (lambda: two_stages(width=-1), "middle.width: expected at least 0"),
    (lambda: two_stages(outer="none"), "first.num_layers: expected 2"),
  ],
)
def test_refusals(make, message):
  with pytest.raises(ValueError, match=f"^model.{message}"):
    dpjax.build_model(make())
