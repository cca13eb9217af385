"""What a mixer costs by the length of a row: layers, training steps, and a token's generation.

  python benchmarks/long_rows.py --out results/long_rows

Float32. Each T has the same number of tokens, in one row or several, except for one longer row in
`layers`. Parts:

  layers   one layer of width 512, its result and the gradients of its parameters and inputs, 32,768
           tokens, and one row of 65,536 without full attention, which takes minutes: each mixer,
           base "dispatcher", beside attention by PyTorch's `scaled_dot_product_attention` in a
           layer of the same shape
  steps    a training step of 4 layers of width 256 and a vocabulary of 256, 8,192 tokens, base
           "dispatcher"
  tokens   one more token of that model with a cache, after T - 16 tokens of one row, in a compiled
           scan over 16 tokens, base "dispatcher"

The mixers of jax-linear-attention are timed where `dpjax[relatives]` is installed, and PyTorch
where torch is. A layer that needs more than 5 GiB of temporary memory is left out, and a step that
needs more than 8. The figure shows microseconds per token over T.
"""

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import config
from dpjax.config import registry
from dpjax.config.setting import ConfigDict
from dpjax.config.supplied import mixer_fields
from dpjax.generation import decode
from dpjax.models.build import build_boundaries, build_model, init_params
from dpjax.training import losses, sharding
from dpjax.training.optimizers import make_optimizer
from dpjax.training.trainer import Trainer

HEADS = 8
# The mixers by the names that the report gives them: their sections.
MIXERS: dict[str, dict[str, Any]] = {
  "dispatcher": dict(name="dispatcher_multihead", num_heads=HEADS),
  "WE": dict(name="we"),
  "local attention, 512": dict(name="local_attention", num_heads=HEADS, window=512),
  "Mamba-2": dict(name="mamba2"),
  "attention": dict(name="attention", num_heads=HEADS),
}
# Those of jax-linear-attention.
RELATIVES: dict[str, dict[str, Any]] = {
  "Gated DeltaNet": dict(name="gated_deltanet", num_heads=HEADS),
  "KDA": dict(name="kda", num_heads=HEADS),
  "GLA": dict(name="gla", num_heads=HEADS),
  "log-linear Mamba-2": dict(name="log_linear_mamba2"),
}
TORCH = "attention, PyTorch"
# The temporary memory of one program, MiB: all programs of a case are in memory at once, and layers
# run beside PyTorch's process.
MAX_LAYER_MIB = 5 * 1024
MAX_STEP_MIB = 8 * 1024
TOKENS_PER_CALL = 16


def mixers() -> dict[str, dict[str, Any]]:
  """The sections of all mixers that are installed."""
  if importlib.util.find_spec("jla") is None:
    return MIXERS
  registry.load_plugins()
  return MIXERS | RELATIVES


def lengths(quick: bool, tokens: int) -> list[int]:
  """The lengths of rows, up to the number of tokens."""
  least = 32 if quick else 512
  return [length for length in (least, 4 * least, 16 * least, 64 * least) if length <= tokens]


def layer(mixer: ConfigDict, length: int, batch: int, width: int) -> harness.Program | str:
  """The result and all gradients of a layer."""
  model = config.default_model()
  model.update(dict(max_length=length, width=width, mixer=mixer))
  module = registry.mixers.maker(model.mixer, **mixer_fields(model)._asdict())()
  normal = np.random.default_rng(0).standard_normal((batch, length, width))
  x_btd = jnp.asarray(normal, jnp.float32)
  params = jax.jit(module.init)(jax.random.key(0), x_btd[:1, :16])

  def loss(params, x_btd):
    return jnp.sum(module.apply(params, x_btd) ** 2)

  gradients = jax.value_and_grad(loss, (0, 1))
  return harness.compiled(gradients, params, x_btd, max_mib=MAX_LAYER_MIB)


def torch_layer(
  processes: contextlib.ExitStack, length: int, batch: int, width: int
) -> harness.Program | str:
  """The same layer with PyTorch's attention, in another process, which `processes` ends."""
  if importlib.util.find_spec("torch") is None:
    return "PyTorch is not installed"
  settings = json.dumps(dict(length=length, batch=batch, width=width))
  process = harness.Process([str(pathlib.Path(__file__).resolve()), "--serve_torch", settings])
  processes.callback(process.close)
  facts = process.read()
  return harness.Program(lambda: process.ask()["seconds"], facts)


