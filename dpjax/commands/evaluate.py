"""Scores a run: dpjax evaluate --workdir=runs/quickstart [--split=test] [--step=N].

The scores are also written as JSON to the run's folder, unless it is exported, or to --out.

Your own texts, each scored by itself; their scores are written only with --out:
dpjax evaluate --workdir=runs/quickstart --text=A.txt --text=B.txt

A checkpoint of the authors' PyTorch code, on a configuration's data and tokenizer:
dpjax evaluate --torch_checkpoint=FILE.pt --config=dispatcher_wikitext2
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dpjax import files
from dpjax.commands import flags as command_line
from dpjax.data import readers
from dpjax.errors import UserError


def main() -> None:
  """Scores the run or texts given on the command line."""
  parser, path = command_line.Parser("evaluate", __doc__, has_config=True), command_line.path
  add = parser.add_argument
  add("--workdir", type=path, help="the run's folder")
  add("--split", choices=("train", "valid", "test"), help="default: test")
  about = "a file with a text to score instead, plain or compressed; may be repeated"
  add("--text", type=path, action="append", default=[], help=about)
  add("--step", type=int, help="checkpoint to score; default: the best by validation")
  add("--window", type=int, default=0, help="tokens the model sees at once; 0: eval.window")
  add("--stride", type=int, default=0, help="tokens each window scores; 0: eval.stride")
  about = "whether to score each document by itself; default: data.isolate_documents"
  add("--isolate_documents", action=argparse.BooleanOptionalAction, help=about)
  add("--torch_checkpoint", type=path, help="a file of the authors' code")
  add("--out", type=path, help="a folder for the scores; default: the run's, unless it is exported")
  command_line.start(parser, _evaluate)


def _evaluate(options) -> None:
  import jax

  from dpjax import run as run_lib
  from dpjax.run import workdir as workdir_lib

  torch, split = options.torch_checkpoint, options.split or "test"
  if bool(torch) == bool(options.workdir):
    got = "both" if torch else "none"
    raise UserError(f"--workdir, --torch_checkpoint: expected one of them, got {got}")
  if bool(torch) != (options.config is not None):
    raise UserError(
      "--config: expected it with --torch_checkpoint, to name data and tokenizer, and "
      "not with --workdir, which has its own"
    )
  if torch and options.step is not None:
    raise UserError(f"--step: expected none with --torch_checkpoint, got {options.step}")
  for name in ("split", "isolate_documents") if options.text else ():
    if (value := getattr(options, name)) is not None:
      raise UserError(f"--{name}: expected none with --text, got {value}")
  texts = {path: _read(path) for path in options.text}
  with tempfile.TemporaryDirectory() as scratch:
    if torch:
      run = run_lib.load_torch(torch, options.config, scratch)
    else:
      run = run_lib.load(options.workdir, options.step)
    if options.text:
      return _score_texts(run, texts, options)
    is_writable = run.workdir is not None and not workdir_lib.is_exported(run.workdir)
    scores = run.score_split(
      split,
      window=options.window,
      stride=options.stride,
      isolate_documents=options.isolate_documents,
      progress=True,
      folder=options.out or (run.workdir if is_writable else None),
    )
  if jax.process_index() == 0:
    isolate = options.isolate_documents
    isolate = run.config.data.isolate_documents if isolate is None else isolate
    note = ", each document by itself" if isolate else ""
    print(f"The {split} split, by {torch or f'step {run.step}'}{note}:")
    print(run_lib.table(scores))
  command_line.exit_unless_finite(**{split: scores["nats_per_token"]})


def _read(path: str) -> str:
  if text := readers.read_text(path, "--text"):
    return text
  raise UserError(f"--text: expected a text, got the empty file {path}")


def _score_texts(run, texts: Mapping[str, str], options) -> None:
  import jax

  from dpjax import run as run_lib
  from dpjax.training import metrics

  size = dict(window=options.window, stride=options.stride)
  texts_scores, nats, is_first = {}, {}, jax.process_index() == 0
  for path, text in texts.items():
    scores = run.score(text, **size, progress=True)
    texts_scores[path], nats[path] = metrics.for_json(scores), scores["nats_per_token"]
    if is_first:
      print(f"{path}, by {options.torch_checkpoint or f'step {run.step}'}:")
      print(run_lib.table(scores))
      if unknown := run.tokenizer.describe_unknown({path: run.tokenizer.encode(text)}):
        print(unknown)
  if options.out and is_first:
    content = {"step": run.step, **size, "texts": texts_scores}
    files.write_json(Path(options.out, f"scores_of_texts_{run.step}.json"), content)
  command_line.exit_unless_finite(**nats)
