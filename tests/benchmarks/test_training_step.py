"""The models in PyTorch are those of dpjax, and steps are compared as the report says."""

import contextlib
import importlib.util
import json
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax.models.build import build_model
from dpjax.training import losses
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "benchmarks"))  # As for a script that lies there.
from benchmarks import training_step  # noqa: E402

needs_torch = pytest.mark.skipif(
  importlib.util.find_spec("torch") is None, reason="PyTorch is no dependency"
)
SMALL = dict(vocab_size=13, num_layers=2, width=6, feed_forward_width=10, max_length=11)
PRE = dict(norm="pre", positions="learned", init_std=0.01)
RELATIVE = dict(mixer="relative_attention", num_heads=3, positions="none", activation="gelu")
RELATIVE |= dict(init_std=0.02, norm_init_std=0.02)
POOLED = RELATIVE | dict(first_layers=1, last_layers=3)
MODELS: dict[str, dict[str, Any]] = {
  "dispatcher": dict(mixer="dispatcher"),
  "attention": dict(mixer="attention", num_heads=2),
  "attention, pre": dict(mixer="attention", num_heads=3, attention_bias=False, **PRE),
  "relative": RELATIVE,
  "fixed": POOLED | dict(boundaries="fixed", shortening_factor=3),
  "whitespace": POOLED | dict(boundaries="whitespace", space_ids=(0, 7, 5), num_capacities=2),
  "she": dict(mixer="she", **PRE),
  "he": dict(mixer="he", **PRE),
  "we": dict(mixer="we", **PRE),
  "me": dict(mixer="me", **PRE),
}
EXTRACTIONS = dict.fromkeys(training_step.FORMS, ("sum", "convolution", "fft"))
FORMS = [(name, form) for name in MODELS for form in EXTRACTIONS.get(name, ("convolution",))]


def settings_of(model):
  return training_step.DEFAULTS | SMALL | model


def build(settings):
  return build_model(config_lib.from_dict({"model": settings}).model)


def test_the_defaults_of_both_sides_are_those_of_dpjax():
  found = config_lib.from_dict({"model": training_step.DEFAULTS}).model
  assert found == config_lib.default_model()


def worker_settings(model, **more):
  optimizer = dict(name="adam", learning_rate=0.02, clip_norm=0.5)
  sizes = {"optimizer": optimizer, "batch": 3}
  return training_step.settings_of(SMALL | model, sizes, "cpu", "float32", **more)


def to_params(arrays):
  """Arrays by the names of `torch_models` -> parameters of dpjax."""
  layers = {}
  for name, x in arrays.items():
    parts = name.split(".")
    index = next((int(part) for part in parts if part.isdigit()), None)
    *path, leaf = (part for part in parts if not part.isdigit())
    if leaf == "weight" and path[-1] == "tokens":
      leaf = "embedding"
    elif leaf == "weight":
      leaf, x = ("kernel", x.T) if x.ndim == 2 else ("scale", x)
    if path and path[-1] == "queries_keys_values":
      x = x.reshape(*x.shape[:-1], 3, -1)
    layers.setdefault((*path, leaf), {})[index] = x
  params: dict[str, Any] = {}
  for (*path, leaf), found in layers.items():
    place = params
    for part in path:
      place = place.setdefault(part, {})
    whole = found[None] if None in found else np.stack([found[i] for i in sorted(found)])
    place[leaf] = jnp.asarray(whole)
  return params


