"""Continues a prompt: dpjax generate --workdir=runs/quickstart --prompt="The ".

Prints the text as it is generated: the first sample at once, further samples after it.
Options that are not given come from the run's configuration (`config.sample`).
"""

import io
import json
import os
import sys
import time

from absl import flags

from dpjax import files
from dpjax.commands import flags as command_line
from dpjax.errors import UserError

flags.adopt_module_key_flags(command_line)
_WORKDIR = flags.DEFINE(command_line.PATH, "workdir", None, "the run's folder", required=True)
_STEP = flags.DEFINE_integer("step", None, "checkpoint to use; default: the best by validation")
_PROMPT = flags.DEFINE_string("prompt", None, "the text to continue")
_PROMPT_FILE = flags.DEFINE(
  command_line.PATH,
  "prompt_file",
  None,
  "a file with it, - being the standard input; its last line end is not part of the prompt",
)
_LENGTH = flags.DEFINE_integer("length", None, "new tokens a sample")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "0 is greedy")
_TOP_K = flags.DEFINE_integer("top_k", None, "draw from the k most likely; 0: all")
_TOP_P = flags.DEFINE_float(
  "top_p", None, "draw from the most likely that together reach this probability"
)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the samples")
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 1, "number of continuations")
_STOP = flags.DEFINE_multi_string("stop", [], "text of a token that ends a sample")
_BEYOND_WINDOW = flags.DEFINE_string(
  "beyond_window",
  None,
  "slide: passes over the last window; continue: the cache goes on, where the model can; refuse",
)
_JSON = flags.DEFINE_bool("json", False, "print one JSON object at the end, no text")

_MOST_SAMPLES = 4096  # All are one batch.


def main(_) -> None:
  """Prints the prompt and its continuation for each sample, then the speed."""
  from dpjax import run as run_lib

  if not 1 <= _NUM_SAMPLES.value <= _MOST_SAMPLES:
    raise UserError(f"num_samples: expected 1 to {_MOST_SAMPLES:,}, got {_NUM_SAMPLES.value}")
  prompt = _given_prompt()
  run = run_lib.load(_WORKDIR.value, _STEP.value)
  given = dict(
    prompt=prompt,
    length=_LENGTH.value,
    temperature=_TEMPERATURE.value,
    top_k=_TOP_K.value,
    top_p=_TOP_P.value,
    beyond_window=_BEYOND_WINDOW.value,
  )
  settings = {
    name: run.config.sample[name] if value is None else value for name, value in given.items()
  }
  settings |= dict(seed=_SEED.value, num_samples=_NUM_SAMPLES.value, stop=_STOP.value)
  prompt = str(settings.pop("prompt"))
  try:
    _write(run, prompt, settings)
  except BrokenPipeError:
    # Who read it has enough; Python would complain again at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _given_prompt() -> str | None:
  if _PROMPT_FILE.value is None:
    return _PROMPT.value
  if _PROMPT.value is not None:
    raise UserError("prompt, prompt_file: expected one of them, got both")
  file = _PROMPT_FILE.value
  try:
    content = sys.stdin.buffer.read() if file == "-" else files.read_file(file)
    prompt = content.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
  except (OSError, ValueError) as error:
    raise UserError(
      f"prompt_file: expected a file with a text, or -, got {file} ({error})"
    ) from error
  if not prompt:
    raise UserError(f"prompt_file: expected a text in {file}, got none")
  return prompt


def _write(run, prompt: str, settings: dict) -> None:
  from dpjax.generation import generator as generation

  is_text, is_one = not _JSON.value, settings["num_samples"] == 1
  if isinstance(sys.stdout, io.TextIOWrapper):
    # A terminal may not have all that a model writes.
    sys.stdout.reconfigure(errors="replace")
  pieces = run.stream(prompt, **settings)
  if is_text:
    print(prompt if is_one else f"--- sample 1 ---\n{prompt}", end="", flush=True)
  begin, times, rows = time.perf_counter(), [], [[] for _ in range(settings["num_samples"])]
  for new in pieces:
    times.append(time.perf_counter())
    for row, piece in zip(rows, new, strict=True):
      row.append(piece)
    if is_text:
      print(new[0].text, end="", flush=True)
  samples = [
    {
      "text": "".join(piece.text for piece in row),
      "num_tokens": sum(piece.num_tokens for piece in row),
      "is_stopped": row[-1].is_stopped,
    }
    for row in rows
  ]
  total = sum(sample["num_tokens"] for sample in samples)
  counts = [sum(piece.num_tokens for piece in new) for new in zip(*rows, strict=True)]
  seconds, to_first = times[-1] - begin, times[0] - begin
  speed = generation.tokens_per_second(counts, times)
  if not is_text:
    content = {
      "prompt": prompt,
      **settings,
      "samples": samples,
      "seconds": seconds,
      "seconds_to_first": to_first,
      "tokens_per_second": speed,
    }
    print(json.dumps(content, indent=2))
    return
  print()
  for number, sample in enumerate(samples[1:], 2):
    print(f"--- sample {number} ---\n{prompt}{sample['text']}")
  print(
    f"{total:,} tokens in {seconds:.2f} s, {to_first:.2f} s of it until the first text came"
    + (f"; then {speed:,.0f} tokens a second" if speed else ""),
    file=sys.stderr,
  )


if __name__ == "__main__":
  command_line.start(main)
