"""Wrong input to every script and module: a message that names what is wrong, no traceback.

Nothing that was there before may change. Most cases run in this process, which saves a
start of JAX each.
"""

import contextlib
import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import jax
import pytest
from absl import flags

from dpjax import run as run_lib
from dpjax.commands import flags as shared_flags  # noqa: F401  (its flags are those of all scripts)
from tests import helpers

pytestmark = pytest.mark.slow
SECONDS = 60  # of a case: only to end one that hangs

# Of train.py: settings, the last of which is wrong and named by the message.
SETTINGS = [
  # Unknown ones and other types.
  "model.widht=3",
  "bach_size=3",
  "train=3",
  "model.width=a",
  "model.width=2.5",
  "model.mixer.num_level=3",
  "model.first.mixer.num_heads=2",
  "model.mixer.num_heads=a",
  "train.optimizer=sgd train.optimizer.b1=0.9",
  "model.mixer=he model.mixer.adjustment=3",
  "train.learning_rate=fast",
  "model.remat=perhaps",
  "data.split_fractions=1",
  "data.max_characters=(1,2.5,3)",
  "seed=-1",
  "seed=4294967296",
  # Names that are none.
  "model.mixer=dispacher",
  "model.mixer=",
  "model.boundaries=fixed model.first.mixer=hee",
  "model.first.mixer=he",
  "model.boundaries=gumble",
  "model.norm=none",
  "model.positions=fixed",
  "model.activation=tanh",
  "model.dtype=float16",
  "model.mixer.implementation=fast",
  "train.batches=random",
  "train.optimizer=sgdm",
  "train.schedule=linear",
  "train.parameters=split",
  "sample.beyond_window=stop",
  "data.tokenizer=character",
  "data.path= data.name=texte8",
  # Sizes below the least, beyond what any machine holds, and beyond 32 bits.
  "model.num_layers=0",
  "model.width=0",
  "model.mixer.num_heads=0",
  "model.max_length=-1",
  "train.batch_size=0",
  "train.accumulate_steps=0",
  "train.keep_checkpoints=0",
  "train.median_every_steps=0",
  "sample.length=0",
  "eval.batch_size=0",
  "model.num_layers=1000000000",
  "model.width=1000000000",
  "model.feed_forward_width=1000000000",
  "model.max_length=1000000000",
  "train.batch_size=1000000000",
  "eval.batch_size=1000000000",
  "train.window=1000000000",
  "eval.window=1000000000",
  "eval.stride=1000000000",
  "model.mixer.num_levels=40",
  "model.mixer.num_levels=1000",
  "model.vocab_size=1000000000",
  "data.tokenizer_size=1000000000",
  "sample.length=1000000000",
  "train.schedule.warmup_steps=9999999999",
  "train.log_every_steps=9999999999999999999999",
  "train.num_epochs=0.0 train.num_steps=9999999999",
  "train.num_steps=9999999999",
  "model.boundaries=gumbel model.first.num_layers=1000000000",
  "model.boundaries=gumbel model.boundaries.num_capacities=1000000000",
  "model.boundaries=fixed model.boundaries.shortening_factor=9999999999",
  "model.boundaries=entropy model.boundaries.left=9999999999",
  "model.boundaries=unigram model.boundaries.size=1000000000",
  # This fits some machine, though not one of today.
  "model.width=100000 model.num_layers=10000 model.feed_forward_width=900",
  # Each alone fits, and all together do not: a matrix, an array of hidden units.
  "model.feed_forward_width=16000000 model.width=16000000",
  "model.max_length=16000000 train.batch_size=16000000 model.feed_forward_width=4000000",
  # Numbers that are none, and those that float32 makes infinite.
  "train.num_epochs=1e308",
  "train.num_epochs=inf",
  "train.eval_every_epochs=1e308",
  "train.eval_every_epochs=nan",
  "train.optimizer.eps=inf",
  "train.optimizer.eps=nan",
  "train.optimizer.eps=1e39",
  "train.optimizer=adamw train.optimizer.weight_decay=inf",
  "train.optimizer=adamw train.optimizer.weight_decay=nan",
  "train.learning_rate=inf",
  "train.learning_rate=nan",
  "train.clip_norm=inf",
  "train.optimizer.b1=nan",
  "model.dropout=nan",
  "model.mixer.level_dropout=nan",
  "model.init_std=inf",
  "model.norm_init_std=nan",
  "sample.temperature=inf",
  "sample.temperature=1e39",
  "sample.top_p=nan",
  "model.boundaries=gumbel model.boundaries.prior=nan",
  "model.boundaries=gumbel model.boundaries.temperature=inf",
  # Those at odds with others.
  "model.mixer.num_heads=7",
  "model.mixer=he model.mixer.num_heads=4",
  "train.window=129",
  "model.boundaries.prior=0.3",
  "model.boundaries=gumbel model.boundaries.pooling=last",
  "model.boundaries=fixed model.boundaries.offset=2",
  "train.accumulate_steps=3",
  "data.split_fractions=(0.9,0.9,0.9)",
  "data.language=en",
  "train.schedule=cosine train.schedule.warmup_steps=400",
  "model.vocab_size=7",
  "data.restrict_vocabulary=true",
  # Files and folders.
  "data.path={nothing}",
  "data.path={latin}",
  "data.path={empty}",
  "data.path={folder}",
  "train.initial_run={nothing}",
  "train.initial_run={folder}",
  "model.boundaries=unigram model.boundaries.file={nothing}",
  "data.tokenizer=wordpiece data.tokenizer_file={nothing}",
]

