"""Texts, configurations, models and comparisons that several tests share."""

import contextlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import dpjax
from dpjax.__main__ import main as dpjax_main
from dpjax.config import registry, sections
from dpjax.config.schema import Train
from dpjax.data import sources
from dpjax.models import PoolingHints, build
from dpjax.training import losses, optimizers
from dpjax.training.trainer import Trainer, TrainState

ROOT = Path(__file__).parents[1]
WORDS = "the cat sat on a mat and saw no rat but one bat in its hat".split()


def write_text(path: Path, num_lines: int = 400, seed: int = 3) -> Path:
  """Writes lines of random words, the same everywhere."""
  draw = np.random.default_rng(seed)
  lines = [" ".join(draw.choice(WORDS, size=7)) for _ in range(num_lines)]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return path


def load_corpus(name: str = "python_manual", path="", **settings) -> sources.Corpus:
  """The corpus of some settings of `config.data`."""
  return sources.load_corpus(path, name=name, **settings)


def vocabulary(name: str, size: int) -> dict[str, int]:
  """The setting of a tokenizer's size, if it has one."""
  return {"vocab_size": size} if "vocab_size" in registry.tokenizers.settings(name) else {}


def builtin(known: registry.Registry) -> list[str]:
  """The names of dpjax's own components, whichever plugins other tests have loaded."""
  return [name for name in known.names() if known.is_builtin(name)]


def component(known: registry.Registry, name: str, **settings):
  """The section of a component; settings that it lacks are ignored."""
  return known.section(name, **{x: settings[x] for x in settings if x in known.settings(name)})


def model_settings(mixer="relative_attention", boundaries="none", **changes):
  """A small model's settings, its sizes different; components by their names or sections.

  model_settings("me", "gumbel", first=dict(num_layers=1), width=9)
  """
  if isinstance(mixer, str):
    mixer = component(registry.mixers, mixer, num_heads=2)
  if isinstance(boundaries, str):
    boundaries = component(registry.boundaries, boundaries, num_buckets=2)
  usual = dict(vocab_size=11, width=6, feed_forward_width=10, num_layers=2, max_length=29)
  usual |= dict(positions="none", activation="gelu", mixer=mixer, boundaries=boundaries)
  config = dpjax.config.default_model()
  config.update({**usual, **changes})
  return config


def objective(boundaries: str = "none", **settings) -> losses.Objective:
  """The objective of a kind of boundaries."""
  if boundaries == "none":
    return losses.Objective()
  section = registry.boundaries.section(boundaries, **settings)
  return losses.Objective([registry.boundaries.build(section, "boundaries", predictor_width=1)])


def small_config(text: Path, **train):
  """A Dispatcher that takes a second to compile, on the text."""
  config = dpjax.config.default()
  config.data.path = str(text)
  config.data.data_dir = str(text.parent / "data_dir")
  config.model.mixer = dpjax.config.mixer("dispatcher", num_heads=3, level_dropout=0.1)
  sizes = dict(num_layers=2, width=12, feed_forward_width=20, max_length=19)
  config.model.update(dropout=0.1, hidden_dropout=0.1, **sizes)
  steps = dict(num_steps=12, num_epochs=0.0, eval_every_steps=6, eval_every_epochs=0.0)
  steps |= dict(log_every_steps=2, checkpoint_every_steps=4)
  config.train.update(dict(batch_size=8, learning_rate=3e-3, **steps))
  config.train.update(train)
  config.eval.batch_size = 8
  return config


def pooled_config(text: Path, boundaries: str, **train):
  """`small_config` with token pooling, one layer a block, and little to compile."""
  config = small_config(text, **train)
  config.model.boundaries = component(registry.boundaries, boundaries, num_buckets=2, size=31)
  one = dict(num_layers=1)
  config.model.update(hidden_dropout=0.0, mixer=dict(level_dropout=0.0), first=one, last=one, **one)
  return config


class Output(NamedTuple):
  logits: jax.Array


class Bigrams(nn.Module):
  """A language model of the user's that compiles at once: bigrams."""

  vocab_size: int

  @nn.compact
  def __call__(self, tokens, *, deterministic):
    x = nn.Embed(self.vocab_size, 9)(tokens)
    return Output(nn.Dense(self.vocab_size)(nn.Dropout(0.1)(x, deterministic)))


def bigrams(settings) -> Bigrams:
  """`dpjax.train(model=bigrams)`, where the model does not matter."""
  return Bigrams(settings.vocab_size)


def draw_params(model, seed: int, spread: float) -> dict:
  """Normal numbers instead of a model's initial values; gains have mean 1."""
  tokens = jnp.zeros((2, 2), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  generator = np.random.default_rng(seed)

  def draw(path, x):
    mean = float(path[-1].key == "scale")
    return jnp.asarray(mean + generator.standard_normal(x.shape) * spread, x.dtype)

  return jax.tree.map_with_path(draw, shapes)


def lengthen(params, model):
  """The parameters for a model with a longer window: its new taps are zero."""
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 2), jnp.int32))["params"]

  def pad(x, y):
    return jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, y.shape, strict=True)])

  return jax.tree.map(pad, params, shapes)


