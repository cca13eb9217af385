"""Wrong arguments of operators are refused by their names, before anything is computed."""

import inspect
import math
import typing
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jaxtyping import AbstractArray, Array, Float, Int32, PRNGKeyArray

from dpjax import ops
from dpjax.ops import arrays
from dpjax.ops.arrays import Binary, Real, Starts, typed
from tests import helpers

B, T, D, K, H, E, M = 2, 7, 5, 3, 4, 6, 8


class Cache(NamedTuple):
  ring: Float[Array, "B 2**K-1 D"]
  length: Int32[Array, "B"]


@typed
def mix(
  x: Float[Array, "B T D"],
  gates: Float[Array, "T K"] | Float[Array, "T K D"],
  cache: Cache | None = None,
  *,
  previous: tuple[Float[Array, "B"], Binary[Array, "B"]] | None = None,
  ends: Binary[Array, "B T"] | None = None,
  document_starts: Starts[Array, "B T"] | None = None,
  weights: Real[Array, "#B T"] | None = None,
  key: PRNGKeyArray | None = None,
  scale: float = 2.0,
):
  del cache, previous, ends, document_starts, weights, key
  return scale * x * gates[:, :1].reshape(gates.shape[0], -1)[None]


def floats(*shape):
  return jnp.full(shape, 0.5)


class Stranger:
  """An object that cannot be an array."""

  def __array__(self, *arguments, **settings):
    raise RuntimeError("no array")


NOTHING = [None, "abc", {}, [[1.0], [1.0, 2.0]], Stranger()]
ENDS, COUNTS = np.eye(T, dtype=np.int32)[[0, 0]], jnp.zeros(B, jnp.int32)
VALID = dict(
  x=floats(B, T, D),
  gates=floats(T, K),
  cache=Cache(floats(B, 2**K - 1, D), COUNTS),
  previous=(floats(B), np.ones(B, bool)),
  ends=ENDS,
  document_starts=ENDS,
  weights=np.ones((1, T), bool),
  key=jax.random.key(0),
)
WRONG = """
  x=floats(T, D) | x: expected Float[Array, 'B T D'], got float32[7, 5]
  x=jnp.ones((B, T, D), int) | x: expected Float[Array, 'B T D'], got int32[2, 7, 5]
  x=None | x: expected Float[Array, 'B T D'], got None
  x=[[1.0], [1.0, 2.0]] | x: expected Float[Array, 'B T D'], got list
  x=Stranger() | x: expected Float[Array, 'B T D'], got Stranger
  gates=floats(T - 1, K) | gates: expected {GATES} with B=2, T=7, D=5, got float32[6, 3]
  gates=floats(T, K, D + 1) | gates: expected {GATES} with B=2, T=7, D=5, got float32[7, 3, 6]
  cache=Cache(floats(B, 5, D), COUNTS) | cache.ring: expected Float[Array, 'B 2**K-1 D'] with B=2,
  cache=Cache(floats(B, 7, D), floats(B)) | cache.length: expected Int32[Array, 'B'] with B=2,
  cache=(floats(B, 7, D), COUNTS) | cache: expected Cache or None with B=2,
  previous=(floats(B), floats(B, 1)) | previous: expected Binary[Array, 'B'] with B=2,
  previous=floats(B) | previous: expected tuple[Float[Array, 'B'], Binary[Array, 'B']] or None with
  ends=ENDS + 2 | ends: expected zeros and ones, got 3
  ends=-ENDS | ends: expected zeros and ones, got -1
  document_starts=ENDS[:, ::-1] | document_starts: expected every row to begin with 1, got 0
  document_starts=ENDS / 1 | document_starts: expected Starts[Array, 'B T'] or None with B=2,
  weights=floats(3, T) | weights: expected Real[Array, '#B T'] or None with B=2,
  weights=1j * floats(B, T) | weights: expected Real[Array, '#B T'] or None with B=2,
  key=jax.random.split(VALID["key"]) | key: expected Key[Array, ''] or UInt32[Array, '2'] or
"""
GATES = "Float[Array, 'T K'] or Float[Array, 'T K D']"


@pytest.mark.parametrize("change, message", helpers.cases(WRONG))
def test_wrong_arrays_are_named(change, message):
  arguments = VALID | eval(f"dict({change})")
  # Under `jit`, of what is closed over as well.
  for call in (lambda: mix(**arguments), lambda: jax.eval_shape(lambda: mix(**arguments))):
    with pytest.raises(ValueError) as error:
      call()
    assert str(error.value).startswith(message.replace("{GATES}", GATES))
    assert "\n" not in str(error.value)


