"""What every configuration takes of an accelerator in training, by `dpjax compile`, without one.

  python benchmarks/compiled.py --topologies=h100,v5e:2x2 --out=results/compiled.json
  python benchmarks/compiled.py --scale --topologies=h100:8,v5e:16x16 --out=results/compiled.json

--scale takes the papers' largest models and one of a billion parameters instead, with
train.param_sharding replicated and fsdp, and a batch of 8 rows for each device. What is in the file
already is not compiled again. Prints the table of docs/accelerators.md.

  python benchmarks/compiled.py --operators --topologies=h100,v5e --out=results/compiled_ops.json

compiles the operators' implementations instead, result and gradients, in float32 unless the case
says otherwise: passes over the first argument, which are the bytes read and written over its own,
and temporary memory. Without the name of an implementation it is the default.
"""

import argparse
import functools
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from dpjax import config as config_lib
from dpjax import files
from dpjax.errors import exit_on_user_error

# Vocabularies that a run gets from its text.
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
  """Compiles in a process of its own; what failed says why."""
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder, "found.json")
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


def row(case: str, found: dict) -> str:
  """A row of the table."""
  if "failed" in found:
    return f"| {case} | {found['failed']} | | | | |"
  train = found["steps"]["train"]
  if "refused" in train:
    return f"| {case} | {train['needed_gib']:.1f} | no | | | |"
  floor = 1e3 * train["floor_seconds"]
  moved = ", ".join(
    f"{number} {kind} {size / 1e6:,.0f} MB" for kind, (number, size) in train["collectives"].items()
  )
  return (
    f"| {case} | {train['needed_gib']:.2f} | {'yes' if train['fits'] else 'no'} | "
    f"{train['compile_seconds']:.0f} | {floor:.1f} | {moved or '-'} |"
  )


def operators() -> Iterator[tuple[str, Callable, Sequence[Sequence[int]], str]]:
  """A name, a function, the shapes of its arguments and their dtype."""
  from dpjax import ops

  for batch, length in ((20, 512), (20, 4096), (4, 16_384)):
    shapes = [(batch, length, 512), (batch, length, ops.num_levels(length))]
    for name in (None, "recompute"):

      def of_case(values, gates, name=name):  # An axis of one head would be padded on a TPU.
        heads = values[:, :, None], gates[:, :, None]
        return ops.shift_and_sum(*heads, implementation=name)[:, :, 0]

      yield f"shift_and_sum, {batch} x {length:,} x 512, {name}", of_case, shapes, "float32"
  for batch, length in ((64, 128), (16, 512), (1, 4096)):
    for rank in (1, 2, 3) if length < 4096 else (1, 2):
      shapes = [(batch, length, 128), (length, 128, 128)[:rank]]
      for name in (None, "toeplitz", "scan", "fft"):
        of_case = functools.partial(ops.causal_convolution, implementation=name)
        case = f"causal_convolution, rank {rank}, {batch} x {length:,} x 128, {name}"
        yield case, of_case, shapes, "float32"
  for batch, length in ((20, 512), (4, 2048), (1, 8192), (1, 16_384)):
    row = batch, length, 8, 64
    for dtype in ("float32", "bfloat16"):
      case = f"{batch} x {length:,}, {dtype}, None"
      yield f"causal_attention, {case}", ops.causal_attention, [row] * 3, dtype
      shapes = [row] * 3 + [row[1:], row[2:], row[2:]]
      yield f"relative_attention, {case}", ops.relative_attention, shapes, dtype


def operator_table(report: dict, topologies: Sequence[str]) -> Iterator[str]:
  """The lines of the table: passes and MiB of each topology, for each case."""
  yield "| | " + " | ".join(f"{x}: passes | MiB" for x in topologies) + " |"
  yield "|---|" + "---:|---:|" * len(topologies)
  for name, *_ in operators():
    found = [report[f"{name}, {topology}"] for topology in topologies]
    cells = [f"{x['passes']:,} | {x['temporary_mib']:,}" if x else "does not fit | " for x in found]
    yield f"| {name.replace(', None', '')} | {' | '.join(cells)} |"


def measure_operators(topology: str, path: pathlib.Path, only: str) -> None:
  """Compiles `operators` for one device, and writes what they move and take."""
  from dpjax.analysis import devices

  devices.prepare()
  import jax

  from dpjax.analysis import traffic
  from dpjax.training import sharding

  mesh = sharding.make_mesh(devices.find(topology)[1][:1])
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  report = files.read_json(path)
  for name, function, shapes, dtype in operators():
    case = f"{name}, {topology}"
    if only not in case or case in report:
      continue
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape in shapes]

    def gradients(cotangent, *given, function=function):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        result, pull = jax.vjp(function, *given)
        return result, *pull(cotangent)

    lowered = jax.jit(gradients).lower(arguments[0], *arguments)
    try:
      program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
      if "RESOURCE_EXHAUSTED" not in str(error):
        raise
      report[case] = None
      files.write_json(path, report)
      continue
    size = math.prod(shapes[0]) * arguments[0].dtype.itemsize
    report[case] = {
      "passes": round(traffic.count(program.as_text()).bytes / size, 1),
      "temporary_mib": round(program.memory_analysis().temp_size_in_bytes / 2**20, 1),
    }
    files.write_json(path, report)


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--topologies", default="h100,v5e:2x2")
  parser.add_argument("--scale", action="store_true", help="the largest models, distributed")
  parser.add_argument("--operators", action="store_true", help="operators instead of training")
  parser.add_argument("--only", default="", help="cases whose name has this")
  parser.add_argument("--out", default="results/compiled.json")
  given = parser.parse_args()
  path = pathlib.Path(given.out)
  if given.operators:
    topologies = given.topologies.split(",")
    for topology in topologies:
      measure_operators(topology, path, given.only)
    if not given.only:
      print(*operator_table(files.read_json(path), topologies), sep="\n")
    return
  report = files.read_json(path)
  print("| | GiB a device | fits | compiled in, s | floor, ms | collectives |")
  print("|---|---:|---|---:|---:|---|")
  for topology in given.topologies.split(","):
    for name in LARGE if given.scale else CONFIGS:
      ways = ("replicated", "fsdp") if given.scale else ("",)
      for way in ways:
        case = ", ".join(filter(None, (name, topology, way)))
        if given.only not in case:
          continue
        if case not in report:
          config, settings = name.partition(",")[0], settings_of(name)
          settings += LARGE[name] if given.scale else ()
          devices = math.prod(map(int, (topology.partition(":")[2] or "1").split("x")))
          rows = 8 if given.scale else -(-config_lib.load(config).train.batch_size // devices)
          settings += [f"train.batch_size={rows * devices}"]
          settings += [f"train.param_sharding={way}"] if way else []
          found = run(config, topology, settings)
          report[case] = {"settings": settings, **found}
          files.write_json(path, report)
        print(row(case, report[case]), flush=True)


if __name__ == "__main__":
  with exit_on_user_error():
    main()