# Flags and files of the scripts and modules, and what the message says.
COMMANDS = [
  # Configurations that are none.
  ("train.py --workdir={new}", "--config"),
  ("train.py --config={quickstart}", "--workdir"),
  ("train.py --config={quickstart} --workdir=", "--workdir: expected a folder, got none"),
  ("train.py --config= --workdir={new}", "--config"),
  ("train.py --config={nothing}.py --workdir={new}", "--config: .*No such file"),
  ("train.py --config={folder} --workdir={new}", "--config: expected a Python file"),
  ("train.py --config=/dev/zero --workdir={new}", "--config: expected a Python file"),
  ("train.py --config={fifo} --workdir={new}", "--config: expected a Python file"),
  ("train.py --config={json} --workdir={new}", "--config: expected .* 'true' is not .*1"),
  ("train.py --config={text} --workdir={new}", "--config: expected .* invalid syntax"),
  ("train.py --config={zeros} --workdir={new}", "--config: expected .* null bytes"),
  ("train.py --config={without} --workdir={new}", "--config: .* no attribute 'get_config'"),
  ("train.py --config={raises} --workdir={new}", "--config: .* division by zero .*line 3"),
  ("train.py --config={number} --workdir={new}", "--config: expected .*ConfigDict.* int"),
  ("train.py --config={nones} --workdir={new}", "--config.* None"),
  ("train.py --config={other} --workdir={new}", "a: expected a known setting"),
  ("train.py --config={quickstart}:huge --workdir={new}", "--config: .*got huge"),
  ("train.py --config={extractors}:shee --workdir={new}", "--config: .*got shee"),
  ("train.py --config={quickstart} --workdir={new} rest", "flags: expected --name=value"),
  ("train.py --config={quickstart} --wordkir={new}", "wordkir"),
  # Folders that are no run's, or another's.
  ("train.py --config={quickstart} --workdir={run}", "workdir: expected an empty folder"),
  (
    "train.py --config={quickstart} --config.data.path={text} --workdir={text}",
    "workdir: expected a folder that can be written",
  ),
  (
    "train.py --config={quickstart} --config.data.path={text} --workdir={text}/a/b",
    "workdir: expected a folder that can be written",
  ),
  (
    "train.py --config={quickstart} --config.data.path={text} --workdir=/proc/a",
    "workdir: expected a folder that can be written",
  ),
  ("evaluate.py --workdir={nothing}", "workdir: expected the folder of a run"),
  ("evaluate.py --workdir={text}", "text"),
  ("evaluate.py --workdir={folder}", "workdir: expected the folder of a run"),
  ("evaluate.py --workdir={no_checkpoints}", "workdir|checkpoints"),
  ("evaluate.py --workdir={no_data}", "data"),
  ("evaluate.py --workdir={damaged}", "workdir: expected a readable .*config.json"),
  ("evaluate.py --workdir={nested}", "workdir: expected a readable .*config.json"),
  ("evaluate.py --workdir={of_text}", "train.batch_size: expected a value of type int"),
  ("evaluate.py --workdir={of_list}", "workdir: expected a readable .*config.json"),
  ("evaluate.py --workdir={run} --step=5", "step: expected one of"),
  ("evaluate.py --workdir={run} --step=-1", "step: expected one of"),
  ("evaluate.py --workdir={run} --step=a", "--step"),
  ("evaluate.py --workdir={run} --split=all", "--split"),
  ("evaluate.py --workdir={run} --window=20", "window: expected 1 to .* 19, got 20"),
  ("evaluate.py --workdir={run} --window=-5", "window: expected 1 to .* 19, got -5"),
  ("evaluate.py --workdir={run} --stride=-5", "stride: expected .* got -5"),
  ("evaluate.py --workdir={run} --stride=20", "stride: expected .* got 20"),
  ("evaluate.py --workdir={run} --config={quickstart}", "--config: expected"),
  ("evaluate.py --workdir={run} --torch_checkpoint={text}", "--workdir, --torch_check"),
  ("evaluate.py --torch_checkpoint={text}", "--config: expected"),
  ("evaluate.py", "--workdir, --torch_checkpoint: expected one of them, got none"),
  # Prompts and samples.
  ("generate.py", "--workdir"),
  ("generate.py --workdir={nothing}", "workdir: expected the folder of a run"),
  ("generate.py --workdir={run} --seed=-1", "seed: expected an integer in"),
  ("generate.py --workdir={run} --length=0", "length: expected"),
  ("generate.py --workdir={run} --length=1000000000", "length: expected .* 1000000000"),
  ("generate.py --workdir={run} --num_samples=0", "num_samples: expected 1 to"),
  ("generate.py --workdir={run} --num_samples=1000000000", "num_samples: expected 1 to"),
  ("generate.py --workdir={run} --temperature=-1", "temperature: expected"),
  ("generate.py --workdir={run} --temperature=nan", "temperature: expected"),
  ("generate.py --workdir={run} --temperature=1e39", "temperature: expected"),
  ("generate.py --workdir={run} --top_p=1.5", "top_p: expected"),
  ("generate.py --workdir={run} --top_k=-1", "top_k: expected"),
  ("generate.py --workdir={run} --top_k=1.5", "--top_k"),
  ("generate.py --workdir={run} --beyond_window=stop", "beyond_window: expected one of"),
  (
    "generate.py --workdir={run} --beyond_window=refuse --length=90",
    "length: expected at most 13 after a prompt of 7 tokens",
  ),
  ("generate.py --workdir={run} --stop=the", "stop: expected texts of one"),
  ("generate.py --workdir={run} --stop=", "stop: expected texts of one"),
  ("generate.py --workdir={run} --prompt=a --prompt_file={text}", "prompt, prompt_file"),
  ("generate.py --workdir={run} --prompt=café", "prompt: expected what the vocabulary"),
  ("generate.py --workdir={run} --prompt='the cat sat on a mat'", "prompt: expected 1 to"),
  ("generate.py --workdir={run} --prompt_file={nothing}", "prompt_file: expected"),
  ("generate.py --workdir={run} --prompt_file={folder}", "prompt_file: expected a file"),
  ("generate.py --workdir={run} --prompt_file={fifo}", "prompt_file: expected a file"),
  ("generate.py --workdir={run} --prompt_file=/dev/zero", "prompt_file: expected a file"),
  ("generate.py --workdir={run} --prompt_file={sparse}", "prompt_file: expected at most"),
  ("generate.py --workdir={run} --prompt_file={empty}", "prompt_file: expected a text"),
  ("generate.py --workdir={run} --prompt_file={latin}", "prompt_file: expected UTF-8"),
  # Processes that do not fit together.
  ("generate.py --workdir={run} --num_processes=2", "--coordinator, .* expected all three"),
  (
    "generate.py --workdir={run} --coordinator=localhost:1234",
    "--coordinator, .* expected all three",
  ),
  (
    "generate.py --workdir={run} --coordinator=localhost --num_processes=2 --process_id=0",
    "--coordinator: expected host:port",
  ),
  (
    "generate.py --workdir={run} --coordinator=localhost:99999 --num_processes=2 --process_id=0",
    "--coordinator: expected host:port",
  ),
  (
    "generate.py --workdir={run} --coordinator=:1234 --num_processes=2 --process_id=0",
    "--coordinator: expected host:port",
  ),
  (
    "generate.py --workdir={run} --coordinator=localhost:1234 --num_processes=2 --process_id=2",
    "--process_id: expected 0 to 1",
  ),
  (
    "generate.py --workdir={run} --coordinator=localhost:1234 --num_processes=2 --process_id=-1",
    "--process_id",
  ),
  (
    "generate.py --workdir={run} --coordinator=localhost:1234 --num_processes=0 --process_id=0",
    "--num_processes",
  ),
  # The modules.
  ("dpjax/analysis/plots.py {run}", "--out"),
  ("dpjax/analysis/plots.py --out=x.png", "run_folder"),
  ("dpjax/analysis/plots.py {run} --out={new}.txt", "--out: expected a file that ends in"),
  ("dpjax/analysis/plots.py {run} --out={text}/x.png", "--out: expected a file that can be"),
  ("dpjax/analysis/plots.py {run} --out={new}.png --json={folder}", "--json: expected a file that"),
  ("dpjax/analysis/plots.py {run} --out={new}.png --every=13", "--every: expected .* 12 .* got 13"),
  ("dpjax/analysis/plots.py {run} --out={new}.png --every=0", "--every: expected .* got 0"),
  ("dpjax/analysis/plots.py {run} --out={new}.png --every=a", "--every"),
  ("dpjax/analysis/plots.py {run} --out={new}.png --labels=a,b", "--labels: expected one for each"),
  ("dpjax/analysis/plots.py {run} --out={new}.png --figure=pie", "--figure"),
  ("dpjax/analysis/plots.py {nothing} --out={new}.png", "workdir: expected the folder of a run"),
  ("dpjax/analysis/plots.py {folder} --out={new}.png", "workdir: expected to read .*losses.f32"),
  ("dpjax/analysis/plots.py {damaged} --out={new}.png", "workdir: expected JSON in .*config.json"),
  ("dpjax/analysis/plots.py {nested} --out={new}.png", "workdir: expected JSON in .*config.json"),
  ("dpjax/analysis/plots.py {of_list} --out={new}.png", "workdir: expected the settings of a run"),
  ("dpjax/analysis/plots.py {of_text} --out={new}.png", "train.median_every_steps: expected"),
  ("dpjax/analysis/plots.py {odd} --out={new}.png", "workdir: expected 4 bytes an update"),
  ("dpjax/analysis/plots.py {none_yet} --out={new}.png", "workdir: expected a run with updates"),
  ("dpjax/analysis/complexity.py --length=0", "--length: expected an integer of at least 1, got 0"),
  ("dpjax/analysis/complexity.py --width=7", "--num_heads: expected a divisor of the width 7"),
  ("dpjax/analysis/complexity.py --inference=129", "--inference: expected .* got 129"),
  ("dpjax/analysis/complexity.py --length=1%s" % ("0" * 2000), "--length: expected"),
  ("dpjax/analysis/complexity.py --width=a", "--width"),
  ("dpjax/analysis/segmentation.py", "run_folder"),
  ("dpjax/analysis/segmentation.py {nothing}", "workdir: expected the folder of a run"),
  ("dpjax/analysis/segmentation.py {run} --length=20", "--length: expected 1 to .* 19, got 20"),
  ("dpjax/analysis/segmentation.py {run} --text=", "--text: expected 1 to 19 tokens"),
  ("dpjax/analysis/segmentation.py {run} --text=a --out={new}.txt", "--out: expected a file"),
  ("dpjax/analysis/segmentation.py {run} --text=a --out={text}/x.png", "--out: expected a file"),
  ("dpjax/analysis/significance.py", "command"),
  ("dpjax/analysis/significance.py compare {seeds}", "--baseline"),
  ("dpjax/analysis/significance.py compare {run} --baseline={run}", "expected runs seed_<n>"),
  ("dpjax/analysis/significance.py compare {seeds} --baseline={nothing}", "expected runs seed_<n>"),
  (
    "dpjax/analysis/significance.py compare {seeds} --baseline={seeds} --alpha=2",
    "--alpha: expect",
  ),
  (
    "dpjax/analysis/significance.py compare {seeds} --baseline={seeds} --split=valid",
    "--split: expected scores_valid",
  ),
  (
    "dpjax/analysis/significance.py compare {seeds} --baseline={seeds} --score=beauty",
    "--score: expected one of .* got beauty",
  ),
  *(
    (
      f"dpjax/analysis/significance.py compare {{seeds}} --baseline={{seeds}} --score={name}",
      f"--score: .*got {name}",
    )
    for name in ("text", "truth", "endless", "huge", "list")
  ),
  (
    "dpjax/analysis/significance.py train --config={quickstart} --workdir={new} --seeds=0,a",
    "seeds: expected whole numbers",
  ),
  (
    "dpjax/analysis/significance.py train --config={quickstart} --workdir={new} --seeds=1,1",
    "seeds: expected whole numbers",
  ),
  (
    "dpjax/analysis/significance.py train --config={quickstart} --workdir={new} --seeds=%s"
    % ("9" * 5000),
    "seeds: expected whole numbers",
  ),
  ("reproduce/__main__.py", "TABLE: expected a name"),
  ("reproduce/__main__.py extractors-tabel7", "nearest is extractors-table7"),
  ("reproduce/__main__.py all --scale=large", "scale: expected one of"),
  ("reproduce/__main__.py all --seeds=0 --out={new}", "seeds: expected at least 1"),
  ("reproduce/__main__.py all --seeds=9999999999 --out={new}", "seeds: expected"),
  ("reproduce/__main__.py all --minutes=nan --out={new}", "minutes: expected"),
  ("reproduce/__main__.py all --data={nothing} --out={new}", "data: expected a fold"),
  ("reproduce/__main__.py extractors-table7 --out={text}", "text.txt: expected"),
  ("reproduce/__main__.py report --out={nothing}", "out: expected a folder with"),
  ("dpjax/data/__main__.py", "command"),
  ("dpjax/data/__main__.py prepare texte8", "nearest is text8"),
  ("dpjax/data/__main__.py prepare wiki40b --language=xx", "language: expected"),
  ("dpjax/data/__main__.py clean --language=xx {text} {new}", "language: expected"),
  ("dpjax/data/__main__.py clean --language=en {nothing} {new}", "no_such"),
  ("dpjax/data/__main__.py clean --language=en {latin} {new}", "latin: expected .* UTF-8"),
  ("dpjax/data/__main__.py clean --language=en {text} {text}/a", "text.txt/a"),
]

