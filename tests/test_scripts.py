"""train, evaluate and generate as a user calls them, most of them in this process."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from dpjax import config as config_lib
from dpjax import run as run_lib
from dpjax.config import loading, registry
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")
call = helpers.command


@pytest.fixture(scope="module")
def workdir(finished, tmp_path_factory):
  """A copy of the finished run, whose scores the scripts write."""
  return shutil.copytree(finished[0], tmp_path_factory.mktemp("runs") / "small", symlinks=True)


def test_a_workdir_alone_resumes_its_run(workdir, capsys):
  assert call("train", f"--workdir={workdir}") is None
  assert "Resuming from the checkpoint of step 12" in capsys.readouterr().out


def test_components_of_a_middle_are_chosen_by_name(tmp_path):
  (tmp_path / "config.py").write_text("""
import dpjax

def get_config():
  config = dpjax.config.default()
  config.model.boundaries = dpjax.config.boundaries("routing")
  config.model.first.mixer = dpjax.config.mixer("we")
  config.model.middle = dpjax.config.middle("fixed")
  return config
""")
  settings = "first.mixer=none middle.boundaries=gumbel middle.last.mixer=he "
  settings += "middle.boundaries.prior=0.3 middle.width=64"
  flags = [f"--config.model.{setting}" for setting in settings.split()]
  with helpers.arguments("train", f"--config={tmp_path / 'config.py'}", *flags):
    model = loading.from_words(sys.argv[1:])[0].model
  assert model.first.mixer is None and model.middle.width == 64
  expected = config_lib.boundaries("gumbel", prior=0.3)
  assert model.middle.boundaries.to_dict() == expected.to_dict()
  assert model.middle.last.mixer.to_dict() == config_lib.mixer("he").to_dict()


def test_evaluate_prints_and_writes(workdir, capsys):
  assert call("evaluate", f"--workdir={workdir}", "--split=valid", "--step=12") is None
  printed = capsys.readouterr().out
  assert "The valid split, by step 12" in printed
  scores = json.loads((workdir / "scores_valid_12.json").read_text())["scores"]
  assert f"{scores['perplexity']:.6g}" in printed


def test_texts_of_ones_own_are_scored_each_by_itself(workdir, tmp_path, capsys):
  texts = {"a.txt": "the cat sat on a hat\n" * 7, "b.txt.gz": "\ufeffa rat"}
  run, out = run_lib.load(workdir), tmp_path / "out"
  (tmp_path / "a.txt").write_bytes(texts["a.txt"].encode())
  (tmp_path / "b.txt.gz").write_bytes(gzip.compress(texts["b.txt.gz"].encode()))
  before, options = sorted(workdir.rglob("*")), [f"--text={tmp_path / name}" for name in texts]
  size = ["--window=11", "--stride=5"]
  assert call("evaluate", f"--workdir={workdir}", *options, *size, f"--out={out}") is None
  shown = capsys.readouterr().out
  result = json.loads((out / f"scores_of_texts_{run.step}.json").read_text())
  assert (result["window"], result["stride"], len(result["texts"])) == (11, 5, 2)
  for name, text in texts.items():
    scores = run.score(text.removeprefix("\ufeff"), window=11, stride=5)
    assert result["texts"][str(tmp_path / name)] == scores
    table = shown[shown.index(f"{tmp_path / name}, by step 12:") :]
    assert f"bits per byte         {scores['bits_per_byte']:12.6g}\n" in table
  assert sorted(workdir.rglob("*")) == before


def test_unknown_tokens_are_counted(workdir, tmp_path, capsys):
  shown = "tokens for what the vocabulary does not know: "
  path = tmp_path / "text.txt"
  path.write_text("the cat\n" * 200 + "zoo\n")
  words = ["--config=quickstart", f"--config.data.path={path}", "--tokenize_only"]
  words += [f"--config.data.data_dir={tmp_path}", "--config.data.tokenizer=characters"]
  assert call("train", *words, f"--workdir={tmp_path / 'run'}") is None
  assert f"{shown}0 in train, 0 in valid, 3 in test\n" in capsys.readouterr().out
  path.write_text("\u2603 the \u2603\n")
  assert call("evaluate", f"--workdir={workdir}", f"--text={path}") is None
  assert f"{shown}2 in {path}\n" in capsys.readouterr().out


def test_generate_prints_samples(workdir, capsys):
  flags = "--num_samples=2 --length=11 --temperature=0.5 --top_k=3 --top_p=0.9 --seed=4".split()
  assert call("generate", f"--workdir={workdir}", "--prompt=on a", *flags) is None
  assert "--- sample 2 ---\non a" in capsys.readouterr().out
  assert call("generate", f"--workdir={workdir}") is None
  # What is not given is as the run's configuration has it.
  printed = capsys.readouterr()
  assert len(printed.out.removesuffix("\n")) == len("the cat") + 9
  # All in one chunk: nothing is said of the speed but that.
  times = r"9 tokens in [\d.]+ s, [\d.]+ s of it until the first text came\n"
  assert re.fullmatch(times, printed.err)


def test_generate_prints_in_the_first_process_alone(workdir, capsys, monkeypatch):
  monkeypatch.setattr("jax.process_index", lambda: 1)
  for flags in ([], ["--json"]):
    assert call("generate", f"--workdir={workdir}", "--length=3", *flags) is None
  assert [*capsys.readouterr()] == ["", ""]


def test_generate_reads_a_file_and_writes_json(workdir, tmp_path, capsys, monkeypatch):
  (tmp_path / "prompt").write_bytes("\ufeffon a mat\r\n".encode())
  settings = [f"--workdir={workdir}", "--length=11", "--num_samples=2", "--seed=3", "--json"]
  assert call("generate", *settings, f"--prompt_file={tmp_path / 'prompt'}") is None
  result = json.loads(capsys.readouterr().out)
  samples = result["samples"]
  assert result["prompt"] == "on a mat" and result["length"] == 11
  assert [sample["num_tokens"] for sample in samples] == [11, 11]
  assert 0 < result["seconds_to_first"] <= result["seconds"]
  # From the standard input, and up to a token.
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"on a mat\n")))
  assert call("generate", *settings, "--prompt_file=-", "--stop= ") is None
  stopped = json.loads(capsys.readouterr().out)["samples"]
  for sample, whole in zip(stopped, samples, strict=True):
    assert sample["text"] == whole["text"].split(" ")[0]
    assert sample["is_stopped"] == (" " in whole["text"])


@pytest.mark.slow
@pytest.mark.parametrize("end", ["interrupt", "reader"])
def test_an_interrupt_or_a_reader_that_has_enough_shows_no_traceback(workdir, end):
  # What runs the tests may ignore interrupts, and then its children do.
  start = (
    "import runpy, signal, sys; del sys.argv[0]; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
  )
  flags = [f"--workdir={workdir}", "--prompt=the ", "--overflow=continue"]
  flags += ["--length=100000" if end == "interrupt" else "--length=400"]
  command = [sys.executable, "-c", start, str(helpers.ROOT / "generate.py"), *flags]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  quick = helpers.environment(XLA_FLAGS=os.environ["XLA_FLAGS"])
  with subprocess.Popen(command, env=quick, **pipes) as process:
    try:
      # An interrupt while it compiles may fall into a callback, where Python drops it.
      assert process.stdout.read(40).startswith(b"the ")
      if end == "interrupt":
        process.send_signal(signal.SIGINT)
      else:
        process.stdout.close()
      complaint = process.communicate(timeout=100)[1].decode()
    finally:
      process.kill()
  expected = (130, "\nInterrupted\n") if end == "interrupt" else (0, "")
  assert (process.returncode, complaint) == expected


# Of files of configurations: the program, and what is said of it.
PROGRAMS = {
  "from dpjax import config\n\ndef get_config():\n  config.mixer('he', adjust=True)\n": (
    "mixer.adjust: expected a setting of he, .* is mixer.adjustment {at}4)"
  ),
  "\ndef get_config():\n  return int('a b\\nc')\n": (
    "expected a Python file whose .*, got ValueError: .* 'a b.nc' {at}3)"
  ),
  "import dpjax\n\ndef get_config():\n  check()\n\n\ndef check():\n"
  "  raise dpjax.UserError('expected\\none line')\n": "expected one line {at}8)",
  "def get_config(:\n": ".* SyntaxError: .*invalid syntax .*config.py, line 1)",
  "x = 3\n": ".* got AttributeError: it has no attribute 'get_config'",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_errors_of_a_configuration_name_its_line(program, tmp_path, monkeypatch):
  file = tmp_path / "config.py"
  file.write_text(program)
  result = call("train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
  message = PROGRAMS[program].format(at=f"({file}, line ")
  message = "--config: " + message.replace("(", r"\(").replace(")", r"\)")
  assert re.fullmatch(message, result) and "\n" not in result
  monkeypatch.setenv("DPJAX_TRACEBACK", "1")
  with pytest.raises((ValueError, AttributeError, SyntaxError)):
    call("train", f"--config={file}", f"--workdir={tmp_path / 'run'}")


PLUGIN = """
import flax.linen as nn
import dpjax

