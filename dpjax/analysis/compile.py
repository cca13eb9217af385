"""Compiles a configuration for devices that need not be there, and tells what it would take.

  dpjax compile --config=dispatcher_openwebtext --topology=v5e:4x4
  dpjax compile --config=runs/mine --topology=h100:8 --config.train.param_sharding=fsdp

A topology is v4, v5e, v5p or v6e with :SHAPE, as v5e:2x2; a100, h100 or h200 with :NUMBER; or cpu.
A vocabulary that a run gets from its text comes from --config=RUN, the folder of one that has it,
or --config.model.vocab_size=NUMBER. A batch is rounded up to whole rows a device.
TPUs need pip install 'dpjax[tpu-compile]', GPUs 'dpjax[gpu-compile]'. Memory and collectives are
the compiler's. "floor" is the time that no run can beat, but for a GPU's cache: that of the bytes
moved at the memory's bandwidth, or of the products at the largest rate, whichever is longer.
"""

import dataclasses
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import config as config_lib
from dpjax import files
from dpjax.analysis import devices, style, traffic
from dpjax.commands import flags as command_line
from dpjax.config import loading
from dpjax.config.registry import ConfigDict
from dpjax.errors import UserError, unknown

STEPS = ("train", "evaluate", "generate")
# The entries of vocabularies by name.
_SIZES = {"gpt2": 50_257, "bert_base_cased": 28_996}


