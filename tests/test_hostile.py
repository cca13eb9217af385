"""Wrong input to every command: a message that names what is wrong, no traceback, no change."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest

import dpjax
from tests import helpers

SECONDS = 60  # Ends a command that hangs.

# Settings of which the last is wrong and named by the message, and what else the message says.
SETTINGS = helpers.cases(r"""
  # Unknown ones and other types; tests/test_config.py has more.
  model.widht=3 | expected a known setting, .* nearest known is model.width
  model.width=a | --config.model.width: .* type int, got a$
  model=3 | model: expected one of its settings, such as model.mixer.name, got the whole section$
  model.first=3 | model.first: expected one of its settings, such as model.first.num_layers, got
  model.width= | --config.model.width: .* type int, got ''$
  model.mixer.adjustment=False model.mixer=we model.mixer.implementation=ftt | did you mean fft
  model.middle=3 | expected it in a configuration file, by dpjax.config.middle
  # What only the data, or the run as a whole, can tell.
  data.path=/ | expected a folder of documents, got /, that of all files
  data.path=/dev/zero | expected a readable text file or folder, .* .not a regular file
  data.path={fifo} | expected a readable text file or folder, .* .not a regular file
  data.path= data.name=texte8 | did you mean text8
  model.vocab_size=7 | expected
  model.max_length=5 sample.prompt=whatever | expected 1 to 5 tokens
  train.sampling=random_windows data.path={short} train.window=0 | has 108 .* got 128
  # Files and folders.
  data.path={nothing} | no_such
  data.path=~no_such_user/x | data.path: .* readable text file or folder, got ~no_such_user/x .No su
  model.boundaries=unigram model.boundaries.file={nothing} | expected a SentencePiece .*no_such
""")

# Flags and files of the scripts and modules, and what the message says.
COMMANDS = helpers.cases(r"""
  # Configurations that are none.
  train --workdir={nothing} | --config: expected an experiment, or a --workdir with a run
  train --config={quickstart} | --workdir
  train --config={quickstart} --workdir={new} --profile=3 | --profile: expected START:STOP, .* 3$
  {train} --config={quickstart} --config.=3 | --config.=3: expected --config.KEY=VALUE, got no key
  {train} --config={nothing}.py | --config: expected a Python file, .* one of
  {train} --config={ends} | --config: expected a Python file .* got SystemExit: 0 .*ends.py, line 1
  {train} --config={quickstart} --plugin=ends | --plugin: expected a module .* .SystemExit: 0
  {train} --config={quickstart}:huge | ^--config: expected the variant tiny, .*, line
  {train} --config={quickstart} rest | RUN: expected none with --config or --workdir, got rest
  train --config={quickstart} rest | RUN: expected none with --config or --workdir, got rest
  train {text} | --config: expected an experiment, or a --workdir with a run
  generate {run} {run} | flags: expected --name=value
  {train} --config={quickstart} --config.model.width=8,6 | .dpjax sweep trains a run for each
  train --config={quickstart} --wordkir={new} | --wordkir: .*; did you mean --workdir
  sweep --workdir={new} | --config: expected an experiment, got none
  # Folders that are no run's, or another's.
  train {quick} --workdir={text} | workdir: expected a folder that can be written
  evaluate --workdir={folder} | workdir: expected the folder of a run
  evaluate --workdir={no_checkpoints} | workdir|checkpoints
  evaluate --workdir={no_data} | data
  {evaluate} --step=5 | step: expected one of
  evaluate --torch_checkpoint={text} | --config: expected it with --torch
  {evaluate} --text={empty} | --text: expected a text, got the empty file .*empty
  {evaluate} --text={latin} | --text: expected a text in UTF-8, got .*latin
  {evaluate} --text={nothing} | --text: expected a text in UTF-8, got .*no_such .No such file
  {evaluate} --text={text} --split=test | --split: expected none with --text, got test
  # Prompts and samples.
  {generate} --seed=-1 | seed: expected at least 0, got -1
  {generate} --num_samples=1000000000 | num_samples: expected 1 to
  {generate} --overflow=error --length=90 | length: .* 13 after a prompt of 7
  {generate} --prompt=a --prompt_file={text} | prompt, prompt_file: .* got both
  {generate} --prompt_file={nothing} | prompt_file: .* a text, or -, got .*no_such
  {generate} --prompt_file={fifo} | prompt_file: expected a file
  {generate} --prompt_file={sparse} | prompt_file: .*more than
  {generate} --prompt_file={empty} | prompt_file: .* text in .*empty, got none
  # Processes that do not fit together.
  {generate} --coordinator=localhost:1234 | --coordinator, .* expected all three
  {generate} --coordinator=a {two} --process_id=0 | expected host:port
  {generate} --coordinator=a:1234 {two} --process_id=2 | --process_id: expected 0 to 1
  {train} {quick} --noconfig.model.use_bias=banana | --noconfig.model.use_bias: .* no value, got b
  {train} {quick} --noconfig.model.use_bias= | --noconfig.model.use_bias: expected no value, got
  look {run} --text=a --out= | --out: expected a path, got none
  plots {run} --out= | --out: expected a path, got none
  train --config={quickstart} --workdir= | --workdir: expected a path, got none
  export '' {new} | RUN: expected a path, got none
  {generate} {two} --coordinator=a:1 --process_id=0 --join_seconds=9999999999999 | _seconds: exp
  {generate} {two} --coordinator=a:1 --process_id=0 --join_seconds=-1 | --join_seconds: expected
  # Files of flags.
  {generate} --flagfile= | --flagfile: expected a file, got none
  {generate} --flagfile | --flagfile: expected a file, got none
  {generate} --flagfile={flags} | --flagfile: .* does not lead to itself, got .*flags.txt
  {generate} --flagfile {more} | --flagfile: .* does not lead to itself, got .*more.txt
  {generate} --flagfile={latin} | --flagfile: expected a text in UTF-8 .* got .*latin
  {generate} --flagfile={fifo} | --flagfile: .*fifo: expected a plain file
  {generate} --flagfile=/dev/zero | --flagfile: .*zero: expected a plain file
  {generate} --flagfile={nothing} | --flagfile: .*No such file
  # Texts that are none.
  look {run} --text={fifo} | --text: expected a text in UTF-8, got .*fifo .not a regular file
  look {run} --text=/ | --text: expected a text in UTF-8, got / .not a regular file
  # Numbers and files that ended in a traceback, or for which a command waited.
  export {folder_of_model} {new} | model.safetensors: expected a plain file, got a folder
  {calibrate} --factor=0.2 | --factor: expected at least 1, and finite, got 0.2
  {calibrate} --factor=3 --window=24 | --window: expected 1 to model.max_length = 19, got 24
  plots --out=x.png | RUN
  plots {run} --out={new}.txt | --out: expected a file that ends in .png, .pdf, .svg, got
  plots {run} --out={text}/x.png | expected to read or write it, got
  plots {run} --out={pipe} | pipe.png: expected to read or write it, got
  {plot} --metric=valid/loss | --metric: expected one of train/.*, got valid/loss
  {plot} --width=90 | --width: expected 1.5 to 40 inches, got 90
  {plot} --every=13 | --every: .* at most the 12 updates of .* got 13
  {plot} --labels=a,b | --labels: .* each of the 1 runs, got 2
  plots {odd} --out={new}.png | workdir: expected 4 bytes an update in .*, got 7 bytes
  plots {none_yet} --out={new}.png | workdir: expected a run with updates
