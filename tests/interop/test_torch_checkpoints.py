"""The authors' checkpoints against what the authors' code computed from them."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.interop import from_torch, to_torch
from dpjax.layers import dispatcher
from dpjax.training import losses
from tests import helpers

FORWARD = dict(atol=1e-5, rtol=1e-5)
MODEL_GRADIENT = dict(atol=1e-6, rtol=1e-4)
LAYER_GRADIENT = dict(atol=1e-4, rtol=0)

CASES = {f"A_dispatcher_nhead1_L{length}": {} for length in (16, 13, 5)}
CASES |= {f"B_dispatcher_multihead_nhead1_L{x}": {"variant": "multihead"} for x in (16, 13)}
CASES |= {f"C_msa_nhead{n}_L{x}": {"num_heads": n} for n in (1, 4) for x in (16, 13)}


@pytest.fixture(autouse=True)
def highest_precision():
  # optax raises floats to integer powers, which strict promotion refuses.
  with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
    yield


def state_dict(arrays):
  return helpers.part(arrays, "param/") | helpers.part(arrays, "buf/")


def batch_first(array):
  return np.swapaxes(array, 0, 1)


DEFAULT = "A_dispatcher_nhead1_L13", "B_dispatcher_multihead_nhead1_L16", "C_msa_nhead4_L13"


@pytest.mark.parametrize("case", [helpers.slow_unless(case in DEFAULT, case) for case in CASES])
def test_logits_loss_every_gradient_and_back(case):
  golden = helpers.golden(case)
  config, params = from_torch(state_dict(golden), **CASES[case])
  model = dpjax.build_model(config)
  tokens, targets = (batch_first(golden[f"in/{name}"]) for name in ("src", "targets"))

  def loss_of(params):
    logits = model.apply({"params": params}, tokens).logits
    weights = jnp.ones(targets.shape)
    nats, count = losses.cross_entropy(logits, jnp.asarray(targets), weights)
    return nats / count, logits

  (loss, logits), grads = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params)
  np.testing.assert_allclose(logits, batch_first(golden["out/logits"]), **FORWARD)
  np.testing.assert_allclose(loss, golden["out/loss"], **FORWARD)
  # The conversion is linear, so the authors' gradients go through it as well.
  _, expected = from_torch(helpers.part(golden, "grad/"), max_length=16, **CASES[case])
  helpers.assert_trees_close(grads, expected, **MODEL_GRADIENT)
  # The parameters go back to the authors' names.
  back = to_torch(config, params)
  helpers.assert_trees_close(back, helpers.part(golden, "param/"), rtol=0)
  assert all(array.flags["C_CONTIGUOUS"] for array in back.values())


@pytest.mark.parametrize("case", ["A_layer_nhead1_L16", "A_layer_leveldrop"])
@pytest.mark.parametrize("implementation", ["loop", "unrolled", "recompute"])
def test_the_layer_alone_and_its_level_dropout(case, implementation):
  golden = helpers.golden(case)
  layer = dispatcher.Dispatcher(1, 16, implementation=implementation)
  names = {
    "values": "linear_in.weight",
    "gates": "internal_attention.weight",
    "out": "linear_out.weight",
  }
  params = {k: {"kernel": golden[f"param/{name}"].T} for k, name in names.items()}
  level_keep = golden["in/uniform"] >= 0.5 if "in/uniform" in golden else None

  @jax.jit
  def run(params, value, cotangent):
    def forward(params, value):
      return layer.apply({"params": params}, value, level_keep=level_keep)

    output, pull_back = jax.vjp(forward, params, value)
    return output, *pull_back(cotangent)

  inputs = (batch_first(golden[f"in/{name}"]) for name in ("value", "cotangent"))
  output, grads, grad_value = run(params, *inputs)
  np.testing.assert_allclose(output, batch_first(golden["out/out"]), **FORWARD)
  expected = batch_first(golden["grad_in/value"])
  np.testing.assert_allclose(grad_value, expected, **LAYER_GRADIENT)
  for key, name in names.items():
    expected = golden[f"grad/{name}"].T
    np.testing.assert_allclose(grads[key]["kernel"], expected, **LAYER_GRADIENT)


def test_six_updates():
  golden = helpers.golden("J_train_dispatcher")
  config, params = from_torch(helpers.part(golden, "param/"), max_length=16)
  helpers.check_updates(golden, config, params, eps=1e-10, grad_clip_norm=0.5)


@pytest.fixture
def dispatcher_state():
  return state_dict(helpers.golden("A_dispatcher_nhead1_L5"))


@pytest.fixture
def attention_state():
  return state_dict(helpers.golden("C_msa_nhead4_L13"))


class Parameter(NamedTuple):
  """As PyTorch's, which NumPy can read after detach() and cpu()."""

  array: np.ndarray

  def detach(self):
    return SimpleNamespace(cpu=lambda: self.array)


