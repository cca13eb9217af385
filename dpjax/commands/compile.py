"""Compiles a configuration for devices that need not be present, and prints what it needs.

  dpjax compile --config=dispatcher_openwebtext --topology=v5e:4x4
  dpjax compile runs/mine --topology=h100:8 --config.train.param_sharding=fsdp

A topology is v4, v5e, v5p or v6e with :SHAPE, such as v5e:2x2; a100, h100 or h200 with :COUNT; or
cpu. A vocabulary that a run fits to its text comes from RUN, the folder of such a run, or from
--config.model.vocab_size=COUNT. A batch is rounded up to full rows on each device.
TPUs need pip install 'dpjax[tpu-compile]', GPUs 'dpjax[gpu-compile]'. Memory, collectives and
custom calls are the compiler's; those within a loop count once.
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from dpjax import files
from dpjax.analysis import compilation, devices
from dpjax.commands.command_line import Parser, local_path, natural, start
from dpjax.config import loading
from dpjax.config.setting import ConfigDict
from dpjax.errors import UserError


def main(words: Sequence[str] | None = None) -> None:
  """Compiles the configurations given on the command line."""
  parser = Parser("compile", __doc__, has_config=True)
  parser.add_run_as_config()
  add = parser.add_argument
  add("--topology", default="cpu", help="what to compile for: v5e:2x2, h100, h100:8, ..., cpu")
  about = "what to compile; repeat it for several"
  add("--steps", choices=compilation.STEPS, action="append", help=about)
  about = "segments of the longest row; 0: the window"
  add("--segments", type=natural, default=0, help=about)
  about = "also find the largest train.batch_size that fits"
  add("--largest_batch", action="store_true", help=about)
  add("--out", type=local_path, help="a JSON file for the results")
  devices.prepare()
  start(parser, _compile, words)


def _find_config(options: Namespace) -> ConfigDict:
  """The configuration of --config or RUN."""
  if options.run is None:
    if options.config is None:
      raise UserError("--config: expected an experiment, got none")
    return options.config
  if options.experiment is not None:
    got = f"{options.run} and {options.experiment}"
    raise UserError(f"RUN, --config: expected one of them, got {got}")
  return options.config or loading.load(options.run)


def _compile(options: Namespace) -> None:
  config = _find_config(options)
  folder = os.path.expanduser(options.experiment or options.run)
  # A text or tokenizer other than the run's has a different vocabulary.
  is_run = os.path.isdir(folder) and loading.load(folder).data.to_dict() == config.data.to_dict()
  run = folder if is_run else ""
  steps = options.steps or compilation.STEPS
  topology = options.topology
  segments = options.segments
  result = compilation.compile_steps(config, topology, steps=steps, segments=segments, run=run)
  if options.largest_batch:
    rows = compilation.largest_batch(config, topology, segments=segments, run=run)
    result["largest_batch"] = rows
  print(compilation.table(result))
  rows = config.train.batch_size
  if result["batch_size"] != rows:
    print(f"train.batch_size: {result['batch_size']}, as {rows} do not divide over the devices")
  if options.out:
    files.write_output(Path(options.out), files.as_json(result))
