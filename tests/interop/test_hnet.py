"""H-Net: the authors' models against what their code computed, their files, and generation."""

import collections
import dataclasses
import functools
import json
import pickle
import sys
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import dpjax
from dpjax import ops
from dpjax.interop import from_torch, hnet, to_torch
from dpjax.runs import numpy_model
from tests import helpers, hub

COLUMNS = slice(None, None, 8)  # of the logits that the files keep
LENGTH = 60  # of the longest rows there
both = pytest.mark.parametrize(
  "name", ["one_stage", pytest.param("two_stages", marks=pytest.mark.slow)]
)


@functools.cache
def prepare(name):
  """The arrays, the authors' JSON, their state, the model, and its parameters."""
  golden = helpers.golden(f"M_hnet_{name}")
  config, state = json.loads(str(golden["config"])), helpers.part(golden, "state/")
  settings, params = from_torch(state, config=config, max_length=LENGTH)
  stage = settings
  while stage is not None and stage.boundaries.name != "none":
    stage.boundaries.num_buckets, stage = 1, stage.middle
  return golden, config, state, dpjax.build_model(settings), settings, params


def assert_near(got, expected, largest, tolerance, least=0.0):
  assert abs(np.asarray(got) - expected).max() <= max(tolerance * largest, least)


def loss_of(output, tokens, factors):
  """The mean cross-entropy of the targets, and each stage's ratio."""
  log_probabilities = jax.nn.log_softmax(output.logits[:, :-1])
  nats = -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], -1).mean()
  counts, ratios = jnp.full(tokens.shape[0], tokens.shape[1]), []
  for stage, factor in zip(output.stages, factors, strict=True):
    weights = (jnp.arange(stage.boundaries.shape[1])[None] < counts[:, None]).astype(jnp.int32)
    ratios.append(ops.ratio_loss(stage.boundaries, stage.probabilities, factor, weights=weights))
    counts = stage.boundaries.sum(1)
  return nats + 0.03 * sum(ratios), (nats, jnp.stack(ratios), output)


