"""Times training steps of the papers' models against PyTorch and attention.

  python benchmarks/step.py --parts=dispatcher,extractors --out results/step

A step is the gradient of the mean loss of a fixed batch, clipping where the paper clips, and an
update by Adam: `dpjax.training.Trainer.jit_step`, or `benchmarks/torch_models.py`, with the
papers' dropout. Each program is a separate process with the same parameters, batch, threads or
GPU; ratios are to dpjax in float32. "products" is `train.matmul_dtype=bfloat16`, "bfloat16" for
dpjax `model.dtype`. PyTorch runs eagerly, compiled, and with bfloat16 by autocast. A GPU multiplies
float32 as TF32 in both. Without PyTorch, and with Gumbel boundaries, only dpjax is timed. Parts:

  paper        the Dispatcher at its paper's batch, 20 x 512
  dispatcher   the Dispatcher and masked self-attention, 4 x 512
  extractors   2 layers of each Extractor, and attention of 32 heads, 64 x 128
  hourglass    12 layers of relative attention, and 2 + 8 + 2 with segments of 4, 2 x 512
  pooling      as hourglass at 2 x 2,048, also with whitespace and Gumbel boundaries
  lengths      the Dispatcher beside attention, batch 1, over T: the Dispatcher paper's Fig. 2
  factors      the pooling paper's model over the shortening factor, 1 x 2048: its Fig. 5

"temporary_mib" is the compiler's plan besides parameters and Adam's moments; "grown_mib" is by how
much the process has grown since it was ready, less Adam's moments where the first step makes them.
"""

import concurrent.futures as futures
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import harness

from dpjax import config

SMALL = dict(vocab_size=31, num_layers=2, width=16, feed_forward_width=24)
# Changes to the default settings of `config.model`, for both sides.
# Sec. 3.3 of the Dispatcher's paper; its vocabulary is Penn Treebank's.
DISPATCHER = dict(
  model=dict(vocab_size=8_558, dropout=0.2, hidden_dropout=0.2),
  optimizer=dict(name="adam", learning_rate=1e-4, grad_clip_norm=0.5),
)
DISPATCHER_MIXERS = {
  "dispatcher": dict(name="dispatcher", level_dropout=0.2),
  "attention": dict(name="attention", dropout=0.2),
}
# Sec. 6, Table 1 of the Extractors' paper, with 2 of 18 layers.
EXTRACTORS = dict(
  model=dict(
    vocab_size=5000, num_layers=2, width=128, max_length=128, norm_position="pre", dropout=0.1
  )
  | dict(feed_forward_width=512, positions="learned", init_std=0.01, hidden_dropout=0.0),
  optimizer=dict(name="adamw", learning_rate=1e-3, grad_clip_norm=0.0, weight_decay=0.01),
)
# Sec. 4.2 of the pooling paper.
POOLING = dict(
  model=dict(mixer=dict(name="relative_attention", num_heads=8, dropout=0.1))
  | dict(vocab_size=27, num_layers=12, feed_forward_width=2048, positions="none")
  | dict(activation="gelu", init_std=0.02, norm_init_std=0.02, dropout=0.1, hidden_dropout=0.1),
  optimizer=dict(name="adam", learning_rate=2.5e-4, grad_clip_norm=0.25),
)
# How PyTorch computes an Extractor.
FORMS = dict.fromkeys(("she", "he", "we", "me"), ("convolution", "fft"))


def settings_of(paper: Mapping, batch: int, quick: bool = False, **model: Any) -> dict[str, Any]:
  """The settings of a process: the model, the optimizer and the batch."""
  given = paper["model"] | model
  if quick:
    given |= {key: value for key, value in SMALL.items() if key not in model}
    given["max_length"] = min(given.get("max_length", 24), 24)
    if "num_heads" in given.get("mixer", {}):
      given["mixer"] = given["mixer"] | {"num_heads": 2}
    batch = 2
  given = config.from_dict({"model": given}).model.to_dict()
  return {"model": given, "optimizer": paper["optimizer"], "batch": batch}


def pooled(factor: int, quick: bool = False) -> dict[str, Any]:
  boundaries = dict(name="fixed", shortening_factor=factor)
  return dict(boundaries=boundaries, num_layers=1 if quick else 8)


