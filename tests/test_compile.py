"""`dpjax compile`: what steps take of devices that need not be there."""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import dpjax
from dpjax.analysis import compilation, devices
from dpjax.config import registry
from dpjax.errors import UserError
from tests import helpers, test_snippets

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZES = dict(vocab_size=41, width=24, feed_forward_width=56, num_layers=2, max_length=48)


def small(boundaries="none", mixer="attention", **model):
  config = dpjax.config.default()
  if boundaries != "none":
    model |= dict(first=dict(num_layers=1), last=dict(num_layers=1))
  config.model = helpers.model_settings(mixer, boundaries, **{**SIZES, **model})
  config.train.batch_size, config.eval.batch_size = 8, 6
  return config


def test_counts_what_a_step_takes_and_tells_whether_it_fits():
  found = compilation.compile_steps(small(), "cpu")
  assert found["devices"] == 1 and [*found["steps"]] == ["train", "evaluate", "generate"]
  train, evaluate, generate = found["steps"].values()
  assert all(x["fits"] and not x["collectives"] for x in (train, evaluate, generate))
  # Adam has two moments; a batch has three arrays of 8 x 48.
  expected = 4 * (3 * found["parameters"] + 3 * 8 * 48)
  assert train["arguments_gib"] * 2**30 == pytest.approx(expected, rel=0.01)
  # Six rows of 48 tokens through four linear layers of attention, two more, and the logits; a
  # head's scores and sums of values are of all pairs.
  tokens, (d, f, v) = 6 * 48, (24, 56, 41)
  products = 2 * tokens * (2 * (4 * d * d + 2 * d * f + 2 * 48 * d) + d * v)
  assert evaluate["operations"] == products
  assert generate["operations"] < evaluate["operations"] / 40
  assert "1 x " in compilation.table(found) and ": fits, " in compilation.table(found)
  evaluate |= {"fits": False, "needed_gib": found["memory_gib"] + 2.5}
  assert "does not fit, by 2.50 GiB" in compilation.table(found)
  message = "RESOURCE_EXHAUSTED: too big"
  train = {"operations": 0, "needed_gib": 15.8, "fits": False, "refused": message}
  shown = compilation.table({**found, "memory_gib": 16.0, "steps": {"train": train}})
  assert "15.80 GiB" in shown and f"refused it ({message})" in shown
  assert "does not fit" in shown  # The compiler keeps some memory for itself.


def test_operations_of_loops_and_branches():
  def function(x, y):
    x, _ = jax.lax.scan(lambda x, _: (x @ y, None), x, length=5)
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ y @ y, lambda x: x @ y, x)

  x, y = np.ones((2, 3)), np.ones((3, 3))
  jaxpr = jax.make_jaxpr(function)(x, y).jaxpr
  assert compilation.count_operations(jaxpr) == (5 + 2) * 2 * (2 * 3 * 3)


def test_parameters_are_told_by_part():
  config = small("fixed")
  found = compilation.compile_steps(config, "cpu", steps=())
  parts, (d, f, v) = found["parts"], (24, 56, 41)
  assert sum(parts.values()) == found["parameters"]
  assert parts["stages_0.first.mixer"] * 2 == parts["layers.mixer"]
  assert parts["stages_0.last.feed_forward"] == 2 * d * f + d + f
  assert parts["stages_0.first.norms"] == 4 * d and parts["stages_0.null_group"] == d
  assert parts["logits"] == d * v + v and parts["embedding"] == v * d


@pytest.fixture
def quick(monkeypatch):
  """Compiles nothing: fewer than 99 rows fit."""

  def measure(program, *_):
    rows = jax.tree.leaves(program[1][1])[0].shape[0]
    return {"operations": 0, "needed_gib": 0.5, "fits": rows < 99, "refused": "by a test"}

  monkeypatch.setattr(compilation, "_measure", measure)


@pytest.mark.parametrize(
  "count, shown", [(12, "12 flop"), (2.1e6, "2.1 Mflop"), (3.456789e13, "34.57 Tflop")]
)
def test_operations_have_a_unit_of_their_size(count, shown):
  assert compilation.format_operations(count) == shown