def balance(params, logits) -> None:
  """Changes a predictor with these logits: boundaries at two tokens in five, none near 0.5."""
  if logits is not None:
    ranked = np.sort(np.asarray(logits), axis=None)
    places = np.arange(ranked.size // 2, 3 * ranked.size // 4)
    place = places[np.argmax(ranked[places] - ranked[places - 1])]
    middle, scale = (ranked[place - 1] + ranked[place]) / 2, 2 / ranked.std()
    out = params["stages_0"]["boundaries"]["out"]
    out["bias"], out["kernel"] = (out["bias"] - middle) * scale, out["kernel"] * scale


def assert_sure(logits) -> None:
  """Rounding flips no boundary: |p - 0.5| > 0.001 everywhere."""
  if logits is not None:
    assert abs(jax.nn.sigmoid(np.asarray(logits)) - 0.5).min() > 1e-3


def pointers(tree) -> set[int]:
  """The addresses of its arrays."""
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.ndim}


make_pipe = getattr(os, "mkfifo", os.mkdir)  # Windows has none: there, a folder.
needs_locks = pytest.mark.skipif(
  not filelock.has_fcntl and sys.platform != "win32", reason="a system without locks"
)


def slow_unless(is_default: bool, *values, id: str | None = None):
  """Marks the case slow unless it runs by default."""
  return pytest.param(*values, id=id, marks=() if is_default else pytest.mark.slow)


def golden(name: str) -> dict[str, np.ndarray]:
  """Arrays that the authors' code computed, by name."""
  with np.load(ROOT / "tests/golden" / f"{name}.npz") as arrays:
    return dict(arrays)


def part(arrays, prefix: str) -> dict:
  """The arrays whose names have the prefix, without it."""
  return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def assert_trees_close(tree, expected, **tolerance) -> None:
  """Each leaf is close to that of its name."""
  assert jax.tree.structure(tree) == jax.tree.structure(expected)
  pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True)
  for (path, got), want in pairs:
    np.testing.assert_allclose(got, want, err_msg=jax.tree_util.keystr(path), **tolerance)


def check_updates(arrays, config, params, *, eps: float, grad_clip_norm: float) -> None:
  """Our losses and gradient norms are those of the authors' first updates by Adam."""
  rates = jnp.asarray(arrays["out/lrs"])
  update = optimizers.make_optimizer(
    "adam", lambda k: rates[k], b1=0.9, b2=0.999, eps=eps, grad_clip_norm=grad_clip_norm
  )
  state = TrainState(jnp.zeros((), jnp.int32), params, update.init(params), jax.random.key(0))
  objective = losses.Objective(build.build_boundaries(config))
  trainer = Trainer(build.build_model(config), Train(), len(rates), update, objective)
  train = jax.jit(trainer.step)
  seen = []
  # optax raises floats to integer powers, which strict promotion refuses.
  with jax.numpy_dtype_promotion("standard"):
    for stream in arrays["in/stream"]:
      tokens = stream.T
      weights = np.ones((len(tokens), tokens.shape[1] - 1), np.float32)
      state, found = train(
        state, dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)
      )
      seen.append((found["loss"], found["grad_norm"]))
  loss, grad_norm = np.asarray(seen).T
  np.testing.assert_allclose(loss, arrays["out/losses"], rtol=0, atol=1e-4)
  np.testing.assert_allclose(grad_norm, arrays["out/grad_norms"], rtol=0, atol=1e-4)


def overrides(config) -> list[str]:
  """The flags that make configs/quickstart.py the given configuration."""
  flags = []
  for key in sections.component_keys(config):
    section = dpjax.config.get(config, key)
    if section is not None:
      flags.append(f"--config.{key}={section.name}")
  for key, value in dpjax.config.flatten(config).items():
    if isinstance(value, bool):
      flags.append(f"--{'' if value else 'no'}config.{key}")
    elif value is not None and not key.endswith(".name") or key == "data.name":
      flags.append(f"--config.{key}={value}")
  return [f"--config={ROOT / 'configs/quickstart.py'}", *flags]


def environment(**changes) -> dict[str, str]:
  """The environment of a script: one CPU device, unless XLA_FLAGS says otherwise.

  It compiles as a user's does, but not what a script of another test has compiled.
  """
  names = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "PYTHONPATH": str(ROOT),
    "JAX_COMPILATION_CACHE_DIR": os.environ["DPJAX_TEST_CACHE"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
  }
  return {**os.environ, **names, **changes}


def script(name: str, *arguments: str, **changes) -> subprocess.CompletedProcess:
  """Runs a script to its end."""
  return subprocess.run(
    [sys.executable, str(ROOT / name), *arguments],
    env=environment(**changes),
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )


