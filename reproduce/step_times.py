"""Seconds and memory of training steps: Dispatcher paper, Fig. 2; pooling paper, Fig. 5.

A step is `dpjax.training.step.jit_train_step`: the gradient of a fixed batch of random
tokens with the configuration's dropout, clipping, and an update by Adam. Two models take
turns step by step, and a ratio is a median of paired ratios:

  seconds  = median over i of s_i
  ratio    = median over i of s_i / b_i      the baseline's b_i in the same turn

Memory is the compiler's plan of what a step needs beside parameters, Adam's moments and
the batch; the pooling paper has the whole. On a GPU float32 means that JAX may round the
factors of products to TF32.

Sources: Cetoli, CLASP 2022, Fig. 2; Nawrot et al. 2023, arXiv:2211.09761, Sec. 5, Fig. 5.
"""

import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import config as config_lib
from dpjax.errors import UserError
from dpjax.models.build import build_boundaries, build_model
from dpjax.training import losses, sharding
from dpjax.training import step as step_lib
from dpjax.training.optimizer import build_optimizer
from reproduce import scales

FIG2, FIG5 = "dispatcher-fig2", "pooling-fig5"
DISPATCHER, ATTENTION = "Dispatcher", "masked self-attention"
VANILLA, FIXED = "no pooling", "fixed segments"
WARM_UPS = 2
LEAST_REPETITIONS = 3
MOST_SECONDS = 20.0  # of a pair, once it has those
MOST_STEP_SECONDS = 60.0
GROWTH = {DISPATCHER: 2.2, ATTENTION: 4.0}  # of a step, at twice the length
_SEED = 0
_BOTH = ("float32", "bfloat16")
_SMALL = dict(width=16, feed_forward_width=24)
# "places" are tokens, or factors; "model" is what differs from the configuration.
_SCALES: dict[str, dict[str, dict[str, Any]]] = {
  FIG2: {
    "tiny": dict(
      places=(16, 32),
      dtypes=_BOTH,
      batch=1,
      repetitions=3,
      model=_SMALL | dict(vocab_size=31, num_layers=2),
    ),
    "cpu": dict(
      places=(512, 1024, 2048, 4096),
      dtypes=_BOTH[:1],
      batch=1,
      repetitions=7,
      model=dict(vocab_size=20_044),
    ),
    "paper": dict(
      places=tuple(512 * 2**i for i in range(8)),
      dtypes=_BOTH,
      batch=1,
      repetitions=7,
      model=dict(vocab_size=20_044),
    ),
  },
  FIG5: {
    "tiny": dict(
      places=(2, 4),
      dtypes=_BOTH[:1],
      batch=2,
      repetitions=3,
      layers=(1, 1, 1),
      model=_SMALL | dict(vocab_size=27, max_length=32, mixer=dict(num_heads=2)),
    ),
    "cpu": dict(
      places=(2, 3, 4, 6, 8),
      dtypes=_BOTH[:1],
      batch=1,
      repetitions=7,
      layers=(2, 8, 2),
      model=dict(vocab_size=27, max_length=512),
    ),
    "paper": dict(
      places=(2, 3, 4, 6, 8),
      dtypes=_BOTH,
      batch=8,
      repetitions=7,
      layers=(2, 8, 2),
      model=dict(vocab_size=27),
    ),
  },
}


@dataclasses.dataclass(frozen=True)
class Place:
  """A point that is to be measured.

  Attributes:
    model: its name in the figure.
    baseline: the model that its ratios are over; None: it has none.
    dtype: "float32" or "bfloat16".
    place: tokens, or the shortening factor.
    settings: what it was measured with, JSON values; "repetitions" at most.
    config: the experiment's.
  """

  model: str
  baseline: str | None
  dtype: str
  place: int
  settings: Mapping[str, Any]
  config: Any = dataclasses.field(repr=False, compare=False)

  def is_at(self, point: Mapping) -> bool:
    """Whether a point is this one's."""
    keys = ("model", "dtype", "place", "settings")
    return all(point.get(key) == getattr(self, key) for key in keys)