def compile_steps(
  config: ConfigDict,
  topology: str,
  *,
  steps: Sequence[str] = STEPS,
  segments: int = 0,
  run: str = "",
) -> dict[str, Any]:
  """Compiles steps of a configuration for a topology, without its data.

  A vocabulary that a run would learn has `data.tokenizer_size` entries; one that follows from a
  text, as of characters, needs `run` or `model.vocab_size`. A batch that does not divide over the
  devices is rounded up.

  Args:
    config: from `dpjax.config`.
    topology: see `dpjax.analysis.devices`.
    steps: some of `STEPS`. Training and evaluation are for all devices; generation, of
      `eval.batch_size` rows with their caches, for one.
    segments: of a batch's longest row, for pooling at places that the tokens tell; 0 is the window.
    run: the folder of a run with the vocabulary, if there is one.

  Returns:
    {"devices", "memory_gib", "batch_size", "parameters", "parts": {part: parameters},
    "steps": {step: {name: value}}}, of each device: "compile_seconds",
    "arguments_gib", "temporary_gib", "needed_gib", "fits", "products" (operations of matrix
    products), "bytes", "floor_seconds", "collectives", "custom_calls" and "unknown_loops" (see
    `dpjax.analysis.traffic.Traffic`). A program that the compiler refuses because
    of its memory has "refused" instead.

  Raises:
    ValueError: a setting or the topology is wrong, or the compiler is not installed.
  """
  for step in steps:
    if step not in STEPS:
      raise unknown("steps", STEPS, step)
  device, places = devices.find(topology)
  config, dtype = _with_vocabulary(config, run), _dtype(config)
  unit = len(places) * config.train.grad_accum_steps
  config.train.batch_size = -(-config.train.batch_size // unit) * unit
  programs = _Programs(config, places, segments)
  found = {step: _measure(getattr(programs, step)(), device, dtype) for step in steps}
  facts = {"devices": len(places), "memory_gib": device.memory / 2**30}
  facts |= {"batch_size": config.train.batch_size, "parameters": programs.parameters}
  return facts | {"parts": programs.parts, "steps": found}


def largest_batch(config: ConfigDict, topology: str, *, segments: int = 0, run: str = "") -> int:
  """The largest `train.batch_size` whose training step fits the devices, to 1 part in 16.

  Compiles for a growing batch, then bisects; 0 if no batch fits.
  """
  device, places = devices.find(topology)
  unit = len(places) * config.train.grad_accum_steps

  def fits(units: int) -> bool:
    changed = _with_vocabulary(config, run)
    changed.train.batch_size = units * unit
    train = _Programs(changed, places, segments).train()
    return _measure(train, device, _dtype(config))["fits"]

  low, high = 0, 1
  while fits(high):
    low, high = high, 2 * high
  while high - low > max(1, low // 16):
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low * unit


def _dtype(config: ConfigDict) -> str:
  """In which training multiplies."""
  low = "bfloat16" in (config.model.dtype, config.train.matmul_dtype)
  return "bfloat16" if low else "float32"


# A jitted function, its arguments without values, and its keywords.
_Program = tuple[Callable[..., Any], tuple, dict[str, Any]]


class _Programs:
  """The steps of a configuration, by their names."""

  def __init__(self, config: ConfigDict, places: Sequence[Any], segments: int):
    import jax

    from dpjax.models import build
    from dpjax.run import training, workdir
    from dpjax.run.run import load
    from dpjax.training import sharding

    config_lib.check(config)
    sharding.check_rows(config.train.batch_size, config.train.grad_accum_steps, len(places))
    self._config, self._mesh = config, sharding.make_mesh(places)
    self._one = sharding.make_mesh(places[:1])
    frozen = load(config.model.boundaries.run).model if workdir.needs_run(config) else None
    self._model = build.make_model(config, None, frozen)
    self._kinds = build.build_boundaries(config.model)
    self._trainer = training.make_trainer(config, self._model, config.train.num_steps or 10**6)
    self._state = self._trainer.abstract_state(self._mesh)
    self.parts: dict[str, int] = {}
    for path, array in jax.tree.leaves_with_path(self._state.params):
      name = _part(jax.tree_util.keystr(path, simple=True, separator="."))
      self.parts[name] = self.parts.get(name, 0) + array.size
    self.parameters = sum(self.parts.values())
    hosts = {place.process_index for place in places}
    self._segments = (segments or config.model.max_length) if len(hosts) == 1 else None

  def train(self) -> _Program:
    settings = self._config.train
    step = self._trainer.jit_step(self._state, self._mesh)
    batch = self._batch(settings.batch_size, settings.window)
    return step, (self._state, batch), {"capacity": self._capacity(batch)}

  def evaluate(self) -> _Program:
    from dpjax.training import step as step_lib

    settings = self._config.eval
    step = step_lib.jit_eval_step(self._model, self._mesh, self._trainer.objective)
    rows = -(-settings.batch_size // self._mesh.size) * self._mesh.size
    batch = self._batch(rows, settings.window)
    return step, (self._state.scored, batch, np.int32(0)), {"capacity": self._capacity(batch)}

  def generate(self) -> _Program:
    import jax
    import jax.numpy as jnp

    model, rows = self._model, self._config.eval.batch_size
    params, cache, length = self._state.params, None, self._config.model.max_length
    if model.has_cache:
      params = jax.eval_shape(model.unstack, params)
      cache = jax.eval_shape(lambda: model.init_cache(rows))
      length = 1

    def add_token(params, cache, tokens, noise):
      known = {} if cache is None else {"cache": cache}
      known |= {"boundary_noise": noise} if draws else {}
      output = model.apply({"params": params}, tokens, deterministic=True, **known)
      return output.logits[:, -1], output.cache

    draws = any(kind.draws_in_evaluation for kind in self._kinds)
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    noise = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    arguments = _placed((params, cache, tokens, noise), self._one, None)
    return jax.jit(add_token, donate_argnums=1), arguments, {}

  def _batch(self, rows: int, window: int) -> dict[str, Any]:
    import jax

    from dpjax.training import sharding

    shape = rows, window or self._config.model.max_length
    kinds = dict(tokens="int32", targets="int32", weights="float32")
    if any(kind.needs_text for kind in self._kinds):
      kinds["boundaries"] = "int32"
    if self._config.data.documents == "isolated":
      kinds["document_starts"] = "int32"
    batch = {name: jax.ShapeDtypeStruct(shape, kind) for name, kind in kinds.items()}
    return _placed(batch, self._mesh, sharding.AXIS)

  def _capacity(self, batch: Mapping[str, Any]) -> int | None:
    """That of a batch whose longest row has `segments`, where training would know it."""
    if not self._segments or not self._kinds or "document_starts" in batch:
      return None
    from dpjax.models import build

    shape, kind = batch["tokens"].shape, self._kinds[0]
    if kind.count_in(np.zeros(shape, np.int32)) is None:
      return None
    return build.capacity_for(kind, shape[1], min(self._segments, shape[1]))


def _part(name: str) -> str:
  """The part of a model that a parameter belongs to: "layers.mixer", "first.norms", "logits"."""
  name = re.sub(r"^hourglass\.|period\.place_\d+\.|layer_\d+\.", "", name)
  found = re.match(r"(.*?)(mixer|feed_forward|boundary_predictor)(_norm)?\.", name)
  return found[1] + ("norms" if found[3] else found[2]) if found else name.partition(".")[0]


def _placed(arrays: Any, mesh: Any, axis: str | None) -> Any:
  """Arrays without values on a mesh, their first axis divided."""
  import jax
  from jax.sharding import NamedSharding, PartitionSpec

  place = NamedSharding(mesh, PartitionSpec(axis))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays)


def _measure(program: _Program, device: devices.Device, dtype: str) -> dict[str, Any]:
  """Compiles a program; what it takes of each device."""
  import jax
  from jax.interpreters import partial_eval

  from dpjax.training import profiling

  step, arguments, known = program
  traced = step.trace(*arguments, **known)
  number = jax.tree.leaves(arguments)[0].sharding.mesh.size
  jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.out_avals))
  products = profiling.count_products_in(jaxpr) / number
  found: dict[str, Any] = {"products": products}
  start = time.perf_counter()
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    # A TPU's compiler tells how much it would need, of all or of temporary memory alone.
    told = re.search(r"(?:Used |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", str(error))
    powers = dict(zip("KMGT", (-20, -10, 0, 10), strict=True))
    needed = float(told[1]) * 2.0 ** powers[told[2]] if told else math.inf
    return found | {"needed_gib": needed, "fits": False, "refused": str(error).splitlines()[0]}
  memory, moved = compiled.memory_analysis(), traffic.count(compiled.as_text())
  needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
  found |= {
    "compile_seconds": time.perf_counter() - start,
    "arguments_gib": memory.argument_size_in_bytes / 2**30,
    "temporary_gib": memory.temp_size_in_bytes / 2**30,
    "needed_gib": needed / 2**30,
    "fits": needed <= device.memory,
    **dataclasses.asdict(moved),
  }
  if device.rates:
    found["floor_seconds"] = max(moved.bytes / device.bandwidth, products / device.rates[dtype])
  return found


