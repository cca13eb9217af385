"""train.py, evaluate.py and generate.py as a user calls them, with right and wrong input.

Most cases run the scripts' functions in this process, which saves a start of JAX each.
"""

import contextlib
import io
import json
import re
import runpy
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from dpjax import config as config_lib
from dpjax import registry
from dpjax import run as run_lib
from dpjax.commands import flags as command_line
from dpjax.errors import Interrupted
from tests import helpers


@pytest.fixture(scope="module")
def text(tmp_path_factory):
  return helpers.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module", autouse=True)
def promotion():
  """Optax raises floats to the power of its integer count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def call(name: str, *arguments: str):
  """Runs a script here, as `python name arguments`; gives the message it exits with."""
  before = set(flags.FLAGS)
  argv, sys.argv = sys.argv, [name, *map(str, arguments)]
  main = runpy.run_path(str(helpers.ROOT / name), run_name="script")["main"]
  try:
    rest = command_line._parse(sys.argv)
    command_line._run(main, rest)
    return None
  except SystemExit as end:
    return end.code
  finally:
    sys.argv = argv
    for flag in set(flags.FLAGS) - before:
      delattr(flags.FLAGS, flag)
    flags.FLAGS.unparse_flags()


def test_a_workdir_alone_goes_on(text, tmp_path, capsys):
  config = helpers.small_config(text)
  asked = iter(range(99))
  with pytest.raises(Interrupted):
    run_lib.train(config, tmp_path / "run", should_stop=lambda: next(asked) == 4)
  assert call("train.py", f"--workdir={tmp_path / 'run'}") is None
  assert "Going on from the checkpoint of step 5" in capsys.readouterr().out
  whole, _ = run_lib.train(config, tmp_path / "whole")
  last = run_lib.load(tmp_path / "run", 12).params
  jax.tree.map(np.testing.assert_array_equal, last, run_lib.load(whole.workdir, 12).params)
  message = call("train.py", f"--workdir={tmp_path / 'none'}")
  assert "--config: expected a file of configs/, or a --workdir with a run" in message


def test_a_longer_schedule_is_another_run(text, tmp_path):
  config = helpers.small_config(text, num_steps=4)
  config.train.schedule = config_lib.schedule("cosine")
  run_lib.train(config, tmp_path)
  config.train.num_steps = 6
  with pytest.raises(ValueError, match="4 there, 6 here .*train.initial_run = .*"):
    run_lib.train(config, tmp_path)


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
  before = set(flags.FLAGS)
  try:
    holder = command_line.define_config()
    command_line._parse(
      [
        "train.py",
        f"--config={tmp_path / 'config.py'}",
        "--config.model.first.mixer=none",
        "--config.model.middle.boundaries=gumbel",
        "--config.model.middle.last.mixer=he",
        "--config.model.middle.boundaries.prior=0.3",
        "--config.model.middle.width=64",
      ]
    )
    model = holder.value.model
  finally:
    for flag in set(flags.FLAGS) - before:
      delattr(flags.FLAGS, flag)
    flags.FLAGS.unparse_flags()
  assert model.first.mixer is None and model.middle.width == 64
  expected = config_lib.boundaries("gumbel", prior=0.3)
  assert model.middle.boundaries.to_dict() == expected.to_dict()
  assert model.middle.last.mixer.to_dict() == config_lib.mixer("he").to_dict()


@pytest.fixture(scope="module")
def workdir(text, tmp_path_factory):
  workdir = tmp_path_factory.mktemp("runs") / "small"
  config = helpers.small_config(text)
  config.sample.prompt, config.sample.length = "the cat", 9
  assert call("train.py", *helpers.overrides(config), f"--workdir={workdir}") is None
  return workdir


def test_evaluate_prints_and_writes(workdir, capsys):
  assert call("evaluate.py", f"--workdir={workdir}", "--split=valid", "--step=12") is None
  printed = capsys.readouterr().out
  assert "The valid split, by step 12" in printed
  scores = json.loads((workdir / "scores_valid_12.json").read_text())["scores"]
  assert f"{scores['perplexity']:.6g}" in printed
  assert call("evaluate.py", f"--workdir={workdir}", "--stride=5") is None
  assert "The test split" in capsys.readouterr().out


def test_generate_prints_samples(workdir, capsys):
  assert (
    call(
      "generate.py",
      f"--workdir={workdir}",
      "--prompt=on a",
      "--num_samples=2",
      "--length=11",
      "--temperature=0.5",
      "--top_k=3",
      "--top_p=0.9",
      "--seed=4",
    )
    is None
  )
  printed = capsys.readouterr().out
  assert "--- sample 2 ---\non a" in printed
  assert call("generate.py", f"--workdir={workdir}") is None
  # What is not given is as the run's configuration has it.
  printed = capsys.readouterr()
  assert len(printed.out.removesuffix("\n")) == len("the cat") + 9
  # All in one chunk: nothing is said of the speed but that.
  times = r"9 tokens in [\d.]+ s, [\d.]+ s of it until the first text came\n"
  assert re.fullmatch(times, printed.err)


def test_generate_reads_a_file_and_writes_json(workdir, tmp_path, capsys, monkeypatch):
  (tmp_path / "prompt").write_bytes("\ufeffon a mat\r\n".encode())
  settings = [f"--workdir={workdir}", "--length=40", "--num_samples=2", "--seed=3"]
  file = f"--prompt_file={tmp_path / 'prompt'}"
  assert call("generate.py", *settings, file) is None
  first, second = capsys.readouterr().out.split("--- sample 2 ---\n")
  assert call("generate.py", *settings, file, "--json") is None
  found = json.loads(capsys.readouterr().out)
  samples = found["samples"]
  assert found["prompt"] == "on a mat" and found["length"] == 40
  assert first == f"--- sample 1 ---\non a mat{samples[0]['text']}\n"
  assert second == f"on a mat{samples[1]['text']}\n"
  assert [sample["num_tokens"] for sample in samples] == [40, 40]
  assert 0 < found["seconds_to_first"] < found["seconds"] and found["tokens_per_second"] > 0
  # From the standard input, and up to a token.
  content = io.TextIOWrapper(io.BytesIO(b"on a mat\n"))
  monkeypatch.setattr("sys.stdin", content)
  assert call("generate.py", *settings, "--prompt_file=-", "--json", "--stop= ") is None
  stopped = json.loads(capsys.readouterr().out)["samples"]
  for sample, whole in zip(stopped, samples, strict=True):
    assert sample["text"] == whole["text"].split(" ")[0]
    assert sample["is_stopped"] == (" " in whole["text"])


def test_an_interrupt_ends_it_without_a_traceback(workdir):
  # What runs the tests may ignore interrupts, and then its children do.
  start = (
    "import runpy, signal, sys; del sys.argv[0]; "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
  )
  command = [
    sys.executable,
    "-c",
    start,
    str(helpers.ROOT / "generate.py"),
    f"--workdir={workdir}",
    "--prompt=the ",
    "--length=100000",
    "--beyond_window=continue",
  ]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  with subprocess.Popen(command, env=helpers.environment(), **pipes) as process:
    assert process.stdout.read(4) == b"the "  # compiles now
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=120)
  assert (process.returncode, complaint.decode()) == (130, "\nInterrupted\n")


def test_a_reader_that_has_enough_ends_it(workdir):
  command = [
    sys.executable,
    str(helpers.ROOT / "generate.py"),
    f"--workdir={workdir}",
    "--prompt=the ",
    "--length=400",
  ]
  pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  with subprocess.Popen(command, env=helpers.environment(), **pipes) as process:
    process.stdout.read(5)
    process.stdout.close()
    complaint = process.stderr.read().decode()
    process.stderr.close()
  assert (process.returncode, complaint) == (0, "")


@pytest.mark.parametrize(
  ("script", "arguments", "message"),
  [
    (
      "train.py",
      ["--config={quickstart}", "--config.model.widht=3", "--workdir={new}"],
      "model.widht: expected a known setting, .* nearest known is model.width",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.width=a", "--workdir={new}"],
      "--config.model.width=a",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.mixer=dispacher", "--workdir={new}"],
      "^model.mixer: expected one of .* did you mean dispatcher",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.mixer.num_level=3", "--workdir={new}"],
      "^model.mixer.num_level: .* nearest known is model.mixer.num_levels",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.model.mixer",
        "we",
        "--config.model.mixer.num_levels=3",
        "--workdir={new}",
      ],
      "^model.mixer.num_levels: expected a setting of ",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.model.mixer.adjustment=False",
        "--config.model.mixer=we",
        "--config.model.mixer.implementation=ftt",
        "--workdir={new}",
      ],
      "^model.mixer.implementation: .* did you mean fft",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.model.mixer.name=we",
        "--config.model.mixer.num_levels=3",
        "--workdir={new}",
      ],
      "^model.mixer.num_levels: expected a setting of ",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model=3", "--workdir={new}"],
      "^model: expected a known setting",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.data.tokenizer=character", "--workdir={new}"],
      "data.tokenizer: .* nearest is characters",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.mixer.num_heads=7", "--workdir={new}"],
      "model.mixer.num_heads: expected a divisor",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.data.path={new}", "--workdir={new}"],
      "data.path: .*no_such",
    ),
    ("train.py", ["--config={new}.py", "--workdir={new}"], "--config: .*No such file"),
    (
      "train.py",
      ["--config={quickstart}:huge", "--workdir={new}"],
      "^--config: expected the variant tiny, or none, got huge .*quickstart.py, line",
    ),
    (
      "train.py",
      ["--config={quickstart}", "workdir={new}", "--workdir={new}"],
      "flags: expected --name=value",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.data.path={latin}", "--workdir={new}"],
      "data.path: .*UTF-8",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.data.path={empty}", "--workdir={new}"],
      "data.path: .*empty",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.data.path={text}", "--workdir={text}"],
      "workdir: expected a folder that can be written",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.data.path={text}",
        "--config.train.batch_size=800",
        "--workdir={new}",
      ],
      "train.window:",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--workdir={workdir}"],
      "workdir: expected an empty folder or a run of this configuration",
    ),
    ("evaluate.py", ["--workdir={new}"], "workdir: expected the folder of a run"),
    ("evaluate.py", ["--workdir={workdir}", "--step=5"], "step: expected one of"),
    ("evaluate.py", [], "--workdir, --torch_checkpoint: expected one of them, got none"),
    ("evaluate.py", ["--torch_checkpoint={new}"], "--config: expected it with --torch"),
    ("evaluate.py", ["--workdir={workdir}", "--config={quickstart}"], "--config: expected"),
    (
      "evaluate.py",
      ["--workdir={workdir}", "--window=-5"],
      "eval.window: expected 1 to model.max_length = 19, got -5",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.mixer.implementation=fast", "--workdir={new}"],
      "model.mixer.implementation: expected None or one",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.max_length=5", "--workdir={new}"],
      "sample.prompt: expected 1 to 5 tokens",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.model.mixer=she",
        "--config.model.mixer.num_heads=4",
        "--workdir={new}",
      ],
      "model.mixer.num_heads: expected a setting of ",
    ),
    (
      "train.py",
      ["--config={extractors}:shee", "--workdir={new}"],
      "^--config: expected a mixer, a figure and tiny, of she, he.* got shee",
    ),
    (
      "train.py",
      ["--config={extractors}:we", "--config.data.path={new}", "--workdir={new}"],
      "data.path: expected .*no_such",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.data.name=penn_treebank",
        "--config.data.data_dir={new}",
        "--workdir={new}",
      ],
      "penn_treebank: expected simple-examples.tgz",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.data.name=texte8", "--workdir={new}"],
      "data.name: .* the nearest is text8",
    ),
    (
      "train.py",
      ["--config={extractors}:we", "--config.model.mixer.implementation=ftt", "--workdir={new}"],
      "None or one of scan, .* got ftt; did you mean fft",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.train.batches=random", "--workdir={new}"],
      "train.batches: .* did you mean random_windows",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.train.median_every_steps=0", "--workdir={new}"],
      "train.median_every_steps: expected at least 1",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.train.batches=random_windows",
        "--config.data.path={short}",
        "--workdir={new}",
      ],
      "train.window: expected at most 107 .the train split has 108 .* got 128",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.boundaries=whitespaces", "--workdir={new}"],
      "model.boundaries: .* did you mean whitespace",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.model.boundaries=gumbel",
        "--config.model.boundaries.pooling=last",
        "--workdir={new}",
      ],
      "model.boundaries.pooling: expected a setting of ",
    ),
    (
      "train.py",
      ["--config={quickstart}", "--config.model.boundaries.prior=0.3", "--workdir={new}"],
      "model.boundaries.prior: expected a setting of ",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.model.boundaries=unigram",
        "--config.data.path={text}",
        "--config.model.boundaries.file={new}",
        "--workdir={new}",
      ],
      "model.boundaries.file: expected a readable .*no_such",
    ),
    (
      "train.py",
      [
        "--config={quickstart}",
        "--config.model.boundaries=whitespace",
        "--config.data.path={text}",
        "--config.model.boundaries.space_ids=(3,99)",
        "--workdir={new}",
      ],
      "model.boundaries.space_ids: expected token ids below .* = 18",
    ),
    ("generate.py", ["--workdir={workdir}", "--seed=-1"], "seed: expected an integer in"),
    ("generate.py", ["--workdir={workdir}", "--length=0"], "^length: expected"),
    ("generate.py", ["--workdir={workdir}", "--prompt={long}"], "prompt: expected 1 to 19"),
    ("generate.py", ["--workdir={workdir}", "--top_p=1.5"], "^top_p: expected"),
    ("generate.py", ["--workdir={workdir}", "--temperature=-1"], "^temperature: expe"),
    (
      "generate.py",
      ["--workdir={workdir}", "--prompt=caf\u00e9"],
      "prompt: expected what the vocabulary has, got 'f' '\u00e9'",
    ),
    ("generate.py", ["--workdir={workdir}", "--stop=the"], "stop: expected texts of one"),
    (
      "generate.py",
      ["--workdir={workdir}", "--beyond_window=refuse", "--length=90"],
      "length: expected at most 13 after a prompt of 7 tokens",
    ),
    (
      "generate.py",
      ["--workdir={workdir}", "--prompt_file={empty}"],
      "prompt_file: expected a text in .*empty, got none",
    ),
    (
      "generate.py",
      ["--workdir={workdir}", "--prompt_file={latin}"],
      "prompt_file: expected UTF-8 in .*latin, got",
    ),
    (
      "generate.py",
      ["--workdir={workdir}", "--prompt_file={new}"],
      "prompt_file: expected a file with a text, or -, got .*no_such",
    ),
    (
      "generate.py",
      ["--workdir={workdir}", "--prompt_file={text}", "--prompt=a"],
      "prompt, prompt_file: expected one of them, got both",
    ),
  ],
)
def test_wrong_input_ends_with_a_message(
  script, arguments, message, workdir, text, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)  # Where there is no data/ of the user's.
  (tmp_path / "latin").write_bytes("naïve\n".encode("latin-1") * 50)
  (tmp_path / "empty").write_bytes(b"")
  (tmp_path / "short").write_text("a cat\n" * 20)
  places = dict(
    quickstart=helpers.ROOT / "configs/quickstart.py",
    workdir=workdir,
    text=text,
    extractors=helpers.ROOT / "configs/extractors_childrens_books.py",
    new=tmp_path / "no_such",
    latin=tmp_path / "latin",
    empty=tmp_path / "empty",
    long="the " * 5,
    short=tmp_path / "short",
  )
  result = call(script, *(argument.format(**places) for argument in arguments))
  assert isinstance(result, str), "expected a message"
  assert re.search(message, result, re.DOTALL) and "Traceback" not in result
  assert not (tmp_path / "no_such" / "checkpoints").exists()


def test_a_wrong_flag_shows_no_traceback(tmp_path):
  done = helpers.script(
    "train.py",
    f"--config={helpers.ROOT / 'configs/quickstart.py'}",
    "--config.train.bach_size=3",
    f"--workdir={tmp_path / 'run'}",
  )
  assert done.returncode == 1
  assert done.stderr.strip().splitlines() == [
    "train.bach_size: expected a known setting, got an unknown one; the nearest known is "
    "train.batch_size"
  ]


# Of files of configurations, in this order: the program, and what is said of it.
PROGRAMS = [
  (
    "from dpjax import config\n\ndef get_config():\n  config.mixer('he', adjust=True)\n",
    "--config: mixer.adjust: expected a setting of he, .* is mixer.adjustment {at}4)",
  ),
  (
    "\ndef get_config():\n  return int('a b\\nc')\n",
    "--config: expected a Python file whose .*, got ValueError: .* 'a b.nc' {at}3)",
  ),
  (
    "from dpjax import errors\n\ndef get_config():\n  check()\n\n\ndef check():\n"
    "  raise errors.UserError('expected\\none line')\n",
    "--config: expected one line {at}8)",
  ),
  ("def get_config(:\n", "--config: .* SyntaxError: .*invalid syntax .*config.py, line 1)"),
  ("x = 3\n", "--config: .* got AttributeError: it has no attribute 'get_config'"),
]


@pytest.mark.parametrize(("program", "message"), PROGRAMS)
def test_errors_of_a_configuration_name_its_line(program, message, tmp_path, monkeypatch):
  file = tmp_path / "config.py"
  file.write_text(program)
  found = call("train.py", f"--config={file}", f"--workdir={tmp_path / 'run'}")
  message = message.format(at=f"({file}, line ").replace("(", r"\(").replace(")", r"\)")
  assert re.fullmatch(message, found) and "\n" not in found
  monkeypatch.setenv("DPJAX_TRACEBACK", "1")
  with pytest.raises((ValueError, AttributeError, SyntaxError)):
    call("train.py", f"--config={file}", f"--workdir={tmp_path / 'run'}")


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
  components = dict(registry.mixers._components)
  monkeypatch.setattr(registry.mixers, "_components", components)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "a_plugin.py").write_text(PLUGIN)
  flags_of_run = [
    f"--config={helpers.ROOT / 'configs/quickstart.py'}",
    "--config.model.mixer=copy",
    f"--workdir={tmp_path / 'run'}",
  ]
  message = call("train.py", *flags_of_run)
  assert message is not None and message.startswith("model.mixer: expected one of disp")
  message = call("train.py", *flags_of_run, "--config.model.mixer.rate=1.5", "--plugin=a_plugin")
  assert message == "model.mixer.rate: expected at most 1, got 1.5"
  message = call("train.py", *flags_of_run, "--plugin", "no_plugin")
  assert message is not None and message.startswith("--plugin: expected a module that")


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
    monkeypatch.setattr(run_lib, "train", lambda found, _, seen=seen: seen.append(found))
    with contextlib.suppress(TypeError):  # of what train.py does with its result
      call("train.py", *helpers.overrides(made), "--workdir=x")
    assert config_lib.flatten(seen[0]) == config_lib.flatten(made)


@pytest.mark.parametrize(
  "allocate",
  [
    lambda: np.zeros(2**60, np.uint8),
    lambda: jax.jit(lambda: jnp.zeros(2**50, jnp.uint8))(),
    lambda: [0] * 2**59,
  ],
)
def test_too_little_memory_ends_with_the_settings_that_need_less(allocate):
  message = r"^memory: expected enough of it, got: .+ Less .* train.batch_size, .*remat"
  with pytest.raises(SystemExit, match=message) as end:
    with command_line.exit_out_of_memory():
      allocate()
  assert "\n" not in end.value.code


def test_other_errors_of_jax_are_raised():
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    with command_line.exit_out_of_memory():
      raise jax.errors.JaxRuntimeError("INTERNAL: a defect")
