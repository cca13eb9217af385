"""Steps of training beside PyTorch's, and beside those of masked self-attention.

  python benchmarks/training_step.py --parts=dispatcher,extractors,hourglass
  python benchmarks/training_step.py --parts=lengths
  python benchmarks/training_step.py --parts=paper

writes results/training_step.json, and with "lengths" results/training_step.png (each
about 8 minutes on 2 cores; --quick: small, and nothing is written). The parts of an
earlier report that are not measured again stay in it, each with its own machine and load.

  dispatcher   the Dispatcher paper's two models, a step of training with its dropout and
               without, and the loss of a batch; under two settings of the allocator
  paper        the Dispatcher at its paper's batch, 20 rows of 512
  flags        the Dispatcher with XLA's settings of `FLAGS`, and with its layers compiled
               one by one, beside what dpjax does by default
  lengths      a step of both over T, batch 1: the paper's Fig. 2
  extractors   SHE, HE, WE, ME and attention of 32 heads, two layers of the paper's model
  hourglass    12 layers of relative attention, and with segments of 4 tokens. T = 512,
               batch 2, a quarter of the paper's length: 2048 takes long on 2 cores

A step is the gradient of the mean loss of a fixed batch, clipping where the paper clips,
and an update by Adam: `dpjax.training.step.jit_train_step` here, `benchmarks/
torch_models.py` there, eager unless --compile_torch. Both have the same number of
parameters, the same batch and rates of dropout, and the same number of threads or the same
GPU. Every part but "lengths" first has the machine to itself, and then a busy neighbour: a
process that copies 256 MiB again and again, on one core. Each model is a process of its own, and
its "utilisation" is the share of a large matrix product's rate that its own products reach, in
the JAX of that run (`dpjax.training.operations`). The processes take turns step by step, and
ratios are medians over repetitions of paired times. Without PyTorch, only dpjax is timed.

The allocator is glibc's as it is by default, "usual", or as `timing.ALLOCATOR` sets it,
"quiet", for both sides; attention, and parts other than "dispatcher", have the quiet one
alone. Those repeat as often as their time allows, three times at least.

On a GPU float32 means that both may round the factors of products to TF32, JAX's default.
Memory: "temporary_mib" is the compiler's plan, beside parameters and Adam's moments;
"peak_mib" what the device's allocator had given out at most (GPU; the whole of it);
"grown_mib" how much the process has grown since it was ready, less Adam's moments; of
dpjax, whose process was larger while it compiled, it says little.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import time

import timing

from dpjax.analysis import style

PARTS = ("dispatcher", "paper", "lengths", "extractors", "hourglass", "flags")
SEED = 0
# The settings of a model in one flat table, for both sides; a component of dpjax takes
# those that it has.
DEFAULTS = dict(
  mixer="dispatcher",
  vocab_size=0,
  num_layers=6,
  width=512,
  feed_forward_width=512,
  num_heads=1,
  max_length=512,
  num_levels=0,
  attention_bias=True,
  adjustment=True,
  output_projection=True,
  norm="post",
  positions="sinusoidal",
  activation="relu",
  dropout=0.0,
  hidden_dropout=0.0,
  mixer_dropout=0.0,
  init_std=0.0,
  norm_init_std=0.0,
  boundaries="none",
  first_layers=2,
  last_layers=2,
  shortening_factor=2,
  space_ids=(),
)
CLIPPED = dict(name="adam", learning_rate=1e-4, clip_norm=0.5)
SIZES = {
  # SPEC of the paper, Sec. 3.3, but the vocabulary and the batch.
  "dispatcher": dict(
    model=dict(vocab_size=10_000, num_layers=6, width=512, feed_forward_width=512, max_length=512),
    optimizer=CLIPPED,
    batch=4,
    dropout=0.2,
    repetitions=9,
    max_seconds=None,
  ),
  # Penn Treebank's vocabulary.
  "paper": dict(
    model=dict(vocab_size=8_558, num_layers=6, width=512, feed_forward_width=512, max_length=512),
    optimizer=CLIPPED,
    batch=20,
    dropout=0.2,
    repetitions=7,
    max_seconds=240.0,
  ),
  "lengths": dict(
    model=dict(vocab_size=10_000, num_layers=6, width=512, feed_forward_width=512),
    optimizer=CLIPPED,
    batch=1,
    dropout=0.2,
    repetitions=9,
    max_seconds=25.0,
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    most_seconds=240.0,
  ),
  # Sec. 6, Table 1, but the number of layers.
  "extractors": dict(
    model=dict(
      vocab_size=5000,
      num_layers=2,
      width=128,
      feed_forward_width=512,
      max_length=128,
      norm="pre",
      positions="learned",
      init_std=0.01,
      dropout=0.1,
    ),
    optimizer=dict(name="adamw", learning_rate=1e-3, clip_norm=0.0, weight_decay=0.01),
    batch=64,
    num_heads=32,
    repetitions=9,
    max_seconds=20.0,
  ),
  # Sec. 4.2, but the length.
  "hourglass": dict(
    model=dict(
      vocab_size=27,
      width=512,
      feed_forward_width=2048,
      num_heads=8,
      max_length=512,
      mixer="relative_attention",
      norm="post",
      positions="none",
      activation="gelu",
      dropout=0.1,
      hidden_dropout=0.1,
      mixer_dropout=0.1,
      init_std=0.02,
      norm_init_std=0.02,
    ),
    optimizer=dict(name="adam", learning_rate=2.5e-4, clip_norm=0.25),
    batch=2,
    layers=(2, 8, 2),
    factor=4,
    repetitions=9,
    max_seconds=50.0,
  ),
}
SIZES["flags"] = SIZES["dispatcher"] | dict(max_seconds=90.0)
_SMALL = dict(vocab_size=31, num_layers=2, width=16, feed_forward_width=24)
_FEW = dict(batch=2, repetitions=3)
QUICK = {
  "dispatcher": SIZES["dispatcher"] | _FEW | dict(model=_SMALL | {"max_length": 21}),
  "paper": SIZES["paper"] | _FEW | dict(model=_SMALL | {"max_length": 21}),
  "flags": SIZES["flags"] | _FEW | dict(model=_SMALL | {"max_length": 21}),
  "lengths": SIZES["lengths"] | dict(model=_SMALL, repetitions=3, lengths=(16, 32, 64)),
  "extractors": SIZES["extractors"]
  | _FEW
  | dict(model=SIZES["extractors"]["model"] | _SMALL | {"max_length": 13}, num_heads=4),
  "hourglass": SIZES["hourglass"]
  | _FEW
  | dict(
    model=SIZES["hourglass"]["model"]
    | {"max_length": 22, "num_heads": 2}
    | {key: _SMALL[key] for key in ("vocab_size", "width", "feed_forward_width")},
    layers=(1, 2, 1),
  ),
}
WARM_UPS = 2
# Each was said to save time or memory on some machine.
FLAGS = {
  "no reductions by YNN": "--xla_cpu_experimental_ynn_fusion_type=-reduce",
  "no concurrent scheduler": "--xla_cpu_enable_concurrency_optimized_scheduler=false",
}
NEIGHBOUR = """
import os, sys
import numpy as np
if hasattr(os, "sched_setaffinity"):
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
x = np.zeros(2**25)
y = x.copy()
print("ready", flush=True)
while True:
  np.copyto(y, x)