@both
def test_the_model_every_gradient_and_documents(name):
  golden, _, _, model, settings, params = prepare(name)
  tokens, factors = golden["tokens"].astype(np.int32), golden["factors"].tolist()

  @jax.jit
  def run(params, starts):
    def loss(params):
      output = model.apply({"params": params}, tokens, document_starts=starts)
      return loss_of(output, tokens, factors)

    return jax.value_and_grad(loss, has_aux=True)(params)

  starts = np.zeros(tokens.shape, np.int32)
  starts[:, 0] = 1
  (loss, (nats, ratios, output)), grads = run(params, starts)
  largest = golden["largest_logit"]
  assert_near(output.logits[..., COLUMNS], golden["logits"], largest, 2e-6)
  for got, expected in ((loss, "loss"), (nats, "nats"), (ratios, "ratios")):
    np.testing.assert_allclose(got, golden[expected], rtol=1e-6)
  outer, *within = (np.asarray(stage.boundaries) for stage in output.stages)
  np.testing.assert_array_equal(outer.ravel(), golden["boundary_mask/0"])
  for inner in within:
    counts = outer.sum(1)
    is_real = np.arange(inner.shape[1]) < counts[:, None]
    np.testing.assert_array_equal(inner[is_real], golden["boundary_mask/1"])
  for key, grad in to_torch(settings, grads).items():
    grad, expected = grad.ravel(), golden[f"grad/{key}"]
    stride = -(-grad.size // 24)
    # Gradients of a head alone in its array, of 2e-6 to 2e-5, are sums of terms that cancel.
    assert_near(grad[::stride], expected, golden[f"largest/{key}"], 2e-4, 3e-8)

  # The same program: row 0 as documents.
  starts[0, golden["documents/cuts"][:-1]] = 1
  output = run(params, starts)[0][1][2]
  assert_near(output.logits[0, :, COLUMNS], golden["documents/logits"], largest, 2e-6)
  outer = output.stages[0].boundaries
  np.testing.assert_array_equal(outer[0], golden["documents/boundary_mask"])


@pytest.mark.slow
def test_steps_are_those_of_the_authors():
  golden, _, _, model, _, params = prepare("two_stages")
  row = golden["tokens"][:1].astype(np.int32)
  step, cache = helpers.make_step(*model.unstack(params)), model.init_cache(1)
  logits = []
  for begin in (0, *range(20, row.shape[1])):
    end = begin + 1 if begin else 20
    lengths = jnp.full(1, end - begin, jnp.int32)
    output, cache = step(cache, row[:, begin:end], lengths, {})
    logits.append(output.logits[0, :, COLUMNS])
  expected = golden["stepped_logits"]
  assert_near(np.concatenate(logits), expected, golden["largest_logit"], 2e-6)


@both
def test_export_gives_every_bit_back(name):
  _, config, state, _, settings, params = prepare(name)
  back = to_torch(settings, params)
  assert back.keys() == state.keys()
  for key, array in state.items():
    np.testing.assert_array_equal(back[key], array, key)
    assert back[key].dtype == array.dtype
  # Another activation is another model: its parameters keep dpjax's names.
  settings = settings.copy_and_resolve_references()
  settings.activation = "gelu"
  assert not back.keys() & to_torch(settings, params).keys()


ERRORS = helpers.cases("""
  lm_head.weight                      | drop  | none unknown, ['lm_head.weight'] missing
  backbone.encoder.rmsnorm.bias       | add   | ['backbone.encoder.rmsnorm.bias'] unknown, none
  backbone.decoder.layers.1.mixer.D   | widen | mixer.D: expected the shape (1,), got (2,)
  backbone.main_network.main_network.layers.1.mlp.fc1.weight | widen | shape (256, 64), got (512,
  backbone.encoder.layers.1.mixer.D   | nan   | mixer.D: expected finite numbers, got nan
""")


@pytest.mark.parametrize("key, change, message", ERRORS)
def test_a_wrong_array_is_named(key, change, message):
  _, config, state, *_ = prepare("one_stage")
  state = dict(state)
  if change == "drop":
    del state[key]
  elif change == "add":
    state[key] = np.zeros(3, np.float32)
  elif change == "nan":
    state[key] = state[key] * np.float32("nan")
  else:
    state[key] = np.concatenate([state[key]] * 2)
  with pytest.raises(dpjax.UserError) as error:
    from_torch(state, config=config)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_wrong_settings_are_refused():
  _, config, state, *_ = prepare("one_stage")
  for key, value, message in (
    ("arch_layout", ["T2"], "arch_layout: expected a layout"),
    ("arch_layout", ["m2", ["T0"], "m2"], "arch_layout: expected a layout"),
    ("tie_embeddings", True, "tie_embeddings: expected false"),
    ("arch_layout", ["m4000000000", ["T2"], "m2"], "arch_layout: expected a layout"),
    ("d_model", [64], r"d_model: expected 2 integers of at least 1, .* got \[64\]"),
    ("d_model", ["32", 48], r"d_model: expected 2 integers .* got \['32', 48\]"),
    ("d_intermediate", ["a", "b"], "d_intermediate: expected 2 integers of at least 0"),
    ("vocab_size", "256", "vocab_size: expected an integer, got '256'"),
    ("attn_cfg", {}, "num_heads: expected 2 integers .* got None"),
    ("attn_cfg", {**config["attn_cfg"], "window_size": [-5, "x"]}, "window_size: expected 2 int"),
    ("attn_cfg", 3, "attn_cfg: expected a JSON object, got 3"),
    ("ssm_cfg", None, "ssm_cfg: expected a JSON object, got None"),
    ("ssm_cfg", {"d_state": "16"}, "mixer.state_width: expected a value of type int, got '16'"),
  ):
    with pytest.raises(dpjax.UserError, match=message) as error:
      from_torch(state, config={**config, key: value})
    assert "\n" not in str(error.value)
  with pytest.raises(dpjax.UserError, match="config: expected the JSON object of an H-Net, got 5"):
    from_torch(state, config=5)
  with pytest.raises(dpjax.UserError, match="state_dict: expected a mapping of names to arrays"):
    from_torch({3: np.zeros(3)}, config=config)
  with pytest.raises(dpjax.UserError, match=r"config: .* without attn_cfg"):
    from_torch(state, config={x: y for x, y in config.items() if x != "attn_cfg"})
  with pytest.raises(dpjax.UserError, match="config: expected the JSON of the H-Net, got none"):
    from_torch(state)
  with pytest.raises(dpjax.UserError, match="config: expected none without an H-Net"):
    from_torch({"encoder.weight": np.zeros((3, 2))}, config=config)


def test_layouts_repeat_mixers_in_turn():
  config = json.loads(str(helpers.golden("M_hnet_two_stages")["config"]))
  layout = ["M2t1M2", ["T1m4", ["T26"], "m4T1"], "m4"]
  model = hnet.make_settings({**config, "arch_layout": layout})
  assert [x.has_feed_forward for x in model.first.mixer] == [True, True, False]
  assert (model.first.num_layers, model.num_layers, model.mixer.name) == (5, 26, "attention")
  assert [x.name for x in model.middle.first.mixer] == ["local_attention", *["mamba2"] * 4]
  table = hnet.find_table(model)
  names = table["stages_0/first/blocks_1/mixer/in/kernel"][1]
  assert names == tuple(f"backbone.encoder.layers.{i}.mixer.in_proj.weight" for i in (1, 4))


def write_pt(path, state, monkeypatch, *, attributes=(), compression=zipfile.ZIP_STORED, more=0):
  """Writes what `torch.save` writes, without PyTorch; `more` numbers than the pickle says."""
  utils, torch = types.ModuleType("torch._utils"), types.ModuleType("torch")

  def _rebuild_tensor_v2():
    pass

  class FloatStorage:
    pass

  for module, object in ((utils, _rebuild_tensor_v2), (torch, FloatStorage)):
    object.__module__, object.__qualname__ = module.__name__, object.__name__
    setattr(module, object.__name__, object)
    monkeypatch.setitem(sys.modules, module.__name__, module)
  arrays = []

  class Storage:
    def __init__(self, array):
      self.pid = ("storage", FloatStorage, str(len(arrays)), "cpu", array.size)
      arrays.append(array)

  class Tensor:
    def __init__(self, array):
      self.array = array

    def __reduce__(self):
      strides = tuple(x // 4 for x in self.array.strides)
      about = 0, self.array.shape, strides, False, collections.OrderedDict()
      return _rebuild_tensor_v2, (Storage(self.array), *about)

  class State(dict):
    def __reduce__(self):
      fields = dict.fromkeys(["_metadata", *attributes], 3)
      return collections.OrderedDict, (), fields, None, iter(self.items())

  class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
      return obj.pid if isinstance(obj, Storage) else None

  with zipfile.ZipFile(path, "w", compression) as archive:
    with archive.open("m/data.pkl", "w") as file:
      Pickler(file, protocol=2).dump(State((name, Tensor(x)) for name, x in state.items()))
    for i, array in enumerate(arrays):
      archive.writestr(f"m/data/{i}", array.tobytes() + bytes(4 * more))


def write_model(folder, config, state):
  """Writes a model as the authors released theirs."""
  save_file(state, folder / "hnet.safetensors")
  (folder / "hnet.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path):
  _, config, state, *_ = prepare("one_stage")
  write_model(tmp_path, config, state)
  return tmp_path


def test_files_of_both_kinds_load_alike(folder, monkeypatch):
  *_, state, _, _, params = prepare("one_stage")
  run = dpjax.load(folder)
  helpers.assert_trees_close(run.params, params, rtol=0)
  assert (run.tokenizer.name, run.window, run.data) == ("bytes_with_ends", 8192, None)
  write_pt(folder / "hnet.pt", state, monkeypatch)
  with pytest.raises(dpjax.UserError, match="expected one released model, got .*pt, .*tensors"):
    dpjax.load(folder)
  half = dpjax.load(folder / "hnet.pt", dtype="bfloat16")
  assert half.model.dtype == half.params["logits"]["kernel"].dtype == jnp.bfloat16
  residual = half.params["stages_0"]["boundaries"]["residual"]["kernel"]
  skip = half.params["stages_0"]["first"]["blocks_0"]["mixer"]["skip"]
  assert residual.dtype == skip.dtype == jnp.float32
  expected = params["layers"]["blocks_0"]["mixer"]["out"]["kernel"].astype(jnp.bfloat16)
  got = half.params["layers"]["blocks_0"]["mixer"]["out"]["kernel"]
  np.testing.assert_array_equal(got, expected)
  with pytest.raises(dpjax.UserError, match="step, model: expected None for an H-Net"):
    dpjax.load(folder / "hnet.pt", 3)
  content = bytearray((folder / "hnet.pt").read_bytes())
  content[content.index(state["lm_head.weight"].tobytes()[:64]) + 9] ^= 1
  (folder / "hnet.pt").write_bytes(content)
  with pytest.raises(dpjax.UserError, match="hnet.pt: expected a complete array, got BadZipFile"):
    dpjax.load(folder / "hnet.pt")


def test_a_pickle_runs_no_code(folder, monkeypatch):
  with zipfile.ZipFile(folder / "hnet.pt", "w") as archive:
    archive.writestr("m/data.pkl", b"cbuiltins\nexit\n(i7\ntR.")
  (folder / "hnet.safetensors").unlink()
  with pytest.raises(dpjax.UserError, match=r"hnet.pt: .* an object of builtins.exit"):
    dpjax.load(folder)
  (folder / "hnet.pt").write_bytes(b"PK\x03\x04")
  with pytest.raises(dpjax.UserError, match="hnet.pt: expected a complete file of arrays, got Bad"):
    dpjax.load(folder)
  (folder / "hnet.json").unlink()
  with pytest.raises(dpjax.UserError, match=r"beside it, hnet.json or config.json"):
    dpjax.load(folder / "hnet.pt")


def test_archives_that_pytorch_does_not_write(folder, monkeypatch):
  """Compressed entries could become any size, and attributes would replace methods."""
  *_, state, _, _, params = prepare("one_stage")
  (folder / "hnet.safetensors").unlink()
  path = folder / "hnet.pt"
  write_pt(path, state, monkeypatch, attributes=["get", "keys", "items", "__iter__"])
  helpers.assert_trees_close(dpjax.load(folder).params, params, rtol=0)
  for options, message in (
    (dict(compression=zipfile.ZIP_DEFLATED), "without compression, as torch.save writes them, got"),
    (
      dict(more=1),
      "of arrays, got UnpicklingError: .* bytes for .* numbers of float32 in m/data/0",
    ),
  ):
    write_pt(path, state, monkeypatch, **options)
    with pytest.raises(dpjax.UserError, match=message) as error:
      dpjax.load(folder)
    assert str(error.value).count(str(path)) == 1


def test_a_model_in_several_files_is_read_by_its_index(folder):
  _, config, state, _, _, params = prepare("one_stage")
  (folder / "hnet.safetensors").unlink()
  (folder / "hnet.json").rename(folder / "config.json")
  places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(state)}
  for file in set(places.values()):
    save_file({name: state[name] for name, x in places.items() if x == file}, folder / file)
  index = folder / "model.safetensors.index.json"
  index.write_text(json.dumps({"metadata": {"total_size": 5}, "weight_map": places}))
  for path in (folder, index):
    helpers.assert_trees_close(dpjax.load(path).params, params, rtol=0)
  name = next(iter(places))
  for wrong in ({name: "../x.safetensors"}, {name: 3}, [name]):
    index.write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(dpjax.UserError, match="index.json: expected a weight_map from names"):
      dpjax.load(folder)
  other = next(file for file in places.values() if file != places[name])
  index.write_text(json.dumps({"weight_map": {**places, name: other}}))
  with pytest.raises(
    dpjax.UserError, match="index.json: expected a complete file of arrays, got Key"
  ):
    dpjax.load(folder)


def test_a_model_of_the_hub(folder, monkeypatch, tmp_path):
  *_, params = prepare("one_stage")
  files = {f"models/{x.name}": x.read_bytes() for x in folder.iterdir() if x.is_file()}
  files["models/other.safetensors"] = b"of another model"
  with hub.running() as server:
    hub.use(monkeypatch, server.url, tmp_path / "cache")
    server.publish("models/me/hnet", files)
    helpers.assert_trees_close(dpjax.load("hf://me/hnet").params, params, rtol=0)
    assert not any("other" in x for x in server.asked if "resolve" in x)


def test_generation_begins_and_ends_with_the_bytes_for_it(tmp_path):
  # Of attention alone, which compiles in less time.
  config = {**prepare("one_stage")[1], "arch_layout": ["t1", ["T1"], "t1"]}
  shapes, draw = hnet.shapes_of(hnet.make_settings(config)), np.random.default_rng(3)
  state = {name: draw.standard_normal(x, np.float32) / 4 for name, x in shapes.items()}
  write_model(tmp_path, config, state)
  run = dpjax.load(tmp_path)
  config = run.config.copy_and_resolve_references()
  config.model.update(max_length=32, boundaries=dict(num_buckets=1))
  run = dataclasses.replace(run, config=config, model=dpjax.build_model(config.model))
  apply = jax.jit(run.model.apply)
  prompts = ["", "h", "\u00e9"]
  streamed = zip(*run.stream(prompts, length=4, temperature=0), strict=True)
  for prompt, pieces in zip(prompts, streamed, strict=True):
    row = [254, *prompt.encode()]
    for _ in range(4):
      tokens = np.zeros((1, 32), np.int32)
      tokens[0, : len(row)] = row
      row.append(int(apply({"params": run.params}, tokens).logits[0, len(row) - 1].argmax()))
    new = bytes(row[1:]).decode(errors="replace")
    assert new.endswith("".join(x.text for x in pieces)) and 255 not in row
  # With weights that predict the end.
  kernel = np.array(run.params["logits"]["kernel"])
  kernel[:, :255] *= 0
  ends = {**run.params, "logits": {"kernel": jnp.asarray(kernel)}}
  sign = np.sign(apply({"params": ends}, np.full((1, 32), 254)).logits[0, 0, 255])
  ends["logits"]["kernel"] *= sign
  pieces = next(iter(run._generator.stream(ends, prompts, length=4, temperature=0)))
  assert pieces[0] == ("", 1, True)


@pytest.mark.slow
def test_it_is_trained_further_and_exported(folder, tmp_path):
  config = dpjax.load(folder).config
  config.model.max_length = 32
  config.model.boundaries.num_buckets = 1
  text = helpers.write_text(tmp_path / "text.txt")
  small = helpers.small_config(text, num_steps=2, eval_every_steps=2, init_from=str(folder))
  config.update(train=small.train, eval=small.eval)
  config.data.update(path=str(text), data_dir=small.data.data_dir)
  begin = dpjax.load(folder).params
  run, _ = dpjax.train(config, tmp_path / "run", optimizer=optax.set_to_zero())
  helpers.assert_trees_close(run.params, begin, rtol=0)
  assert run.tokenizer.name == "bytes_with_ends"
  run.save(tmp_path / "out")
  helpers.assert_trees_close(dpjax.load(tmp_path / "out").params, begin, rtol=0)
  loaded = numpy_model.load(tmp_path / "out")([254, *b"cat"])
  logits = run.model.apply({"params": run.params}, np.array([[254, *b"cat"]])).logits[0]
  np.testing.assert_allclose(loaded, logits, rtol=1e-4, atol=1e-4)