""")

# Where nothing can be written, and what the message says.
ADDRESSES = helpers.cases(r"""
  train {quick} --workdir=hf://x/y | --workdir: expected a path on this machine, .* hf://x/y
  train {quick} --workdir=gs://x/y --dry_run | --workdir: expected a path .* address gs://x/y
  sweep {quick} --seeds=0,1 --workdir=s3://x/y | --workdir: expected a path .* address s3://x/y
  train {quick} --workdir=new --config.data.data_dir=gs://x/y | data.data_dir: .* address gs://x/y
  {evaluate} --out=http://x/y | --out: expected a path .* address http://x/y
  {evaluate} --text={text} --out=http://x/y | --out: expected a path .* address http://x/y
  export {run} s3://x/y | folder: expected a path on this machine, got the address s3://x/y
  look {run} --text=a --out=http://x/y.html | --out: expected a path .* address http://x/y.html
  plots {run} --out=http://x/y.png | --out: expected a path .* address http://x/y.png
  compile {run} --out=file:///x/y.json | --out: expected a path .* address file:///x/y.json
  {generate} --compilation_cache=gs://x/y | --compilation_cache: .* got the address gs://x/y
""")

# What needs a process of its own: the environment, the command, and the message. On {free}
# nobody listens, on {busy} something else does.
PROCESSES = helpers.cases(r"""
  JAX_PLATFORMS=cuda | generate --workdir={run} | JAX_PLATFORMS: expected
  A=1 | generate --workdir={run} --distributed | --distributed: expected
  A=1 | generate --workdir={run} --prompt_file=- < /dev/null | prompt_file: .*a text
  A=1 | {join} --coordinator=localhost:{free} --process_id=1 | --coord.*: .* all .* within 2 s
  A=1 | {join} --coordinator=localhost:{busy} --process_id=0 | --coordinator=.*: .* listen .*in use