class Times(NamedTuple):
  """Seconds of each repetition, and the compiler's plan, None where it tells none."""

  seconds: Sequence[float]
  temporary_mib: float | None


def places(name: str, scale: str) -> list[Place]:
  """All points of a figure.

  Args:
    name: "dispatcher-fig2" or "pooling-fig5".
    scale: "tiny", "cpu" or "paper".

  Returns:
    Them, by dtype and place.

  Raises:
    ValueError: the name or the scale is unknown.
  """
  if name not in _SCALES:
    raise UserError(f"table: expected one of {', '.join(_SCALES)}, got {name}")
  if scale not in _SCALES[name]:
    raise UserError(f"scale: expected one of {', '.join(_SCALES[name])}, got {scale}")
  sizes, found = _SCALES[name][scale], []
  for dtype in sizes["dtypes"]:
    if name == FIG2:
      for length in sizes["places"]:
        at = (dtype, length, sizes, dict(max_length=length))
        found += [
          _place(DISPATCHER, ATTENTION, "dispatcher_wikitext2.py", *at),
          _place(ATTENTION, None, "msa_wikitext2.py", *at),
        ]
    else:
      first, middle, last = sizes["layers"]
      layers = dict(first=dict(num_layers=first), num_layers=middle, last=dict(num_layers=last))
      whole = dict(num_layers=first + middle + last)
      found.append(_place(VANILLA, None, "pooling_text8.py:none", dtype, 1, sizes, whole))
      found += [
        _place(
          FIXED,
          VANILLA,
          "pooling_text8.py:fixed2",
          dtype,
          factor,
          sizes,
          layers | dict(boundaries=dict(shortening_factor=factor)),
        )
        for factor in sizes["places"]
      ]
  return found


def measure(
  name: str,
  scale: str,
  known: Sequence[Mapping],
  *,
  put: Callable[[dict], None],
  should_stop: Callable[[], bool],
) -> None:
  """Measures the points of a figure that are not known yet, and prints a line for each.

  A model that runs out of memory has a point with the reason, "left_out". In Fig. 2 that
  goes for all greater lengths too, which are not tried, and likewise where a step would
  take more than `MOST_STEP_SECONDS`, by what it took at half the length; known points
  count here. The time without pooling is that of all its turns: its point comes last.

  Args:
    name: as `places`.
    scale: as `places`.
    known: points that are there, of this machine; one that was left out is not tried again.
    put: called with each point as soon as it is there: "model", "baseline", "dtype",
      "place", "seconds", "temporary_mib", "ratio", "memory_ratio", "left_out", "settings"
      and "repetitions", how often it was timed. Numbers that it lacks are None.
    should_stop: asked before each pair; when it is true the time without pooling is put,
      if there is any, and no more is measured.

  Raises:
    ValueError: the name or the scale is unknown.
    RuntimeError: a loss is not finite.
  """
  session = _Session(places(name, scale), known, put, should_stop)
  run = _measure_lengths if name == FIG2 else _measure_factors
  for dtype in _SCALES[name][scale]["dtypes"]:
    run(session, [place for place in session.places if place.dtype == dtype])


def paired_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
  """The median over i of seconds[i] / base[i]; both have one length."""
  return statistics.median(x / y for x, y in zip(seconds, base, strict=True))