"""
# The allocator's setting, and what else runs.
QUIET, BUSY = "quiet", "quiet, busy neighbour"
# How PyTorch computes an Extractor: the first is what rows without a name are.
FORMS = dict.fromkeys(("she", "he", "we", "me"), ("convolution", "fft"))
BASELINE = "attention"
NAMES = {
  "dispatcher": "Dispatcher",
  BASELINE: "attention",
  "she": "SHE",
  "he": "HE",
  "we": "WE",
  "me": "ME",
  "vanilla": "no pooling",
  "jax": "dpjax",
  "torch": "PyTorch",
}


@contextlib.contextmanager
def neighbour():
  """A process that copies memory on one core, as long as the context lasts."""
  process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE)
  try:
    process.stdout.readline()
    yield process
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def draw_text(seed, batch, length, vocab_size):
  """[B, T + 1], ids at random, the same in every process."""
  import numpy as np

  generator = np.random.default_rng(seed)
  return generator.integers(0, vocab_size, (batch, length + 1)).astype(np.int32)


def peak_rss_mib():
  """The most that this process has had in memory, MiB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**20 if sys.platform == "darwin" else 2**10)


def serve(runner):
  """Prints what the runner is, then for every line that is read what it took."""
  print(json.dumps(runner.describe()), flush=True)
  for line in sys.stdin:
    print(json.dumps(runner.run(line.strip())), flush=True)


