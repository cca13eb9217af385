"""train, evaluate and generate as a user calls them, most of them in this process."""

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

import dpjax
from dpjax.commands import generate
from dpjax.config import loading, registry
from dpjax.generation.generator import Piece
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")
call = helpers.command


@pytest.fixture(scope="module")
def workdir(finished, tmp_path_factory):
  """A copy of the finished run, whose scores the scripts write."""
  return shutil.copytree(finished[0], tmp_path_factory.mktemp("runs") / "small", symlinks=True)


def test_a_workdir_alone_resumes_its_run(workdir, capsys):
  for words in ([f"--workdir={workdir}"], [workdir]):
    assert call("train", *words) is None
    assert "Resuming from the checkpoint of step 12" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--workdir={}"], ["{}"]])
def test_a_workdir_resumes_its_run_with_changed_settings(words, finished, tmp_path, capsys):
  run = shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
  words = [word.format(run) for word in words]
  assert call("train", "--config.train.num_steps", "14", *words, "--noconfig.model.remat") is None
  shown = capsys.readouterr().out
  assert "Resuming from the checkpoint of step 12" in shown and "step 14:" in shown
  assert dpjax.config.load(str(run)).train.num_steps == 14
  said = call("train", *words, "--config.model.width=27")
  assert re.search("workdir: .* model.width: 12 there, 27 here", said)


def test_registered_of_a_middle_are_chosen_by_name(tmp_path):
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
  model = loading.from_words([f"--config={tmp_path / 'config.py'}", *flags])[0].model
  assert model.first.mixer is None and model.middle.width == 64
  expected = dpjax.config.boundaries("gumbel", prior=0.3)
  assert model.middle.boundaries.to_dict() == expected.to_dict()
  assert model.middle.last.mixer.to_dict() == dpjax.config.mixer("he").to_dict()


def test_evaluate_prints_and_writes(workdir, tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(workdir.parent))
  flags = "~/small", "--split=valid", "--step=12", "--out=~/scores"
  assert call("evaluate", *flags) is None
  printed = capsys.readouterr().out
  assert "The valid split, by step 12" in printed
  written = json.loads((workdir.parent / "scores/scores_valid_12.json").read_text())
  assert f"{written['scores']['perplexity']:.6g}" in printed
  assert not [*tmp_path.iterdir()] and dpjax.runs.load("~/small").step == 12


def test_texts_of_ones_own_are_scored_each_by_itself(workdir, tmp_path, capsys):
  texts = {"a.txt": "the cat sat on a hat\n" * 7, "b.txt.gz": "\ufeffa rat"}
  run, out = dpjax.runs.load(workdir), tmp_path / "out"
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


def test_scores_of_texts_say_the_window_that_was_used(workdir, tmp_path):
  (tmp_path / "a.txt").write_text("the cat sat on a hat\n")
  flags = [f"--text={tmp_path / 'a.txt'}", f"--out={tmp_path}"]
  assert call("evaluate", str(workdir), *flags) is None
  run = dpjax.runs.load(workdir)
  result = json.loads((tmp_path / "scores_of_texts_12.json").read_text())
  assert (result["window"], result["stride"]) == run.scorer.sizes() != (0, 0)


def test_unknown_tokens_are_counted(workdir, tmp_path, capsys):
  shown = "tokens for what the vocabulary does not know: "
  path = tmp_path / "text.txt"
  path.write_text("the cat\n" * 200 + "zoo\n")
  words = ["--config=quickstart", f"--config.data.path={path}", "--tokenize_only"]
  assert (
    call("train", *words, f"--config.data.data_dir={tmp_path}", f"--workdir={tmp_path}/a") is None
  )
  assert f"{shown}0 in train, 0 in valid, 3 in test\n" in capsys.readouterr().out
  path.write_text("\u2603 the \u2603\n")
  assert call("evaluate", f"--workdir={workdir}", f"--text={path}") is None
  assert f"{shown}2 in {path}\n" in capsys.readouterr().out


