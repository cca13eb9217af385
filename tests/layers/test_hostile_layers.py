"""What no layer can have as a field, or take as an input, is refused by its name."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import layers
from tests.ops.test_arrays import NOTHING

X, TOKENS, STARTS = np.full((2, 7, 6), 0.5, np.float32), np.full((2, 7), 3), np.eye(7, dtype=int)
STARTS = STARTS[[0, 0]]
HEADS = dict(num_heads=3, max_length=9)
PARTS = ("mixer", "feed_forward", "mixer_norm", "feed_forward_norm")
# The fields of every layer, besides those that it has by default, and its inputs.
LAYERS = [
  (layers.Dispatcher, HEADS | dict(num_levels=2), dict(inputs=X, document_starts=STARTS)),
  (layers.MultiHeadDispatcher, HEADS, dict(inputs=X)),
  (layers.SelfAttention, HEADS | dict(rotary_base=5.0), dict(inputs=X, document_starts=STARTS)),
  (layers.RelativeAttention, HEADS, dict(inputs=X, document_starts=STARTS)),
  (layers.LocalAttention, HEADS, dict(inputs=X)),
  (layers.ShortConvolution, dict(max_length=9), dict(inputs=X, document_starts=STARTS)),
  *((getattr(layers, x), dict(max_length=9), dict(inputs=X)) for x in ("ME", "WE", "HE", "SHE")),
  (layers.FeedForward, dict(hidden_width=5, out_width=4), dict(inputs=X)),
  (
    layers.Block,
    dict(mixer=layers.ME(max_length=9), feed_forward=layers.FeedForward(5))
    | dict(mixer_norm=layers.Norm(), feed_forward_norm=layers.Norm()),
    dict(inputs=X),
  ),
  (layers.Norm, {}, dict(x=X)),
  (
    layers.TokenAndPosition,
    dict(vocab_size=5, width=6, max_length=9),
    dict(tokens=TOKENS, document_starts=STARTS),
  ),
  (layers.Fixed, dict(offset=0), dict(hidden=X, tokens=TOKENS, document_starts=STARTS)),
  (layers.Whitespace, dict(space_ids=(0, 3)), dict(hidden=X, tokens=TOKENS)),
  (layers.SpaceByte, dict(space_ids=(0, 3), end_ids=(3,)), dict(hidden=X, tokens=TOKENS)),
  *(
    (kind, dict(predictor_width=5), dict(hidden=X, tokens=TOKENS))
    for kind in (layers.Unigram, layers.EntropySpikes, layers.Gumbel, layers.FlexiTokens)
  ),
  (layers.Routing, dict(width=6), dict(hidden=X, tokens=TOKENS, document_starts=STARTS)),
]
# Fields that are no settings of the layer itself, and inputs that it does not read.
FREE = ("parent", "name", *PARTS, "file", "target_schedule", "space_ids of Gumbel")
FREE += ("space_ids of FlexiTokens", "inputs of Fixed")
UNREAD = ("hidden of Whitespace", "hidden of SpaceByte", "tokens")


def wrong(value):
  """Values of other kinds and sizes than a field's."""
  if isinstance(value, bool):
    return [None, 2, 0.5, "x", []]
  if isinstance(value, int):
    return [None, 0, -1, 2.5, 2**40, "x", [value], math.nan]
  if isinstance(value, float):
    return [None, -1, 1j, math.nan, math.inf, "x", [value], np.ones(3)]
  if isinstance(value, str):
    return [None, "nope", 3, []]
  if isinstance(value, tuple):
    return [None, 3, "ab", (2.5,), (-1,), (2**40,), (None,)]
  return ["nope", int, None, 3, jnp.complex64]  # dtype


@pytest.mark.parametrize("layer, fields, inputs", LAYERS, ids=[x.__name__ for x, *_ in LAYERS])
def test_a_layer_names_what_is_wrong(layer, fields, inputs):
  def run(fields, inputs):
    def init(key):
      return layer(**fields).init({"params": key, "dropout": key}, **inputs)

    return jax.eval_shape(init, jax.random.key(0))

  known = dataclasses.fields(layer)
  valid = {x.name: getattr(layer(**fields), x.name) for x in known}
  defaults = {x.name: x.default for x in known}
  run(fields, inputs)
  # Lists of numbers are arrays.
  run(fields, jax.tree.map(np.ndarray.tolist, inputs))
  changed = [
    (name, value, fields | {name: value}, inputs)
    for name, old in valid.items()
    if old is not None and name not in FREE and f"{name} of {layer.__name__}" not in FREE
    for value in wrong(old)
    if value is not defaults[name] and value is not old
  ] + [
    (name, value, fields, inputs | {name: value})
    for name in inputs
    if name not in UNREAD and f"{name} of {layer.__name__}" not in UNREAD
    for value in NOTHING
    if value is not None or name != "document_starts"
  ]
  complaints = []
  for name, value, *arguments in changed:
    try:
      run(*arguments)
    except ValueError as error:
      if str(error).startswith(f"{name}: expected "):
        continue
      complaints.append(f"{name} = {value!r}: {error}")
    except Exception as error:
      complaints.append(f"{name} = {value!r}: {type(error).__name__} {str(error)[:200]}")
    else:
      complaints.append(f"{name} = {value!r} is taken")
  assert not complaints, "\n".join(complaints)


MIXER = layers.ME(max_length=9)
EMBEDDING = layers.TokenAndPosition(vocab_size=5, width=6, max_length=9)


def step(x, context):
  return MIXER.init(jax.random.key(0), x, MIXER.init_cache(2, 6), context, method="step")


@pytest.mark.parametrize(
  "call, field",
  [
    (lambda context: MIXER.init(jax.random.key(0), X, context), "document_starts"),
    (lambda context: EMBEDDING.init(jax.random.key(0), TOKENS, context), "document_starts"),
    (lambda context: EMBEDDING.init(jax.random.key(0), TOKENS, context), "num_before"),
    (lambda context: step(X, context), "lengths"),
  ],
)
def test_a_layer_names_what_is_wrong_in_a_context(call, field):
  for value in NOTHING:
    if value is None:
      continue
    with pytest.raises(ValueError, match=f"^{field}: expected "):
      call(layers.Context(**{field: value}))