# What needs a process of its own: the environment, the standard input, and the message.
PROCESSES = [
  (dict(JAX_PLATFORMS="cuda"), "generate.py --workdir={run}", "JAX_PLATFORMS: expected"),
  (dict(JAX_PLATFORMS="foo"), "evaluate.py --workdir={run}", "JAX_PLATFORMS: .*'foo'"),
  (dict(JAX_PLATFORMS="foo"), "dpjax/analysis/segmentation.py {run}", "JAX_PLATFORMS: .*'foo'"),
  ({}, "generate.py --workdir={run} --distributed", "--distributed: expected"),
  ({}, "generate.py --workdir={run} --prompt_file=- < /dev/zero", "prompt_file: .* most"),
  ({}, "generate.py --workdir={run} --prompt_file=- < /dev/null", "prompt_file: .*a text"),
  # Nobody listens, or something else does.
  (
    {},
    "generate.py --workdir={run} --coordinator=localhost:{free} --num_processes=2 "
    "--process_id=1 --join_seconds=2",
    "--coordinator=.*: expected all .* within 2 s",
  ),
  (
    {},
    "generate.py --workdir={run} --coordinator=localhost:{busy} --num_processes=2 "
    "--process_id=1 --join_seconds=2",
    "--coordinator=.*: expected all .* within 2 s",
  ),
  (
    {},
    "generate.py --workdir={run} --coordinator=localhost:{free} --num_processes=2 "
    "--process_id=0 --join_seconds=2",
    "--coordinator=.*: expected all .* within 2 s",
  ),
  (
    {},
    "generate.py --workdir={run} --coordinator=localhost:{busy} --num_processes=2 "
    "--process_id=0 --join_seconds=2",
    "--coordinator=.*: expected .* listen .*in use",
  ),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
  """Paths by name: a trained run, damaged copies of it, and files of all kinds."""
  root = tmp_path_factory.mktemp("places")
  text = helpers.write_text(root / "text.txt")
  config = helpers.small_config(text)
  config.sample.prompt, config.sample.length = "the cat", 9
  with jax.numpy_dtype_promotion("standard"):  # Optax raises floats to its integer count
    run_lib.train(config, root / "run")
  settings = json.loads((root / "run/config.json").read_text())
  settings["train"] |= dict(batch_size="8", median_every_steps="5")
  damage = {
    "damaged/config.json": '{"model": {"mix',
    "nested/config.json": "[" * 100_000,
    "of_list/config.json": "[]",
    "of_text/config.json": json.dumps(settings),
    "odd/losses.f32": "7 bytes",
    "none_yet/losses.f32": "",
    "no_checkpoints/checkpoints": None,
    "no_data/data": None,
  }
  scores = dict(
    bits_per_character=2.5, text="a", truth=True, endless=float("inf"), huge=10**400, list=[1]
  )
  files = {
    "latin": "na\u00efve\n" * 50,
    "empty": "",
    "json": '{"model": true}',
    "without.py": "x = 1\n",
    "raises.py": "\ndef get_config():\n  return 1 / 0\n",
    "number.py": "def get_config():\n  return 3\n",
    "nones.py": "def get_config():\n  pass\n",
    "other.py": "from ml_collections import ConfigDict\n"
    "def get_config():\n  return ConfigDict({'a': 1})\n",
    "zeros.py": "\0\0",
    "seeds/seed_0/scores_test_12.json": json.dumps({"scores": scores}),
    "seeds/seed_1/scores_test_12.json": json.dumps({"scores": scores}),
  }
  for name, content in (damage | files).items():
    path = root / name
    if name in damage:
      shutil.copytree(root / "run", path.parent, symlinks=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
      shutil.rmtree(path)
    else:
      path.write_text(content, encoding="latin-1")
  (root / "folder").mkdir()
  os.mkfifo(root / "fifo")
  with (root / "sparse").open("wb") as file:
    file.truncate(2**40)
  known = {path.stem: path for path in root.iterdir()}
  configs = dict(
    quickstart=helpers.ROOT / "configs/quickstart.py",
    extractors=helpers.ROOT / "configs/extractors_childrens_books.py",
  )
  return known | configs | dict(nothing=root / "no_such")


@pytest.fixture(autouse=True)
def unchanged(places, tmp_path, monkeypatch):
  """Works in an empty folder; what lay in another one is as it was, and nothing new."""
  monkeypatch.chdir(tmp_path)
  before = _digests(places["run"].parent)
  yield
  assert _digests(places["run"].parent) == before


def _digests(root):
  files = sorted(path for path in root.rglob("*") if path.name != "sparse")
  return {
    path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else path.stat()
    for path in files
  }


@contextlib.contextmanager
def limited():
  def end(*_):
    raise TimeoutError(f"no answer in {SECONDS} s")

  before = signal.signal(signal.SIGALRM, end)
  signal.alarm(SECONDS)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def call(arguments, capsys):
  """Runs a script or a module here; gives what its exit says and prints."""
  before, argv = {*flags.FLAGS}, sys.argv
  sys.argv = [*arguments]
  try:
    with limited(), pytest.raises(SystemExit) as end:
      runpy.run_path(str(helpers.ROOT / arguments[0]), run_name="__main__")
  finally:
    sys.argv = argv
    for name in {*flags.FLAGS} - before:
      delattr(flags.FLAGS, name)
    for name in flags.FLAGS:
      flags.FLAGS[name].unparse()
    flags.FLAGS.unparse_flags()
  code, complaint = end.value.code, capsys.readouterr().err
  assert code not in (None, 0), "expected a message"
  return complaint + (code if isinstance(code, str) else "")


def expect(pattern, message):
  assert re.search(pattern, message, re.DOTALL), f"expected {pattern}, got: {message}"
  assert "Traceback" not in message


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_wrong_setting_is_named(settings, places, tmp_path, capsys):
  given = [f"--config.{setting.format(**places)}" for setting in settings.split()]
  message = call(
    [
      "train.py",
      f"--config={places['quickstart']}",
      f"--config.data.path={places['text']}",
      *given,
      f"--workdir={tmp_path / 'new'}",
    ],
    capsys,
  )
  name = given[-1].removeprefix("--config.").partition("=")[0]
  expect(rf"{name}\b.*expected|{name}=", message)
  assert len(message.strip().splitlines()) == 1
  assert not (tmp_path / "new/checkpoints").exists()


# Settings of components that are wrong, and what the message has to name.
COMPONENTS = {
  "model.mixer=dispacher": "did you mean dispatcher[?]",
  "model.mixer=rg_lru": "one of dispatcher, .*dpjax.register_mixer adds another",
  "model.mixer.num_level=3": "the nearest known is model.mixer.num_levels",
  "model.mixer=we model.mixer.num_levels=3": "expected a setting of we",
  "model.mixer=he model.mixer.ajustment=1": "the nearest known is model.mixer.adjustment",
  "model.mixer.num_levels=0": "expected at least 1, got 0",
  "model.mixer.num_levels=many": "num_levels",
  "model.mixer.level_dropout=1.5": "expected .*, got 1.5",
  "model.mixer.num_heads=7": "a divisor of model.width",
  "model.mixer.implementation=lop": "did you mean loop[?]",
  "model.boundaries=whitespaces": "did you mean whitespace[?]",
  "model.boundaries.factor=3": "model.boundaries.factor: .* setting of none",
  "model.boundaries=gumbel model.boundaries.pior=0.1": "known is .*boundaries.prior",
  "model.boundaries=gumbel model.boundaries.prior=1.0": r"expected a number in \(0, 1\)",
  "model.boundaries=routing model.boundaries.factor=1": "expected above 1, got 1",
  "model.boundaries=fixed model.boundaries.pooling=max": "one of mean, last, got max",
  "model.first.mixer=heh": "one of .*, he, .*did you mean he",
  "model.middle=3": "expected it in a configuration file, by dpjax.config.middle",
  "train.optimizer=adamx": "one of adam, .*did you mean adam",
  "train.optimizer=sgd train.optimizer.b1=0.8": "expected a setting of sgd",
  "train.optimizer=muon train.optimizer.beta=2": r"expected a number in \[0, 1\), got 2",
  "train.schedule=cosin": "did you mean cosine[?]",
  "train.schedule=cosine train.schedule.warmup=5": "known is train.schedule.warmup_steps",
}


@pytest.mark.parametrize("settings", COMPONENTS)
def test_a_wrong_setting_of_a_component_is_named(settings, places, tmp_path, capsys):
  given = [f"--config.{setting}" for setting in settings.split()]
  message = call(
    [
      "train.py",
      f"--config={places['quickstart']}",
      f"--config.data.path={places['text']}",
      *given,
      f"--workdir={tmp_path / 'new'}",
    ],
    capsys,
  )
  name = given[-1].removeprefix("--config.").partition("=")[0]
  expect(rf"^[^\n]*{name}\b[^\n]*$", message.strip())
  expect(COMPONENTS[settings], message)
  assert not (tmp_path / "new").exists()  # Nothing was prepared, nor compiled.


@pytest.mark.parametrize("command, message", COMMANDS, ids=lambda text: text[:60])
def test_a_wrong_flag_or_file_is_named(command, message, places, tmp_path, capsys):
  command = command.format(**places, new=tmp_path / "new")
  expect(message, call(shlex.split(command), capsys))
  assert not [*tmp_path.rglob("checkpoints")]


@pytest.mark.parametrize("environment, command, message", PROCESSES)
def test_a_wrong_surrounding_is_named(environment, command, message, places):
  with socket.create_server(("localhost", 0)) as busy:
    with socket.create_server(("localhost", 0)) as closed:
      ports = dict(free=closed.getsockname()[1], busy=busy.getsockname()[1])
    command, _, source = command.format(**places, **ports).partition(" < ")
    name, *rest = shlex.split(command)
    with open(source or os.devnull, "rb") as file:
      done = subprocess.run(
        [sys.executable, str(helpers.ROOT / name), *rest],
        stdin=file,
        check=False,
        env=helpers.environment(**environment),
        capture_output=True,
        text=True,
        timeout=SECONDS,
      )
  assert done.returncode == 1, done.stderr
  expect(message, done.stderr)