def serve_jax(settings: Mapping) -> None:
  """Serves a training step of dpjax, in its own process."""
  import jax
  import numpy as np

  from dpjax.models.build import build_boundaries, build_model
  from dpjax.training import losses, sharding
  from dpjax.training.optimizers import make_optimizer
  from dpjax.training.trainer import Trainer

  device = jax.devices()[0]
  mesh = sharding.make_mesh([device])
  of_model = config.from_dict({"model": settings["model"] | {"dtype": settings["dtype"]}}).model
  model = build_model(of_model)
  given = dict(settings["optimizer"])
  optimizer = make_optimizer(given.pop("name"), given.pop("learning_rate"), model=model, **given)
  objective = losses.Objective(build_boundaries(of_model))
  text = harness.draw_text(settings["batch"], of_model.max_length, of_model.vocab_size)
  batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
  batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
  batch = sharding.put_batch(batch, mesh)
  train = config.Train(matmul_dtype=settings["matmul_dtype"])
  trainer = Trainer(model, train, 10**6, optimizer, objective)
  abstract = trainer.abstract_state(mesh)
  start = time.perf_counter()
  step = trainer.jit_step(mesh).lower(abstract, batch).compile()
  seconds = time.perf_counter() - start
  state = trainer.init(mesh)
  ready = harness.peak_mib()

  def run() -> dict[str, Any]:
    nonlocal state
    jax.block_until_ready(state)
    start = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    seconds = time.perf_counter() - start
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
      "seconds": seconds,
      "loss": float(metrics["nats"] / metrics["count"]),
      "grown_mib": harness.peak_mib() - ready if peak is None else peak / 2**20,
    }

  facts = {
    "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(abstract.params)),
    "version": jax.__version__,
    "compile_seconds": seconds,
    "temporary_mib": step.memory_analysis().temp_size_in_bytes / 2**20,
  }
  harness.serve(facts, run)


def torch_ways() -> dict[str, dict[str, Any]]:
  """How PyTorch runs, by name; {} without PyTorch."""
  if importlib.util.find_spec("torch") is None:
    return {}
  ways = {"PyTorch": {}, "PyTorch, compiled": {"compile": True}}
  return ways | {f"{name}, bfloat16": way | {"dtype": "bfloat16"} for name, way in ways.items()}


