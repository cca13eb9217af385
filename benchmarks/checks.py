"""Compares this machine's accelerator with its CPU: operators, training steps, a resumed run.

  python benchmarks/checks.py --out results/checks_h200.json

For an operator, compares its result and gradients with respect to all floats; for a training step,
the loss and all gradients together. A difference is the norm of the difference over the norm on the
CPU, and each check has a tolerance. Float32 is multiplied with the precision "highest", not as
TF32. A resumed run is compared with one that never stopped. Without an accelerator, the CPU is
compared with itself. Exits with status 1 if a difference exceeds its tolerance.
"""

import argparse
import concurrent.futures as futures
import dataclasses
import functools
import json
import math
import pathlib
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from dpjax import ops
from dpjax.errors import Interrupted
from dpjax.models import build
from dpjax.runs import launch
from dpjax.training import sharding

FLOAT32, BFLOAT16 = 1e-4, 3e-2
STEPS = {
  "Dispatcher": ("dispatcher_ptb:tiny", FLOAT32),
  "masked self-attention": ("msa_ptb:tiny", FLOAT32),
  "SHE": ("extractors_childrens_books:she,tiny", FLOAT32),
  "HE": ("extractors_childrens_books:he,tiny", FLOAT32),
  "hourglass, no pooling": ("pooling_text8:none,tiny", FLOAT32),
  "hourglass, whitespace": ("pooling_text8:whitespace,tiny", FLOAT32),
  "hourglass, Gumbel": ("pooling_text8:gumbel,tiny", FLOAT32),
  "H-Net": ("hnet:tiny", FLOAT32),
}


def draw(*shape: int, dtype: Any = jnp.float32) -> np.ndarray:
  values = np.random.default_rng(sum(shape)).uniform(0.1, 0.9, shape)
  return np.asarray(jnp.asarray(values, dtype))


def operators(is_tiny: bool) -> Iterator[tuple[str, Callable, tuple[np.ndarray, ...], float]]:
  """Name, operator, arrays, tolerance."""
  rows, width, lengths = (2, 16, (48,)) if is_tiny else (4, 512, (512, 2048))
  for length in lengths:
    levels = ops.num_levels(length)
    size = f"{rows} x {length} x {width}"
    gated = draw(rows, length, 1, width), draw(rows, length, 1, levels)
    yield f"shift_and_sum, {size}", ops.shift_and_sum, gated, FLOAT32
    low = draw(rows, length, 1, width, dtype=jnp.bfloat16), gated[1].astype(jnp.bfloat16)
    yield f"shift_and_sum, {size}, bfloat16", ops.shift_and_sum, low, BFLOAT16
    shape = rows, length, 8, width // 8
    qkv = draw(*shape), draw(*shape) ** 2, draw(*shape) ** 3
    yield f"causal_attention, {size}", ops.causal_attention, qkv, FLOAT32
    low = tuple(jnp.asarray(x, jnp.bfloat16) for x in qkv)
    yield f"causal_attention, {size}, bfloat16", ops.causal_attention, low, BFLOAT16
    local = functools.partial(ops.causal_attention, window=length // 4)
    yield f"local attention, {size}", local, qkv, FLOAT32
    more = draw(length, *shape[2:]), draw(*shape[2:]), 1 - draw(*shape[2:])
    yield f"relative_attention, {size}", ops.relative_attention, (*qkv, *more), FLOAT32
  length, width = (24, 6) if is_tiny else (128, 128)
  inputs = draw(16, length, width)
  for taps in (draw(length), draw(length, width), draw(length, width, width)):
    name = f"causal_convolution, {inputs.shape}, taps {taps.shape}"
    yield name, ops.causal_convolution, (inputs, taps / length), FLOAT32
  boundaries = (draw(16, length) > 0.6).astype(np.int32)
  pool = functools.partial(ops.pool_segments, capacity=length + 1)
  yield f"pool_segments, {inputs.shape}", pool, (inputs, boundaries), FLOAT32
  yield f"upsample_segments, {inputs.shape}", ops.upsample_segments, (inputs, boundaries), FLOAT32
  yield (
    f"short_convolution, {inputs.shape}",
    ops.short_convolution,
    (inputs, draw(3, width)),
    FLOAT32,
  )


def with_gradients(operator: Callable) -> Callable:
  """(arrays) -> the result, and the gradients of a weighted sum with respect to all floats."""

  def run(*arrays):
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def total(*arrays):
      result = operator(*arrays)
      weights = jnp.cos(jnp.arange(result.shape[-1], dtype=jnp.float32))
      return jnp.sum(result.astype(jnp.float32) @ weights), result

    gradients, result = jax.grad(total, argnums=floats, has_aux=True)(*arrays)
    return result, gradients

  return jax.jit(run)


def operator_check(operator: Callable, arrays: tuple, devices: list) -> list:
  """The results on each device."""
  run = with_gradients(operator)
  with jax.default_matmul_precision("highest"):
    return [jax.device_get(run(*jax.device_put(arrays, device))) for device in devices]


def step_check(name: str, products: str, devices: list) -> list:
  """The loss of a training step, and all gradients as one array, on each device."""
  config = dpjax.config.load(name)
  config.train.matmul_dtype = products
  config.model.vocab_size = 31
  for kind in build.build_boundaries(config.model)[:1]:
    for setting in ("space_ids", "end_ids"):
      if hasattr(kind, setting):
        config.model.boundaries[setting] = (0, 5, 9, 14, 20)
  model = build.build_model(config.model)
  shape = config.train.batch_size, config.train.window or config.model.max_length
  text = np.random.default_rng(0).integers(0, 31, (shape[0], shape[1] + 1)).astype(np.int32)
  batch = {"tokens": text[:, :-1], "targets": text[:, 1:], "weights": np.ones(shape, np.float32)}
  # With SGD at learning rate 1, the update is minus the gradient.
  trainer = launch.make_trainer(config, model, config.train.num_steps or 10, optax.sgd(1.0))
  initial = trainer.init(sharding.make_mesh(devices[-1:]))  # once, for all devices
  # As NumPy arrays, since an update donates the buffers of its state.
  initial = jax.device_get(dataclasses.replace(initial, key=jax.random.key_data(initial.key)))
  results, steps = [], {}
  for device in devices:
    mesh = sharding.make_mesh([device])
    abstract = trainer.abstract_state(mesh)
    state = dataclasses.replace(initial, key=jax.random.wrap_key_data(jnp.array(initial.key)))
    state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, abstract)
    run = steps.setdefault(device, trainer.jit_step(mesh))
    with jax.default_matmul_precision("highest"):
      state, metrics = run(state, sharding.put_batch(batch, mesh), capacity=None)
    changes = jax.tree.map(np.subtract, initial.params, jax.device_get(state.params))
    gradients = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(changes)])
    results.append((np.asarray(metrics["loss"]), gradients))
  return results