@needs_torch
@pytest.mark.parametrize("name, form", FORMS)
def test_models_of_pytorch_are_those_of_dpjax(name, form):
  import torch

  from benchmarks import torch_models

  settings = settings_of(MODELS[name])
  model = torch_models.LanguageModel(settings | {"extraction": form})
  generator = np.random.default_rng(5)
  with torch.no_grad():
    for key, x in model.named_parameters():
      is_gain = key.endswith("norm.weight")
      x.copy_(torch.from_numpy(is_gain + 0.3 * generator.standard_normal(x.shape)))
  # Shorter than the window, and other than the number of rows.
  text = training_step.draw_text(7, 4, 9, SMALL["vocab_size"])
  tokens, targets = text[:, :-1], text[:, 1:]
  logits = model.eval()(torch.from_numpy(tokens).long())
  torch.nn.functional.cross_entropy(
    logits.flatten(0, 1), torch.from_numpy(targets).long().flatten(), reduction="sum"
  ).backward()

  def arrays(pick):
    return to_params({key: pick(x).numpy() for key, x in model.named_parameters()})

  def loss(params):
    output: Any = build(settings).apply({"params": params}, jnp.asarray(tokens))
    nats, _ = losses.cross_entropy(output.logits, jnp.asarray(targets), jnp.ones((4, 9)))
    return nats, output.logits

  params = arrays(torch.Tensor.detach)
  shapes = jax.eval_shape(build(settings).init, jax.random.key(0), tokens)["params"]
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
  with jax.default_matmul_precision("highest"):
    gradients, expected = jax.jit(jax.grad(loss, has_aux=True))(params)
  np.testing.assert_allclose(logits.detach(), expected, rtol=1e-4, atol=1e-5)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4),
    arrays(lambda x: x.grad),
    gradients,
  )


@needs_torch
def test_initial_values_are_those_of_dpjax():
  import torch

  from benchmarks import torch_models

  torch.manual_seed(3)
  for name in ("dispatcher", "attention", "attention, pre", "fixed", "she"):
    settings = settings_of(MODELS[name]) | dict(width=48, feed_forward_width=60)
    model = build(settings)
    arrays = {
      key: x.detach().numpy() for key, x in torch_models.LanguageModel(settings).named_parameters()
    }
    expected = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    for (path, x), y in zip(
      jax.tree.leaves_with_path(to_params(arrays)), jax.tree.leaves(expected["params"]), strict=True
    ):
      what = f"{name}{jax.tree_util.keystr(path)}"
      x, y = np.asarray(x, float), np.asarray(y, float)
      # Four standard errors, and more of the mean.
      error = 4 * x.size**-0.5
      spread, mean = float(y.std()), float(y.mean())
      assert float(x.std()) == pytest.approx(spread, rel=error, abs=1e-6), what
      assert float(x.mean()) == pytest.approx(mean, abs=1.5 * error * spread + 1e-6), what


@needs_torch
def test_dropped_levels_and_units_are_there_in_training_alone():
  import torch

  from benchmarks import torch_models

  torch.manual_seed(3)
  rates = training_step.dropouts(0.5)
  tokens = torch.from_numpy(training_step.draw_text(7, 2, 10, 13)).long()
  for part in rates:
    for more in (MODELS["dispatcher"], MODELS["attention"], MODELS["relative"]):
      model = torch_models.LanguageModel(settings_of(more | {part: 0.5}))
      assert not torch.equal(model(tokens), model(tokens)), (part, more)
      model.eval()
      assert torch.equal(model(tokens), model(tokens))


@needs_torch
@pytest.mark.parametrize(
  "settings, words",
  [
    (dict(mixer="dispatcher", num_heads=2), "num_heads: expected 1"),
    (dict(mixer="dispatcher_multihead"), "mixer: expected one of dispatcher, attention"),
    (dict(POOLED, boundaries="gumbel"), "boundaries: expected fixed or whitespace"),
  ],
)
def test_refuses_what_is_not_written_in_pytorch(settings, words):
  from benchmarks import torch_models

  with pytest.raises(ValueError, match=words):
    torch_models.LanguageModel(settings_of(settings))


