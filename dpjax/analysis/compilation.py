"""Compiles the steps of a configuration for devices that need not be present; see `compile_steps`.

Memory, collectives and custom calls are the compiler's; those within a loop count once.
"""

import collections
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict, TypeVar, final

import numpy as np

from dpjax.analysis import devices, style
from dpjax.config import rules
from dpjax.config.setting import ConfigDict
from dpjax.errors import UserError, unknown

if TYPE_CHECKING:
  import jax
  from jax.sharding import Mesh

STEPS = ("train", "evaluate", "generate")
# The sizes of named vocabularies.
_VOCAB_SIZES = {"gpt2": 50_257, "bert_base_cased": 28_996}
_COLLECTIVE = re.compile(
  r" (all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-[a-z]+)(?:-start)?\("
)


Tree = TypeVar("Tree")


@final
class Compiled(TypedDict):
  """What a compiled step needs of each device.

  Attributes:
    operations: of matrix products.
    compile_seconds: how long the compiler took.
    arguments_gib: memory of the arguments.
    temporary_gib: memory while the step runs.
    needed_gib: memory of all together.
    fits: whether the device has it.
    collectives: the number of each, by name.
    custom_calls: the number of each, by name.
  """

  operations: float
  compile_seconds: float
  arguments_gib: float
  temporary_gib: float
  needed_gib: float
  fits: bool
  collectives: dict[str, int]
  custom_calls: dict[str, int]


@final
class Refused(TypedDict):
  """What is known of a step that the compiler refuses because of its memory.

  Attributes:
    operations: of matrix products.
    needed_gib: memory of all together; inf if the compiler does not tell.
    fits: False.
    refused: the first line of the compiler's message.
  """

  operations: float
  needed_gib: float
  fits: bool
  refused: str


class Report(TypedDict):
  """The result of `compile_steps`.

  Attributes:
    devices: how many.
    memory_gib: the memory of each.
    batch_size: `train.batch_size`, rounded up to full rows on each device.
    parameters: how many.
    parts: the parameters of each part of the model.
    steps: what each step needs.
    largest_batch: the result of `largest_batch`, where it was asked for.
  """

  devices: int
  memory_gib: float
  batch_size: int
  parameters: int
  parts: dict[str, int]
  steps: dict[str, Compiled | Refused]
  largest_batch: NotRequired[int]


