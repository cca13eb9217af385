"""The mixers equal the layers of jax-linear-attention with the same weights."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax_relatives import MIXERS, LogLinearMamba2
from tests import helpers

pytest.importorskip("jla")

B, T, D = 2, 150, 32
LINEAR = ("gated_deltanet", "gdn2", "kda", "deltanet", "gla")
NAMES = (*LINEAR, "gla with taps", "log_linear_mamba2")
COMMON = dict(std=0.2, norm_eps=1e-5, compute_dtype="float32")


def linear_attention_of_jla(name):
  """A layer of jla, and the mixer of the same sizes."""
  from jla.layers import linear_attention as layers
  from jla.models.config import LinearAttentionConfig

  kind = name.split()[0]
  num_taps = 0 if name == "gla" else 4
  config = LinearAttentionConfig(
    num_k_heads=2,
    num_v_heads=2,
    head_k_dim=8,
    head_v_dim=12,
    conv_size=num_taps,
    gate_low_rank_dim=16 if kind == "gla" else None,
    output_gate=kind != "deltanet",
  )
  layer = layers.make_mixer(kind, D, config, key=jax.random.key(3), **COMMON)
  mixer = MIXERS[kind](max_length=256, num_heads=2, key_width=8, value_width=12, num_taps=num_taps)
  return layer, mixer


def log_linear_mamba2_of_jla():
  """A layer of jla, and the mixer of the same sizes."""
  from jla.layers.ssm import Mamba2
  from jla.models.config import SSMConfig

  config = SSMConfig(d_state=16, head_dim=16, log_linear_levels=9)
  layer = Mamba2(D, config, key=jax.random.key(3), **COMMON)
  return layer, LogLinearMamba2(max_length=256, state_width=16, head_width=16)


def dense(linear):
  """The parameters of a linear layer."""
  if linear.bias is None:
    return {"kernel": linear.weight}
  return {"kernel": linear.weight, "bias": linear.bias}


def taps(*convolutions):
  """[taps, features]; the last column of jla's weights is for the position itself."""
  return jnp.concatenate([each.weight for each in convolutions]).T[::-1]


def params_of_linear_attention(layer):
  """The mixer's parameters from a layer of jla, or from gradients in its place."""
  joined = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
  params = {
    "in": {"kernel": jnp.concatenate(joined, axis=1)},
    "gain": layer.o_norm.weight,
    "out": dense(layer.o_proj),
  }
  if layer.q_conv is not None:
    params["taps"] = taps(layer.q_conv, layer.k_conv, layer.v_conv)
  if layer.kind == "kda":
    params["gate_down"] = dense(layer.g_proj.down)
    params["gate_up"] = dense(layer.g_proj.up)
  elif layer.g_proj is not None:
    params["gate"] = dense(layer.g_proj)
  if layer.kind in ("gated_deltanet", "gdn2", "kda"):
    params["a_log"] = layer.A_log
    by_key = layer.kind != "gated_deltanet"
    params["dt_bias"] = layer.dt_bias.reshape(2, 8) if by_key else layer.dt_bias
  if layer.kind == "gated_deltanet":
    params["decay"] = dense(layer.a_proj)
  elif layer.kind in ("kda", "gdn2", "gla"):
    projection = layer.gk_proj if layer.kind == "gla" else layer.f_proj
    params["decay_down"] = dense(projection.down)
    params["decay_up"] = dense(projection.up)
  if layer.kind == "gdn2":
    params["erase"] = dense(layer.b_proj)
    params["write"] = dense(layer.w_proj)
  elif layer.kind != "gla":
    params["beta"] = dense(layer.b_proj)
  return params


