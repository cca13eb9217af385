"""Trains a model: dpjax train --config=quickstart --workdir=runs/quickstart.

Run again, it resumes the run in the folder, as dpjax train runs/quickstart does. With a setting
that may change: dpjax train runs/quickstart --config.train.log_every_steps=10
"""

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dpjax.commands.command_line import Parser, exit_unless_finite, start
from dpjax.errors import UserError

if TYPE_CHECKING:
  from dpjax.config import ConfigDict
  from dpjax.data import Tokens
  from dpjax.runs import Run


def main(words: Sequence[str] | None = None) -> None:
  """Trains the model that the command line specifies."""
  parser = Parser("train", __doc__, has_config=True)
  parser.add_run_to_resume()
  add = parser.add_argument
  add("--tokenize_only", action="store_true", help="only prepare the tokens of the run")
  about = "print updates, parameters and memory, and make only the tokens, which runs share"
  add("--dry_run", action="store_true", help=about)
  add("--profile", metavar="START:STOP", help="updates to trace into the run's folder, e.g. 10:13")
  start(parser, _train, words)


def _train(options: Namespace) -> None:
  from dpjax import runs
  from dpjax.runs import prepare
  from dpjax.training import reporting

  workdir = _find_workdir(options)
  profile = _parse_profile(options.profile)
  config = options.config
  if config is None:
    expected = "expected an experiment, or a --workdir with a run to resume"
    raise UserError(f"--config: {expected}, got none, and no run in {workdir}")
  if options.dry_run:
    data = prepare.find_or_make_tokens(config, workdir)
    print_tokens(data)
    print_plan(config, data)
    return
  if options.tokenize_only:
    print_tokens(runs.tokenize_only(config, workdir))
    return
  try:
    run, scores = runs.train(config, workdir, profile=profile)
  except reporting.NonFiniteError as error:
    sys.exit(str(error))
  _print_result(run, scores)
  exit_unless_finite(test=scores["nats_per_token"])


def _find_workdir(options: Namespace) -> str:
  """The folder of --workdir, or of RUN, which names a run to resume and so stands alone."""
  if options.run is not None and (options.experiment is not None or options.workdir is not None):
    raise UserError(f"RUN: expected none with --config or --workdir, got {options.run}")
  workdir = options.workdir if options.run is None else options.run
  if not workdir:
    raise UserError("--workdir: expected a folder, got none")
  return workdir


def print_tokens(data: "Tokens") -> None:
  """Prints the size of each split."""
  for split, counts in data.counts.items():
    print(f"{split:6}{counts['tokens']:16,} tokens{counts['words']:16,} words")
  if unknown := data.tokenizer.describe_unknown(data.splits):
    print(unknown)


def print_plan(config: "ConfigDict", data: "Tokens") -> None:
  """Prints the number of updates, the parameters and the memory of an update."""
  from dpjax.analysis import compilation
  from dpjax.config import rules
  from dpjax.models import build
  from dpjax.runs import launch
  from dpjax.training import sharding

  settings = config.train
  sharding.check_rows(settings.batch_size, settings.grad_accum_steps)
  config = build.with_vocabulary(config, data.tokenizer)
  epoch = launch.make_batches(config, data).steps_per_epoch
  updates = rules.steps_in(settings.num_steps, settings.num_epochs, "num", steps_per_epoch=epoch)
  size = f"{settings.batch_size} x {settings.window or config.model.max_length} tokens"
  print(f"{updates:,} updates of {size}, {updates / epoch:.4g} times the text; one update takes")
  print(compilation.table(compilation.compile_steps(config, "here", steps=["train"])))


def _print_result(run: "Run", scores: Mapping[str, float]) -> None:
  import jax

  from dpjax import runs

  is_first = jax.process_index() == 0
  if is_first:
    print(f"\nThe test split, by step {run.step} (best by validation):")
    print(runs.table(scores), flush=True)
  prompt = run.config.sample.prompt
  if not prompt:
    return
  try:  # In every process: each may hold only a part of the parameters.
    text = prompt + run.generate(prompt, seed=run.config.seed)[0]
  except UserError as error:  # The vocabulary may lack characters of the prompt.
    text = f"(none: sample.{error})"
  if is_first:
    print(f"\nA sample:\n{text}")


def _parse_profile(text: str | None) -> tuple[int, int] | None:
  if text is None:
    return None
  if match := re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text):
    return int(match[1]), int(match[2])
  raise UserError(f"--profile: expected START:STOP, two numbers of updates, got {text}")