def programs(
  settings: Mapping, stack: contextlib.ExitStack, dtype: str = ""
) -> dict[str, harness.Program]:
  """Processes that run a model in both libraries in all ways, or in those of a dtype."""
  import jax

  device = jax.default_backend()
  settings = settings | {"device": "cuda" if device == "gpu" else device, "dtype": "float32"}
  settings |= {"compile": False, "matmul_dtype": "float32"}
  here = pathlib.Path(__file__).resolve()
  told = {"dpjax": ("jax", {}), "dpjax, products": ("jax", {"matmul_dtype": "bfloat16"})}
  told["dpjax, bfloat16"] = "jax", {"dtype": "bfloat16"}
  has_torch = settings["model"]["boundaries"]["name"] in ("none", "fixed", "whitespace")
  for form in FORMS.get(settings["model"]["mixer"]["name"], ("",)) * has_torch:
    for name, way in torch_ways().items():
      told[f"{name}, {form}".strip(", ")] = "torch", way | {"extraction": form}
  started, found = {}, {}
  for name, (side, way) in told.items():
    is_low = "bfloat16" in way.values()
    if name != "dpjax" and dtype and is_low != (dtype == "bfloat16"):
      continue
    way = dict(way)
    form = {"extraction": way.pop("extraction")} if way.get("extraction") else {}
    text = json.dumps(settings | way | {"model": settings["model"] | form})
    command = (
      [here, "--serve", text] if side == "jax" else [here.with_name("torch_models.py"), text]
    )
    process = harness.Process(map(str, command), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    stack.callback(process.close)
    started[name] = process
    if device == "cpu":  # One at a time: compilations would compete for the cores.
      found[name] = as_program(process)
  others = [name for name in started if name not in found]
  with futures.ThreadPoolExecutor() as pool:  # PyTorch compiles in its first run.
    found |= zip(others, pool.map(as_program, [started[name] for name in others]), strict=True)
  counts = {program.facts["parameters"] for program in found.values()}
  if len(counts) > 1:
    raise RuntimeError(f"parameters: expected one number for all programs, got {counts}")
  return found


def as_program(process: harness.Process) -> harness.Program:
  """A process as a program; its facts become those of its last run."""
  facts = process.read()

  def run() -> float:
    answer = process.ask()
    if not math.isfinite(answer["loss"]):
      raise RuntimeError(f"loss: expected a finite number, got {answer['loss']}")
    facts.update(answer)
    return facts.pop("seconds")

  run()  # PyTorch compiles, and creates Adam's moments.
  return harness.Program(run, facts)


def case(name: str, settings: Mapping, dtype: str = "") -> Iterator[harness.Case]:
  """Yields one case; its processes end after it is measured."""
  with contextlib.ExitStack() as stack:
    yield harness.Case(name, "dpjax", programs(settings, stack, dtype))


def beside(name: str, base: str, models: Mapping[str, Mapping]) -> Iterator[harness.Case]:
  """Models of dpjax and of PyTorch side by side, the base's first."""
  with contextlib.ExitStack() as stack:
    found = {}
    for model, settings in models.items():
      of_model = programs(settings, stack)
      found |= {f"{model}, {side}": program for side, program in of_model.items()}
    yield harness.Case(name, f"{base}, dpjax", found)


def paper(quick: bool) -> Iterator[harness.Case]:
  settings = settings_of(DISPATCHER, 20, quick, mixer=DISPATCHER_MIXERS["dispatcher"])
  for dtype in ("float32", "bfloat16"):  # All at once would need more than 24 GiB.
    yield from case(f"Dispatcher, 20 x 512, {dtype}", settings, dtype)


def dispatcher(quick: bool) -> Iterator[harness.Case]:
  for name, mixer in DISPATCHER_MIXERS.items():
    yield from case(f"{name}, 4 x 512", settings_of(DISPATCHER, 4, quick, mixer=mixer))


def extractors(quick: bool) -> Iterator[harness.Case]:
  for name in FORMS:
    settings = settings_of(EXTRACTORS, 64, quick, mixer=dict(name=name))
    yield from case(f"{name.upper()}, 64 x 128", settings)
  mixer = dict(name="attention", num_heads=32, use_bias=False)
  settings = settings_of(EXTRACTORS, 64, quick, mixer=mixer)
  yield from case("attention, 32 heads, 64 x 128", settings)


def hourglass(quick: bool) -> Iterator[harness.Case]:
  yield from case("relative attention, 2 x 512", settings_of(POOLING, 2, quick))
  yield from case("segments of 4, 2 x 512", settings_of(POOLING, 2, quick, **pooled(4, quick)))


def pooling(quick: bool) -> Iterator[harness.Case]:
  size = dict(max_length=24 if quick else 2048)
  # Five of 27 random characters are spaces: a segment has 5.4, about as in text8.
  words = dict(name="whitespace", space_ids=tuple(range(5)))
  kinds = {"fixed 4": pooled(4, quick)["boundaries"], "whitespace": words}
  kinds["Gumbel"] = dict(name="gumbel", prior=0.2, space_ids=tuple(range(5)))
  yield from case("no pooling, 2 x 2,048", settings_of(POOLING, 2, quick, **size))
  for name, boundaries in kinds.items():
    changes = pooled(4, quick) | size | dict(boundaries=boundaries)
    yield from case(f"{name}, 2 x 2,048", settings_of(POOLING, 2, quick, **changes))


def lengths(quick: bool) -> Iterator[harness.Case]:
  for length in (16, 32) if quick else (512, 1024, 2048, 4096, 8192):
    models = {
      name: settings_of(
        DISPATCHER, 1, quick, mixer=DISPATCHER_MIXERS[name.lower()], max_length=length
      )
      for name in ("Dispatcher", "attention")
    }
    yield from beside(f"1 x {length}", "attention", models)


def factors(quick: bool) -> Iterator[harness.Case]:
  size = dict(max_length=24 if quick else 2048)
  models = {"no pooling": settings_of(POOLING, 1, quick, **size)}
  for factor in (2, 3, 4):
    models[f"factor {factor}"] = settings_of(POOLING, 1, quick, **pooled(factor, quick), **size)
  yield from beside("1 x 2048", "no pooling", models)


if __name__ == "__main__":
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # Processes share a GPU.
  if sys.argv[1:2] == ["--serve"]:
    serve_jax(json.loads(sys.argv[2]))
  else:
    PARTS = (paper, dispatcher, extractors, hourglass, pooling, lengths, factors)
    harness.main(__doc__, {part.__name__: part for part in PARTS}, name="step", max_seconds=240.0)