class JaxRunner:
  """A model of dpjax, its optimiser and a batch.

  Args:
    settings: as `torch_models.Runner` takes them, and "commands", what is compiled.
  """

  def __init__(self, settings):
    import jax
    import numpy as np

    from dpjax import config
    from dpjax.models.build import build_boundaries, build_model
    from dpjax.training import losses, operations, sharding
    from dpjax.training import step as training
    from dpjax.training.optimizer import make_optimizer

    device = jax.devices()[0]
    mesh = sharding.make_mesh([device])
    flat = settings["model"] | {"dtype": settings["dtype"]}
    flat.pop("extraction", None)
    of_model = config.from_dict({"model": flat}).model
    model = build_model(of_model)
    of_optimizer = dict(settings["optimizer"])
    optimizer = make_optimizer(
      of_optimizer.pop("name"), of_optimizer.pop("learning_rate"), **of_optimizer
    )
    objective = losses.Objective(build_boundaries(of_model))
    text = draw_text(SEED, settings["batch"], settings["length"], of_model.vocab_size)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
    self.batch = sharding.put_batch(batch, mesh)
    state = training.abstract_state(model, optimizer, SEED, mesh)
    self.product_rate = operations.product_rate(of_model.dtype)
    self.utilisation = operations.Utilisation(
      model, state.params, settings["length"], bool(objective.boundaries), self.product_rate
    )
    self.parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    steps = {
      "train": (
        training.jit_train_step(model, optimizer, places, mesh, objective=objective),
        (state, self.batch),
      ),
      "evaluate": (training.jit_eval_step(model, mesh, objective), (state.params, self.batch, 0)),
    }
    self.compiled, self.compile_seconds, self.temporary_mib = {}, {}, {}
    for command in settings["commands"]:
      step, arguments = steps[command]
      start = time.perf_counter()
      self.compiled[command] = step.lower(*arguments).compile()
      self.compile_seconds[command] = time.perf_counter() - start
      self.temporary_mib[command] = timing.temporary_mib(self.compiled[command])
    self.state = training.jit_init(model, optimizer, SEED, mesh)
    self.device = device

  def describe(self):
    """What the first line says."""
    import jax

    statistics = self.device.memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return {
      "ready": True,
      "parameters": self.parameters,
      "version": jax.__version__,
      "device": self.device.device_kind,
      "compile_seconds": self.compile_seconds,
      "temporary_mib": self.temporary_mib,
      "product_rate": self.product_rate,
      "limit_mib": limit / 2**20 if limit else None,
      "rss_mib": peak_rss_mib(),
    }

  def run(self, command):
    """What "train" or "evaluate" took, the loss, and the most memory so far."""
    import jax

    compiled = self.compiled[command]
    jax.block_until_ready(self.state)
    start = time.perf_counter()
    if command == "train":
      self.state, metrics = compiled(self.state, self.batch)
      jax.block_until_ready((self.state, metrics))
    else:
      metrics = compiled(self.state.params, self.batch, 0)
      jax.block_until_ready(metrics)
    seconds = time.perf_counter() - start
    statistics = self.device.memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    segments = float(metrics["segments"] / metrics["rows"]) if "segments" in metrics else 0.0
    operations = self.utilisation.operations(segments) * self.batch["tokens"].size
    return {
      "seconds": seconds,
      "operations": operations / (1 if command == "train" else 3),
      "loss": float(metrics["nats"] / metrics["count"]),
      "peak_mib": peak / 2**20 if peak else None,
      "peak_rss_mib": peak_rss_mib(),
    }


class WorkerError(RuntimeError):
  """A process that did not answer."""


