"""Reports by `dpjax compile` what each configuration needs to train on an accelerator.

  python benchmarks/compiled.py --topologies=h100,v5e:2x2 --out=runs/compiled.json
  python benchmarks/compiled.py --scale --topologies=h100:8,v5e:16x16 --out=runs/compiled.json

--scale uses the papers' largest models and one of a billion parameters instead, with
train.param_sharding replicated and fsdp, and a batch of 8 rows for each device. Cases
in the file are not compiled again. Prints a table as in docs/accelerators.md.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import dpjax
from dpjax import files
from dpjax.errors import exit_on_user_error

# Vocabularies that a run derives from its text.
VOCABULARIES = {
  "dispatcher_ptb": 8_558,
  "msa_ptb": 8_558,
  "dispatcher_wikitext2": 20_044,
  "msa_wikitext2": 20_044,
  "dispatcher_finetuned": 50_257,
  "quickstart": 100,
}
CHARACTERS = 28  # of a cleaned text
SEGMENTS = 512  # of a window of 2,048 characters, with words' boundaries
CONFIGS = (
  *("quickstart", "dispatcher_ptb", "dispatcher_wikitext2", "dispatcher_wikitext103"),
  *("dispatcher_lm1b", "dispatcher_openwebtext", "dispatcher_finetuned"),
  *("msa_ptb", "msa_wikitext2", "msa_wikitext103", "msa_lm1b", "extractors_childrens_books"),
  *("pooling_text8:none", "pooling_text8:fixed4", "pooling_text8:whitespace"),
  *("pooling_text8:gumbel", "pooling_cc100", "pooling_wiki40b"),
  *("modern_transformer", "modern_dispatcher", "modern_we", "hnet", "hnet:two"),
)
BILLION = ("model.num_layers=24", "model.width=1792", "model.feed_forward_width=4864")
BILLION += ("model.mixer.num_heads=14", "model.max_length=2048", "model.vocab_size=32000")
LARGE = {
  "dispatcher_openwebtext": (),
  "pooling_text8:none": (),
  "pooling_wiki40b": (),
  "modern_transformer, 1B": (*BILLION, "model.remat=True", "model.dtype=bfloat16"),
}


def settings_of(name: str) -> list[str]:
  """The flags of a configuration whose vocabulary is not known without its text."""
  stem = name.partition(":")[0]
  size = VOCABULARIES.get(stem, CHARACTERS if stem.startswith("pooling") else 0)
  return [f"model.vocab_size={size}"] if size else []


def run(config: str, topology: str, settings: list[str]) -> dict:
  """Compiles in a separate process; a failure is returned with its error message."""
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder, "result.json")
    command = [sys.executable, "-m", "dpjax", "compile", f"--config={config}", f"--out={out}"]
    command += [f"--topology={topology}", "--steps=train", f"--segments={SEGMENTS}"]
    command += [f"--config.{setting}" for setting in settings]
    try:
      done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    except subprocess.TimeoutExpired:
      return {"failed": "took more than an hour"}
    if done.returncode:
      return {"failed": (done.stderr.strip().splitlines() or ["without a message"])[-1]}
    return json.loads(out.read_text(encoding="utf-8"))


def row(case: str, result: dict) -> str:
  """A row of the table."""
  if "failed" in result:
    return f"| {case} | {result['failed']} | | | | |"
  train = result["steps"]["train"]
  if "refused" in train:
    return f"| {case} | {train['needed_gib']:.1f} | no | | | |"
  collectives = ", ".join(f"{count} {kind}" for kind, count in train["collectives"].items())
  return (
    f"| {case} | {train['needed_gib']:.2f} | {'yes' if train['fits'] else 'no'} | "
    f"{train['compile_seconds']:.0f} | {train['operations'] / 1e12:.2f} | {collectives or '-'} |"
  )


def cases(topology: str, is_scale: bool) -> Iterator[tuple[str, str, list[str]]]:
  """The name, the configuration and the settings of each case."""
  devices = math.prod(map(int, (topology.partition(":")[2] or "1").split("x")))
  for name in LARGE if is_scale else CONFIGS:
    config, settings = name.partition(",")[0], settings_of(name)
    if not is_scale:
      rows = -(-dpjax.config.load(config).train.batch_size // devices) * devices
      yield f"{name}, {topology}", config, [*settings, f"train.batch_size={rows}"]
      continue
    settings += [*LARGE[name], f"train.batch_size={8 * devices}"]
    for way in ("replicated", "fsdp"):
      yield f"{name}, {topology}, {way}", config, [*settings, f"train.param_sharding={way}"]


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--topologies", default="h100,v5e:2x2")
  parser.add_argument("--scale", action="store_true", help="the largest models, distributed")
  parser.add_argument("--only", default="", help="cases whose name contains this")
  parser.add_argument("--out", type=pathlib.Path, default="runs/compiled.json")
  arguments = parser.parse_args()
  report = files.read_json(arguments.out)
  print("| | GiB a device | fits | compiled in, s | Tflop | collectives |")
  print("|---|---:|---|---:|---:|---|")
  for topology in arguments.topologies.split(","):
    for case, config, settings in cases(topology, arguments.scale):
      if arguments.only not in case:
        continue
      if case not in report:
        report[case] = {"settings": settings, **run(config, topology, settings)}
        files.write_output(arguments.out, files.as_json(report))
      print(row(case, report[case]), flush=True)


if __name__ == "__main__":
  with exit_on_user_error():
    main()