""")


@pytest.fixture(scope="module")
def locations(text, finished, tmp_path_factory):
  """Paths by name: a trained run, damaged copies of it, files of all kinds; and flags."""
  root = tmp_path_factory.mktemp("places")
  shutil.copy(text, root / "text.txt")
  shutil.copytree(finished[0], root / "run", symlinks=True)
  damage = {
    "odd/losses.f32": "7 bytes",
    "none_yet/losses.f32": "",
    "no_checkpoints/checkpoints": None,
    "no_data/data": None,
  }
  files = {
    "latin": "na\u00efve\n" * 50,
    "empty": "",
    "flags.txt": f"--seed=1\n--flagfile={root / 'flags.txt'}",
    "more.txt": f"--flagfile={root / 'again.txt'}",
    "again.txt": f"# Comment\n--flagfile={root / 'more.txt'}",
    "short": "a cat\n" * 20,
    "ends.py": "import sys; sys.exit(0)",
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
  for name in ("fifo", "pipe.png"):
    helpers.make_pipe(root / name)
  shutil.copytree(root / "run", root / "folder_of_model", symlinks=True)
  (root / "folder_of_model/model.safetensors").mkdir()
  with (root / "sparse").open("wb") as file:
    file.truncate(2**40)
  expected = {path.stem: path for path in root.iterdir()}
  quickstart = helpers.ROOT / "configs/quickstart.py"
  return expected | dict(
    quickstart=quickstart,
    nothing=root / "no_such",
    quick=f"--config={quickstart} --config.data.path={expected['text']}",
    train="train --workdir=new",
    evaluate=f"evaluate --workdir={expected['run']}",
    generate=f"generate --workdir={expected['run']}",
    plot=f"plots {expected['run']} --out=new.png",
    calibrate=f"calibrate {expected['run']}",
    two="--num_processes=2",
    join=f"generate --workdir={expected['run']} --num_processes=2 --join_seconds=2",
  )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, locations):
  """Works in an empty folder."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(locations["run"].parent)


@pytest.fixture(autouse=True, scope="module")
def unchanged(locations):
  """What lies there is as it was, and nothing new."""

  def contents():
    return {
      path: path.read_bytes() if path.is_file() and path.name != "sparse" else path.stat().st_mtime
      for path in locations["run"].parent.rglob("*")
    }

  before = contents()
  yield
  assert contents() == before


@contextlib.contextmanager
def limited(seconds=SECONDS):
  if not hasattr(signal, "alarm"):  # as on Windows
    yield
    return

  def end(*_):
    raise TimeoutError(f"no answer in {seconds} s")

  before = signal.signal(signal.SIGALRM, end)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def expect(pattern, message):
  assert re.search(pattern, message, re.DOTALL), f"expected {pattern}, got: {message}"
  assert "Traceback" not in message


def call(command, capsys):
  """Runs a command here; gives what its exit says and prints."""
  with limited():
    code = helpers.command(*shlex.split(command))
  complaint = capsys.readouterr().err
  assert code not in (None, 0), "expected a message"
  return complaint + (code if isinstance(code, str) else "")


@pytest.mark.parametrize(("settings", "pattern"), SETTINGS)
def test_a_wrong_setting_is_named(settings, pattern, locations, tmp_path, capsys):
  options = [f"--config.{setting}" for setting in settings.format(**locations).split()]
  message = call(f"train {locations['quick']} {' '.join(options)} --workdir=new", capsys).strip()
  name = options[-1].removeprefix("--config.").partition("=")[0]
  expect(rf"^[^\n]*{name}\b[^\n]*$", message)
  expect(pattern, message)
  assert not (tmp_path / "new/checkpoints").exists()


@pytest.mark.parametrize(("command", "message"), COMMANDS)
def test_a_wrong_flag_or_file_is_named(command, message, locations, tmp_path, capsys):
  expect(message, call(command.format(**locations, new=tmp_path / "new"), capsys))
  assert not [*tmp_path.rglob("checkpoints")]


@pytest.mark.parametrize(("command", "message"), ADDRESSES)
@pytest.mark.usefixtures("standard_promotion")
def test_no_folder_has_the_name_of_a_scheme(command, message, locations, tmp_path, capsys):
  line = call(command.format(**locations), capsys).strip()
  expect(f"^{message}$", line)
  assert "\n" not in line and not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("standard_promotion")
def test_from_python_too_an_address_is_no_folder(finished, tmp_path):
  _, run, _ = finished
  for write in (
    lambda: dpjax.train(run.config, "gs://x/y"),
    lambda: run.save("gs://x/y"),
    lambda: run.score_split("valid", folder="gs://x/y"),
  ):
    with pytest.raises(dpjax.UserError, match="^(workdir|folder): expected a path .* gs:/+x/y$"):
      write()
  assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "command", "message"), PROCESSES)
def test_a_wrong_surrounding_is_named(environment, command, message, locations):
  with socket.create_server(("localhost", 0)) as busy:
    with socket.create_server(("localhost", 0)) as closed:
      ports = dict(free=closed.getsockname()[1], busy=busy.getsockname()[1])
    command, _, source = command.format(**locations, **ports).partition(" < ")
    with open(source or os.devnull, "rb") as file:
      done = subprocess.run(
        [sys.executable, "-m", "dpjax", *shlex.split(command)],
        stdin=file,
        check=False,
        env=helpers.environment(**dict([environment.split("=")])),
        capture_output=True,
        text=True,
        timeout=SECONDS,
      )
  assert done.returncode == 1, done.stderr
  expect(message, done.stderr)