@needs_torch
def test_a_process_of_pytorch_answers_every_line():
  worker = training_step.Worker("torch", worker_settings({"mixer": "dispatcher"}))
  try:
    ready = worker.wait()
    assert ready["ready"] and ready["device"] == "cpu"
    assert (
      ready["parameters"]
      == training_step.JaxRunner(worker_settings({"mixer": "dispatcher"}, commands=())).parameters
    )
    answers = [worker.run("train") for _ in range(5)] + [worker.run("evaluate")]
    assert all(x["seconds"] > 0 and x["peak_mib"] is None for x in answers)
    # It learns its one batch.
    assert answers[5]["loss"] < answers[0]["loss"] - 0.1
    with pytest.raises(training_step.WorkerError, match="torch: ended with status 1"):
      worker.run("sing")
  finally:
    worker.close()


def test_the_runner_trains_and_evaluates_the_model():
  with jax.numpy_dtype_promotion("standard"):  # Optax needs it.
    check_runner()


def check_runner():
  settings = worker_settings({"mixer": "dispatcher"}, commands=("train", "evaluate"))
  runner = training_step.JaxRunner(settings)
  ready = json.loads(json.dumps(runner.describe()))
  assert set(ready["compile_seconds"]) == set(ready["temporary_mib"]) == {"train", "evaluate"}
  before = runner.run("evaluate")
  answers = [runner.run("train") for _ in range(5)]
  # A head as wide as the model, 4 levels, 3 rows of 11; 3 passes.
  layer = 2 * 6 * 6 + 6 * 4 + 2 * 6 * 10
  assert answers[0]["operations"] == 3 * before["operations"]
  assert answers[0]["operations"] == pytest.approx(3 * 2 * 33 * (2 * layer + 6 * 13))
  # Without dropout it is the same loss, which then falls.
  assert answers[0]["loss"] == pytest.approx(before["loss"], rel=1e-4)
  assert before["loss"] == pytest.approx(math.log(13), abs=1.0)
  assert runner.run("evaluate")["loss"] < before["loss"] - 0.1


class Fake:
  """A worker that takes as long as a formula says; `takes` and `most` are set by tests."""

  takes: Any = None
  mib: Any = None
  started: list = []
  flags: list = []

  def __init__(self, side, settings, *, is_quiet=True):
    self.side, self.settings = side, settings
    self.model, self.count = settings["model"], 0
    self.flags.append(settings["flags"])
    self.started.append((side, self.model["mixer"], settings["length"], is_quiet))

  def wait(self):
    mib = 1.0 if self.mib is None else self.mib(self.model, self.settings["length"])
    more = {
      "compile_seconds": {"train": 7.0, "evaluate": 5.0},
      "temporary_mib": {"train": mib, "evaluate": 1.0},
      "product_rate": 8e9,
    }
    self.ready = {"parameters": 2**18, "rss_mib": 100.0}
    self.ready |= more if self.side == "jax" else {}
    return self.ready

  def run(self, command):
    self.count += 1
    seconds = self.takes(self.side, self.model, self.settings["length"], self.count)
    if seconds is None:
      raise training_step.WorkerError("torch: ended with status 9")
    more = {"operations": 2e9} if self.side == "jax" else {}
    return {"seconds": seconds, "loss": 3.0, "peak_mib": None, "peak_rss_mib": 110.0, **more}

  def close(self):
    pass


@pytest.fixture
def fake(monkeypatch):
  monkeypatch.setattr(training_step, "Worker", Fake)
  monkeypatch.setattr(Fake, "started", [])
  monkeypatch.setattr(Fake, "flags", [])
  monkeypatch.setattr(Fake, "mib", None)
  monkeypatch.setattr(Fake, "takes", staticmethod(lambda *_: 0.5))
  monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # As the program sets it.
  monkeypatch.setattr(training_step, "find_torch", lambda device: ("2.0", f"PyTorch for {device}"))
  return Fake


def run_program(monkeypatch, *arguments):
  monkeypatch.setattr(sys, "argv", ["training_step.py", *map(str, arguments)])
  training_step.main()


def strict(text):
  return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the report"))