def test_the_command_takes_the_vocabulary_of_a_run(quick, finished, tmp_path, monkeypatch, capsys):
  """Of its folder, unless it is of another text."""
  folder, run, _ = finished
  monkeypatch.setattr(devices, "prepare", lambda: None)
  two = devices.Device("cpu", 2**30), jax.devices()[:2]
  monkeypatch.setattr(devices, "find", lambda topology: topology == "h100:2" and two)
  words = [str(folder), f"--out={tmp_path / 'found.json'}", "--topology=h100:2"]
  words += ["--largest_batch", "--config.train.batch_size=5", "--config.train.grad_accum_steps=2"]
  assert helpers.command("compile", *words) is None
  shown, found = capsys.readouterr().out, json.loads((tmp_path / "found.json").read_text())
  assert "2 x 1.00 GiB: fits" in shown and "train.batch_size: 8, as 5 do not divide" in shown
  assert found["parameters"] == sum(x.size for x in jax.tree.leaves(run.params))
  assert re.search(rf"^parameters +{found['parameters']:,}$", shown, re.MULTILINE)
  assert found["largest_batch"] == 96 and "largest train.batch_size that fits: 96" in shown
  said = helpers.command("compile", *words, "--config.data.isolate_documents")
  assert "--config.model.vocab_size=COUNT, or --config=RUN" in said
  # --config=RUN says the same, and a flag before RUN takes no word from it.
  for run_words in (
    [f"--config={folder}"],
    ["--config.model.dropout=0.2", str(folder)],
    [str(folder), "--config.model.dropout", "0.2"],
  ):
    assert helpers.command("compile", *run_words, "--topology=h100:2") is None
    assert f"parameters  {found['parameters']:,}" in re.sub("  +", "  ", capsys.readouterr().out)
  said = helpers.command("compile", folder, f"--config={folder}")
  assert said == f"RUN, --config: expected one of them, got {folder} and {folder}"


def test_a_dry_run_tells_what_training_takes_and_trains_nothing(quick, finished, tmp_path, capsys):
  folder, run, _ = finished
  words = [f"--config={folder}", f"--workdir={tmp_path / 'plan'}", "--dry_run"]
  assert helpers.command("train", *words, "--config.train.batch_size=16") is None
  shown = capsys.readouterr().out
  size = sum(x.size for x in jax.tree.leaves(run.params))
  assert re.search(rf"^parameters +{size:,}$", shown, re.MULTILINE)
  assert re.search(r"^train +9,318 tokens", shown, re.MULTILINE)
  assert "12 updates of 16 x 19 tokens, 0.3" in shown and "8 x " in shown and ": fits, " in shown
  said = helpers.command("train", *words, "--config.train.batch_size=9")
  assert said.startswith("train.batch_size: expected a multiple of 8 ")
  said = helpers.command("train", *words, "--config.model.vocab_size=3")
  assert said.startswith("model.vocab_size: expected 0 or the tokenizer's ")
  assert not [*tmp_path.iterdir()]


def test_a_dry_run_of_a_run_changes_nothing_in_it(quick, finished, tmp_path, capsys):
  run = shutil.copytree(finished[0], tmp_path / "run", symlinks=True)

  def contents():
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

  before = contents()
  changes = ["--config.train.log_every_steps=3", f"--config.data.data_dir={tmp_path / 'new'}"]
  assert helpers.command("train", run, *changes, "--dry_run") is None
  assert re.search(r"^train +9,318 tokens", capsys.readouterr().out, re.MULTILINE)
  said = helpers.command("train", run, "--config.train.batch_size=9", "--dry_run")
  assert said.startswith(
    f"workdir: expected an empty folder or a run of this configuration, got {run}"
  )
  assert contents() == before


def test_no_batch_may_fit(monkeypatch):
  monkeypatch.setattr(compilation, "_measure", lambda *_: {"fits": False})
  assert compilation.largest_batch(small(), "cpu") == 0


def test_every_command_of_the_documentation_is_taken(monkeypatch, capsys):
  """As far as the compiler, here on eight chips."""

  def measure(program, *_):
    rows = jax.tree.leaves(program[1][1])[0].shape[0]
    return {"operations": 0, "needed_gib": 3.0, "fits": rows < 99, "refused": "by a test"}

  monkeypatch.setattr(compilation, "_measure", measure)
  monkeypatch.setattr(devices, "prepare", lambda: None)
  tpu = devices.DEVICES["v5e"], jax.devices()
  monkeypatch.setattr(devices, "find", lambda topology: topology and tpu)
  blocks = test_snippets.blocks(helpers.ROOT / "docs/accelerators.md")
  words = [words for *_, code, _ in blocks for words in test_snippets.commands(code)]
  compiled = [rest for program, name, *rest in words if (program, name) == ("dpjax", "compile")]
  assert [helpers.command("compile", *rest) for rest in compiled] == [None] * 3
  shown = capsys.readouterr().out
  assert "train.batch_size: 8, as 5 do not divide" in shown
  assert "largest train.batch_size that fits: 9" in shown


def test_segments_choose_the_length_of_a_middle_that_the_tokens_tell():
  config = small("whitespace")
  config.model.boundaries.space_ids = (0,)
  few, all_of_them = (
    compilation._Programs(config, jax.devices()[:1], segments).evaluate()[2]["capacity"]
    for segments in (5, 0)
  )
  assert few < all_of_them == 49