def _with_vocabulary(config: ConfigDict, run: str = "") -> ConfigDict:
  """A copy with what a run would learn from its tokenizer, as far as sizes depend on it."""
  from dpjax.models import build
  from dpjax.run import workdir
  from dpjax.text.tokens import load_tokenizer

  config, data = config.copy_and_resolve_references(), config.data
  size = config.model.vocab_size or _SIZES.get(data.tokenizer_file, 0)
  source = run or data.tokenizer_file or config.train.init_from
  if not size and source and (tokenizer := load_tokenizer(workdir.find(source))):
    return build.with_vocabulary(config, tokenizer)
  if not size and not data.tokenizer_file and data.tokenizer != "characters":
    size = 256 if data.tokenizer == "bytes" else data.tokenizer_size
  if not size:
    raise UserError(
      "model.vocab_size: expected the number of entries of the vocabulary, which a run gets from "
      "its text (--config.model.vocab_size=NUMBER, or --config=RUN, the folder of a run that has "
      "it), got 0"
    )
  config.model.vocab_size = size
  for kind in build.build_boundaries(config.model)[:1]:
    for name in ("space_ids", "end_ids"):
      if hasattr(kind, name) and not getattr(kind, name):
        config.model.boundaries[name] = (0,)
  return config


def main() -> None:
  """Compiles what the command line describes."""
  parser = command_line.Parser("compile", __doc__, has_config=True)
  about = "what to compile for: v5e:2x2, h100, h100:8, ..., cpu"
  parser.add_argument("--topology", default="cpu", help=about)
  about = "what to compile; given several times for several"
  parser.add_argument("--steps", choices=STEPS, action="append", help=about)
  about = "segments of the longest row; 0: the window"
  parser.add_argument("--segments", type=command_line.natural, default=0, help=about)
  about = "find the largest train.batch_size that fits, too"
  parser.add_argument("--largest_batch", action="store_true", help=about)
  parser.add_argument("--out", type=command_line.path, help="a file for all of it as JSON")
  devices.prepare()
  _, places = loading.take(sys.argv[1:], "config")
  command_line.start(parser, lambda options: _compile(options, *places[-1:]))