def test_reports_all_parts_and_keeps_those_of_before(monkeypatch, tmp_path, fake, capsys):
  busy = []

  @contextlib.contextmanager
  def neighbour():
    busy.append(True)
    yield
    busy.clear()

  monkeypatch.setattr(training_step, "neighbour", neighbour)

  def takes(side, model, length, count):
    seconds = (1.0 if side == "jax" else 4.0) * (2.0 if busy else 1.0)
    seconds *= 3.0 if count <= training_step.WARM_UPS else 1.0
    return seconds * (2.0 if model["mixer"] == "attention" else 1.0)

  monkeypatch.setattr(fake, "takes", staticmethod(takes))
  out = tmp_path / "folder/steps"
  quick = ("--quick", "--out", out)
  run_program(monkeypatch, *quick, "--parts=dispatcher,hourglass,extractors,paper,flags")
  run_program(monkeypatch, *quick, "--parts=lengths", "--no_torch")
  report = strict(out.with_suffix(".json").read_text())
  assert set(report["parts"]) == set(training_step.PARTS)
  twice = [training_step.QUIET, training_step.BUSY]
  for part in ("paper", "extractors", "hourglass", "flags"):
    assert [*report["parts"][part]["rows"]] == twice
  for rows in report["parts"]["flags"]["rows"].values():
    assert [row["name"] for row in rows] == [
      "default",
      *training_step.FLAGS,
      "layers one by one",
    ]
    assert all([*row["sides"]] == ["jax"] for row in rows)
    assert all(row["over_baseline"] == {"jax": 1.0} for row in rows)
  assert set(fake.flags) == {"", *training_step.FLAGS.values()}
  rows = report["parts"]["paper"]["rows"]
  for (row,), slower in zip(rows.values(), (1, 2), strict=True):
    shares = [slower * x["utilisation"] for x in row["sides"].values()]
    assert shares == [2 / 8, 2 / 4 / 8]
  assert out.with_suffix(".png").stat().st_size > 5000
  for part in report["parts"].values():
    assert part["machine"]["cores"] > 0 and part["minutes"] >= 0
  assert report["parts"]["lengths"]["torch"] == "dpjax alone"
  found = report["parts"]["dispatcher"]["rows"]
  busy_rows = found.pop(training_step.BUSY)
  assert [(x["name"], x["sides"]["jax"]["milliseconds"]) for x in busy_rows] == [
    ("dispatcher", 2000.0),
    ("attention", 4000.0),
  ]
  assert set(found) == {"usual", "quiet"}
  for allocator, rows in found.items():
    names = ["dispatcher"] + ["attention"] * (allocator == "quiet")
    assert [(x["name"], x["command"], x["dropout"]) for x in rows] == [
      (name, *rest)
      for rest in (("train", 0.2), ("evaluate", 0.2), ("train", 0.0))
      for name in names
    ]
    for row in rows:
      assert row["over"] == {"torch": 0.25} and row["parameters"] == 2**18
      half = 0.5 if row["name"] == "dispatcher" else 1.0
      assert row["over_baseline"] == ({"jax": half, "torch": half} if allocator == "quiet" else {})
      ours, theirs = row["sides"]["jax"], row["sides"]["torch"]
      # Warm-ups do not count but as the first step; moments of Adam are not growth.
      assert ours["milliseconds"] == 1e3 * (1 + (row["name"] == "attention"))
      assert len(ours["seconds"]) == 3 and ours["loss"] == 3.0
      assert (ours["compile_seconds"], theirs["compile_seconds"]) == (
        5.0 if row["command"] == "evaluate" else 7.0,
        None,
      )
      assert (ours["grown_mib"], theirs["grown_mib"]) == (10.0, 8.0)
  rows = report["parts"]["extractors"]["rows"]["quiet"]
  assert [(x["name"], tuple(x["sides"])) for x in rows][:3] == [
    ("she", ("jax", "torch", "torch, fft")),
    ("attention", ("jax", "torch")),
    ("he", ("jax", "torch", "torch, fft")),
  ]
  assert [x["name"] for x in rows][3:] == ["we", "me"]
  lines = capsys.readouterr().out.splitlines()
  for line in (
    "| Dispatcher, dpjax | train | 0.2 | float32 "
    "| 1,000 | 0.250 | - | 0.500 | 3.00 | 1.00 | 7.00 |",
    "| attention, PyTorch | evaluate | 0.2 | float32 "
    "| 8,000 | 0.0312 | 0.250 | 1.00 | 3.00 | - | - |",
    "Dispatcher below attention, time, dpjax, float32: at all lengths, from T = 16 on.",
  ):
    assert line in lines, f"expected the line {line}"


