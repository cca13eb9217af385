"""Scores a run: dpjax evaluate runs/quickstart [--split=test] [--step=N].

The scores are also written as JSON to the run's folder, unless it is exported, or to --out.

Your own texts, each scored by itself; their scores are written only with --out:
dpjax evaluate runs/quickstart --text=A.txt --text=B.txt

A checkpoint of the authors' PyTorch code, on a configuration's data and tokenizer:
dpjax evaluate --torch_checkpoint=FILE.pt --config=dispatcher_wikitext2
"""

import argparse
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpjax import files
from dpjax.commands.command_line import (
  Parser,
  exit_unless_finite,
  find_run,
  local_path,
  path,
  start,
)
from dpjax.data import readers
from dpjax.errors import UserError

if TYPE_CHECKING:
  from dpjax.runs import Run


def main(words: Sequence[str] | None = None) -> None:
  """Scores the run or texts given on the command line."""
  parser = Parser("evaluate", __doc__, has_config=True)
  parser.add_run()
  add = parser.add_argument
  add("--split", choices=("train", "valid", "test"), help="default: test")
  about = "a file with a text to score instead, plain or compressed; may be repeated"
  add("--text", type=path, action="append", default=[], help=about)
  add("--step", type=int, help="checkpoint to score; default: the best by validation")
  add("--window", type=int, default=0, help="tokens the model sees at once; 0: eval.window")
  add("--stride", type=int, default=0, help="tokens each window scores; 0: eval.stride")
  about = "whether to score each document by itself; default: data.isolate_documents"
  add("--isolate_documents", action=argparse.BooleanOptionalAction, help=about)
  add("--torch_checkpoint", type=path, help="a file of the authors' code")
  about = "a folder for the scores; default: the run's, unless it is exported"
  add("--out", type=local_path, help=about)
  start(parser, _evaluate, words)


def _evaluate(options: Namespace) -> None:
  from dpjax import runs

  folder = find_run(options)
  _check(options, folder)
  texts = {name: _read(name) for name in options.text}
  with tempfile.TemporaryDirectory() as scratch:
    if folder:
      run = runs.load(folder, options.step)
    else:
      run = runs.load_torch(options.torch_checkpoint, options.config, scratch)
    if texts:
      _score_texts(run, texts, options)
    else:
      _score_split(run, options)


def _check(options: Namespace, folder: str | None) -> None:
  """Raises a `UserError` for options that exclude each other."""
  torch = options.torch_checkpoint
  if bool(torch) == bool(folder):
    got = "both" if torch else "none"
    raise UserError(f"RUN, --torch_checkpoint: expected one of them, got {got}")
  if bool(torch) != (options.config is not None):
    raise UserError(
      "--config: expected it with --torch_checkpoint, to name data and tokenizer, and "
      "not with RUN, which has its own"
    )
  if torch and options.step is not None:
    raise UserError(f"--step: expected none with --torch_checkpoint, got {options.step}")
  if options.text:
    for name in ("split", "isolate_documents"):
      if (value := getattr(options, name)) is not None:
        raise UserError(f"--{name}: expected none with --text, got {value}")


def _read(name: str) -> str:
  if text := readers.read_text(name, "--text"):
    return text
  raise UserError(f"--text: expected a text, got the empty file {name}")


def _score_split(run: "Run", options: Namespace) -> None:
  import jax

  from dpjax import runs
  from dpjax.runs import run_files

  split = options.split or "test"
  isolate = options.isolate_documents
  if isolate is None:
    isolate = run.config.data.isolate_documents
  is_writable = run.workdir is not None and not run_files.is_exported(run.workdir)
  scores = run.score_split(
    split,
    window=options.window,
    stride=options.stride,
    isolate_documents=isolate,
    progress=True,
    folder=options.out or (run.workdir if is_writable else None),
  )
  if jax.process_index() == 0:
    note = ", each document by itself" if isolate else ""
    print(f"The {split} split, by {options.torch_checkpoint or f'step {run.step}'}{note}:")
    print(runs.table(scores))
  exit_unless_finite(**{split: scores["nats_per_token"]})


def _score_texts(run: "Run", texts: Mapping[str, str], options: Namespace) -> None:
  import jax

  from dpjax import runs
  from dpjax.training import metrics

  window, stride = run.scorer.sizes(options.window, options.stride)
  is_first = jax.process_index() == 0
  scores_of_texts = {}
  nats = {}
  for name, text in texts.items():
    scores = run.score(text, window=window, stride=stride, progress=True)
    scores_of_texts[name] = metrics.for_json(scores)
    nats[name] = scores["nats_per_token"]
    if is_first:
      print(f"{name}, by {options.torch_checkpoint or f'step {run.step}'}:")
      print(runs.table(scores))
      if unknown := run.tokenizer.describe_unknown({name: run.tokenizer.encode(text)}):
        print(unknown)
  if options.out and is_first:
    content = {"step": run.step, "window": window, "stride": stride, "texts": scores_of_texts}
    files.write_json(Path(options.out, f"scores_of_texts_{run.step}.json"), content)
  exit_unless_finite(**nats)