class Worker:
  """A process that serves one model.

  Args:
    side: "jax", or "torch" and what comes after it.
    settings: of the runner.
    is_quiet: whether its allocator is `timing.ALLOCATOR`.
  """

  def __init__(self, side, settings, *, is_quiet=True):
    self.side, self.settings = side, settings
    here = pathlib.Path(__file__).resolve()
    program = [here, "--serve"] if side == "jax" else [here.with_name("torch_models.py")]
    environment = {
      name: value for name, value in os.environ.items() if name not in timing.ALLOCATOR
    }
    # Several processes share a GPU.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {settings['flags']}".strip()
    if settings["device"] == "cpu" and side == "jax":
      environment["JAX_PLATFORMS"] = "cpu"
    self.process = subprocess.Popen(
      [sys.executable, *map(str, program), json.dumps(settings)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=environment | (timing.ALLOCATOR if is_quiet else {}),
    )
    self.ready = None

  def wait(self):
    """Returns what it says of itself once it is ready."""
    self.ready = self._read()
    return self.ready

  def run(self, command):
    """Has it do "train" or "evaluate"."""
    try:
      self.process.stdin.write(f"{command}\n")
      self.process.stdin.flush()
    except BrokenPipeError:
      pass
    return self._read()

  def close(self):
    """Ends it."""
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.close()
    self.process.stdout.close()
    if self.process.poll() is None:
      self.process.kill()
    self.process.wait()

  def _read(self):
    line = self.process.stdout.readline()
    if not line:
      raise WorkerError(f"{self.side}: ended with status {self.process.wait()}")
    return json.loads(line)


def settings_of(model, sizes, device, dtype, *, commands=("train",), is_compiled=False):
  """What a worker is told; `model` are the settings that differ from `DEFAULTS`."""
  model = json.loads(json.dumps(DEFAULTS | model))
  return {
    "flags": model.pop("flags", ""),
    "model": model,
    "optimizer": sizes["optimizer"],
    "batch": sizes["batch"],
    "length": model["max_length"],
    "seed": SEED,
    "device": device,
    "dtype": dtype,
    "compile": is_compiled,
    "commands": list(commands),
  }


@contextlib.contextmanager
def working(programs, run, *, is_quiet=True):
  """Workers of all programs, by name and side, which are ready; ended in the end.

  Args:
    programs: name -> settings of a worker.
    run: the choices of this run: "torch", whether it takes part, and so on.
    is_quiet: as `Worker`.
  """
  workers = {name: {} for name in programs}
  try:
    # Those of PyTorch together, as nothing of that is timed; compilations one by one.
    for name, settings in programs.items():
      forms = FORMS.get(settings["model"]["mixer"], ("",)) if run["torch"] else ()
      for i, form in enumerate(forms):
        model = settings["model"] | ({"extraction": form} if form else {})
        side = f"torch, {form}" if i else "torch"
        workers[name][side] = Worker(side, settings | {"model": model}, is_quiet=is_quiet)
    for sides in workers.values():
      for worker in sides.values():
        worker.wait()
    for name, settings in programs.items():
      workers[name] = {"jax": Worker("jax", settings, is_quiet=is_quiet), **workers[name]}
      workers[name]["jax"].wait()
      counts = {side: x.ready["parameters"] for side, x in workers[name].items()}
      assert len(set(counts.values())) == 1, f"{name}: parameters of {counts}"
    yield workers
  finally:
    for sides in workers.values():
      for worker in sides.values():
        worker.close()


def measure(workers, command, repetitions, *, max_seconds=None, warm_ups=WARM_UPS):
  """Runs them by turns.

  Args:
    workers: key -> worker.
    command: "train" or "evaluate".
    repetitions: rounds that are counted.
    max_seconds: no further round is begun after so long, once there are three.
    warm_ups: rounds that are not counted.

  Returns:
    Key -> the first answer, the last one, and the seconds of all counted rounds.
  """
  import numpy as np

  keys = list(workers)
  answers = {key: [] for key in keys}
  begin = time.perf_counter()
  for i in range(warm_ups + repetitions):
    is_late = max_seconds and time.perf_counter() - begin > max_seconds
    if is_late and i >= warm_ups + 3:
      break
    first = i % len(keys)
    for key in keys[first:] + keys[:first]:
      answers[key].append(workers[key].run(command))
  return {
    key: (x[0], x[-1], np.asarray([y["seconds"] for y in x[warm_ups:]]))
    for key, x in answers.items()
  }


def describe(worker, command, found):
  """What a report holds of one side of a row."""
  import numpy as np

  first, last, seconds = found
  if not math.isfinite(first["loss"]) or not math.isfinite(last["loss"]):
    raise RuntimeError(f"{worker.side}: the loss is {first['loss']}, {last['loss']}")
  low, middle, high = (float(x) for x in np.percentile(seconds * 1e3, [25, 50, 75]))
  ready = worker.ready
  # PyTorch makes them in the first step, dpjax before.
  moments = 0 if worker.side == "jax" else 2 * 4 * ready["parameters"] / 2**20
  return {
    "milliseconds": middle,
    "quartiles": [low, high],
    "seconds": seconds.tolist(),
    "first_seconds": first["seconds"],
    "loss": first["loss"],
    "last_loss": last["loss"],
    "compile_seconds": ready.get("compile_seconds", {}).get(command),
    "temporary_mib": ready.get("temporary_mib", {}).get(command),
    "peak_mib": last["peak_mib"],
    "grown_mib": last["peak_rss_mib"] - ready["rss_mib"] - moments,
  }


def make_rows(workers, command, found, baseline):
  """A row for every name.

  "utilisation" of a side: the operations of its matrix products over its time and over the
  rate of a large one. "over" has, by side, the ratio of dpjax's time to that side's;
  "over_baseline", by side, the ratio to the baseline's time on the same side, where it was
  measured.
  """
  rows = []
  for name, sides in workers.items():
    seconds = {side: found[name, side][2] for side in sides}
    settings = sides["jax"].settings
    row = {
      "name": name,
      "command": command,
      "dropout": settings["model"]["dropout"],
      **{key: settings[key] for key in ("batch", "length", "dtype")},
      "parameters": sides["jax"].ready["parameters"],
      "sides": {
        side: describe(worker, command, found[name, side]) for side, worker in sides.items()
      },
      "over": {
        side: timing.ratio(seconds["jax"], x) for side, x in seconds.items() if side != "jax"
      },
      "operations": found[name, "jax"][1]["operations"],
      "product_rate": sides["jax"].ready["product_rate"],
      "baseline": baseline,
      "over_baseline": {
        side: timing.ratio(x, found[baseline, side.split(",")[0]][2])
        for side, x in seconds.items()
        if baseline in workers
      },
    }
    for x in row["sides"].values():
      x["utilisation"] = row["operations"] / (x["milliseconds"] / 1e3) / row["product_rate"]
    rows.append(row)
    times = ", ".join(f"{side} {x['milliseconds']:.0f}" for side, x in row["sides"].items())
    print(f"{name}, {command}, dropout {row['dropout']}: ms {times}", flush=True)
  return rows


def compare(models, run, sizes, baseline, *, commands=("train",), is_quiet=True):
  """Rows of these models, by name, for each dtype and command."""
  rows = []
  for dtype in run["dtypes"]:
    programs = {
      name: settings_of(
        sizes["model"] | model,
        sizes,
        run["device"],
        dtype,
        commands=commands,
        is_compiled=run["compile_torch"],
      )
      for name, model in models.items()
    }
    with working(programs, run, is_quiet=is_quiet) as workers:
      flat = {
        (name, side): worker for name, sides in workers.items() for side, worker in sides.items()
      }
      for command in commands:
        found = measure(flat, command, sizes["repetitions"], max_seconds=sizes["max_seconds"])
        rows += make_rows(workers, command, found, baseline)
  return rows


def dropouts(rate):
  return {"dropout": rate, "hidden_dropout": rate, "mixer_dropout": rate}


def compare_dispatcher(sizes, run):
  """Rows by the allocator's setting; attention with the quiet one alone."""
  models = {x: dropouts(sizes["dropout"]) | {"mixer": x} for x in ("dispatcher", BASELINE)}

  def compare_all(is_quiet, mixers):
    rows = []
    for rate in (sizes["dropout"], 0.0):
      chosen = {x: models[x] | dropouts(rate) for x in mixers}
      commands = ("train", "evaluate") if rate else ("train",)
      rows += compare(chosen, run, sizes, BASELINE, commands=commands, is_quiet=is_quiet)
    return rows

  print("usual", flush=True)
  rows = {"usual": compare_all(False, ("dispatcher",))}
  print(QUIET, flush=True)
  rows[QUIET] = compare_all(True, ("dispatcher", BASELINE))
  with neighbour():
    print(BUSY, flush=True)
    rows[BUSY] = compare(models, run, sizes, BASELINE)
  return {"rows": rows}


def quiet_and_busy(compare_all):
  """Rows with the machine for themselves, and beside a busy neighbour.

  Args:
    compare_all: takes the sizes of a part and the choices of this run; gives rows.
  """

  def compare_twice(sizes, run):
    rows = {}
    for name, context in ((QUIET, contextlib.nullcontext), (BUSY, neighbour)):
      print(name, flush=True)
      with context():
        rows[name] = compare_all(sizes, run)
    return {"rows": rows}

  return compare_twice


def compare_paper(sizes, run):
  """One row."""
  models = {"dispatcher": dropouts(sizes["dropout"]) | {"mixer": "dispatcher"}}
  return compare(models, run, sizes, BASELINE)


def compare_flags(sizes, run):
  """A row for what is default, and one for each thing that is not."""
  usual = dropouts(sizes["dropout"]) | {"mixer": "dispatcher"}
  models = {"default": usual}
  models |= {name: usual | {"flags": flags} for name, flags in FLAGS.items()}
  models["layers one by one"] = usual | {"scan_layers": False}
  return compare(models, run | {"torch": None}, sizes, "default")


def compare_extractors(sizes, run):
  """A row for every layer, each beside attention: all at once would fill the memory."""
  attention = {"mixer": BASELINE, "num_heads": sizes["num_heads"], "attention_bias": False}
  rows = []
  for mixer in FORMS:
    found = compare({mixer: {"mixer": mixer}, BASELINE: attention}, run, sizes, BASELINE)
    rows += [row for row in found if row["name"] == mixer or mixer == "she"]
  return rows


def compare_hourglass(sizes, run):
  """A row without pooling and one with."""
  first, between, last = sizes["layers"]
  models = {
    "vanilla": {"num_layers": first + between + last},
    f"fixed {sizes['factor']}": {
      "boundaries": "fixed",
      "shortening_factor": sizes["factor"],
      "num_layers": between,
      "first_layers": first,
      "last_layers": last,
    },
  }
  return compare(models, run, sizes, "vanilla")


def extrapolate(values, shortest_growth):
  """What comes after values at lengths that double: it grows as it last did, or more."""
  if not values:
    return 0.0
  growth = values[-1] / values[-2] if len(values) > 1 and values[-2] > 0 else 4.0
  return max(values[-1], 0.0) * max(growth, shortest_growth)


class Lengths:
  """The part "lengths": what is known of each program so far, and what is left out.

  Args:
    sizes: of the part.
    run: the choices of this run.
  """

  def __init__(self, sizes, run):
    self.sizes, self.run = sizes, run
    self.rows = []
    self.begin = time.perf_counter()

  def measure(self):
    """All rows."""
    sides = ("jax", "torch") if self.run["torch"] else ("jax",)
    for dtype in self.run["dtypes"]:
      self.known = {(name, side): [] for name in ("dispatcher", BASELINE) for side in sides}
      self.out = set()
      for length in self.sizes["lengths"]:
        self.measure_length(length, dtype)
    places = {key: i for i, key in enumerate(self.known)}
    self.rows.sort(key=lambda x: (x["dtype"], places[x["name"], x["side"]], x["length"]))
    return {"rows": self.rows, "crossings": find_crossings(self.rows)}

  def leave_out(self, key, length, dtype, reason):
    """A row that says why there are no numbers; longer ones are not tried."""
    self.out.add(key)
    self.rows.append(
      dict(zip(("name", "side"), key, strict=True), length=length, dtype=dtype, left_out=reason)
    )
    print(f"{key[0]}, {key[1]}, T = {length}: left out, {reason}", flush=True)

  def measure_length(self, length, dtype):
    """The rows of one length, all programs by turns."""
    sizes, run = self.sizes, self.run
    # One step that is not counted, and three that are.
    seconds = {
      key: 4 * extrapolate([x[0] for x in found], 2.0) for key, found in self.known.items()
    }
    time_left = sizes["most_seconds"] - (time.perf_counter() - self.begin)
    memory_left, workers, warm = run["limit_mib"], {}, {}
    with contextlib.ExitStack() as stack:
      for key in sorted(self.known, key=seconds.get):
        if key in self.out:
          continue
        if seconds[key] > time_left:
          reason = f"4 steps of about {seconds[key] / 4:.0f} s, with {time_left:.0f} s left"
          self.leave_out(key, length, dtype, reason)
          continue
        name, side = key
        needs = 0.0  # Of dpjax the compiler tells it.
        if side != "jax":
          needs = extrapolate([x[1] for x in self.known[key]], 2.0)
        settings = settings_of(
          sizes["model"] | dropouts(sizes["dropout"]) | {"mixer": name, "max_length": length},
          sizes,
          run["device"],
          dtype,
          is_compiled=run["compile_torch"],
        )
        try:
          if needs <= memory_left:
            worker = Worker(side, settings)
            stack.callback(worker.close)
            ready = worker.wait()
            needs = ready["temporary_mib"]["train"] if side == "jax" else needs
          if needs > memory_left:
            reason = f"{needs / 1024:.1f} GiB, with {memory_left / 1024:.1f} GiB left"
            self.leave_out(key, length, dtype, reason)
            continue
          warm[key] = worker.run("train")
        except WorkerError as error:
          self.leave_out(key, length, dtype, str(error))
          continue
        time_left -= max(seconds[key], 4 * warm[key]["seconds"])
        memory_left -= needs
        workers[key] = worker
      self.take_turns(workers, warm, length, dtype)

  def take_turns(self, workers, warm, length, dtype):
    """Rows of those that are left."""
    if not workers:
      return
    sizes = self.sizes
    slowest = max(x["seconds"] for x in warm.values())
    found = measure(
      workers,
      "train",
      sizes["repetitions"],
      max_seconds=sizes["max_seconds"],
      warm_ups=WARM_UPS - 1 if slowest < 3 else 0,
    )
    for key, (_, last, seconds) in found.items():
      name, side = key
      row = {"name": name, "side": side, "length": length, "dtype": dtype}
      row |= describe(workers[key], "train", (warm[key], last, seconds))
      for over, other in (("over_torch", (name, "torch")), ("over_attention", (BASELINE, side))):
        row[over] = timing.ratio(seconds, found[other][2]) if other in found else None
      self.rows.append(row)
      self.known[key].append((row["milliseconds"] / 1e3, memory_of(row)))
      print(f"{name}, {side}, T = {length}: {row['milliseconds']:.0f} ms", flush=True)


def memory_of(row):
  """MiB beside parameters and moments: of dpjax the plan; of PyTorch what was seen."""
  if row["side"] == "jax":
    return row["temporary_mib"]
  if row["peak_mib"] is None:
    return row["grown_mib"]
  return row["peak_mib"] - 3 * 4 * row["parameters"] / 2**20


def crossing(lengths, ratios):
  """From which length on ratios are below 1, on lines between their logarithms.

  Args:
    lengths: rising.
    ratios: at each of them.

  Returns:
    The length; the first one where the ratio is never above; None where it is at the end.
  """
  above = [i for i, ratio in enumerate(ratios) if ratio >= 1]
  if not above:
    return float(lengths[0]) if lengths else None
  i = above[-1]
  if i + 1 == len(lengths):
    return None
  (x0, y0), (x1, y1) = ((math.log(lengths[j]), math.log(ratios[j])) for j in (i, i + 1))
  return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))