def _compile(given, place: str = "") -> None:
  if given.config is None:
    raise UserError("--config: expected an experiment, got none")
  # Another text or tokenizer than the run's has another vocabulary.
  place = os.path.expanduser(place)
  data = given.config.data.to_dict()
  is_run = os.path.isdir(place) and config_lib.load(place).data.to_dict() == data
  sizes: Any = dict(topology=given.topology, segments=given.segments, run=place * is_run)
  found = compile_steps(given.config, **sizes, steps=given.steps or STEPS)
  if given.largest_batch:
    found["largest_batch"] = largest_batch(given.config, **sizes)
  print(table(found))
  if found["batch_size"] != (rows := given.config.train.batch_size):
    print(f"train.batch_size: {found['batch_size']}, as {rows} do not divide over the devices")
  if given.out:
    files.write_json(Path(given.out), found)


def _size(gib: float) -> str:
  return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 2**10:.1f} MiB"


def table(found: Mapping[str, Any]) -> str:
  """The result of `compile_steps` as a text."""
  heads = ["", "compiled in", "arguments", "temporary", "needed", "products", "moved", "floor"]
  rows, notes = [], []
  for name, step in found["steps"].items():
    if "refused" in step:
      rows.append([name, *["-"] * 3, f"{step['needed_gib']:.2f} GiB", *["-"] * 3])
      notes.append(f"{name}: the compiler refused it ({step['refused']})")
      continue
    floor = step.get("floor_seconds")
    rows.append(
      [
        name,
        f"{step['compile_seconds']:.1f} s",
        *(_size(step[key]) for key in ("arguments_gib", "temporary_gib", "needed_gib")),
        f"{step['products'] / 1e12:.3f} Tflop",
        f"{step['bytes'] / 1e9:.2f} GB",
        "-" if floor is None else f"{1e3 * floor:.2f} ms",
      ]
    )
    for kind, (number, size) in step["collectives"].items():
      notes.append(f"{name}: {number} {kind}, {size / 1e6:,.1f} MB")
    for target, number in step["custom_calls"].items():
      notes.append(f"{name}: {number} calls of {target}")
    if step["unknown_loops"]:
      notes.append(f"{name}: {step['unknown_loops']} loops of unknown length, counted once")
  memory, worst = found["memory_gib"], max(x["needed_gib"] for x in found["steps"].values())
  if all(step["fits"] for step in found["steps"].values()):
    verdict = f"fits, {memory - worst:.2f} GiB to spare"
  else:  # A compiler may refuse what needs less: it keeps some memory for itself.
    verdict = f"does not fit, by {max(0.0, worst - memory):.2f} GiB"
  head = f"{found['devices']} x {memory:.2f} GiB: {verdict}"
  if "largest_batch" in found:
    notes.append(f"largest train.batch_size that fits: {found['largest_batch']}")
  parts = [[name, f"{size:,}"] for name, size in found["parts"].items()]
  parts = style.table(["parameters", f"{found['parameters']:,}"], parts)
  return "\n".join([head, "", style.table(heads, rows), "", parts, "", *notes]).rstrip()
