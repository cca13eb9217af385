"""Loads, scores and generates with an H-Net of a released size, whose weights are random.

  python benchmarks/released_hnet.py --name=1stage_L --dtype=bfloat16

Writes the authors' names and shapes as FOLDER/NAME.safetensors, in float32, if it is missing, and
prints the seconds, the peak memory so far, and bytes per second. The weights are those at the
start of training, except for the routing, whose boundaries are arbitrary.
"""

import argparse
import json
import math
import resource
import sys
import time
from pathlib import Path

import numpy as np

import dpjax
from configs import hnet as configs
from dpjax.interop import hnet

TEXT = "A fox ran over the hills and far away, and nobody has seen it since. " * 15


def write(path: Path, config: dict) -> None:
  """Writes a checkpoint, one array at a time."""
  shapes, begin, header = hnet.shapes_of(hnet.make_settings(config)), 0, {}
  for name, shape in shapes.items():
    end = begin + 4 * math.prod(shape)
    header[name] = dict(dtype="F32", shape=shape, data_offsets=[begin, end])
    begin = end
  draw, start = np.random.default_rng(0), json.dumps(header).encode()
  with path.open("wb") as file:
    file.write(len(start).to_bytes(8, "little") + start)
    for name, shape in shapes.items():
      file.write(make(name, shape, draw).astype("<f4").data)
  path.with_suffix(".json").write_text(json.dumps(config))


def make(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
  """The values of an array."""
  if name.endswith("A_log"):
    return np.log(draw.uniform(1, 16, shape))
  if name.endswith("dt_bias"):
    return np.full(shape, -4.0)
  if len(shape) == 1:
    return np.full(shape, float("norm" in name or name.endswith(".D")))
  std = 1.0 if name == "embeddings.weight" else 0.02
  return std * draw.standard_normal(shape, np.float32)


def report(what: str, begin: float, more: str = "") -> None:
  """Prints a line."""
  unit = 2**30 if sys.platform == "darwin" else 2**20
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
  print(f"{what:9s} {time.time() - begin:7.1f} s   peak {peak:5.2f} GiB   {more}", flush=True)


def main() -> None:
  """Parses the command line and runs."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--name", default="1stage_L", choices=configs.RELEASED)
  parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
  parser.add_argument("--folder", type=Path, default=Path("data/released"))
  parser.add_argument("--length", type=int, default=48)
  options = parser.parse_args()
  path = options.folder / f"{options.name}.safetensors"
  if not path.exists():
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, configs.RELEASED[options.name])
    print(f"wrote {path}; run again: this process had what it wrote in memory")
    return
  begin = time.time()
  run = dpjax.load(path, dtype=options.dtype)
  report("load", begin, f"{path.stat().st_size / 2**30:.2f} GiB of a file")
  for what in ("compile", "score"):
    begin = time.time()
    scores = run.score(TEXT, window=512)
    speed = len(TEXT) / (time.time() - begin)
    report(what, begin, f"{scores['bits_per_byte']:.3f} bits per byte, {speed:.1f} bytes a second")
  for what in ("compile", "generate"):
    begin = time.time()
    run.generate("A fox", length=options.length)
    report(what, begin, f"{options.length / (time.time() - begin):.2f} bytes a second")


if __name__ == "__main__":
  main()
