"""What several tests need: a small text, a small configuration, a quick compilation."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import config as config_lib
from dpjax import old_settings, registry
from dpjax.training import losses

ROOT = Path(__file__).parents[1]
WORDS = "the cat sat on a mat and saw no rat but one bat in its hat".split()


def write_text(path: Path, num_lines: int = 400, seed: int = 3) -> Path:
  """Lines of random words: text with a little to learn, the same everywhere."""
  draw = np.random.default_rng(seed)
  lines = [" ".join(draw.choice(WORDS, size=7)) for _ in range(num_lines)]
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return path


def set_model(model, **settings):
  """Changes a model's settings, those of its components by their names of version 0.1.

  Of those a component takes what it has: `set_model(model, mixer="me", num_heads=3)`.
  """
  flat = dict(settings)
  for name in ("mixer", "boundaries"):
    flat.setdefault(name, model[name].name)
  new = old_settings.to_sections({"model": flat})["model"]
  for place in ("mixer", "boundaries"):
    known = registry.mixers if place == "mixer" else registry.boundaries
    section = new.pop(place)
    same = model[place] if model[place].name == section["name"] else {}
    later = {
      key: new.pop(key)
      for key in known.settings(section["name"])
      if key in flat and key in new and key not in model
    }
    model[place] = known.section(**{**dict(same), **section, **later})
  for place in ("first", "last"):
    stack = new.pop(place, {})
    if "mixer" in stack:
      model[place].mixer = registry.mixers.section(**stack.pop("mixer"))
    model[place].update(stack)
  model.update(new)
  return model


def objective(boundaries: str = "none", **settings) -> losses.Objective:
  """That of a kind of boundaries, by its name and settings."""
  if boundaries == "none":
    return losses.Objective()
  section = registry.boundaries.section(boundaries, **settings)
  return losses.Objective([registry.boundaries.build(section, "boundaries", predictor_width=1)])


def small_config(text: Path, **train):
  """A Dispatcher that takes a second to compile, on the text."""
  config = config_lib.default()
  config.data.path = str(text)
  config.data.data_dir = str(text.parent / "data_dir")
  set_model(
    config.model,
    num_layers=2,
    width=12,
    feed_forward_width=20,
    num_heads=3,
    max_length=19,
    dropout=0.1,
    hidden_dropout=0.1,
    mixer_dropout=0.1,
  )
  config.train.update(
    dict(
      batch_size=8,
      num_steps=12,
      num_epochs=0.0,
      learning_rate=3e-3,
      eval_every_steps=6,
      eval_every_epochs=0.0,
      log_every_steps=2,
      median_every_steps=5,
      checkpoint_every_steps=4,
    )
  )
  config.train.update(train)
  config.eval.batch_size = 8
  return config


def pooled_config(text: Path, boundaries: str, **train):
  """`small_config` with token pooling, one layer a block, and little to compile."""
  config = small_config(text, **train)
  set_model(
    config.model,
    boundaries=boundaries,
    num_layers=1,
    first_layers=1,
    last_layers=1,
    hidden_dropout=0.0,
    mixer_dropout=0.0,
    num_capacities=2,
  )
  if boundaries == "unigram":
    config.model.boundaries.size = 31
  return config


def draw_params(model, seed: int, spread: float) -> dict:
  """Normal numbers in the place of a model's initial ones; gains lie about 1."""
  tokens = jnp.zeros((2, 2), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  generator = np.random.default_rng(seed)

  def draw(path, x):
    mean = float(path[-1].key == "scale")
    return jnp.asarray(mean + generator.standard_normal(x.shape) * spread, x.dtype)

  return jax.tree.map_with_path(draw, shapes)


def pointers(tree) -> set[int]:
  """Where its arrays lie in memory; numbers may move."""
  return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.ndim}


def overrides(config) -> list[str]:
  """The flags that make configs/quickstart.py the given configuration."""
  flags = []
  for key in config_lib.COMPONENTS:
    section = config_lib.get(config, key)
    if section is not None:
      flags.append(f"--config.{key}={section.name}")
  for key, value in config_lib.flatten(config).items():
    if isinstance(value, bool):
      flags.append(f"--{'' if value else 'no'}config.{key}")
    elif value is not None and not key.endswith(".name") or key == "data.name":
      flags.append(f"--config.{key}={value}")
  return [f"--config={ROOT / 'configs/quickstart.py'}", *flags]


def environment(**changes) -> dict[str, str]:
  """Of a script: one CPU device, unless XLA_FLAGS says otherwise."""
  names = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
  return {**os.environ, **names, **changes}


def script(name: str, *arguments: str, **changes) -> subprocess.CompletedProcess:
  """Runs a script to its end, and gives what it printed."""
  return subprocess.run(
    [sys.executable, str(ROOT / name), *arguments],
    env=environment(**changes),
    capture_output=True,
    text=True,
    timeout=900,
    check=False,
  )


# Sizes of chunks, and of 3 rows of 23 tokens how many of each chunk's are real.
SCHEDULES = {
  "steps": [
    (9, (9, 4, 0)),
    (1, (1, 1, 0)),
    (1, (0, 1, 1)),
    (9, (3, 9, 9)),
    (9, (0, 8, 2)),
    (1, (1, 0, 1)),
    (9, (9, 0, 9)),
    (1, (0, 0, 1)),
  ],
  "chunks": [
    (17, (0, 11, 4)),
    (17, (17, 3, 8)),
    (1, (0, 1, 1)),
    (1, (1, 1, 1)),
    (17, (5, 7, 9)),
  ],
}


def check_chunks(model, params, tokens, whole, schedule, after=lambda cache, seen: None):
  """Chunks with a cache say what a pass over the whole rows says.

  Args:
    model: with token pooling.
    params: of the model.
    tokens: [B, T].
    whole: output of the whole rows.
    schedule: of `SCHEDULES`; what is not real is any token.
    after: called with the cache and the tokens seen, [B], after each chunk.
  """
  step = jax.jit(
    lambda tokens, cache, lengths: model.apply(
      {"params": params}, tokens, cache=cache, lengths=lengths
    )
  )
  cache, seen = model.init_cache(len(tokens)), np.zeros(len(tokens), int)
  garbage = np.random.default_rng(7)
  for size, lengths in schedule:
    chunk = garbage.integers(tokens.max() + 1, size=(len(tokens), size))
    for row, length in enumerate(lengths):
      chunk[row, :length] = tokens[row, seen[row] : seen[row] + length]
    output = step(chunk, cache, jnp.array(lengths, jnp.int32))
    cache = output.cache
    for row, length in enumerate(lengths):
      places = slice(seen[row], seen[row] + length)
      np.testing.assert_array_equal(output.boundaries[row, :length], whole.boundaries[row, places])
      np.testing.assert_allclose(
        output.logits[row, :length], whole.logits[row, places], atol=1e-5, rtol=1e-5
      )
    seen += lengths
    after(cache, seen)
  assert (seen == tokens.shape[1]).all()
  assert step._cache_size() == len({size for size, _ in schedule})