def resume_check(_: list) -> list:
  """The losses of a run that never stopped, and of one that was stopped after 3 of 6 updates."""
  from dpjax.analysis import curves

  config = dpjax.config.load("quickstart:tiny")
  config.train.num_steps, config.train.eval_every_steps = 6, 2
  config.train.log_every_steps = 1
  losses = []
  with tempfile.TemporaryDirectory() as folder:
    config.data.data_dir = f"{folder}/data"
    for name, stop in (("whole", 6), ("stopped", 3)):
      done = iter(range(1, 7))
      try:
        dpjax.train(config, f"{folder}/{name}", should_stop=lambda d=done, s=stop: next(d) == s < 6)
      except Interrupted:
        dpjax.train(config, f"{folder}/{name}")
      losses.append(curves.read_losses(f"{folder}/{name}"))
  return losses[::-1]


def difference(found: Any, expected: Any) -> float:
  """The largest relative difference of two trees' arrays, by norms."""
  worst = 0.0
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    x, y = (np.asarray(z, np.float64).ravel() for z in (x, y))
    norm = float(np.linalg.norm(y))
    worst = max(worst, float(np.linalg.norm(x - y)) / norm if norm else math.inf)
  return worst


def checks(is_tiny: bool) -> Iterator[tuple[str, Callable[[list], list], float]]:
  """Name, a function that returns a result for each of the devices, tolerance."""
  for name, operator, arrays, tolerance in operators(is_tiny):
    yield name, functools.partial(operator_check, operator, arrays), tolerance
  for name, (config, tolerance) in STEPS.items():
    for products in ("float32", "bfloat16"):
      check = functools.partial(step_check, config, products)
      most = tolerance if products == "float32" else BFLOAT16
      yield f"update of {name}, products in {products}", check, most
  yield "losses of a resumed run", resume_check, FLOAT32


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", required=True, help="the report, a .json file")
  parser.add_argument("--scale", choices=("paper", "tiny"), default="paper", help="sizes of arrays")
  arguments = parser.parse_args()
  path, lock = pathlib.Path(arguments.out), threading.Lock()
  path.parent.mkdir(parents=True, exist_ok=True)
  devices = [jax.devices()[0], jax.devices("cpu")[0]]
  report = {
    "command": " ".join(["python", *sys.orig_argv[1:]]),
    "device": devices[0].device_kind,
    "versions": {"dpjax": dpjax.__version__, "jax": jax.__version__},
    "checks": {},
  }

  def look(check: tuple[str, Callable, float]) -> dict[str, Any]:
    name, run, tolerance = check
    start = time.perf_counter()
    try:
      away = difference(*run(devices))
      found = {"difference": away, "tolerance": tolerance, "passes": away <= tolerance}
    except Exception as error:  # The other checks still run.
      traceback.print_exc()
      found = {"error": str(error).splitlines()[:1], "passes": False}
    found["seconds"] = round(time.perf_counter() - start, 1)
    with lock:  # Written after each check: the time may run out.
      report["checks"][name] = found
      path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{'right' if found['passes'] else 'WRONG'}  {name}: {found}", flush=True)

  every = [*checks(arguments.scale == "tiny")]
  # Compiling for an accelerator uses the cores of its host; the resumed run is the last check.
  with futures.ThreadPoolExecutor(1 if devices[0].platform == "cpu" else 8) as pool:
    list(pool.map(look, every[:-1]))
  look(every[-1])
  wrong = [name for name, x in report["checks"].items() if not x["passes"]]
  print(f"{len(every) - len(wrong)} of {len(every)} agree with the CPU")
  if wrong:
    sys.exit(f"these differ from the CPU: {'; '.join(wrong)}")


if __name__ == "__main__":
  main()