def compile_steps(
  config: ConfigDict,
  topology: str,
  *,
  steps: Sequence[str] = STEPS,
  segments: int = 0,
  run: str = "",
) -> Report:
  """Compiles steps of a configuration for a topology, without its data.

  A fitted vocabulary has `data.tokenizer.vocab_size` entries; one that follows from a text, such
  as characters, needs `run` or `model.vocab_size`. A batch that does not divide over the devices is
  rounded up.

  Args:
    config: from `dpjax.config`.
    topology: see `dpjax.analysis.devices`.
    steps: some of `STEPS`. Training and evaluation are compiled for all devices; generation, of
      `eval.batch_size` rows with their caches, for one.
    segments: the number of segments in a batch's longest row, for boundaries that follow from the
      tokens; 0 stands for the window.
    run: the folder of a run with the vocabulary, if there is one.

  Raises:
    ValueError: a setting or the topology is wrong, or the compiler is not installed.
  """
  for step in steps:
    if step not in STEPS:
      raise unknown("steps", STEPS, step)
  device, chips = devices.find(topology)
  config = _with_vocabulary(config, run)
  unit = len(chips) * config.train.grad_accum_steps
  config.train.batch_size = -(-config.train.batch_size // unit) * unit
  programs = _Programs(config, chips, segments)
  return {
    "devices": len(chips),
    "memory_gib": device.memory / 2**30,
    "batch_size": config.train.batch_size,
    "parameters": sum(programs.parts.values()),
    "parts": programs.parts,
    "steps": {step: _measure(getattr(programs, step)(), device.memory) for step in steps},
  }


def largest_batch(config: ConfigDict, topology: str, *, segments: int = 0, run: str = "") -> int:
  """The largest `train.batch_size` whose training step fits the devices, to 1 part in 16.

  Compiles for a growing batch, then bisects; 0 if no batch fits.
  """
  device, chips = devices.find(topology)
  config = _with_vocabulary(config, run)
  unit = len(chips) * config.train.grad_accum_steps

  def fits(units: int) -> bool:
    config.train.batch_size = units * unit
    return _measure(_Programs(config, chips, segments).train(), device.memory)["fits"]

  low = 0
  high = 1
  while fits(high):
    low = high
    high = 2 * high
  while high - low > max(1, low // 16):
    middle = (low + high) // 2
    if fits(middle):
      low = middle
    else:
      high = middle
  return low * unit


def count_operations(jaxpr: Any) -> int:
  """Counts the operations of the matrix products of a `jax.extend.core.Jaxpr`.

  A product of [p, q] and [q, r] takes p q r multiplications and as many additions. A loop counts
  all of its iterations, or one if their number is unknown; of branches, the largest counts.
  """
  from jax.extend import core

  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contracted, _), _ = equation.params["dimension_numbers"]
      summed = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
      total += 2 * summed * math.prod(equation.outvars[0].aval.shape)
    else:
      inner = [count_operations(part) for part in core.jaxprs_in_params(equation.params)]
      is_branch = equation.primitive.name == "cond"
      total += max(inner) if is_branch else sum(inner) * equation.params.get("length", 1)
  return total


class _Program(NamedTuple):
  """A jitted step with its abstract arguments and its keyword arguments."""

  step: Callable
  arguments: tuple
  options: Mapping[str, int | None] = {}


class _Programs:
  """The steps of a configuration, by name, and the numbers of parameters by part."""

  def __init__(self, config: ConfigDict, chips: Sequence, segments: int):
    import jax

    from dpjax.models import build
    from dpjax.runs import launch, run_files
    from dpjax.runs.run import load
    from dpjax.training import sharding

    rules.check(config)
    sharding.check_rows(config.train.batch_size, config.train.grad_accum_steps, len(chips))
    self._config = config
    self._mesh = sharding.make_mesh(chips)
    self._one_chip = sharding.make_mesh(chips[:1])
    frozen = load(config.model.boundaries.run).model if run_files.needs_run(config) else None
    self._model = build.make_model(config, None, frozen)
    self._boundaries = build.build_boundaries(config.model)
    self._trainer = launch.make_trainer(config, self._model, config.train.num_steps or 10**6)
    self._state = self._trainer.abstract_state(self._mesh)
    self.parts: dict[str, int] = {}
    for path, array in jax.tree.leaves_with_path(self._state.params):
      name = _part(jax.tree_util.keystr(path, simple=True, separator="."))
      self.parts[name] = self.parts.get(name, 0) + array.size
    # Hosts do not know each other's segments.
    one_host = len({chip.process_index for chip in chips}) == 1
    self._segments = (segments or config.model.max_length) if one_host else 0

  def train(self) -> _Program:
    settings = self._config.train
    step = self._trainer.jit_step(self._mesh)
    batch = self._batch(settings.batch_size, settings.window)
    return _Program(step, (self._state, batch), {"capacity": self._capacity(batch)})

  def evaluate(self) -> _Program:
    from dpjax.training.evaluation import jit_eval_step

    settings = self._config.eval
    step = jit_eval_step(self._model, self._mesh, self._trainer.objective)
    rows = -(-settings.batch_size // self._mesh.size) * self._mesh.size
    batch = self._batch(rows, settings.window)
    arguments = (self._state.scored, batch, np.int32(0))
    return _Program(step, arguments, {"capacity": self._capacity(batch)})

  def generate(self) -> _Program:
    import jax
    import jax.numpy as jnp

    from dpjax.models.stage import PoolingHints

    model = self._model
    rows = self._config.eval.batch_size
    params = self._state.params
    cache = None
    length = self._config.model.max_length
    if model.has_cache:
      unstacked = []

      def unstack(params):
        stepped, params = model.unstack(params)
        unstacked.append(stepped)
        return params

      params = jax.eval_shape(unstack, params)
      (model,) = unstacked
      cache = jax.eval_shape(lambda: model.init_cache(rows))
      length = 1
    draws = any(boundaries.samples_in_eval for boundaries in self._boundaries)

    def add_token(params, cache, tokens, noise):
      pooling = PoolingHints(noise=noise) if draws else None
      variables = {"params": params}
      if cache is None:
        output = model.apply(variables, tokens, deterministic=True, pooling=pooling)
      else:
        output, cache = model.apply(variables, tokens, cache, pooling=pooling, method="step")
      return output.logits[:, -1], cache

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    noise = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    arguments = _sharded((params, cache, tokens, noise), self._one_chip, None)
    return _Program(jax.jit(add_token, donate_argnums=1), arguments)

  def _batch(self, rows: int, window: int) -> dict[str, "jax.ShapeDtypeStruct"]:
    import jax

    from dpjax.training import sharding

    shape = rows, window or self._config.model.max_length
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32"}
    if any(boundaries.text_boundaries for boundaries in self._boundaries):
      dtypes["boundaries"] = "int32"
    if self._config.data.isolate_documents:
      dtypes["document_starts"] = "int32"
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    return _sharded(batch, self._mesh, sharding.AXIS)

  def _capacity(self, batch: Mapping[str, "jax.ShapeDtypeStruct"]) -> int | None:
    """The capacity of a batch whose longest row has `segments`, if training would count them."""
    if not self._segments or not self._boundaries or "document_starts" in batch:
      return None
    from dpjax.models import build

    shape = batch["tokens"].shape
    boundaries = self._boundaries[0]
    if boundaries.count_segments(np.zeros(shape, np.int32)) is None:
      return None
    return build.capacity_for(boundaries, shape[1], min(self._segments, shape[1]))


def _part(name: str) -> str:
  """The part of a model that a parameter belongs to.

  layers.blocks_0.mixer.taps           ->  layers.mixer
  stages_0.first.blocks_0.mixer.taps   ->  stages_0.first.mixer
  stages_0.null_group, logits.kernel   ->  stages_0.null_group, logits
  """
  name = re.sub(r"blocks_\d+\.", "", name)
  match = re.match(r"(.*?)(mixer|feed_forward|boundaries)(_norm)?\.", name)
  if not match:
    keys = name.split(".")
    return ".".join(keys[:2]) if keys[0].startswith("stages_") else keys[0]
  return match[1] + ("norms" if match[3] else match[2])


def _sharded(arrays: Tree, mesh: "Mesh", axis: str | None) -> Tree:
  """Abstract arrays on a mesh, with their first axis divided."""
  import jax
  from jax.sharding import NamedSharding, PartitionSpec

  rows = NamedSharding(mesh, PartitionSpec(axis))
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), arrays)