def find_crossings(rows):
  """From which T on the Dispatcher costs less than attention, by side and quantity."""
  rows = {(x["dtype"], x["side"], x["length"], x["name"]): x for x in rows if "left_out" not in x}
  found = []
  for dtype, side in dict.fromkeys(key[:2] for key in rows):
    pairs = [
      (key[2], x, rows[(*key[:3], BASELINE)])
      for key, x in sorted(rows.items(), key=str)
      if key[:2] == (dtype, side) and key[3] == "dispatcher" and (*key[:3], BASELINE) in rows
    ]
    pairs.sort(key=lambda pair: pair[0])
    lengths = [length for length, *_ in pairs]
    ratios = {
      "time": [x["over_attention"] for _, x, _ in pairs],
      "memory": [
        memory_of(x) / memory_of(base) if min(memory_of(x), memory_of(base)) > 0 else 1.0
        for _, x, base in pairs
      ],
    }
    for quantity, values in ratios.items():
      if not lengths:
        continue
      start = crossing(lengths, values)
      if start is None:
        words = f"not up to T = {lengths[-1]}"
      elif start == lengths[0]:
        words = f"at all lengths, from T = {lengths[0]} on"
      else:
        words = f"from T = {start:.0f} on"
      found.append(
        {
          "dtype": dtype,
          "side": side,
          "quantity": quantity,
          "lengths": lengths,
          "ratios": values,
          "dispatcher_below_attention_from": start,
          "words": words,
        }
      )
  return found