def time_by_turns(
  steps: MutableMapping[str, Callable[[], float]], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
  """Calls each step once a turn, and another one first in every turn.

  Args:
    steps: by name; they return their seconds. One out of memory is taken out of them.
    repetitions: turns, after `WARM_UPS` that do not count; none is begun once all
      together have taken `MOST_SECONDS` and there are `LEAST_REPETITIONS`.

  Returns:
    The seconds, in order, by name; and why a step is not among them, by name.
  """
  seconds: dict[str, list[float]] = {name: [] for name in steps}
  reasons = {}
  for i in range(WARM_UPS + repetitions):
    names = [*steps]
    first = i % len(names) if names else 0
    for name in names[first:] + names[:first]:
      try:
        seconds[name].append(steps[name]())
      except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reasons[name] = _reason(error)
        del steps[name], seconds[name]
    if i + 1 == WARM_UPS:
      seconds = {name: [] for name in steps}
    spent = sum(map(sum, seconds.values()))
    if i + 1 >= WARM_UPS + LEAST_REPETITIONS and spent > MOST_SECONDS:
      break
  return seconds, reasons


class Step:
  """A step of training, compiled, with its state and its batch; a call takes one.

  Args:
    config: with `model.vocab_size`; a batch is [train.batch_size, model.max_length].

  Raises:
    MemoryError: the plan is above 6 tenths of the machine's memory, where the device
      tells nothing of its own (a CPU, which would begin to swap).
  """

  def __init__(self, config):
    settings = config.train
    optimizer = build_optimizer(settings, settings.num_steps)
    device = jax.devices()[0]
    mesh, model = sharding.make_mesh([device]), build_model(config.model)
    size = (settings.batch_size, config.model.max_length + 1)
    text = np.random.default_rng(_SEED).integers(0, config.model.vocab_size, size, np.int32)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
    self.batch = sharding.put_batch(batch, mesh)
    state = step_lib.abstract_state(model, optimizer, _SEED, mesh)
    self.compiled = (
      step_lib.jit_train_step(
        model,
        optimizer,
        jax.tree.map(lambda leaf: leaf.sharding, state),
        mesh,
        objective=losses.Objective(build_boundaries(config.model)),
      )
      .lower(state, self.batch)
      .compile()
    )
    plan = getattr(self.compiled.memory_analysis(), "temp_size_in_bytes", None)
    self.temporary_mib = None if plan is None else plan / 2**20
    if plan is not None and device.memory_stats() is None:
      machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
      if plan > 0.6 * machine:
        raise MemoryError(f"{plan / 2**30:.1f} GiB of the machine's {machine / 2**30:.1f}")
    self.state = step_lib.jit_init(model, optimizer, _SEED, mesh)

  def __call__(self) -> float:
    """The seconds of one update."""
    jax.block_until_ready(self.state)
    start = time.perf_counter()
    self.state, metrics = self.compiled(self.state, self.batch)
    jax.block_until_ready((self.state, metrics))
    seconds = time.perf_counter() - start
    if not math.isfinite(loss := float(metrics["loss"])):
      raise RuntimeError(f"the loss is {loss}")
    return seconds


class _Session:
  def __init__(self, places, known, put, should_stop):
    self.places, self.known, self.should_stop = places, [*known], should_stop
    self._put = put
    self.left = sum(not self.find(place) for place in places)

  def find(self, place: Place) -> Mapping | None:
    return next((point for point in self.known if place.is_at(point)), None)

  def put(self, place: Place, times: Times | None, base: Times | None, reason="") -> None:
    point = {key: getattr(place, key) for key in ("model", "baseline", "dtype", "place")}
    point |= dict.fromkeys(("seconds", "temporary_mib", "ratio", "memory_ratio"))
    point |= {"left_out": reason, "settings": dict(place.settings), "repetitions": 0}
    said = f"left out, {reason}"
    if times is not None:
      mib = times.temporary_mib
      point["seconds"] = statistics.median(times.seconds)
      point["temporary_mib"], point["repetitions"] = mib, len(times.seconds)
      said = f"{point['seconds']:.4g} s" + ("" if mib is None else f", {mib:.1f} MiB")
      if base is not None:
        point["ratio"] = paired_ratio(times.seconds, base.seconds)
        if mib is not None and base.temporary_mib:
          point["memory_ratio"] = mib / base.temporary_mib
        said += f", {point['ratio']:.3g} of the time of {place.baseline}"
    self.left -= 1
    self.known.append(point)
    self._put(point)
    print(f"{place.model}, {place.dtype}, {place.place}: {said}; {self.left} left", flush=True)


def _measure_lengths(session: _Session, of_dtype: Sequence[Place]) -> None:
  out, previous = {}, {}
  for pair in zip(of_dtype[::2], of_dtype[1::2], strict=True):
    missing = [place for place in pair if not session.find(place)]
    if missing and session.should_stop():
      return
    said = f"{pair[0].place:,} tokens: "
    trying = []
    # Attention alone, where the Dispatcher is known; but that has to be paired.
    for place in pair if pair[0] in missing else missing:
      about = previous.get(place.model, 0.0) * GROWTH[place.model]
      if place in missing and about > MOST_STEP_SECONDS:
        out.setdefault(place.model, f"{said}a step of about {about:.0f} s")
      if not (session.find(place) or {}).get("left_out") and place.model not in out:
        trying.append(place)
    times, reasons = _take_turns(trying, {})
    if reasons:
      gc.collect()  # An error may still hold all that was there.
    out |= {model: said + reason for model, reason in reasons.items() if model not in out}
    for place in missing:
      session.put(
        place, times.get(place.model), times.get(place.baseline or ""), out.get(place.model, "")
      )
    for point in filter(None, map(session.find, pair)):
      if point["left_out"]:
        out.setdefault(point["model"], point["left_out"])
      else:
        previous[point["model"]] = point["seconds"]


def _measure_factors(session: _Session, of_dtype: Sequence[Place]) -> None:
  vanilla, *pooled = of_dtype
  point = session.find(vanilla)
  why = point["left_out"] if point else ""
  steps, base = {}, Times([], None)
  missing = [place for place in pooled if not session.find(place)]
  for place in missing or [vanilla] * (point is None):
    if session.should_stop():
      break
    # Without pooling there is one step, compiled once and kept.
    times, reasons = _take_turns([place] if why else [vanilla, place], steps)
    steps.pop(FIXED, None)
    if reasons:
      gc.collect()
    why = reasons.get(VANILLA, why)
    if found := times.get(VANILLA):
      base = Times([*base.seconds, *found.seconds], found.temporary_mib)
    if place is not vanilla:
      session.put(place, times.get(FIXED), found, reasons.get(FIXED, ""))
  if point is None and base.seconds:
    session.put(vanilla, base, None)
  elif point is None and why:
    session.put(vanilla, None, None, why)


def _take_turns(
  places: Sequence[Place], steps: MutableMapping[str, Any]
) -> tuple[dict[str, Times], dict[str, str]]:
  """Of each model its times, or why there are none; compiles what `steps` lacks."""
  reasons = {}
  for place in places:
    if place.model not in steps:
      try:
        steps[place.model] = Step(place.config)
      except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reasons[place.model] = _reason(error)
  plans = {model: step.temporary_mib for model, step in steps.items()}
  repetitions = max((place.settings["repetitions"] for place in places), default=0)
  seconds, failed = time_by_turns(steps, repetitions)
  return {model: Times(x, plans[model]) for model, x in seconds.items()}, reasons | failed


def _reason(error: Exception) -> str:
  """What is said of a model that is out of memory; any other error goes on."""
  text = str(error)
  is_memory = any(word in text for word in ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY"))
  if not isinstance(error, MemoryError) and not is_memory:
    raise error
  return f"out of memory, {text.partition(chr(10))[0][:100] or 'no more is said'}"


def _place(model, baseline, file, dtype, place, sizes, of_model) -> Place:
  config = scales.load(f"configs/{file}")
  config.train.batch_size = sizes["batch"]
  of = config.model
  of.update(sizes["model"] | of_model | dict(dtype=dtype))
  outer = of.first.num_layers + of.last.num_layers if config_lib.is_pooled(of) else 0
  settings = {
    "batch": sizes["batch"],
    "tokens": of.max_length,
    "layers": of.num_layers + outer,
    "width": of.width,
    "feed_forward_width": of.feed_forward_width,
    "vocab_size": of.vocab_size,
    "dropout": of.dropout,
    "repetitions": sizes["repetitions"],
  }
  return Place(model, baseline, dtype, place, settings, config)
