import jax
import jax.numpy as jnp
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import ops, registry
from dpjax.layers import attention, dispatcher, extractors
from tests import helpers

LAYERS = {
  "dispatcher": dispatcher.Dispatcher,
  "dispatcher_multihead": dispatcher.MultiHeadDispatcher,
  "attention": attention.SelfAttention,
  "relative_attention": attention.RelativeAttention,
  "she": extractors.SHE,
  "he": extractors.HE,
  "we": extractors.WE,
  "me": extractors.ME,
}


def settings(mixer="dispatcher", boundaries="none", **changes):
  return helpers.model_settings(mixer, boundaries, max_length=13, **changes)


def init_shapes(model):
  tokens = jnp.zeros((1, 1), jnp.int32)
  return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


# The sizes of the paper (Sec. 3.3): width and feed-forward network 512, 6 layers, 512
# tokens; vocabularies are the types of the train split and 3 special tokens.
@pytest.mark.parametrize(
  "mixer, vocab_size, expected, in_millions",
  [
    ("dispatcher", 20_044, 26_882_636, 26.9),
    ("attention", 20_044, 30_013_004, 30.0),
    ("dispatcher", 8_558, 15_109_486, 15.1),
    ("attention", 8_558, 18_239_854, 18.2),
  ],
)
def test_parameter_counts(mixer, vocab_size, expected, in_millions):
  model = config_lib.default_model()
  model.update(mixer=mixer, vocab_size=vocab_size)
  leaves = jax.tree.leaves(init_shapes(dpjax.build_model(model)))
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
  assert sum(leaf.size for leaf in leaves) == expected
  assert round(expected / 1e6, 1) == in_millions
  width, levels = 512, 9
  mix = 2 * width**2 + levels * width
  if mixer == "attention":
    mix = 4 * width**2 + 4 * width
  feed_forward_and_norms = 2 * width**2 + 2 * width + 4 * width
  tables = (2 * width + 1) * vocab_size
  assert expected == tables + 6 * (mix + feed_forward_and_norms)


def attributes(component, expected):
  """Asserts that these have the values expected."""
  assert {name: getattr(component, name) for name in expected} == expected


@pytest.mark.parametrize("mixer", registry.mixers.names())
def test_every_setting_arrives(mixer):
  known = registry.mixers.settings(mixer)
  forms = ops.CAUSAL_CONVOLUTION if "adjustment" in known or mixer == "me" else (ops.SHIFT_AND_SUM)
  other = dict(num_heads=3, num_levels=2, level_dropout=0.3, dropout=0.3, use_bias=False)
  other |= dict(rotary_base=50.0)
  other |= dict(adjustment=False, output_projection=False, implementation=next(iter(forms)))
  assert known.keys() <= other.keys()
  own = {name: other[name] for name in known}
  config = settings(config_lib.mixer(mixer, **own))
  init = dict(init_std=0.4, norm_init_std=0.5)
  modern = dict(norm_kind="rms_norm", use_bias=False)
  shared = dict(norm="pre", activation="swiglu", dropout=0.1, hidden_dropout=0.2, **init, **modern)
  layers = dict(num_layers=3, scan_layers=False, remat=True)
  config.update(positions="learned", dtype="bfloat16", tie_embeddings=True, **shared, **layers)
  model = dpjax.build_model(config)
  bfloat16 = dict(dtype=jnp.bfloat16)
  sizes = dict(vocab_size=11, width=6, max_length=13, positions="learned", dropout=0.1)
  sizes |= modern | dict(tie_embeddings=True, final_norm=True, make_hourglass=None)
  attributes(model, sizes | init | bfloat16)
  attributes(model.layers, layers)
  has_positions = mixer == "relative_attention"
  assert model.layers.has_positions == (model.make_positions is not None) == has_positions
  if has_positions:
    attributes(model.make_positions(), dict(num_heads=3, dropout=0.1, init_std=0.4) | bfloat16)
  block = model.layers.make_block()
  attributes(block, dict(hidden_width=10) | shared | bfloat16)
  layer = block.make_mixer()
  assert type(layer) is LAYERS[mixer]
  attributes(layer, dict(max_length=13, init_std=0.4) | bfloat16 | own)