def number(value, digits=3):
  """Of so many digits that count; "-" for None."""
  if value is None:
    return "-"
  if value == 0 or not math.isfinite(value):
    return f"{value:g}"
  places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
  return f"{value:,.{places}f}"


def table(heads, rows):
  """Markdown lines; the first column is text, the others numbers."""

  def line(cells):
    return "| " + " | ".join(cells) + " |"

  return [line(heads), "|---|" + "---:|" * (len(heads) - 1), *map(line, rows), ""]


def name_of(name):
  """Of a model, or of a side with what comes after it."""
  first, comma, rest = name.partition(",")
  return NAMES.get(first, first) + comma + rest


def make_tables(report):
  """The report in Markdown."""
  lines = []
  for part, found in report["parts"].items():
    lines += [f"{part}: {found['torch']}", ""]
    if part == "lengths":
      lines += table(
        (
          "model",
          "T",
          "dtype",
          "ms a step",
          "dpjax / PyTorch",
          "over attention",
          "MiB",
          "compiling, s",
        ),
        [
          (
            f"{name_of(x['name'])}, {name_of(x['side'])}",
            str(x["length"]),
            x["dtype"],
            *(
              (x["left_out"], "", "", "", "")
              if "left_out" in x
              else (
                number(x["milliseconds"]),
                number(x["over_torch"] if x["side"] == "jax" else None),
                number(x["over_attention"]),
                number(memory_of(x)),
                number(x["compile_seconds"]),
              )
            ),
          )
          for x in found["rows"]
        ],
      )
      lines += [
        f"Dispatcher below attention, {x['quantity']}, {name_of(x['side'])}, "
        f"{x['dtype']}: {x['words']}."
        for x in found["crossings"]
      ] + [""]
      continue
    for allocator, rows in found["rows"].items():
      lines += [f"Allocator: {allocator}.", ""]
      lines += table(
        (
          "model, side",
          "step",
          "dropout",
          "dtype",
          "ms",
          "utilisation",
          "dpjax / it",
          "over baseline",
          "first loss",
          "temporary, MiB",
          "compiling, s",
        ),
        [
          (
            f"{name_of(row['name'])}, {name_of(side)}",
            row["command"],
            f"{row['dropout']:g}",
            row["dtype"],
            number(x["milliseconds"]),
            number(x.get("utilisation")),
            number(row["over"].get(side)),
            number(row["over_baseline"].get(side)),
            number(x["loss"]),
            number(x["temporary_mib"]),
            number(x["compile_seconds"]),
          )
          for row in rows
          for side, x in row["sides"].items()
        ],
      )
  return "\n".join(lines)