def test_tensors_and_whole_checkpoints(dispatcher_state):
  tensors = {name: Parameter(array) for name, array in dispatcher_state.items()}
  checkpoint = {"epoch": 7, "model_state_dict": tensors}
  config, params = from_torch(checkpoint)
  expected_config, expected = from_torch(dispatcher_state)
  assert config == expected_config
  helpers.assert_trees_close(params, expected, rtol=0)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_the_authors_5000_positions(dispatcher_state):
  width = 16
  # Their table is computed in float32, whose angles are off by up to 5e-4 at the end.
  position = np.arange(5000, dtype=np.float32)[:, None]
  index = np.arange(0, width, 2, dtype=np.float32)
  angles = position * np.exp(index * np.float32(-np.log(1e4) / width))
  table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(5000, 1, width)
  config, _ = from_torch(dispatcher_state | {"pos_encoder.pe": table})
  assert (config.max_length, config.mixer.num_levels) == (5000, 4)
  config, _ = from_torch(dispatcher_state, max_length=300)
  assert (config.max_length, config.mixer.num_levels) == (300, 4)


def test_several_heads_of_a_dispatcher_are_refused(dispatcher_state):
  for variant in ("paper", "multihead"):
    with pytest.raises(ValueError, match="num_heads = 2.*cuts positions"):
      from_torch(dispatcher_state, num_heads=2, variant=variant)
  halves, stacked = dict(dispatcher_state), dict(dispatcher_state)
  for name in dispatcher_state:
    if name.endswith(("linear_in.weight", "linear_out.weight")):
      halves[name] = halves[name][:8, :8]
    if name.endswith("internal_attention.weight"):
      halves[name] = halves[name][:, :8]
      stacked[name] = np.concatenate(4 * [stacked[name]])
  with pytest.raises(ValueError, match="8 of the 16 features.*cuts positions"):
    from_torch(halves)
  with pytest.raises(ValueError, match="16 rows of gates.*cuts positions"):
    from_torch(stacked, variant="multihead")


def test_refusals_name_what_is_wrong(dispatcher_state, attention_state):
  layer = "transformer_encoder.layers.1."

  def refused(state, message, **options):
    with pytest.raises(ValueError, match=message):
      from_torch(state, **options)

  def changed(name, value):
    return dispatcher_state | {name: value}

  missing = dict(dispatcher_state)
  del missing[f"{layer}norm2.bias"]
  refused(missing, "layers.1.norm2.bias'.* missing")
  refused({}, "encoder.weight.* missing")
  refused(changed("encoder.norm", np.ones(3)), r"\['encoder.norm'\] unknown")
  refused(changed(f"{layer}linear1.bias", np.ones(23)), r"linear1.bias.*24.*23")
  table = dispatcher_state["pos_encoder.pe"]
  refused(changed("pos_encoder.pe", table + np.float32(1e-2)), "sinusoidal")
  refused(changed("pos_encoder.pe", table[:, 0]), r"pos_encoder.pe.*\[5, 16\]")
  refused(attention_state, "num_heads.*3", num_heads=3)
  refused(dispatcher_state, "variant.*later", variant="later")
  del missing["pos_encoder.pe"]
  missing[f"{layer}norm2.bias"] = np.ones(16)
  refused(missing, "max_length")


@pytest.mark.parametrize(
  "changes", [dict(norm_position="pre"), dict(activation="gelu"), dict(mixer="we")], ids=str
)
def test_other_models_keep_their_names(changes):
  usual = dict(mixer=dpjax.config.mixer("dispatcher"), positions="sinusoidal", activation="relu")
  config = helpers.model_settings(**usual | changes)
  params = helpers.draw_params(dpjax.build_model(config), 1, 1.0)
  state = to_torch(config, params)
  assert len(state) == len(jax.tree.leaves(params))
  np.testing.assert_array_equal(state["logits.kernel"], params["logits"]["kernel"])
  norm = params["layers"]["mixer_norm"]["scale"]
  np.testing.assert_array_equal(state["layers.mixer_norm.scale"], norm)
