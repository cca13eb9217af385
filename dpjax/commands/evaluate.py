"""Scores a run: dpjax evaluate --workdir=runs/quickstart [--split=test] [--step=N].

The scores also go into the run's folder, unless it is exported, or that of --out, as JSON.

Texts of your own, each by itself, whose scores go into a file only with --out:
dpjax evaluate --workdir=runs/quickstart --text=A.txt --text=B.txt

A checkpoint of the authors' PyTorch code, on a configuration's data and tokenizer:
dpjax evaluate --torch_checkpoint=FILE.pt --config=dispatcher_wikitext2
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from dpjax import files
from dpjax.commands import flags as command_line
from dpjax.data import readers
from dpjax.errors import UserError


def main() -> None:
  """Scores what the command line describes."""
  command_line.define_config()
  flags.DEFINE(command_line.PATH, "workdir", None, "the run's folder")
  flags.DEFINE_enum("split", "test", ("train", "valid", "test"), "what to score")
  about = "a file with a text to score instead, plain or packed; may be given several times"
  flags.DEFINE_multi(command_line.PATH, flags.ArgumentSerializer(), "text", [], about)
  flags.DEFINE_integer("step", None, "checkpoint to score; default: the best by validation")
  flags.DEFINE_integer("window", 0, "tokens the model sees at once; 0: eval.window")
  flags.DEFINE_integer("stride", 0, "tokens each window scores; 0: eval.stride")
  about = "isolated: score each document as if it stood alone; '': as data.documents"
  flags.DEFINE_enum("documents", "", ("", "joined", "isolated"), about)
  flags.DEFINE(command_line.PATH, "torch_checkpoint", None, "a file of the authors' code")
  about = "a folder for the scores as JSON; default: the run's, and none for an exported model"
  flags.DEFINE(command_line.PATH, "out", None, about)
  command_line.start(lambda _: _evaluate(flags.FLAGS), __doc__)


def _evaluate(given) -> None:
  import jax

  from dpjax import run as run_lib
  from dpjax.run import workdir as workdir_lib

  torch, split = given.torch_checkpoint, given.split
  if bool(torch) == bool(given.workdir):
    got = "both" if torch else "none"
    raise UserError(f"--workdir, --torch_checkpoint: expected one of them, got {got}")
  if bool(torch) != (given.config is not None):
    raise UserError(
      "--config: expected it with --torch_checkpoint, to name data and tokenizer, and "
      "not with --workdir, which has its own"
    )
  if torch and given.step is not None:
    raise UserError(f"--step: expected none with --torch_checkpoint, got {given.step}")
  for name in ("split", "documents") if given.text else ():
    if given[name].present:
      raise UserError(f"--{name}: expected none with --text, got {given[name].value}")
  texts = {path: _read(path) for path in given.text}
  with tempfile.TemporaryDirectory() as scratch:
    if torch:
      run = run_lib.load_torch(torch, given.config, scratch)
    else:
      run = run_lib.load(given.workdir, given.step)
    if given.text:
      return _score_texts(run, texts, given)
    is_own = run.workdir is not None and not workdir_lib.is_exported(run.workdir)
    scores = run.score_split(
      split,
      window=given.window,
      stride=given.stride,
      documents=given.documents,
      progress=True,
      folder=given.out or (run.workdir if is_own else None),
    )
  if jax.process_index() == 0:
    is_isolated = (given.documents or run.config.data.documents) == "isolated"
    alone = ", each document as if it stood alone" if is_isolated else ""
    print(f"The {split} split, by {torch or f'step {run.step}'}{alone}:")
    print(run_lib.table(scores))
  command_line.exit_unless_finite(**{split: scores["nats_per_token"]})


def _read(path: str) -> str:
  if text := readers.read_text(path, "--text"):
    return text
  raise UserError(f"--text: expected a text, got the empty file {path}")


def _score_texts(run, texts: Mapping[str, str], given) -> None:
  import jax

  from dpjax import run as run_lib
  from dpjax.training import metrics

  size = dict(window=given.window, stride=given.stride)
  found, nats, is_first = {}, {}, jax.process_index() == 0
  for path, text in texts.items():
    scores = run.score(text, **size, progress=True)
    found[path], nats[path] = metrics.for_json(scores), scores["nats_per_token"]
    if is_first:
      print(f"{path}, by {given.torch_checkpoint or f'step {run.step}'}:")
      print(run_lib.table(scores))
      if unknown := run.tokenizer.describe_unknown({path: run.tokenizer.encode(text)}):
        print(unknown)
  if given.out and is_first:
    content = {"step": run.step, **size, "texts": found}
    files.write_json(Path(given.out, f"scores_of_texts_{run.step}.json"), content)
  command_line.exit_unless_finite(**nats)