@style.applied()
def draw_figure(rows, path):
  """Time and memory of a step over T."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  # The shapes tell the same as the colours.
  colors = {"dispatcher": "C0", BASELINE: "C1"}
  shapes = {"jax": "o-", "torch": "s--"}
  figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
  rows = [x for x in rows if "left_out" not in x]
  dtypes = list(dict.fromkeys(x["dtype"] for x in rows))
  for dtype, side, name in dict.fromkeys((x["dtype"], x["side"], x["name"]) for x in rows):
    line = [x for x in rows if (x["dtype"], x["side"], x["name"]) == (dtype, side, name)]
    lengths = [x["length"] for x in line]
    label = f"{name_of(name)}, {name_of(side)}" + f", {dtype}" * (len(dtypes) > 1)
    look = dict(
      color=colors[name],
      markersize=7,
      alpha=1.0 if dtype == dtypes[0] else 0.5,
      label=label,
      markerfacecolor=colors[name] if side == "jax" else "white",
    )
    axes[0].plot(lengths, [x["milliseconds"] / 1e3 for x in line], shapes[side], **look)
    axes[1].plot(lengths, [memory_of(x) for x in line], shapes[side], **look)
  axes[0].set_title("a step of training, seconds")
  axes[1].set_title("memory beside parameters and moments, MiB")
  lengths = sorted({x["length"] for x in rows})
  for axis in axes:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(x) for x in lengths])
    axis.set_xlabel("T, tokens")
  axes[0].legend()
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def find_torch(device):
  """Its version where it can take part, or None; and what is said of it."""
  if importlib.util.find_spec("torch") is None:
    return None, "PyTorch is not installed: dpjax alone"
  code = "import torch; print(torch.__version__, torch.cuda.is_available())"
  output = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  ).stdout
  version, has_cuda = output.split()
  if device not in ("cpu", "cuda") or device == "cuda" and has_cuda != "True":
    return None, f"PyTorch {version} has no {device}: dpjax alone"
  return version, f"PyTorch {version}"


def parse_arguments(arguments=None):
  """The command line; parts and dtypes as tuples."""

  def names(known):
    def parse(text):
      found = tuple(text.split(","))
      unknown = [name for name in found if name not in known]
      if unknown:
        raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, got {', '.join(unknown)}")
      return found

    return parse

  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument(
    "--out", help="path, no suffix; results/training_step; nothing is written if --quick"
  )
  parser.add_argument(
    "--parts",
    type=names(PARTS),
    default=("dispatcher",),
    help=f"of {','.join(PARTS)}; dispatcher",
  )
  parser.add_argument("--quick", action="store_true", help="small, few repetitions")
  parser.add_argument("--device", choices=("cpu", "gpu"), help="JAX's choice")
  parser.add_argument(
    "--dtypes",
    type=names(("float32", "bfloat16")),
    default=("float32",),
    help="of float32,bfloat16, of PyTorch by autocast; float32",
  )
  parser.add_argument("--compile_torch", action="store_true", help="by torch.compile")
  parser.add_argument("--no_torch", action="store_true", help="dpjax alone")
  parser.add_argument("--serve", help="what the program starts itself with")
  return parser.parse_args(arguments)


def choose_run(arguments):
  """What all parts have to know of this run."""
  import jax

  device = jax.devices()[0]
  if arguments.device and device.platform != arguments.device:
    raise SystemExit(f"--device: expected {device.platform}, got {arguments.device}")
  name = {"gpu": "cuda"}.get(device.platform, device.platform)
  version, words = None, "dpjax alone"
  if not arguments.no_torch:
    version, words = find_torch(name)
  limit = (device.memory_stats() or {}).get("bytes_limit")
  return {
    "device": name,
    "torch": version,
    "words": words,
    "dtypes": arguments.dtypes,
    "compile_torch": arguments.compile_torch,
    "limit_mib": 0.8 * limit / 2**20 if limit else timing.most_mib(),
  }


COMPARISONS = {
  "dispatcher": compare_dispatcher,
  "paper": quiet_and_busy(compare_paper),
  "lengths": lambda sizes, run: Lengths(sizes, run).measure(),
  "extractors": quiet_and_busy(compare_extractors),
  "hourglass": quiet_and_busy(compare_hourglass),
  "flags": quiet_and_busy(compare_flags),
}


def main():
  arguments = parse_arguments()
  # Processes share a GPU, this one, too, which only asks for its name.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  if arguments.device == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
  if arguments.serve:
    serve(JaxRunner(json.loads(arguments.serve)))
    return
  run = choose_run(arguments)
  print(run["words"], flush=True)
  path = None
  report = {"parts": {}}
  if arguments.out or not arguments.quick:
    path = pathlib.Path(arguments.out or "results/training_step")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.with_suffix(".json").exists():
      report = json.loads(path.with_suffix(".json").read_text())
  measured = {"parts": {}}
  for part in arguments.parts:
    sizes = (QUICK if arguments.quick else SIZES)[part]
    machine = timing.describe_machine()
    machine["allocator"] = {"usual": {}, "quiet": timing.ALLOCATOR}
    begin = time.perf_counter()
    found = COMPARISONS[part](sizes, run)
    measured["parts"][part] = {
      "machine": machine,
      "torch": run["words"],
      "compile_torch": run["compile_torch"],
      "seed": SEED,
      "settings": sizes,
      "minutes": (time.perf_counter() - begin) / 60,
    } | found
    report["parts"][part] = measured["parts"][part]
    # As soon as a part is there: an interrupt costs the rest alone.
    if path is not None:
      path.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
  print(make_tables(measured))
  if path is not None and "lengths" in measured["parts"]:
    draw_figure(measured["parts"]["lengths"]["rows"], path.with_suffix(".png"))


if __name__ == "__main__":
  main()