def test_array_likes_and_missing_arguments():
  listed = VALID | dict(gates=np.full((T, K), 0.5).tolist(), x=np.full((B, T, D), 0.5))
  np.testing.assert_array_equal(mix(**listed), floats(B, T, D))
  assert mix(floats(B, T, D), floats(T, K, D)).shape == (B, T, D)
  assert mix(**VALID | dict(cache=Cache(np.ones((B, 7, D), "f"), np.ones(B, "i")))) is not None
  with pytest.raises(TypeError, match="missing a required argument: 'gates'"):
    mix(floats(B, T, D))  # pyright: ignore[reportCallIssue]


def test_within_transformations():
  """The same checks, and nothing is added to what is traced."""
  x, gates = floats(B, T, D), floats(T, K)
  plain = mix.__wrapped__
  traced = [str(jax.make_jaxpr(f)(x, gates, document_starts=ENDS)) for f in (mix, plain)]
  assert traced[0] == traced[1]
  expected = mix(x, gates)
  mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
  rows, everywhere = PartitionSpec("rows"), PartitionSpec()
  shards = jax.shard_map(mix, mesh=mesh, in_specs=(rows, everywhere), out_specs=rows)
  for run in (jax.jit(mix), jax.jit(shards), lambda x, g: jax.vmap(mix, (0, None))(x[None], g)[0]):
    np.testing.assert_array_equal(run(x, gates), expected)
  np.testing.assert_array_equal(jax.grad(lambda x: mix(x, gates).sum())(x), 2 * expected)
  jax.eval_shape(mix, x, gates, document_starts=jnp.asarray(ENDS + 1))  # No values to read.
  message = "^gates: expected .*got float32.6, 3."
  mapped = jax.vmap(mix, (0, None))
  for run in (jax.jit(mix), lambda x, g: mapped(x[None], g), jax.grad(lambda *a: mix(*a).sum())):
    with pytest.raises(ValueError, match=message):
      run(x, gates[:-1])


# Of JAX's signature; array-likes of a shape that is an argument, too.
OTHERS = {"dot_general", "as_factor", "product_dtype", "check_starts", "check_boundaries"}


def test_every_array_of_a_public_function_is_annotated():
  functions = {name: x for name in ops.__all__ if inspect.isfunction(x := getattr(ops, name))}
  assert len(functions) > 30
  for name in functions.keys() - OTHERS:
    hints = typing.get_type_hints(functions[name])
    hints.pop("return")
    hints.pop("others", None)
    # A number that may be traced, such as the rate of a loss, has no shape to say.
    hints = {x: float if hint == (jax.Array | float) else hint for x, hint in hints.items()}
    assert hints.keys() >= inspect.signature(functions[name]).parameters.keys() - {"others"}, name
    choices = [x for hint in hints.values() for x in arrays._choices(hint)]
    inner = [x for choice in choices for x in arrays._choices(choice)]
    assert not {jax.Array, np.ndarray, typing.Any} & {*inner}, name
    has_arrays = any(isinstance(x, type) and issubclass(x, AbstractArray) for x in choices)
    assert has_arrays == hasattr(functions[name], "__wrapped__"), name