def params_of_log_linear_mamba2(layer):
  """The mixer's parameters from a layer of jla, or from gradients in its place."""
  zx = layer.zx_proj.weight
  bc = layer.bc_proj.weight
  joined = [zx[:, 0], zx[:, 1], bc[:, 0], bc[:, 1], layer.dt_proj.weight]
  return {
    "in": {"kernel": jnp.concatenate(joined, axis=1)},
    "taps": taps(layer.x_conv, layer.bc_conv),
    "taps_bias": jnp.concatenate([layer.x_conv.bias, layer.bc_conv.bias]),
    "levels": dense(layer.level_proj),
    "level_gain": layer.level_weight,
    "a_log": layer.A_log,
    "dt_bias": layer.dt_bias,
    "skip": layer.D,
    "gain": layer.norm.weight,
    "out": dense(layer.out_proj),
  }


class Pair(NamedTuple):
  layer: object
  mixer: object
  params: dict
  params_of: object


def make_pair(name):
  """A layer of jla whose weights are not at their initial zeros and ones, and the mixer."""
  if name == "log_linear_mamba2":
    layer, mixer = log_linear_mamba2_of_jla()
    params_of = params_of_log_linear_mamba2
  else:
    layer, mixer = linear_attention_of_jla(name)
    params_of = params_of_linear_attention
  draw = np.random.default_rng(7).standard_normal
  layer = jax.tree.map(lambda x: x + 0.1 * jnp.asarray(draw(x.shape), x.dtype), layer)
  return Pair(layer, mixer, params_of(layer), params_of)


def draw_inputs():
  draw = np.random.default_rng(1).standard_normal
  return jnp.asarray(draw((2, B, T, D)), jnp.float32)


def documents():
  """The number of each position's document, and 1 where one begins, [B, T]."""
  rows = [[0] * 40 + [1] * 64 + [2] * 46, [0] + [1] * 149]
  ids = jnp.asarray(rows, jnp.int32)
  return ids, jnp.diff(ids, axis=1, prepend=-1)


def difference(got, expected) -> float:
  """The largest difference relative to the largest expected number."""
  return float(jnp.abs(got - expected).max() / jnp.abs(expected).max())


def compare_whole_rows(pair, is_packed) -> dict[str, float]:
  """The differences of outputs and gradients."""
  inputs, weights = draw_inputs()
  ids, starts = documents() if is_packed else (None, None)

  def loss_of_jla(layer, x):
    y = layer(x, ids)
    return jnp.sum(y * weights), y

  def loss(params, x):
    y = pair.mixer.apply({"params": params}, x, document_starts=starts)
    return jnp.sum(y * weights), y

  differentiate = jax.jit(jax.value_and_grad(loss_of_jla, (0, 1), has_aux=True))
  (_, expected), grads_of_jla = differentiate(pair.layer, inputs)
  differentiate = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  (_, output), grads = differentiate(pair.params, inputs)
  result = {
    "outputs": difference(output, expected),
    "gradient by inputs": difference(grads[1], grads_of_jla[1]),
  }
  expected_grads = pair.params_of(grads_of_jla[0])
  assert jax.tree.structure(expected_grads) == jax.tree.structure(grads[0])
  for (path, want), got in zip(
    jax.tree.leaves_with_path(expected_grads), jax.tree.leaves(grads[0]), strict=True
  ):
    result[f"gradient by {jax.tree_util.keystr(path)}"] = difference(got, want)
  return result


def compare_steps(pair) -> dict[str, float]:
  """The differences of cached steps of several sizes."""
  inputs, _ = draw_inputs()
  cache_of_jla = pair.layer.init_cache(B, jnp.float32)
  cache = pair.mixer.init_cache(B, D)
  step_of_jla = jax.jit(lambda x, cache: pair.layer.step(x, cache))  # jla's method has no hash.
  step = jax.jit(partial(pair.mixer.apply, {"params": pair.params}, method="step"))
  expected = []
  outputs = []
  for begin, end in [(0, 70), *((t, t + 1) for t in range(70, 80)), (80, T)]:
    y, cache_of_jla = step_of_jla(inputs[:, begin:end], cache_of_jla)
    expected.append(y)
    y, cache = step(inputs[:, begin:end], cache)
    outputs.append(y)
  whole = jax.jit(pair.mixer.apply)({"params": pair.params}, inputs)
  output = jnp.concatenate(outputs, axis=1)
  return {
    "steps": difference(output, jnp.concatenate(expected, axis=1)),
    "steps and whole rows": difference(output, whole),
    "state": difference(cache.state, cache_of_jla.state),
  }