def test_generate_prints_samples(workdir, capsys, monkeypatch):
  # What is not given is as the run's configuration has it.
  assert call("generate", f"--workdir={workdir}") is None
  printed = capsys.readouterr()
  assert len(printed.out.removesuffix("\n")) == len("the cat") + 9
  times = r"9 tokens in [\d.]+ s\n"  # All in one chunk: there is no speed.
  assert re.fullmatch(times, printed.err)
  flags = "--num_samples=2 --length=11 --temperature=0.5 --top_k=3 --top_p=0.9 --seed=4".split()
  assert call("generate", workdir, "--prompt=on a", *flags) is None
  assert "--- sample 2 ---\non a" in capsys.readouterr().out
  monkeypatch.setattr("jax.process_index", lambda: 1)
  for flags in ([], ["--json"]):
    assert call("generate", f"--workdir={workdir}", *flags) is None
  assert [*capsys.readouterr()] == ["", ""]


@pytest.mark.parametrize("seconds, speed", [(4.0, 8.0), (0.001, None)])
def test_a_speed_is_told_where_it_takes_time(seconds, speed):
  chunk = [Piece("a", 16, False)]
  assert generate.Sampled([chunk] * 3, [1.0, 1.0, 1.0 + seconds]).speed == speed


def test_generate_reads_a_file_and_writes_json(workdir, tmp_path, capsys, monkeypatch):
  (tmp_path / "prompt").write_bytes("\ufeffon a mat\r\n".encode())
  settings = [f"--workdir={workdir}", "--length=11", "--num_samples=2", "--seed=3", "--json"]
  assert call("generate", *settings, f"--prompt_file={tmp_path / 'prompt'}") is None
  result = json.loads(capsys.readouterr().out)
  samples = result["samples"]
  assert result["prompt"] == "on a mat" and result["length"] == 11
  assert [sample["num_tokens"] for sample in samples] == [11, 11]
  assert 0 < result["seconds_to_first"] <= result["seconds"]
  # From the standard input, and up to a text of two tokens.
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"on a mat\n")))
  stop = samples[0]["text"][3:5]
  assert call("generate", *settings, "--prompt_file=-", f"--stop={stop}") is None
  stopped = json.loads(capsys.readouterr().out)["samples"]
  for sample, whole in zip(stopped, samples, strict=True):
    assert sample["text"] == whole["text"].split(stop)[0]
    assert sample["is_stopped"] == (stop in whole["text"])
  assert stopped[0]["is_stopped"]


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
import dpjax

class Copy(dpjax.layers.Mixer):
  rate: float = 0.5

  def __post_init__(self):
    if self.rate > 1:
      raise ValueError(f"rate: expected at most 1, got {self.rate}")
    super().__post_init__()

  def mix(self, inputs, context, cache):
    return inputs, None

dpjax.register_mixer("copy", Copy)
"""


def test_a_plugin_adds_a_mixer_that_a_flag_can_name(tmp_path, monkeypatch):
  monkeypatch.setattr(registry.mixers, "_registered", dict(registry.mixers._registered))
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
  monkeypatch.setattr(registry.mixers, "_registered", dict(registry.mixers._registered))
  monkeypatch.setattr(registry.mixers, "_origins", {})
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "copies.py").write_text(PLUGIN)
  config = helpers.small_config(text, num_steps=2)
  registry.import_plugin("copies")
  config.model.mixer = dpjax.config.mixer("copy")
  dpjax.runs.train(config, tmp_path / "run")
  del registry.mixers._registered["copy"], sys.modules["copies"]
  yield tmp_path / "run"
  sys.modules.pop("copies", None)


@pytest.mark.slow
def test_a_run_says_which_plugin_it_needs(copying, tmp_path, monkeypatch):
  for words, needs_it in (
    (["export", copying, tmp_path / "exported"], True),
    (["train", f"--workdir={copying}"], True),
    (["plots", copying, f"--out={tmp_path}/x.png"], False),  # which builds no model
  ):
    for plugin in ([], ["--plugin=copies"]):
      with monkeypatch.context() as patch:
        patch.setattr(registry.mixers, "_registered", dict(registry.mixers._registered))
        patch.delitem(sys.modules, "copies", raising=False)
        message = str(helpers.command(*words, *plugin))
      needed = f"plugin: expected copies, with which the run in {copying} was trained, got none"
      expected = needed if needs_it and not plugin else "None"
      assert message.removeprefix("--").startswith(expected), (words, message)
  assert json.loads((tmp_path / "exported/config.json").read_text())["plugins"] == ["copies"]
