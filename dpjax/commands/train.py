"""Trains a model: dpjax train --config=quickstart --workdir=runs/quickstart.

Called again, it resumes the run in the folder; --workdir alone is then enough.
"""

import re
import sys
from pathlib import Path

from absl import flags

from dpjax.commands import flags as command_line
from dpjax.errors import UserError

_CONFIG = command_line.define_config()
flags.adopt_module_key_flags(command_line)
_WORKDIR = flags.DEFINE(command_line.PATH, "workdir", None, "the run's folder", required=True)
_PREPARE_ONLY = flags.DEFINE_bool(
  "prepare_only", False, "make the tokens that the run needs, and stop"
)
_PROFILE = flags.DEFINE_string(
  "profile", None, "START:STOP, updates to trace into the run's folder: 10:13 is three of them"
)
_MEASURE_PRODUCTS = flags.DEFINE_bool(
  "measure_products",
  True,
  "measure how fast matrix products are, a second at the beginning, to report the share of "
  "it that training reaches",
)


def main(_) -> None:
  """Trains, then scores the test split and prints a sample."""
  import jax

  from dpjax import run as run_lib
  from dpjax.run import workdir as workdir_lib
  from dpjax.training import loop

  if not _WORKDIR.value:
    raise UserError("--workdir: expected a folder, got none")
  profile = _parse_profile(_PROFILE.value)
  config = _CONFIG.value
  if config is None:
    if not (Path(_WORKDIR.value) / "config.json").exists():
      raise UserError(
        "--config: expected an experiment, or a --workdir with a run to "
        f"go on with, got none, and {_WORKDIR.value}"
      )
    config = workdir_lib.read_config(Path(_WORKDIR.value))
  if _PREPARE_ONLY.value:
    data = run_lib.prepare(config, _WORKDIR.value)
    for split, counts in data.counts.items():
      print(f"{split:6}{counts['tokens']:16,} tokens{counts['words']:16,} words")
    return
  try:
    run, scores = run_lib.train(
      config, _WORKDIR.value, profile=profile, measure_products=_MEASURE_PRODUCTS.value
    )
  except loop.NonFiniteError as error:
    sys.exit(str(error))
  is_first = jax.process_index() == 0
  if is_first:
    print(f"\nThe test split, by step {run.step} (best by validation):")
    print(run_lib.table(scores), flush=True)
  prompt = run.config.sample.prompt
  if prompt:
    # In every process: each may hold a part of the parameters alone.
    try:
      text = prompt + run.generate(prompt, seed=run.config.seed)[0]
    # Another text than the configuration's may have other characters than its prompt.
    except UserError as error:
      text = f"(none: sample.{error})"
    if is_first:
      print(f"\nA sample:\n{text}")


def _parse_profile(text: str | None) -> tuple[int, int] | None:
  if text is None:
    return None
  found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
  if not found:
    raise UserError(f"--profile: expected START:STOP, two numbers of updates, got {text}")
  return int(found[1]), int(found[2])


if __name__ == "__main__":
  command_line.start(main)