class Copy(nn.Module):
  max_length: int
  rate: float = 0.5

  def __post_init__(self):
    if self.rate > 1:
      raise ValueError(f"rate: expected at most 1, got {self.rate}")
    super().__post_init__()

  def __call__(self, inputs, *, deterministic=True):
    return inputs

dpjax.register_mixer("copy", Copy)
"""


def test_a_plugin_adds_a_mixer_that_a_flag_can_name(tmp_path, monkeypatch):
  monkeypatch.setattr(registry.mixers, "_components", dict(registry.mixers._components))
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "a_plugin.py").write_text(PLUGIN)
  flags = [f"--config={helpers.ROOT / 'configs/quickstart.py'}", "--config.model.mixer=copy"]
  run = f"--workdir={tmp_path / 'run'}"
  assert str(call("train", *flags, run)).startswith("model.mixer: expected one of disp")
  message = call("train", *flags, run, "--plugin", "no_plugin")
  assert str(message).startswith("--plugin: expected a module that")
  # Flags of a file are those of the command line.
  lines = [*flags, "--config.model.mixer.rate=1.5", "--plugin=a_plugin"]
  (tmp_path / "flags").write_text("\n".join(lines))
  message = call("train", run, f"--flagfile={tmp_path / 'flags'}")
  assert message == "model.mixer.rate: expected at most 1, got 1.5"


@pytest.fixture
def copying(text, tmp_path, monkeypatch):
  """A run with a mixer of a plugin, which the program that reads it has not imported."""
  monkeypatch.setattr(registry.mixers, "_components", dict(registry.mixers._components))
  monkeypatch.setattr(registry.mixers, "_origins", {})
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "copies.py").write_text(PLUGIN)
  config = helpers.small_config(text, num_steps=2)
  registry.import_plugin("copies")
  config.model.mixer = config_lib.mixer("copy")
  run_lib.train(config, tmp_path / "run")
  del registry.mixers._components["copy"], sys.modules["copies"]
  yield tmp_path / "run"
  sys.modules.pop("copies", None)


@pytest.mark.slow
def test_a_run_says_which_plugin_it_needs(copying, tmp_path, monkeypatch, capsys):
  for name, *arguments in (
    ("export", copying, tmp_path / "exported"),
    ("evaluate", f"--workdir={copying}"),
    ("train", f"--workdir={copying}"),
    ("plots", copying, f"--out={tmp_path}/x.png"),
  ):
    for plugin in ([], ["--plugin=copies"]):
      capsys.readouterr()
      with monkeypatch.context() as patch:
        patch.setattr(registry.mixers, "_components", dict(registry.mixers._components))
        patch.delitem(sys.modules, "copies", raising=False)
        message = helpers.command(name, *arguments, *plugin)
      if plugin or name == "plots":  # which builds no model
        assert not message, (name, message)
      else:
        needed = f"plugin: expected copies, with which the run in {copying} was trained, got none"
        assert str(message).removeprefix("--").startswith(needed), (name, message)
  assert json.loads((tmp_path / "exported/config.json").read_text())["plugins"] == ["copies"]


def test_a_path_may_begin_with_a_tilde(workdir, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(workdir.parent))
  flags = "--workdir=~/small", "--split=valid", "--step=12", "--out=~/scores"
  assert call("evaluate", *flags) is None
  assert (workdir.parent / "scores/scores_valid_12.json").exists()
  assert not [*tmp_path.iterdir()]
  assert run_lib.load("~/small").step == run_lib.load(workdir).step


def test_overrides_make_the_quickstart_any_configuration(text, monkeypatch):
  config = helpers.pooled_config(text, "whitespace", window=17)
  config.seed = 5
  config.model.mixer = config_lib.mixer("dispatcher", num_levels=3, implementation="loop")
  config.model.first.mixer = config_lib.mixer("attention", use_bias=False)
  config.model.boundaries.space_ids = (3, 7)
  config.train.optimizer = config_lib.optimizer("sgd", momentum=0.9)
  for made in (config, helpers.small_config(text), config_lib.default()):
    made.sample.prompt = "a cat's = 'x'"
    seen = []
    monkeypatch.setattr(run_lib, "train", lambda result, *_, seen=seen, **__: seen.append(result))
    with contextlib.suppress(TypeError):  # of what train.py does with its result
      call("train", *helpers.overrides(made), "--workdir=x")
    assert config_lib.flatten(seen[0]) == config_lib.flatten(made)
