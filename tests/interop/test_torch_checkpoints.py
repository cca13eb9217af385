"""The authors' checkpoints against what their code computed; files, with a stand-in for PyTorch."""

import string
import sys
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

CASES = {
  "A_dispatcher_nhead1_L13": {},
  "B_dispatcher_multihead_nhead1_L16": {"variant": "multihead"},
  "C_msa_nhead4_L13": {"num_heads": 4},
}


@pytest.fixture(autouse=True)
def highest_precision():
  # optax raises floats to integer powers, which strict promotion refuses.
  with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("standard"):
    yield


def state_dict(arrays):
  return helpers.part(arrays, "param/") | helpers.part(arrays, "buf/")


def batch_first(array):
  return np.swapaxes(array, 0, 1)


@pytest.mark.parametrize("case", [helpers.slow_unless("multihead" not in x, x) for x in CASES])
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


class FixedLevels(dispatcher.Dispatcher):
  """A Dispatcher that keeps certain levels instead of drawing them."""

  level_keep: np.ndarray | None = None

  def _draw_levels(self, context):
    return None if self.level_keep is None else jnp.asarray(self.level_keep)


@pytest.mark.parametrize(
  "case, implementation", [("A_layer_nhead1_L16", "loop"), ("A_layer_leveldrop", "recompute")]
)
def test_the_layer_alone_and_its_level_dropout(case, implementation):
  golden = helpers.golden(case)
  levels = golden["in/uniform"] >= 0.5 if "in/uniform" in golden else None
  layer = FixedLevels(num_heads=1, max_length=16, implementation=implementation, level_keep=levels)
  names = dict(values="linear_in", gates="internal_attention", out="linear_out")
  params = {k: {"kernel": golden[f"param/{name}.weight"].T} for k, name in names.items()}

  @jax.jit
  def run(params, value, cotangent):
    def forward(params, value):
      return layer.apply({"params": params}, value)

    output, pull_back = jax.vjp(forward, params, value)
    return output, *pull_back(cotangent)

  inputs = (batch_first(golden[f"in/{name}"]) for name in ("value", "cotangent"))
  output, grads, grad_value = run(params, *inputs)
  np.testing.assert_allclose(output, batch_first(golden["out/out"]), **FORWARD)
  expected = batch_first(golden["grad_in/value"])
  np.testing.assert_allclose(grad_value, expected, **LAYER_GRADIENT)
  for key, name in names.items():
    expected = golden[f"grad/{name}.weight"].T
    np.testing.assert_allclose(grads[key]["kernel"], expected, **LAYER_GRADIENT)


@pytest.mark.slow
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
  for name, array in dispatcher_state.items():
    if name.endswith(("linear_in.weight", "linear_out.weight")):
      halves[name] = array[:8, :8]
    if name.endswith("internal_attention.weight"):
      halves[name], stacked[name] = array[:, :8], np.concatenate(4 * [array])
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
  norm = params["layers"]["blocks_0"]["mixer_norm"]["scale"]
  np.testing.assert_array_equal(state["layers.blocks_0.mixer_norm.scale"], norm)


@pytest.fixture
def torch(monkeypatch):
  """Loads a checkpoint of 31 tokens and 16 positions."""
  state = helpers.part(helpers.golden("A_dispatcher_nhead1_L16"), "param/")
  content = {"epoch": 7, "model_state_dict": state}
  stand_in = SimpleNamespace(load=lambda *_, **__: content)
  monkeypatch.setitem(sys.modules, "torch", stand_in)
  return stand_in


@pytest.fixture
def config(tmp_path):
  """30 characters and the unknown one make the checkpoint's 31 tokens."""
  letters = np.random.default_rng(5).choice(list(string.ascii_lowercase + " .,\n"), 3000)
  (tmp_path / "text.txt").write_text("".join(letters))
  config = helpers.small_config(tmp_path / "text.txt")
  config.model.mixer = dpjax.config.mixer("dispatcher")
  config.model.update(num_layers=2, width=16, feed_forward_width=24, max_length=16)
  return config


@pytest.mark.slow
def test_a_file_is_scored(torch, config, tmp_path):
  config.model.scan_layers = False
  run = dpjax.runs.load_torch("model.pt", config, tmp_path)
  assert run.config.model.scan_layers is False
  # The model by hand, on the first window.
  ids = np.asarray(run.data.splits["test"])[:16].astype(np.int32)
  inputs = np.concatenate([[run.tokenizer.start_id], ids[:-1]])
  logits = run.model.apply({"params": run.params}, inputs[None]).logits[0]
  nats = -jax.nn.log_softmax(logits)[np.arange(16), ids].mean()
  assert run.score(run.tokenizer.decode(ids))["nats_per_token"] == pytest.approx(
    float(nats), rel=1e-5
  )


def test_a_file_that_cannot_be_loaded_is_refused(torch, config, tmp_path, monkeypatch):
  def refused(message):
    with pytest.raises(ValueError, match=message):
      dpjax.runs.load_torch("model.pt", config, tmp_path)

  # Their characters are numbered by how often a text has them, which no file tells.
  config.model.mixer = dpjax.config.mixer("relative_attention")
  config.model.boundaries = dpjax.config.boundaries("whitespace")
  refused("model.mixer: .*dpjax.interop.from_torch reads it")
  config.model.boundaries = dpjax.config.boundaries("none")
  config.model.mixer = dpjax.config.mixer("attention")
  refused("model.mixer: expected the file's dispatcher")
  config.model.mixer = dpjax.config.mixer("dispatcher")
  config.data.tokenizer = "bytes"
  refused("model.vocab_size: .* tokenizer's 256, got 31")
  monkeypatch.setattr(torch, "load", lambda *_, **__: [3])
  refused("state_dict: expected a mapping .* got list")
  monkeypatch.setattr(torch, "load", lambda *_, **__: 1 / 0)
  refused("torch_checkpoint: expected a file of the")
  monkeypatch.setitem(sys.modules, "torch", None)
  refused("torch_checkpoint: expected PyTorch")