@pytest.mark.parametrize(
  "changes, topology, expected",
  [
    ({}, "v99", "--topology: expected one of v4, .*, cpu, here, such as v5e:2x2 or .*, got v99"),
    ({}, "h100", r"--topology: expected the compiler .*pip install 'dpjax\[gpu-compile\]'"),
    ({"vocab_size": 0}, "cpu", "model.vocab_size: expected the size of the vocabulary, .* got 0"),
  ],
)
def test_wrong_input_is_refused(changes, topology, expected, monkeypatch):
  missing = SimpleNamespace(find_spec=lambda name: None)
  monkeypatch.setattr(devices, "importlib", SimpleNamespace(util=missing))
  with pytest.raises(UserError, match=expected):
    compilation.compile_steps(small(**changes), topology)
  with pytest.raises(UserError, match="^steps: .*got training; did you mean train"):
    compilation.compile_steps(small(), "cpu", steps=["training"])


def test_a_vocabulary_is_known_where_the_tokenizer_tells():
  config = small(vocab_size=0)
  for settings, size in (
    (dict(name="bpe", vocab_size=77), 77),
    (dict(name="bytes"), 256),
    (dict(name="bpe", file="gpt2"), 50_257),
  ):
    config.data.tokenizer = dpjax.config.tokenizer(**settings)
    assert compilation._with_vocabulary(config).model.vocab_size == size


def compiled_training(parameters, **model):
  """A compiled update on all devices, of one layer, so that only the operators have loops."""
  config = small(vocab_size=40, num_layers=1, **model)
  config.train.param_sharding = parameters
  programs = compilation._Programs(config, jax.devices(), 0)
  step, arguments, options = programs.train()
  return step.lower(*arguments, **options).compile().as_text(), programs.parts


def test_sharded_parameters_are_gathered_and_activations_stay():
  text, parts = compiled_training("fsdp", activation="swiglu")
  assert {*compilation._COLLECTIVE.findall(text)} == {"all-gather", "all-reduce"}

  def numbers(kind):
    shapes = re.findall(r"[fsu]32\[([\d,]*)\]", " ".join(re.findall(rf" = (.*) {kind}\(", text)))
    return sum(math.prod(map(int, shape.split(","))) if shape else 1 for shape in shapes)

  # Once forward and once backward; the gradients once, with the sums of the metrics.
  parameters = sum(parts.values())
  assert 0 < numbers("all-gather") <= 2 * parameters
  assert parameters / 2 < numbers("all-reduce") <= parameters + 250


@pytest.mark.slow
def test_relative_positions_are_gathered_before_the_tiles():
  text, _ = compiled_training("replicated", mixer="relative_attention", max_length=264)
  # Its loop over six tiles would gather what a program gathers before it.
  assert compilation._COLLECTIVE.findall(text).count("all-gather") <= 1


BOUNDARIES = [
  x for x in helpers.builtin(registry.boundaries) if x not in ("none", "entropy_threshold")
]
MODELS = [(x, "none") for x in helpers.builtin(registry.mixers)] + [
  ("attention", x) for x in BOUNDARIES
]
QUICK = [("dispatcher", "none"), ("attention", "gumbel")]


@pytest.mark.parametrize("mixer, boundaries", [helpers.slow_unless(x in QUICK, *x) for x in MODELS])
def test_every_model_trains_on_every_platform(mixer, boundaries):
  config = small(boundaries, mixer, num_layers=1)
  if mixer == "mamba2":
    config.model.mixer.head_width = 8
  if "dispatcher" in mixer:  # A kernel is lowered for a kind of GPU, which a CPU does not tell.
    config.model.mixer.implementation = "recompute"
  programs = compilation._Programs(compilation._with_vocabulary(config), jax.devices()[:1], 0)
  step, arguments, options = programs.train()
  traced = step.trace(*arguments, **options)
  texts = {x: traced.lower(lowering_platforms=(x,)).as_text() for x in ("cpu", "cuda", "tpu")}
  assert texts["cpu"] not in (texts["cuda"], texts["tpu"])  # Its loss is another.
  assert not any("callback" in text for text in texts.values())


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, topology",
  [("quickstart:tiny", "v5e:2x2"), ("extractors_childrens_books:tiny", "h100:2")],
)
def test_compiles_for_an_accelerator(name, topology, tmp_path):
  compiler = "libtpu" if topology.startswith("v") else "jax_cuda13_plugin"
  if importlib.util.find_spec(compiler) is None:
    pytest.skip(f"needs {compiler}: pip install 'dpjax[tpu-compile]' or 'dpjax[gpu-compile]'")
  out, config = tmp_path / "found.json", f"--config={name}"
  command = [sys.executable, "-m", "dpjax", "compile", config, "--config.model.vocab_size=90"]
  command += [f"--topology={topology}", f"--out={out}"]
  environment = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
  subprocess.run(command, check=True, env=environment)
  found = json.loads(out.read_text())
  train = found["steps"]["train"]
  assert train["fits"] and train["operations"] > 0 and train["collectives"]["all-reduce"]
