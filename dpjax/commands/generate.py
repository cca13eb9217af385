"""Continues a prompt: dpjax generate runs/quickstart --prompt="The ".

Prints the first sample as it is generated, and further ones after it. Options default to
the run's `config.sample`.
"""

import dataclasses
import io
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpjax import files
from dpjax.commands.command_line import Parser, path, require_run, start
from dpjax.config import schema
from dpjax.errors import UserError

if TYPE_CHECKING:
  from dpjax.generation.generator import Piece, Sampling
  from dpjax.runs import Run

_MAX_SAMPLES = 4096  # All are rows of one batch.
_MIN_SECONDS = 0.1  # Below, a speed says little.


def main(words: Sequence[str] | None = None) -> None:
  """Generates text as the command line specifies."""
  parser = Parser("generate", __doc__)
  parser.add_run()
  add = parser.add_argument
  add("--step", type=int, help="checkpoint to use; default: the best by validation")
  add("--prompt", help="the text to continue")
  about = "a file with the prompt, - for standard input; its last line end is dropped"
  add("--prompt_file", type=path, help=about)
  for name, setting in schema.settings_of(schema.Sample).items():
    if name != "prompt":
      add(f"--{name}", type=setting.value_type, help=setting.meaning)
  add("--seed", type=int, default=0, help="seed of the samples")
  add("--num_samples", type=int, default=1, help="number of continuations")
  about = "a text that ends a sample where it appears; may be repeated"
  add("--stop", action="append", default=[], help=about)
  add("--json", action="store_true", help="print one JSON object at the end instead of text")
  start(parser, _generate, words)


def _generate(options: Namespace) -> None:
  from dpjax import runs
  from dpjax.generation.generator import Sampling

  folder = require_run(options)
  if not 1 <= options.num_samples <= _MAX_SAMPLES:
    raise UserError(f"num_samples: expected 1 to {_MAX_SAMPLES:,}, got {options.num_samples}")
  prompt = _read_prompt(options.prompt, options.prompt_file)
  run = runs.load(folder, options.step)
  sample = run.config.sample.to_dict()
  default_prompt = sample.pop("prompt")
  for name in sample:
    if getattr(options, name) is not None:
      sample[name] = getattr(options, name)
  settings = Sampling(
    **sample, seed=options.seed, num_samples=options.num_samples, stop=options.stop
  )
  try:
    _write(run, default_prompt if prompt is None else prompt, settings, not options.json)
  except BrokenPipeError:  # The reader closed the pipe; Python would complain again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _read_prompt(prompt: str | None, file: str | None) -> str | None:
  if file is None:
    return prompt
  if prompt is not None:
    raise UserError("prompt, prompt_file: expected one of them, got both")
  try:
    content = sys.stdin.buffer.read() if file == "-" else files.read_file(file)
    prompt = content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
  except (OSError, ValueError) as error:
    expected = "expected a file with a text, or -"
    raise UserError(f"prompt_file: {expected}, got {file} ({error})") from error
  if not prompt:
    raise UserError(f"prompt_file: expected a text in {file}, got none")
  return prompt


@dataclasses.dataclass
class Sampled:
  """The pieces of the samples, and when they came, in seconds."""

  pieces: "list[list[Piece]]" = dataclasses.field(default_factory=list)
  times: list[float] = dataclasses.field(default_factory=list)

  @property
  def num_tokens(self) -> int:
    """The number of new tokens of all samples."""
    return sum(piece.num_tokens for new in self.pieces for piece in new)

  @property
  def speed(self) -> float | None:
    """Tokens a second after the first text; None if there is too little of it to measure."""
    seconds = self.times[-1] - self.times[0]
    if seconds < _MIN_SECONDS:
      return None
    later = sum(piece.num_tokens for new in self.pieces[1:] for piece in new)
    return later / seconds

  def samples(self) -> list[dict[str, str | int]]:
    """One JSON object for each sample."""
    return [
      {
        "text": "".join(piece.text for piece in row),
        "num_tokens": sum(piece.num_tokens for piece in row),
        "is_stopped": row[-1].is_stopped,
      }
      for row in zip(*self.pieces, strict=True)
    ]


def _write(run: "Run", prompt: str, settings: "Sampling", is_text: bool) -> None:
  import jax

  is_first = jax.process_index() == 0
  if isinstance(sys.stdout, io.TextIOWrapper):  # A terminal may lack a model's characters.
    sys.stdout.reconfigure(errors="replace")
  pieces = run.stream(prompt, **settings)
  prints = is_text and is_first
  if prints:
    head = "--- sample 1 ---\n" if settings.get("num_samples", 1) > 1 else ""
    print(f"{head}{prompt}", end="", flush=True)
  sampled = Sampled()
  begin = time.perf_counter()
  for new in pieces:
    sampled.times.append(time.perf_counter() - begin)
    sampled.pieces.append(new)
    if prints:
      print(new[0].text, end="", flush=True)
  if prints:
    _print_rest(sampled, prompt)
  elif is_first:
    content = {"prompt": prompt, **settings, "samples": sampled.samples()}
    content["seconds"] = sampled.times[-1]
    content["seconds_to_first"] = sampled.times[0]
    content["tokens_per_second"] = sampled.speed
    print(json.dumps(content, indent=2))


def _print_rest(sampled: Sampled, prompt: str) -> None:
  """Prints the samples after the first, and how long they took."""
  print()
  for number, sample in enumerate(sampled.samples()[1:], 2):
    print(f"--- sample {number} ---\n{prompt}{sample['text']}")
  seconds = sampled.times[-1]
  shown = f"{sampled.num_tokens:,} tokens in {seconds:.2f} s"
  if sampled.speed is not None:
    to_first = f"{sampled.times[0]:.2f} s of it until the first text came"
    shown += f", {to_first}; then {sampled.speed:,.0f} tokens a second"
  print(shown, file=sys.stderr)
