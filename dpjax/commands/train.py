"""Trains a model: dpjax train --config=quickstart --workdir=runs/quickstart.

Run again, it resumes the run in the folder; --workdir then suffices.
"""

import re
import sys
from pathlib import Path

from dpjax.commands import flags as command_line
from dpjax.errors import UserError


def main() -> None:
  """Trains the model that the command line specifies."""
  parser = command_line.Parser("train", __doc__, has_config=True)
  add = parser.add_argument
  add("--workdir", type=command_line.path, required=True, help="the run's folder")
  add("--tokenize_only", action="store_true", help="only prepare the tokens of the run")
  add("--dry_run", action="store_true", help="also print parameters, updates and memory")
  add("--profile", metavar="START:STOP", help="updates to trace into the run's folder, e.g. 10:13")
  command_line.start(parser, _train)


def _train(options) -> None:
  import jax

  from dpjax import run as run_lib
  from dpjax.run import workdir as workdir_lib
  from dpjax.training import loop

  profile, config, folder = _parse_profile(options.profile), options.config, options.workdir
  if not folder:
    raise UserError("--workdir: expected a folder, got none")
  if config is None:
    if not (Path(folder) / "config.json").exists():
      expected = "expected an experiment, or a --workdir with a run to resume"
      raise UserError(f"--config: {expected}, got none, and {folder}")
    config = workdir_lib.read_config(Path(folder))
  if options.tokenize_only or options.dry_run:
    data = run_lib.tokenize(config, folder)
    for split, counts in data.counts.items():
      print(f"{split:6}{counts['tokens']:16,} tokens{counts['words']:16,} words")
    if unknown := data.tokenizer.describe_unknown(data.splits):
      print(unknown)
    if options.dry_run:
      _print_plan(config, data)
    return
  try:
    run, scores = run_lib.train(config, folder, profile=profile)
  except loop.NonFiniteError as error:
    sys.exit(str(error))
  is_first, prompt = jax.process_index() == 0, run.config.sample.prompt
  if is_first:
    print(f"\nThe test split, by step {run.step} (best by validation):")
    print(run_lib.table(scores), flush=True)
  if prompt:  # In every process: each may hold only a part of the parameters.
    try:
      text = prompt + run.generate(prompt, seed=run.config.seed)[0]
    except UserError as error:  # The vocabulary may lack characters of the prompt.
      text = f"(none: sample.{error})"
    if is_first:
      print(f"\nA sample:\n{text}")
  command_line.exit_unless_finite(test=scores["nats_per_token"])


def _print_plan(config, data) -> None:
  from dpjax import config as config_lib
  from dpjax.analysis import compile as compile_lib
  from dpjax.models import build
  from dpjax.run import training
  from dpjax.training import sharding

  sharding.check_rows(config.train.batch_size, config.train.grad_accum_steps)
  config, settings = build.with_vocabulary(config, data.tokenizer), config.train
  epoch = training.make_batches(config, data).steps_per_epoch
  updates = config_lib.steps_in(settings, "num", steps_per_epoch=epoch)
  size = f"{settings.batch_size} x {settings.window or config.model.max_length} tokens"
  print(f"{updates:,} updates of {size}, {updates / epoch:.4g} times the text; one update takes")
  print(compile_lib.table(compile_lib.compile_steps(config, "here", steps=["train"])))


def _parse_profile(text: str | None) -> tuple[int, int] | None:
  if text is None:
    return None
  if match := re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text):
    return int(match[1]), int(match[2])
  raise UserError(f"--profile: expected START:STOP, two numbers of updates, got {text}")