def assert_small(found, most) -> None:
  """All differences are below `most`; nan is not."""
  print({name: f"{value:.1e}" for name, value in found.items()})
  assert [name for name, value in found.items() if not value < most] == []


@pytest.mark.parametrize(
  "name, is_packed",
  [
    helpers.slow_unless(is_packed or name == "gated_deltanet", name, is_packed)
    for name in NAMES
    for is_packed in (False, True)
  ],
)
def test_whole_rows_and_gradients(name, is_packed):
  found = compare_whole_rows(make_pair(name), is_packed)
  # These gradients are sums over all positions, whose terms cancel.
  by_all_positions = {"gradient by ['a_log']", "gradient by ['dt_bias']"}
  assert_small({name: found[name] for name in found if name in by_all_positions}, 3e-5)
  assert_small({name: found[name] for name in found if name not in by_all_positions}, 1e-5)


@pytest.mark.parametrize("name", LINEAR)
def test_cached_steps(name):
  assert_small(compare_steps(make_pair(name)), 1e-5)


@pytest.mark.parametrize(("name", "least"), [("gated_deltanet", 0), ("gdn2", 0), ("kda", 1)])
def test_decays_start_at_the_rates_of_jla(name, least):
  from jla.layers import linear_attention as layers
  from jla.models.config import LinearAttentionConfig

  heads = 300
  sizes = dict(num_k_heads=heads, num_v_heads=heads, head_k_dim=2, head_v_dim=2)
  layer = layers.make_mixer(
    name, D, LinearAttentionConfig(**sizes), key=jax.random.key(3), **COMMON
  )
  mixer = MIXERS[name](max_length=256, num_heads=heads, key_width=2, value_width=2)
  params = jax.jit(mixer.init)(jax.random.key(4), jnp.ones((2, 3, D)))["params"]
  for a_log in (layer.A_log, params["a_log"]):
    rates = np.exp(a_log)
    assert least <= rates.min() < least + 0.5 and 15.5 < rates.max() <= 16
  for dt_bias in (layer.dt_bias, params["dt_bias"]):
    steps = np.logaddexp(0, dt_bias)
    assert 0.0009 < steps.min() < 0.0013 and 0.08 < steps.max() < 0.101


@pytest.mark.parametrize("chunk_size", [32, 64])
def test_the_recurrence_of_mamba2(chunk_size):
  from jla.layers import ssm

  draw = np.random.default_rng(5).standard_normal
  shapes = [(B, T, 3, 4), (B, T, 3), (3,), (B, T, 1, 5), (B, T, 1, 5)]
  x, dt, a, b, c = (jnp.asarray(draw(shape), jnp.float32) for shape in shapes)
  arguments = x, jax.nn.softplus(dt - 2), -jnp.exp(a), b, c

  def theirs(*arguments):
    return ssm.mamba2_ssd(*arguments, chunk_size=chunk_size)[0]

  found = {}
  weights = jnp.asarray(draw((B, T, 3, 4)), jnp.float32)
  for name, function in (("ours", ops.selective_state_space), ("theirs", theirs)):
    output, pull = jax.vjp(jax.jit(function), *arguments)
    found[name] = [output, *pull(weights)]
  names = ["outputs", *(f"gradient by {name}" for name in ("x", "dt", "a", "b", "c"))]
  differences = map(difference, found["ours"], found["theirs"])
  assert_small(dict(zip(names, differences, strict=True)), 1e-5)