def test_the_neighbour_copies_until_it_is_ended():
  with training_step.neighbour() as process:
    before = process.poll()
  assert before is None and process.returncode == -9


def test_the_allocator_is_that_of_the_environment(monkeypatch):
  found = []

  class Process:
    def __init__(self, command, *, env, **_):
      found.append((command, env))

  monkeypatch.setattr(training_step.subprocess, "Popen", Process)
  for name, value in training_step.timing.ALLOCATOR.items():
    monkeypatch.setenv(name, value)
  for side in ("jax", "torch, sum"):
    for is_quiet in (False, True):
      settings = {"device": "cpu", "flags": "--xla_that"}
      training_step.Worker(side, settings, is_quiet=is_quiet)
  for command, env in found:
    assert env["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false", command
    assert env["XLA_FLAGS"].split()[-1] == "--xla_that"
  names = set(training_step.timing.ALLOCATOR)
  assert [names & set(env) for _, env in found] == [set(), names, set(), names]
  assert [("--serve" in command) for command, _ in found] == [True, True, False, False]


def test_writes_nothing_unless_told_and_has_one_allocator(monkeypatch, tmp_path, fake):
  monkeypatch.setattr(training_step, "neighbour", contextlib.nullcontext)
  monkeypatch.chdir(tmp_path)
  run_program(monkeypatch, "--quick")
  assert not list(tmp_path.iterdir())
  for is_quiet, processes in ((False, 4), (True, 12)):
    sides = [x[0] for x in fake.started if x[3] == is_quiet]
    assert len(sides) == processes and 2 * sides.count("jax") == processes


def test_refuses_unequal_models(monkeypatch, fake):
  def wait(self):
    self.ready = {"parameters": len(self.side)}
    return self.ready

  monkeypatch.setattr(fake, "wait", wait)
  with pytest.raises(AssertionError, match="dispatcher: parameters of"):
    run_program(monkeypatch, "--quick")


def test_refuses_unknown_parts(monkeypatch, capsys):
  for argument in ("--parts=all", "--dtypes=float32,float16"):
    with pytest.raises(SystemExit):
      run_program(monkeypatch, argument)
    assert "expected" in capsys.readouterr().err


def measured_lengths(**sizes):
  run = {"device": "cpu", "torch": "2.0", "words": "", "dtypes": ("float32",)}
  run |= {"compile_torch": False, "limit_mib": 1000.0}
  lengths = training_step.Lengths(training_step.QUICK["lengths"] | sizes, run)
  found = lengths.measure()
  rows = {(x["name"], x["side"], x["length"]): x for x in found["rows"]}
  return rows, {(x["side"], x["quantity"]): x for x in found["crossings"]}


def square_attention(side, model, length, count):
  """Equal at T = 24 here, at 2**20 there."""
  if model["mixer"] == "dispatcher":
    return 1e-3 * length
  return 1e-3 * length**2 / {"jax": 24, "torch": 2**20}[side]


def test_finds_where_lines_cross(monkeypatch, fake):
  monkeypatch.setattr(fake, "takes", staticmethod(square_attention))
  rows, crossings = measured_lengths()
  assert len(rows) == 12 and not any("left_out" in x for x in rows.values())
  assert rows["dispatcher", "jax", 32]["over_attention"] == pytest.approx(24 / 32)
  assert rows["attention", "jax", 64]["over_torch"] == pytest.approx(2**20 / 24)
  found = crossings["jax", "time"]
  assert found["dispatcher_below_attention_from"] == pytest.approx(24)
  assert found["words"] == "from T = 24 on" and found["lengths"] == [16, 32, 64]
  assert crossings["torch", "time"]["words"] == "not up to T = 64"


def test_a_crossing_is_the_last():
  for ratios, start in (
    *(((0.9, 0.5), 16.0), ((1.0, 0.5), 16.0), ((2.0, 0.5), 32.0)),
    *(((2.0, 1.0), None), ((0.5, 1.5), None)),
  ):
    found = training_step.crossing((16, 64), ratios)
    assert found == (None if start is None else pytest.approx(start))


def test_leaves_out_what_does_not_fit(monkeypatch, fake):
  def takes(side, model, length, count):
    is_broken = side == "torch" and model["mixer"] == "dispatcher" and length > 16
    return None if is_broken else square_attention("jax", model, length, count)

  monkeypatch.setattr(fake, "takes", staticmethod(takes))
  monkeypatch.setattr(
    fake,
    "mib",
    staticmethod(lambda model, length: length**2 / 2 if model["mixer"] == "attention" else 1.0),
  )
  rows, crossings = measured_lengths(lengths=(16, 32, 64, 128))
  out = {key: x["left_out"] for key, x in rows.items() if "left_out" in x}
  assert out == {
    ("dispatcher", "torch", 32): "torch: ended with status 9",
    ("attention", "jax", 64): "2.0 GiB, with 1.0 GiB left",
  }
  # Longer ones are not tried, nor are they said to be missing again.
  assert {x[2] for x in fake.started if x[:2] == ("torch", "dispatcher")} == {16, 32}
  assert {x[2] for x in fake.started if x[:2] == ("jax", "attention")} == {16, 32, 64}
  assert crossings["jax", "memory"]["lengths"] == [16, 32]


def test_leaves_out_what_takes_too_long(monkeypatch, fake):
  monkeypatch.setattr(fake, "takes", staticmethod(square_attention))
  rows, _ = measured_lengths(lengths=(16, 32, 64), most_seconds=0.7)
  out = {key: x["left_out"] for key, x in rows.items() if "left_out" in x}
  assert set(out) == {("attention", "jax", 64)}
  assert out["attention", "jax", 64].startswith("4 steps of about 0 s")


def test_ratios_are_of_pairs_and_repetitions_end_in_time():
  class Paced:
    def __init__(self, *seconds):
      self.left = iter(seconds)

    def run(self, command):
      return {"seconds": next(self.left)}

  workers = {"a": Paced(9, 1, 2, 8), "b": Paced(9, 2, 1, 2)}
  found = training_step.measure(workers, "train", 3, warm_ups=1)
  assert training_step.timing.ratio(found["a"][2], found["b"][2]) == 2
  workers = {"a": Paced(*[1] * 52)}
  found = training_step.measure(workers, "train", 50, max_seconds=1e-9, warm_ups=2)
  assert len(found["a"][2]) == 3


@pytest.mark.slow
def test_the_program_runs(tmp_path):
  out = tmp_path / "steps"
  flags = f"--quick --no_torch --parts=lengths,extractors --out={out}".split()
  command = [sys.executable, "benchmarks/training_step.py", *flags]
  subprocess.run(command, cwd=helpers.ROOT, check=True)
  report = strict(out.with_suffix(".json").read_text())
  rows = report["parts"]["lengths"]["rows"]
  assert len(rows) == 6 and all(x["milliseconds"] > 0 for x in rows)
  for row in report["parts"]["extractors"]["rows"]["quiet"]:
    assert row["over"] == {} and row["over_baseline"]["jax"] > 0
    assert row["sides"]["jax"]["loss"] == pytest.approx(math.log(31), abs=0.3)