def serve_torch(settings: Mapping[str, int]) -> None:
  """Serves the result and all gradients of attention in PyTorch."""
  import torch
  from torch_models import SelfAttention

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  torch.manual_seed(0)
  mixer = dict(use_bias=True, num_heads=HEADS, dropout=0.0)
  module = SelfAttention(dict(width=settings["width"], mixer=mixer, init_std=0.0))
  shape = settings["batch"], settings["length"], settings["width"]
  x_btd = torch.randn(shape, requires_grad=True)

  def run() -> dict[str, float]:
    start = time.perf_counter()
    module.zero_grad()
    x_btd.grad = None
    module(x_btd).square().sum().backward()
    return {"seconds": time.perf_counter() - start}

  run()  # allocates
  harness.serve({"version": torch.__version__}, run)


def layers(quick: bool) -> Iterator[harness.Case]:
  num_tokens = 256 if quick else 32_768
  width = 16 if quick else 512
  for length in [*lengths(quick, num_tokens), 2 * num_tokens]:
    batch = max(1, num_tokens // length)
    programs: dict[str, harness.Program | str] = {}
    with contextlib.ExitStack() as processes:
      for name, mixer in mixers().items():
        programs[name] = layer(section_of(mixer, quick), length, batch, width)
      if length > num_tokens and not quick:
        programs["attention"] = programs[TORCH] = "takes minutes"
      else:
        programs[TORCH] = torch_layer(processes, length, batch, width)
      sizes = {"length": length, "tokens": batch * length}
      yield harness.Case(f"layers, {batch} x {length}", "dispatcher", programs, sizes)


def section_of(mixer: Mapping[str, Any], quick: bool) -> ConfigDict:
  """A mixer's section, with sizes for a small width if it is quick."""
  settings = dict(mixer)
  if quick:
    sizes = dict(state_width=8, head_width=8, window=8, num_heads=2)
    known = registry.mixers.settings(mixer["name"])
    settings |= {name: size for name, size in sizes.items() if name in known}
  return config.mixer(**settings)


def model_settings(mixer: Mapping[str, Any], length: int, quick: bool) -> ConfigDict:
  """`config.model` of the small model: today's frame on bytes."""
  model = config.load("modern_transformer:small").model
  model.update(dict(vocab_size=256, max_length=length, mixer=section_of(mixer, quick)))
  sizes = (
    dict(width=16, feed_forward_width=24) if quick else dict(width=256, feed_forward_width=704)
  )
  model.update(sizes)
  return model


def steps(quick: bool) -> Iterator[harness.Case]:
  num_tokens = 256 if quick else 8_192
  mesh = sharding.make_mesh(jax.devices()[:1])
  for length in lengths(quick, num_tokens):
    programs = {}
    for name, mixer in mixers().items():
      programs[name] = step(model_settings(mixer, length, quick), num_tokens // length, mesh)
    sizes = {"length": length, "tokens": num_tokens}
    yield harness.Case(f"steps, {num_tokens // length} x {length}", "dispatcher", programs, sizes)


def step(settings: ConfigDict, batch: int, mesh: jax.sharding.Mesh) -> harness.Program | str:
  """A training step of a model."""
  model = build_model(settings)
  optimizer = make_optimizer("adamw", 1e-3, model=model)
  objective = losses.Objective(build_boundaries(settings))
  trainer = Trainer(model, config.Train(), 10**6, optimizer, objective)
  text = harness.draw_text(batch, settings.max_length, settings.vocab_size)
  inputs = {"tokens": text[:, :-1], "targets": text[:, 1:]}
  inputs["weights"] = np.ones(inputs["tokens"].shape, np.float32)
  inputs = sharding.put_batch(inputs, mesh)
  start = time.perf_counter()
  compiled = trainer.jit_step(mesh).lower(trainer.abstract_state(mesh), inputs).compile()
  compile_seconds = time.perf_counter() - start
  mib = compiled.memory_analysis().temp_size_in_bytes / 2**20
  if mib > MAX_STEP_MIB:
    return harness.too_large(mib)
  state = trainer.init(mesh)

  def run() -> float:
    nonlocal state
    start = time.perf_counter()
    state, metrics = compiled(state, inputs)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - start

  return harness.Program(run, {"compile_seconds": compile_seconds, "temporary_mib": mib})


def tokens(quick: bool) -> Iterator[harness.Case]:
  for length in lengths(quick, 128 if quick else 32_768):
    programs: dict[str, harness.Program | str] = {}
    for name, mixer in mixers().items():
      if name == "log-linear Mamba-2" and length > 2048:
        programs[name] = "reads its prompt position by position, in minutes"
      else:
        programs[name] = token(model_settings(mixer, length, quick))
    name = f"tokens, after {length - TOKENS_PER_CALL}"
    yield harness.Case(name, "dispatcher", programs, {"length": length, "tokens": 1})


def token(settings: ConfigDict) -> harness.Program | str:
  """Generates the last tokens of a row; a run returns the seconds of one token."""
  length = settings.max_length
  model = build_model(settings)
  if not model.has_cache:
    return "has no cache"
  params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
  model, params = model.unstack(params)
  prompt = jnp.asarray(harness.draw_text(1, length, settings.vocab_size))
  count = jnp.full(1, length - TOKENS_PER_CALL, jnp.int32)
  keys = jax.random.split(jax.random.key(0), 1)

  def apply(params, tokens_bt, cache, lengths_b):
    output, cache = model.apply(
      {"params": params}, tokens_bt, cache, lengths=lengths_b, method="step"
    )
    return output.logits, cache

  @jax.jit
  def begin(params, prompt):
    read = functools.partial(apply, params)
    return decode.begin(read, model.init_cache(1), prompt, count, chunk=min(512, length))

  @functools.partial(jax.jit, donate_argnames="state")
  def advance(params, state):
    read = functools.partial(apply, params)
    return decode.advance(read, state, keys, num_tokens=TOKENS_PER_CALL, temperature=0.0)

  state = jax.block_until_ready(begin(params, prompt[:, :length]))

  def run() -> float:
    # A call continues in the memory of its state, as the generator's do.
    copy = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    start = time.perf_counter()
    jax.block_until_ready(advance(params, copy))
    return (time.perf_counter() - start) / TOKENS_PER_CALL

  run()  # compiles
  cache = sum(x.nbytes for x in jax.tree.leaves(state.cache))
  return harness.Program(run, {"cache_mib": cache / 2**20})


def draw(report: Mapping[str, Any], path: pathlib.Path) -> None:
  """A panel for each part: microseconds per token over the length of a row."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  from dpjax.analysis import style

  titles = {
    "layers": "one layer, forward and backward",
    "steps": "a training step",
    "tokens": "one more token",
  }
  names = [*MIXERS, *RELATIVES, TORCH]
  parts = {name: part for name, part in report["parts"].items() if part["cases"]}
  with style.applied():
    figure, axes = pyplot.subplots(
      1, len(parts), figsize=(4.2 * len(parts), 4.2), squeeze=False, layout="constrained"
    )
    for axis, (part_name, part) in zip(axes.flat, parts.items(), strict=True):
      for name, points in curves(part).items():
        lengths, microseconds = zip(*points, strict=True)
        line = "-" if name in MIXERS else "--"
        colour = f"C{names.index(name) % len(style.COLOURS)}"
        axis.plot(lengths, microseconds, line, color=colour, marker="o", markersize=3, label=name)
      axis.set_xscale("log", base=2)
      axis.set_yscale("log")
      all_lengths = sorted({length for points in curves(part).values() for length, _ in points})
      axis.set_xticks(all_lengths, [f"{length:,}" for length in all_lengths], rotation=30)
      axis.set_xlabel("tokens in a row")
      axis.set_title(titles[part_name], loc="left", fontsize=9)
    axes.flat[0].set_ylabel("microseconds per token")
    handles = {
      label: handle
      for axis in axes.flat
      for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, fontsize=8)
    style.finish(figure)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def curves(part: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
  """For each mixer the length of a row and the microseconds per token of each case."""
  found: dict[str, list[tuple[int, float]]] = {}
  for entry in part["cases"]:
    for name, row in entry["rows"].items():
      if "quiet" in row:
        microseconds = row["quiet"]["milliseconds"] * 1000 / entry["tokens"]
        found.setdefault(name, []).append((entry["length"], microseconds))
  return found


if __name__ == "__main__":
  if sys.argv[1:2] == ["--serve_torch"]:
    serve_torch(json.loads(sys.argv[2]))
  else:
    PARTS = (layers, steps, tokens)
    harness.main(
      __doc__,
      {part.__name__: part for part in PARTS},
      name="long_rows",
      rounds=5,
      max_seconds=240.0,
      conditions=("quiet",),
      draw=draw,
    )