QKV = (floats(B, T, H, E),) * 3
CACHE = ops.init_attention_cache(B, M, H, E)
FULL = CACHE._replace(length=CACHE.length + 2)
SMALL = ops.init_attention_cache(B, 6, H, E)
KEYS = dict(positions=floats(T, H, E), content_bias=floats(H, E), position_bias=floats(H, E))
SHORT = KEYS | dict(positions=floats(T - 1, H, E))
HALF, FLAT = floats(B, T, D).astype(jnp.bfloat16), floats(B, T)
LOW_VALUES = *QKV[:2], QKV[2].astype(jnp.bfloat16)
STATE_SPACE = QKV[0], floats(B, T, H), floats(H), *[floats(B, T, 3, E)] * 2
TAPS, TWO_ROWS = ops.init_convolution_cache(B, M, D), jnp.arange(14.0).reshape(2, 7)
# Relations between sizes, dtypes and values, which no annotation tells.
RELATIONS = r"""
  relative_attention(*QKV, **SHORT) | positions: expected R of at least 7
  relative_attention_cached(*QKV, **KEYS, cache=CACHE) | positions: expected R of at least 8
  causal_attention(*(x[:, :0] for x in QKV)) | queries: expected sizes of at least 1
  causal_attention(*QKV, dropout_rate=0.1) | dropout_key: expected a random key
  causal_attention(*QKV, dropout_rate=1.0) | dropout_rate: expected a probability
  causal_attention(*QKV, window=0) | window: expected at least 1, got 0
  causal_attention(*QKV, block_size=2.5) | block_size: expected an integer
  causal_attention_cached(*QKV, SMALL) | queries: expected a chunk of C = 1 .. 6 tokens
  causal_attention_cached(*QKV, FULL) | cache: expected rows of at most M = 8 tokens, got 9
  causal_attention_cached(*LOW_VALUES, CACHE) | values: expected float32, got bfloat16
  causal_attention_cached(*QKV, CACHE, lengths=np.array([T, 8])) | lengths: expected 0 .. 7
  rotate(QKV[0][..., :5], floats(1, T, 2)) | inputs: expected an even E
  rotate(QKV[0], floats(1, T, 4)) | angles: expected at most E / 2
  rotary_angles(T, 5) | features: expected an even number
  rotary_angles(T, E, math.nan) | base: expected a number above 0
  shift_and_sum(*QKV[:2], implementation="loob") | implementation: expected one of
  init_shift_and_sum_cache(B, H, E, 31) | num_levels: expected at most 30, got 31
  selective_state_space(*STATE_SPACE) | b: expected G that divides H = 4, got G = 3
  causal_convolution(HALF, floats(T - 1)) | inputs: expected at most 6 positions
  causal_convolution(HALF[:, :0], floats(0)) | filters: expected at least one tap
  causal_convolution_cached(HALF, floats(M), TAPS) | cache.inputs: expected bfloat16, got float32
  check_boundaries(ENDS, (B, T + 1)) | boundaries: expected Binary
  check_starts(ENDS, (T,)) | shape: expected \(B, T\)
  init_segment_cache(True, D) | batch: expected an integer of at least 1, got True
  init_segment_cache(B, D, jnp.int32) | dtype: expected a float, got int32
  pool_segments(HALF, ENDS, 3, method="max") | method: expected one of
  pool_segments(HALF, ENDS, -1) | capacity: expected at least 0, got -1
  upsample_segments(HALF[:, :1], ENDS) | segments: expected S of at least 2
  whitespace_boundaries(ENDS, (0, 2.5)) | space_ids: expected token ids
  whitespace_boundaries(ENDS, ()) | space_ids: .* alphabet without a space
  fixed_boundaries((B, T), 3, 3) | offset: expected at most 2, got 3
  fixed_boundaries((B, T), 3, num_before=np.ones(3, int)) | num_before: expected
  conditional_entropy(floats(B, T, 0)) | logits: expected V of at least 1
  entropy_threshold(FLAT, "local", 1.0) | rule: expected one of global, monotonic, combined
  entropy_threshold(FLAT, "global", 1.0, 0.5) | theta_add: expected 0 with the rule global
  # Of two tokens in a row one is a boundary at most.
  entropy_theta(TWO_ROWS, 1.5, "combined", 0.1) | factor: expected at least 1.75, which theta_add
  ratio_loss(ENDS, FLAT, 1.0) | factor: expected a factor above 1, got 1.0
  binomial_prior_loss(FLAT, 1.0) | alpha: expected 0 < alpha < 1, got 1.0
  gumbel_sigmoid(FLAT, 1.0) | key, noise: .* got none
  gumbel_sigmoid(FLAT, 1.0, key=VALID["key"], noise=FLAT) | key, noise: .* got both
  gumbel_sigmoid(FLAT, 1.0, noise=FLAT - 0.5) | noise: .* above 0 and below 1
  run_in_bucket(3, (3,), None, HALF) | function: expected a function, got 3
  run_in_bucket(abs, (3,), None, HALF) | bucket_sizes: expected increasing lengths up to S = 7
  bucket_sizes(3, 0) | num_buckets: expected at least 1, got 0
"""


@pytest.mark.parametrize("call, message", helpers.cases(RELATIONS))
def test_relations_that_no_annotation_tells(call, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    eval(f"ops.{call}")


@pytest.mark.parametrize("integer", [2**40, np.int64(2**40)])
def test_an_integer_beyond_32_bits_is_the_float(integer):
  logits = floats(B, T)
  for call in (
    lambda x: ops.entropy_threshold(logits, "global", x),
    lambda x: ops.gumbel_sigmoid(logits, x, noise=logits),
    lambda x: ops.ratio_loss(ENDS, logits, x),
    lambda x: ops.rate_bounds_loss(ENDS, x, -x),
  ):
    np.testing.assert_array_equal(call(integer), call(2.0**40))


NO_NUMBERS = [None, "0.5", math.nan, -math.inf, 1j, [0.5], True, Stranger(), 2**80]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_no_number(value):
  with pytest.raises(ValueError, match="^theta: expected a finite number, got "):
    arrays.number("theta", value)


def test_each_element_of_a_tuple_has_sizes_of_its_own():
  hint = tuple[tuple[Float[Array, "B D"], Float[Array, "D"]], ...]
  value = tuple((jnp.ones((2, width)), jnp.ones(width)) for width in (3, 5))
  checked = arrays.check("x", value, hint)
  assert jax.tree.structure(checked) == jax.tree.structure(value)
  with pytest.raises(ValueError, match="x: expected"):
    arrays.check("x", (value[0], (jnp.ones((2, 5)), jnp.ones(7))), hint)