def test_what_is_left_open_is_the_best_and_the_longest():
  model = dpjax.build_model(settings())
  layer = model.layers.make_block().make_mixer()
  assert layer.implementation is None and layer.num_levels is None
  shapes = init_shapes(model)
  assert shapes["layers"]["mixer"]["gates"]["kernel"].shape == (2, 3, 4)


@pytest.mark.parametrize(
  "kind, own",
  [
    ("fixed", dict(shortening_factor=5, offset=3, pooling="last")),
    ("whitespace", dict(space_ids=(4, 7), num_capacities=3, pooling="last")),
    ("gumbel", dict(temperature=0.7, sample=True)),
  ],
)
def test_every_setting_of_the_pooling_arrives(kind, own):
  init = dict(init_std=0.4, norm_init_std=0.5)
  modern = dict(norm_kind="rms_norm", use_bias=False)
  config = settings(
    config_lib.mixer("attention", num_heads=2),
    config_lib.boundaries(kind, **own),
    first=dict(num_layers=1, mixer=config_lib.mixer("dispatcher", num_heads=2)),
    last=dict(num_layers=4, mixer=config_lib.mixer("relative_attention", num_heads=2)),
    **dict(num_layers=3, dtype="bfloat16", **init, **modern),
  )
  model = dpjax.build_model(config)
  assert model.layers is None and model.make_positions is None
  built = model.make_hourglass()
  attributes(built, dict(norm_init_std=0.5, dtype=jnp.bfloat16) | modern)
  boundaries = built.make_boundaries(name="boundary_predictor")
  given = dict(predictor_width=10, init_std=0.4, dtype=jnp.bfloat16) if kind == "gumbel" else {}
  own = {"pooling": "mean", **own}
  attributes(boundaries, given | {("pooling_method" if x == "pooling" else x): own[x] for x in own})
  assert type(boundaries) is registry.boundaries.component(kind)
  stacks = (built.first, built.middle, built.last)
  assert [stack.num_layers for stack in stacks] == [1, 3, 4]
  assert [stack.has_positions for stack in stacks] == [False, False, True]
  assert built.make_positions().num_heads == 2
  layers = [stack.make_block().make_mixer() for stack in stacks]
  names = ("dispatcher", "attention", "relative_attention")
  assert [type(layer) for layer in layers] == [LAYERS[name] for name in names]
  assert [layer.max_length for layer in layers] == [13, 14, 13]


def test_the_mixers_of_the_pooling_are_all_one_unless_they_are_named():
  built = dpjax.build_model(settings("she", "entropy")).make_hourglass()
  for stack in (built.first, built.middle, built.last):
    assert type(stack.make_block().make_mixer()) is LAYERS["she"]
  assert built.make_positions is None


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(vocab_size=0), "model.vocab_size: expected the tokenizer's size, got 0"),
    (
      dict(mixer=config_lib.mixer("dispatcher", num_heads=4)),
      "model.mixer.num_heads: expected a divisor of model.width = 6, g",
    ),
    (dict(dropout=1.0), "model.dropout: expected a probability"),
    (
      dict(mixer=config_lib.mixer("he", implementation="loop")),
      "model.mixer.implementation: expected one of None, sc",
    ),
    (dict(max_length=0), "model.max_length: expected at least 1, got 0"),
  ],
)
def test_refusals(changes, message):
  model = settings()
  model.update(changes)
  with pytest.raises(ValueError, match=message):
    dpjax.build_model(model)


def test_unknown_and_missing_keys_are_refused():
  model = settings().to_dict()
  dpjax.build_model(model)
  with pytest.raises(ValueError, match="model.num_layer: .*nearest.* model.num_layers"):
    dpjax.build_model(model | {"num_layer": 3})
  del model["norm"]
  with pytest.raises(ValueError, match="model.norm: expected a value"):
    dpjax.build_model(model)