@contextlib.contextmanager
def arguments(*argv):
  """Sets sys.argv."""
  saved, sys.argv = sys.argv, [*map(str, argv)]
  try:
    yield
  finally:
    sys.argv = saved


def command(name: str, *words):
  """Runs `dpjax NAME WORDS` here; gives what it exits with."""
  with arguments("dpjax", name, *words):
    try:
      dpjax_main()
      return None
    except SystemExit as end:
      return end.code


def cases(table: str) -> list[tuple[str, ...]]:
  """One case a line, with " | " between cells; lines with # are comments."""
  lines = [line.strip() for line in table.strip().splitlines()]
  rows = [line for line in lines if line and not line.startswith("#")]
  return [tuple(cell.strip() for cell in row.split(" | ")) for row in rows]


def reports(workdir: Path, split: str) -> list[dict]:
  """The metrics a run wrote about a split."""
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if line["split"] == split]


# Sizes of chunks, and of 3 rows of 23 tokens how many of each chunk's are real.
SCHEDULES = {
  "steps": [
    *((9, (9, 4, 0)), (1, (1, 1, 0)), (1, (0, 1, 1)), (9, (3, 9, 9))),
    *((9, (0, 8, 2)), (1, (1, 0, 1)), (9, (9, 0, 9)), (1, (0, 0, 1))),
  ],
  "chunks": [
    *((17, (0, 11, 4)), (17, (17, 3, 8)), (1, (0, 1, 1)), (1, (1, 1, 1)), (17, (5, 7, 9)))
  ],
}


def make_step(model, params):
  """(cache, tokens, lengths, hints) -> (output, cache), jitted, with the cache donated.

  `hints` are fields of `PoolingHints`, by name.
  """

  def step(params, cache, tokens, lengths, hints):
    pooling = PoolingHints(**hints)
    return model.apply(
      {"params": params}, tokens, cache, lengths=lengths, pooling=pooling, method="step"
    )

  return partial(jax.jit(step, donate_argnums=1), params)


def by_chunks(step, cache, tokens, schedule, after=None, **hints):
  """The logits for every token, [B, T, V], chunk by chunk.

  `step` is from `make_step`; `schedule` has the size of each chunk and how many tokens of each row
  are real; `after(cache, seen)` is called after each chunk; `hints` are more arrays, [B, T].
  """
  batch, garbage, found = len(tokens), np.random.default_rng(7), None
  seen = np.zeros(batch, int)
  kinds = jax.tree.map(jax.typeof, cache)
  for size, lengths in schedule:
    rows = [(b, slice(n), slice(seen[b], seen[b] + n)) for b, n in enumerate(lengths)]
    chunk = garbage.integers(tokens.max() + 1, size=(batch, size))
    parts = {key: np.resize(x, (batch, size)) for key, x in hints.items()}
    for b, own, part in rows:
      chunk[b, own] = tokens[b, part]
      for key, array in hints.items():
        parts[key][b, own] = array[b, part]
    places = pointers(cache)
    output, cache = step(cache, chunk, jnp.asarray(lengths, jnp.int32), parts)
    # The cache neither grows nor moves.
    assert jax.tree.map(jax.typeof, cache) == kinds and pointers(cache) == places
    if found is None:
      found = np.full((*tokens.shape, output.logits.shape[2]), np.nan, np.float32)
    for b, own, part in rows:
      found[b, part] = output.logits[b, own]
    seen += lengths
    np.testing.assert_array_equal(cache.length, seen)
    if after:
      after(cache, seen)
  assert (seen == tokens.shape[1]).all()
  return found


def assert_found(found, expected):
  """The logits of a pass over whole rows equal those of `by_chunks`."""
  np.testing.assert_allclose(found, expected.logits, atol=1e-5, rtol=1e-5)


def check_chunks(model, params, tokens, whole, schedule, after=None):
  """Chunks with a cache give the logits of a whole pass, with one program a size."""
  step, cache = make_step(model, params), model.init_cache(len(tokens))
  assert_found(by_chunks(step, cache, tokens, schedule, after), whole)
  assert step.func._cache_size() == len({size for size, _ in schedule})


def over_devices() -> tuple[jax.NamedSharding, jax.NamedSharding]:
  """The first axis over the devices, and copies on all of them."""
  mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.NamedSharding(mesh, jax.P("batch")), jax.NamedSharding(mesh, jax.P())


def collectives(compiled) -> set[str]:
  """The collectives of a compiled function."""
  names = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
  text = compiled.as_text()
  return {name for name in names if f" {name}" in text}


def parquet(texts, column: str = "text", **options) -> bytes:
  """A Parquet file with the texts in a column, between two others."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  numbers, sink = [f"Q{i}" for i in range(len(texts))], pa.BufferOutputStream()
  table = pa.table({"id": range(len(texts)), column: texts, "name": numbers})
  pq.write_table(table, sink, row_group_size=5, **options)
  return sink.getvalue().to_pybytes()