def _measure(program: _Program, memory: int) -> Compiled | Refused:
  """Compiles a program; returns what it needs on each device, which has `memory` bytes."""
  import jax
  from jax.interpreters import partial_eval

  traced = program.step.trace(*program.arguments, **program.options)
  num_chips = jax.tree.leaves(program.arguments)[0].sharding.mesh.size
  jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.out_avals))
  operations = count_operations(jaxpr) / num_chips
  start = time.perf_counter()
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    # A TPU's compiler reports how much total, or temporary, memory would be needed.
    match = re.search(r"(?:Used |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", str(error))
    in_gib = dict(zip("KMGT", (2**-20, 2**-10, 1, 2**10), strict=True))
    needed = float(match[1]) * in_gib[match[2]] if match else math.inf
    refused = str(error).splitlines()[0]
    return {"operations": operations, "needed_gib": needed, "fits": False, "refused": refused}
  sizes = compiled.memory_analysis()
  assert sizes is not None  # CPUs, GPUs and TPUs have it.
  text = compiled.as_text() or ""
  needed = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes
  needed += sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  return {
    "operations": operations,
    "compile_seconds": time.perf_counter() - start,
    "arguments_gib": sizes.argument_size_in_bytes / 2**30,
    "temporary_gib": sizes.temp_size_in_bytes / 2**30,
    "needed_gib": needed / 2**30,
    "fits": needed <= memory,
    "collectives": dict(collections.Counter(_COLLECTIVE.findall(text))),
    "custom_calls": dict(collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))),
  }


