"""Continues a prompt: dpjax generate --workdir=runs/quickstart --prompt="The ".

Prints the first sample as it is generated, and further ones after it. Options default to
the run's `config.sample`.
"""

import io
import json
import os
import sys
import time

from dpjax import files
from dpjax.commands import flags as command_line
from dpjax.config import schema
from dpjax.errors import UserError

_MAX_SAMPLES = 4096  # All are rows of one batch.


def main() -> None:
  """Generates text as the command line specifies."""
  parser = command_line.Parser("generate", __doc__)
  add = parser.add_argument
  add("--workdir", type=command_line.path, required=True, help="the run's folder")
  add("--step", type=int, help="checkpoint to use; default: the best by validation")
  add("--prompt", help="the text to continue")
  about = "a file with the prompt, - for standard input; its last line end is dropped"
  add("--prompt_file", type=command_line.path, help=about)
  for name, setting in schema.SCHEMA["sample"].items():
    if name != "prompt":
      add(f"--{name}", type=setting.value_type, help=setting.meaning)
  add("--seed", type=int, default=0, help="seed of the samples")
  add("--num_samples", type=int, default=1, help="number of continuations")
  about = "text of a token that ends a sample; may be repeated"
  add("--stop", action="append", default=[], help=about)
  add("--json", action="store_true", help="print one JSON object at the end instead of text")
  command_line.start(parser, _generate)


def _generate(options) -> None:
  from dpjax import run as run_lib

  if not 1 <= options.num_samples <= _MAX_SAMPLES:
    raise UserError(f"num_samples: expected 1 to {_MAX_SAMPLES:,}, got {options.num_samples}")
  prompt = _read_prompt(options.prompt, options.prompt_file)
  run = run_lib.load(options.workdir, options.step)
  settings = {
    name: default if getattr(options, name) is None else getattr(options, name)
    for name, default in run.config.sample.items()
    if name != "prompt"
  }
  settings |= dict(seed=options.seed, num_samples=options.num_samples, stop=options.stop)
  prompt = run.config.sample.prompt if prompt is None else prompt
  try:
    _write(run, prompt, settings, is_text=not options.json)
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


def _write(run, prompt: str, settings: dict, is_text: bool) -> None:
  import jax

  is_first = jax.process_index() == 0
  is_one = settings["num_samples"] == 1
  if isinstance(sys.stdout, io.TextIOWrapper):  # A terminal may lack a model's characters.
    sys.stdout.reconfigure(errors="replace")
  pieces = run.stream(prompt, **settings)
  if is_text and is_first:
    print(prompt if is_one else f"--- sample 1 ---\n{prompt}", end="", flush=True)
  begin, times, seen = time.perf_counter(), [], []
  for new in pieces:
    times.append(time.perf_counter())
    seen.append(new)
    if is_text and is_first:
      print(new[0].text, end="", flush=True)
  if not is_first:
    return
  samples = [
    {
      "text": "".join(piece.text for piece in row),
      "num_tokens": sum(piece.num_tokens for piece in row),
      "is_stopped": row[-1].is_stopped,
    }
    for row in zip(*seen, strict=True)
  ]
  counts = [sum(piece.num_tokens for piece in new) for new in seen]
  seconds, to_first = times[-1] - begin, times[0] - begin
  speed = sum(counts[1:]) / (seconds - to_first) if len(counts) > 1 else None
  if not is_text:
    content = {"prompt": prompt, **settings, "samples": samples, "seconds": seconds}
    content |= {"seconds_to_first": to_first, "tokens_per_second": speed}
    print(json.dumps(content, indent=2))
    return
  print()
  for number, sample in enumerate(samples[1:], 2):
    print(f"--- sample {number} ---\n{prompt}{sample['text']}")
  shown = f"{sum(counts):,} tokens in {seconds:.2f} s, {to_first:.2f} s of it until the first text"
  print(f"{shown} came{f'; then {speed:,.0f} tokens a second' if speed else ''}", file=sys.stderr)
