"""What is no valid argument is refused by its name, before anything is computed."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax.ops import checks

B, T, H, E, K, D, L, S, V, M, R = 2, 7, 3, 4, 5, 8, 11, 6, 13, 10, 17
KEY = jax.random.key(0)
LENGTHS = np.array([7, 5])
STARTS, ENDS = (np.eye(T, dtype=np.int32)[[place] * B] for place in (0, 4))
IDS = (0, 3)


def floats(*shape):
  return np.full(shape, 0.5, np.float32)


HEADS = dict.fromkeys(("queries", "keys", "values"), floats(B, T, H, E))
DISTANCES = dict(positions=floats(R, H, E), content_bias=floats(H, E), position_bias=floats(H, E))
DROP = dict(dropout_rate=0.1, dropout_key=KEY, block_size=5)
CHUNK = dict(lengths=LENGTHS)
GATES = dict(values=floats(B, T, H, E), gates=floats(B, T, H, K))
ATTENTION = ops.init_attention_cache(B, M, H, E)
TAPS = dict(inputs=floats(B, T, D), taps=floats(L, D))
ROUTE = dict(hidden=floats(B, T, D), query_kernel=floats(D, E), key_kernel=floats(D, E))
ENTROPY = dict(rule="combined", theta=1.0, theta_add=0.5)

# Of every public function a valid call; some functions have two.
CALLS = [
  ("num_levels", dict(max_length=9)),
  (
    "shift_and_sum",
    dict(**GATES, level_keep=np.ones(K, bool), document_starts=STARTS, implementation="loop"),
  ),
  ("dispatch_matrix", dict(gates=floats(B, T, H, K), level_keep=np.ones(K, bool))),
  ("init_shift_and_sum_cache", dict(batch=2, num_heads=3, features=4, num_levels=5)),
  ("shift_and_sum_cached", dict(**GATES, cache=ops.init_shift_and_sum_cache(B, H, E, K), **CHUNK)),
  (
    "causal_convolution",
    dict(
      inputs=floats(B, T, D), filters=floats(L, D), document_starts=STARTS, implementation="fft"
    ),
  ),
  ("causal_convolution", dict(inputs=floats(B, T, D), filters=floats(L, D, E))),
  ("init_convolution_cache", dict(batch=2, num_taps=11, width=8, dtype=jnp.float32)),
  ("init_online_convolution_cache", dict(batch=2, num_taps=11, width=8, block=4)),
  ("causal_convolution_cached", dict(**TAPS, cache=ops.init_convolution_cache(B, L, D), **CHUNK)),
  (
    "causal_convolution_cached",
    dict(**TAPS, cache=ops.init_online_convolution_cache(B, L, D, block=4)),
  ),
  ("causal_attention", dict(**HEADS, **DROP, document_starts=STARTS, window=3)),
  ("relative_attention", dict(**HEADS, **DISTANCES, **DROP, document_starts=STARTS)),
  ("relative_positions", dict(length=7, width=6)),
  ("init_attention_cache", dict(batch=2, max_length=10, num_heads=3, features=4)),
  ("causal_attention_cached", dict(**HEADS, cache=ATTENTION, **CHUNK)),
  ("relative_attention_cached", dict(**HEADS, **DISTANCES, cache=ATTENTION, **CHUNK)),
  ("local_attention_cached", dict(**HEADS, cache=ATTENTION, rotary_base=10.0, **CHUNK)),
  ("short_convolution", dict(inputs=floats(B, T, D), taps=floats(3, D), document_starts=STARTS)),
  ("init_short_convolution_cache", dict(batch=2, num_taps=3, width=8, dtype=jnp.float32)),
  (
    "short_convolution_cached",
    dict(inputs=floats(B, T, D), taps=floats(3, D), cache=floats(B, 2, D), **CHUNK),
  ),
  ("rotary_angles", dict(length=7, features=4, base=10.0)),
  ("rotate", dict(inputs=floats(B, T, H, E), angles=floats(1, T, E // 2))),
  ("check_boundaries", dict(boundaries=ENDS, shape=(B, T))),
  ("segment_ids", dict(boundaries=ENDS)),
  (
    "pool_segments",
    dict(
      inputs=floats(B, T, D), boundaries=ENDS, capacity=6, method="mean", document_starts=STARTS
    ),
  ),
  ("upsample_segments", dict(segments=floats(B, S, D), boundaries=ENDS, document_starts=STARTS)),
  ("segment_starts", dict(boundaries=ENDS, document_starts=STARTS, capacity=6)),
  ("init_segment_cache", dict(batch=2, width=8, dtype=jnp.float32)),
  (
    "pool_segments_cached",
    dict(
      inputs=floats(B, T, D),
      boundaries=ENDS,
      cache=ops.init_segment_cache(B, D),
      method="last",
      lengths=LENGTHS,
    ),
  ),
  ("capacities", dict(longest=9, number=4)),
  (
    "run_at_capacity",
    dict(function=lambda x: 2 * x, sizes=(3, 5, 7), needed=np.array(4), inputs=floats(B, T, D)),
  ),
  (
    "fixed_boundaries",
    dict(shape=(B, T), factor=3, offset=1, num_before=np.array([4, 0]), document_starts=STARTS),
  ),
  ("whitespace_boundaries", dict(tokens=ENDS, space_ids=IDS)),
  (
    "spacelike_boundaries",
    dict(
      tokens=ENDS, space_ids=IDS, end_ids=IDS, previous=np.ones(B, bool), document_starts=STARTS
    ),
  ),
  ("gumbel_sigmoid", dict(logits=floats(B, T), temperature=0.5, key=KEY)),
  ("gumbel_sigmoid", dict(logits=floats(B, T), temperature=0.5, noise=floats(B, T))),
  (
    "binomial_prior_loss",
    dict(boundaries=ENDS, alpha=0.2, weights=floats(B, T), document_starts=STARTS),
  ),
  (
    "rate_bounds_loss",
    dict(boundaries=ENDS, highest=0.3, lowest=0.2, weights=floats(B, T), document_starts=STARTS),
  ),
  ("conditional_entropy", dict(logits=floats(B, T, V))),
  ("entropy_spikes", dict(entropies=floats(B, T), left=2, document_starts=STARTS)),
  (
    "entropy_threshold",
    dict(
      entropies=floats(B, T),
      previous=(floats(B), np.ones(B, int)),
      document_starts=STARTS,
      **ENTROPY,
    ),
  ),
  ("entropy_theta", dict(entropies=floats(B, T), factor=2.0, rule="global", theta_add=0.0)),
  ("check_starts", dict(document_starts=STARTS, shape=(B, T))),
  ("document_places", dict(document_starts=STARTS)),
  ("dropout", dict(inputs=floats(B, T), rate=0.1, key=KEY)),
  ("relu_dropout", dict(inputs=floats(B, T), rate=0.1, key=KEY)),
  (
    "route",
    dict(**ROUTE, previous=floats(B, D), num_before=np.array([4, 0]), document_starts=STARTS),
  ),
  (
    "smooth_segments",
    dict(
      segments=floats(B, T, D),
      probabilities=floats(B, T),
      previous=floats(B, D),
      document_starts=STARTS,
    ),
  ),
  ("straight_through", dict(probabilities=floats(B, T), boundaries=ENDS)),
  (
    "ratio_loss",
    dict(boundaries=ENDS, probabilities=floats(B, T), factor=3.0, weights=floats(B, T)),
  ),
]


# Arguments that are real numbers of any kind, or whose values are 0 and 1.
NUMBERS, ONES = ("boundaries", "weights"), ("boundaries", "document_starts")
# What is no error: arguments that are not used, any rank or numbers, and infinite bounds.
ALLOWED = {
  ("causal_convolution", "filters, rank"),
  ("causal_convolution_cached", "taps, rank"),
  ("dropout", "inputs, rank"),
  ("entropy_threshold", "theta, -inf"),
  ("binomial_prior_loss", "boundaries, value"),
  ("rate_bounds_loss", "boundaries, value"),
  ("ratio_loss", "boundaries, value"),
  ("relu_dropout", "inputs, rank"),
  ("run_at_capacity", "inputs, rank"),
  ("run_at_capacity", "needed, None"),
}


class Stranger:
  """An object that cannot be an array."""

  def __array__(self, *arguments, **settings):
    raise RuntimeError("no array")


NOTHING = [(str(x), x) for x in (None, "abc", {}, [[1.0], [1.0, 2.0]])] + [("object", Stranger())]


def of_array(name, x):
  """Pairs of what is wrong and the wrong array."""
  yield from NOTHING
  yield from (("rank", x[None]), ("dtype", x.astype(np.complex64)))
  if x.ndim:
    yield "rank", x[0]
  for axis in range(x.ndim):
    yield "size", np.repeat(x, [2] + [1] * (x.shape[axis] - 1), axis)
    yield "size", x[(slice(None),) * axis + (slice(0),)]
  if name not in NUMBERS:
    is_float = x.dtype.kind == "f"
    yield from ((("dtype", x.astype(int)), ("dtype", x > 0)) if is_float else (("dtype", x + 0.5),))
  if name in ONES:
    yield from (("value", x + 2), ("value", -1 - x))


def of_cache(cache):
  for kind in (None, "abc", 3, (), tuple(cache), Stranger()):
    yield "type", kind
  for field, x in zip(cache._fields, cache, strict=True):
    if isinstance(x, tuple):
      changed = [("type", y) for y in (None, "abc", (), x[:-1], x * 2)]
    else:
      changed = of_array(field, np.asarray(x))
    for label, y in changed:
      yield label, cache._replace(**{field: y})


def changes(name, value):
  """Pairs of what is wrong and an argument in place of a valid one."""
  if isinstance(value, np.ndarray):
    return of_array(name, value)
  if hasattr(value, "_fields"):
    return of_cache(value)
  if isinstance(value, jax.Array):
    others = [None, 3, "abc", floats(2), jax.random.split(value), Stranger()]
  elif name == "dtype":
    others = [None, "abc", int, jnp.complex64, bool, 3]
  elif callable(value):
    others = [None, "abc", 3]
  elif isinstance(value, str):
    others = [None, "abc", 3, [], ["mean"], value.encode()]
  elif isinstance(value, int):
    others = [None, "3", 2.5, float(value), -1, 2**31, 2**40, math.nan, 1j, [value], True]
  elif isinstance(value, float):
    others = [None, "0.5", math.nan, -math.inf, 0.5j, [value], floats(3), True, Stranger()]
    others += [2**40, 2**80, 1e300]
  else:
    others = [None, 3, "ab", (2.5, 3), (-1, 2), (None, None), (1j,), ("a",), [[1]], Stranger()]
    others += [(2**31,), (0, 2**40)]
  return [(str(x), x) for x in others]


def complaints(name, signature, arguments, call):
  """The changed arguments that raise nothing, or an error that does not name them."""
  jax.block_until_ready(call(**arguments))
  for argument, value in arguments.items():
    for label, change in changes(argument, value):
      is_default = change is None and argument in signature and signature[argument].default is None
      if is_default or not ALLOWED.isdisjoint({(name, argument), (name, f"{argument}, {label}")}):
        continue
      try:
        call(**arguments | {argument: change})
      except Exception as error:
        named = str(error).partition(": expected ")[0].partition(".")[0]
        # The other of two arguments may be the one whose size is wrong.
        if isinstance(error, ValueError) and named in (
          arguments if label == "size" else [argument]
        ):
          continue
        got = f"{type(error).__name__}: {str(error)[:150]}"
      else:
        if label == "size" or change == 2**40 and isinstance(value, float):
          continue  # It is a free one, or has no bound.
        got = "no error"
      yield f"{argument}, {label}, {getattr(change, 'shape', change)!r:.40}: {got}"


@pytest.mark.parametrize("name, arguments", CALLS, ids=[name for name, _ in CALLS])
def test_an_operator_names_the_wrong_argument(name, arguments):
  function = getattr(ops, name)

  def call(**arguments):
    # Only shapes are computed, but what is closed over is concrete, so its values are checked.
    return jax.eval_shape(lambda: function(**arguments))

  if name == "entropy_theta":
    call = function  # which computes on the host
  signature = inspect.signature(function).parameters
  found = [*complaints(name, signature, arguments, call)]
  assert not found, "\n".join(found)


@pytest.mark.parametrize("integer", [2**40, np.int64(2**40)])
@pytest.mark.parametrize("name", ["highest", "lowest", "theta", "temperature", "factor"])
def test_an_integer_beyond_32_bits_is_the_float(name, integer):
  functions = [(getattr(ops, x), y) for x, y in CALLS if name in y and x != "fixed_boundaries"]
  for function, arguments in functions:
    expected, got = (function(**arguments | {name: x}) for x in (2.0**40, integer))
    np.testing.assert_array_equal(got, expected)


def test_the_table_is_complete():
  names = {name for name in ops.__all__ if name.islower()} - {"dot_general"}  # JAX's own
  names -= {"as_factor", "product_dtype"}
  assert {name for name, _ in CALLS} == names


def test_checks_add_nothing_to_a_traced_function():
  def check(x, ends, document_starts):
    x, ends, document_starts = checks.arrays(
      x=(x, "B T>=1 D", checks.FLOATS),
      ends=(ends, "B T", checks.ONES),
      document_starts=(document_starts, "B T | None", checks.STARTS),
    )
    return x, ends, ops.check_starts(document_starts, x.shape[:2])

  jaxpr = jax.make_jaxpr(check)(floats(B, T, D), ENDS, STARTS)
  assert not jaxpr.eqns and not jaxpr.consts