def _with_vocabulary(config: ConfigDict, run: str = "") -> ConfigDict:
  """A copy with the sizes that follow from the tokenizer of a run."""
  from dpjax.models import build
  from dpjax.runs import run_files
  from dpjax.text.tokenizer import load_tokenizer

  config = config.copy_and_resolve_references()
  section = config.data.tokenizer
  size = config.model.vocab_size or _VOCAB_SIZES.get(section.file, 0)
  source = run or section.file or config.train.init_from
  if not size and source and (tokenizer := load_tokenizer(run_files.find(source))):
    return build.with_vocabulary(config, tokenizer)
  if not size and not section.file and section.name != "characters":
    size = section.get("vocab_size", 256)
  if not size:
    raise UserError(
      "model.vocab_size: expected the size of the vocabulary, which a run takes from its text "
      "(--config.model.vocab_size=COUNT, or --config=RUN, the folder of a run), got 0"
    )
  config.model.vocab_size = size
  for boundaries in build.build_boundaries(config.model)[:1]:
    for name in ("space_ids", "end_ids"):
      if hasattr(boundaries, name) and not getattr(boundaries, name):
        config.model.boundaries[name] = (0,)
  return config


def _size(gib: float) -> str:
  return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 2**10:.1f} MiB"


def format_operations(count: float) -> str:
  """A number of operations with three digits or more: 2,100,000 -> "2.1 Mflop"."""
  for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
    if count >= size:
      return f"{count / size:,.4g} {unit}flop"
  return f"{count:,.0f} flop"


def table(result: Report) -> str:
  """The result of `compile_steps` as text."""
  heads = ["", "compiled in", "arguments", "temporary", "needed", "operations"]
  rows = []
  notes = []
  for name, step in result["steps"].items():
    if "refused" in step:
      cells = ["-", "-", "-"]
      notes.append(f"{name}: the compiler refused it ({step['refused']})")
    else:
      cells = [
        f"{step['compile_seconds']:.1f} s",
        _size(step["arguments_gib"]),
        _size(step["temporary_gib"]),
      ]
      notes += [f"{name}: {count} {operation}" for operation, count in step["collectives"].items()]
      notes += [f"{name}: {n} calls of {target}" for target, n in step["custom_calls"].items()]
    rows.append([name, *cells, _size(step["needed_gib"]), format_operations(step["operations"])])
  memory = result["memory_gib"]
  worst = max(step["needed_gib"] for step in result["steps"].values())
  if all(step["fits"] for step in result["steps"].values()):
    verdict = f"fits, {memory - worst:.2f} GiB to spare"
  else:  # A compiler keeps some memory for itself, and may refuse a program that needs less.
    verdict = f"does not fit, by {max(0.0, worst - memory):.2f} GiB"
  if "largest_batch" in result:
    notes.append(f"largest train.batch_size that fits: {result['largest_batch']}")
  parts = [[name, f"{size:,}"] for name, size in result["parts"].items()]
  parts = style.table(["parameters", f"{result['parameters']:,}"], parts)
  head = f"{result['devices']} x {memory:.2f} GiB: {verdict}"
  return "\n".join([head, "", style.table(heads, rows), "", parts, "", *notes]).rstrip()
