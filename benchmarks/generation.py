"""A token by caches beside a window computed again: operators, models, token pooling.

  python benchmarks/generation.py --out results/generation
  python benchmarks/generation.py --text text8 --out results/generation

writes results/generation.json and .png (about 10 minutes on 2 cores; --quick: a minute,
smaller, where the bars say nothing) and prints the tables. Float32; one token of every row
a step, in a compiled scan over tokens that carries the cache.

"operators" are what mixes tokens in one layer, values and gates being there. "models" are
6 layers, greedy; the baseline is "attention". Both start from a cache that is full but for
the tokens that are measured: random numbers, and the length set. A sum by online
convolution takes its time in blocks, so it is measured from the first token to the last:
an operator at once, a model in stretches, one a repetition, of which the mean is taken.
"recomputing" is one pass over the whole window, as each token needs it without a cache; of
a model with the logits of all its positions.

"pooling" is the pooling paper's model, 2 + 8 + 2 layers with boundaries at spaces, over one
of 12 layers. Both are given the tokens of a text, so that segments are those of text: the
first half of the window untimed, by the same program, then the second. Rows of the batch
are the stretches whose shortening factor is nearest to that of the whole text. --text is a
file like text8, the letters a to z and spaces, plain or .xz; without it the words are made
up, of 1 letter and a Poisson variable of the mean 3.9 more.

Times are microseconds a step, medians over repetitions, ratios medians of paired times;
programs take turns. The cache that a repetition starts from is copied before its time
begins. Temporary memory is the compiler's plan for the loop, beside parameters and cache.
"""

import argparse
import functools
import json
import lzma
import math
import pathlib
import time
from typing import Any

import timing

from dpjax.analysis import style

SETTINGS: dict[str, Any] = dict(
  lengths=(512, 4096),
  width=512,
  num_heads=8,
  # Tokens a repetition, at most; the sums of Extractors take all of their length.
  tokens=512,
  attention_tokens=64,
  model_tokens=64,
  # T and D of a WE, of a ME and of a SHE; and the lengths at which blocks may pay.
  we=(4096, 128),
  me=(1024, 128),
  she=(128, 128),
  sweep=(128, 256, 512, 1024, 2048),
  sweep_width=512,
  num_layers=6,
  feed_forward_width=2048,
  vocab_size=10_000,
  pooled_layers=(2, 8, 2),
  pooled_length=512,
  batches=(1, 2, 4, 8),
  repetitions=9,
  sum_repetitions=5,
  model_repetitions=8,
  pooled_repetitions=5,
)
QUICK: dict[str, Any] = dict(
  lengths=(64, 1024),
  width=32,
  num_heads=2,
  tokens=32,
  attention_tokens=8,
  model_tokens=8,
  we=(256, 8),
  me=(256, 8),
  she=(32, 8),
  sweep=(64, 256),
  sweep_width=8,
  num_layers=2,
  feed_forward_width=64,
  vocab_size=101,
  pooled_layers=(1, 2, 1),
  pooled_length=64,
  batches=(1, 2),
  repetitions=3,
  sum_repetitions=3,
  model_repetitions=4,
  pooled_repetitions=3,
)
# As in configs/: dispatcher_ptb.py, extractors_childrens_books.py, pooling_text8.py.
MODELS = {
  "dispatcher": dict(mixer="dispatcher"),
  "we": dict(mixer="we", norm="pre", positions="learned"),
  "attention": dict(mixer="attention"),
  "relative_attention": dict(mixer="relative_attention", positions="none", activation="gelu"),
}
BASELINE = "attention"
NAMES = {
  "dispatcher": "Dispatcher",
  "we": "WE",
  "me": "ME",
  "she": "SHE",
  "attention": "attention",
  "relative_attention": "relative attention",
}
# Of a pass over a window, seconds from which two repetitions are enough.
LONG_PASS = 1.0
TEXT_SIZE = 200_000
# Of a made-up word, beyond the first; text8 has 4.9 letters a word.
MORE_LETTERS = 3.9
SPACE, LETTERS = 0, 26
SEED = 0


class Loop:
  """A compiled scan over tokens.

  Attributes:
    tokens: steps of a repetition.
    carries: a repetition goes on where the one before ended.
    temporary_mib: of the compiled loop.
    compile_seconds: what tracing and compiling took.
    cache_mib: of the cache, by its shapes.
  """

  def __init__(self, step, constants, cache, tokens, inputs=None, carries=False):
    """`step`: (constants, cache, input) -> cache, output; `inputs`: [tokens, ...]."""
    import jax

    def scan(constants, cache, inputs):
      body = functools.partial(step, constants)
      return jax.lax.scan(body, cache, inputs, length=tokens)

    self.tokens, self.carries = tokens, carries
    self.cache_mib = mib(cache)
    start = time.perf_counter()
    lowered = jax.jit(scan, donate_argnums=1).lower(constants, cache, inputs)
    self._compiled = lowered.compile()
    self.compile_seconds = time.perf_counter() - start
    self.temporary_mib = timing.temporary_mib(self._compiled)
    self._constants, self._cache, self._inputs = constants, cache, inputs

  def advance(self, inputs):
    """Goes on by other tokens, untimed, and begins there from now on."""
    self._cache, _ = self._compiled(self._constants, self._cache, inputs)

  def begin(self):
    """A copy of the cache to start from, which `run` uses up."""
    import jax
    import jax.numpy as jnp

    return jax.block_until_ready(jax.tree.map(jnp.copy, self._cache))

  def run(self, cache):
    """The cache after the tokens, and their outputs."""
    return self._compiled(self._constants, cache, self._inputs)

  def end(self, result):
    """Where the next repetition begins, if that is where this one ended."""
    if self.carries:
      self._cache = result[0]


class Pass:
  """A compiled pass over a window, for one token; attributes as those of `Loop`."""

  def __init__(self, function, *arguments):
    self.tokens, self.carries = 1, False
    self._compiled, self.compile_seconds = timing.compile_timed(function, *arguments)
    self.temporary_mib = timing.temporary_mib(self._compiled)
    self._arguments = arguments
    if self.temporary_mib > timing.most_mib():
      raise RuntimeError(f"a pass needs {self.temporary_mib / 1024:.1f} GiB")

  def begin(self):
    """Nothing is used up."""

  def run(self, _):
    """The outputs of the window."""
    return self._compiled(*self._arguments)

  def end(self, result):
    """Nothing goes on."""


def measure(programs, repetitions):
  """Microseconds a step of every repetition, by name; programs take turns.

  A program that carries its cache from one repetition to the next is warmed up on a copy;
  a long pass ends with two repetitions.
  """
  import jax
  import numpy as np

  micros = {name: [] for name in programs}
  most = {name: repetitions for name in programs}

  def run(name):
    program = programs[name]
    cache = program.begin()
    start = time.perf_counter()
    result = jax.block_until_ready(program.run(cache))
    return time.perf_counter() - start, result

  for name, program in programs.items():
    seconds, _ = run(name)
    if isinstance(program, Pass) and seconds > LONG_PASS:
      most[name] = 2
  names = list(programs)
  for i in range(repetitions):
    first = i % len(names)
    for name in names[first:] + names[:first]:
      if i < most[name]:
        seconds, result = run(name)
        programs[name].end(result)
        micros[name].append(seconds * 1e6 / programs[name].tokens)
  return {name: np.asarray(x) for name, x in micros.items()}


def middle(program, micros):
  """The median, of a program in stretches the mean."""
  import numpy as np

  return float(np.mean(micros) if program.carries else np.median(micros))


class Measured:
  """Programs and their times."""

  def __init__(self, programs, repetitions):
    self.programs = programs
    self.micros = measure(programs, repetitions)

  def row(self, name, batch=1):
    """What the report says of every program."""
    import numpy as np

    program, micros = self.programs[name], self.micros[name]
    value = middle(program, micros)
    return {
      "microseconds": value,
      "quartiles": [float(x) for x in np.percentile(micros, [25, 75])],
      "tokens_per_second": batch * 1e6 / value,
      "tokens": program.tokens,
      "repetitions": len(micros),
      "temporary_mib": program.temporary_mib,
      "compile_seconds": program.compile_seconds,
    }

  def ratio(self, name, base):
    """Of the times, paired; of those of programs in stretches the means."""
    if any(self.programs[x].carries for x in (name, base)):
      values = [middle(self.programs[x], self.micros[x]) for x in (name, base)]
      return values[0] / values[1]
    pairs = min(len(self.micros[x]) for x in (name, base))
    return timing.ratio(self.micros[name][:pairs], self.micros[base][:pairs])


def mib(tree):
  import jax

  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) / 2**20


def draw(*shape):
  import jax.numpy as jnp
  import numpy as np

  generator = np.random.default_rng(SEED)
  return jnp.asarray(generator.standard_normal(shape), jnp.float32)


def filled(cache, length):
  """The cache of rows of `length` random tokens."""
  import jax
  import jax.numpy as jnp

  def fill(path, leaf):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      return draw(*leaf.shape)
    if getattr(path[-1], "name", "") != "length":
      raise ValueError(f"cache: expected floats and lengths, got {path}")
    return jnp.full_like(leaf, length)

  if length == 0:
    return cache
  return jax.tree_util.tree_map_with_path(fill, cache)


def dispatcher_programs(length, width, tokens):
  """Of the operator: by the cache, and the window again."""
  import jax

  from dpjax import ops

  levels, tokens = ops.num_levels(length), min(tokens, length)

  def step(_, cache, inputs):
    values, gates = inputs
    outputs, cache = ops.shift_and_sum_cached(values, gates, cache)
    return cache, outputs

  cache = filled(ops.init_shift_and_sum_cache(1, 1, width, levels), length - tokens)
  inputs = draw(tokens, 1, 1, 1, width), jax.nn.sigmoid(draw(tokens, 1, 1, 1, levels))
  window = draw(1, length, 1, width), jax.nn.sigmoid(draw(1, length, 1, levels))
  return Loop(step, (), cache, tokens, inputs), Pass(ops.shift_and_sum, *window)


def attention_program(name, length, width, heads, tokens):
  from dpjax import ops

  tokens = min(tokens, length)
  shape = heads, width // heads

  def step(constants, cache, inputs):
    q, k, v = inputs
    if name == "attention":
      outputs, cache = ops.causal_attention_cached(q, k, v, cache)
    else:
      table_hre, content, position = constants
      outputs, cache = ops.relative_attention_cached(
        q, k, v, table_hre.swapaxes(0, 1), content, position, cache
      )
    return cache, outputs

  cache = filled(ops.init_attention_cache(1, length, *shape), length - tokens)
  constants = draw(shape[0], length, shape[1]), draw(*shape), draw(*shape)
  inputs = tuple(draw(3, tokens, 1, 1, *shape))
  return Loop(step, constants, cache, tokens, inputs)


def extractor_programs(length, width, rank, with_pass=False):
  """All tokens of a row: by the plain cache, the online one, the window again."""
  import jax.numpy as jnp

  from dpjax import ops

  taps = draw(*(length, width, width)[:rank]) / length**0.5
  inputs = draw(length, 1, 1, width)

  def step(taps, cache, inputs):
    outputs, cache = ops.causal_convolution_cached(inputs, taps, cache)
    return cache, outputs

  inits: dict[str, Any] = {"plain": ops.init_convolution_cache}
  if rank < 3:
    inits["online"] = ops.init_online_convolution_cache
  programs: dict[str, Any] = {
    name: Loop(step, taps, init(1, length, width), length, inputs) for name, init in inits.items()
  }
  if with_pass:
    window = jnp.swapaxes(inputs[:, :, 0], 0, 1)
    programs["recomputing"] = Pass(ops.causal_convolution, window, taps)
  return programs


def compare_operators(settings):
  """Rows of the operators, and of the two caches of a sum by its length."""
  width, heads, lengths = (settings[x] for x in ("width", "num_heads", "lengths"))
  programs = {}
  for length in lengths:
    loop, again = dispatcher_programs(length, width, settings["tokens"])
    programs[f"dispatcher {length}"] = loop
    programs[f"dispatcher {length} again"] = again
    for name in ("attention", "relative_attention"):
      programs[f"{name} {length}"] = attention_program(
        name, length, width, heads, settings["attention_tokens"]
      )
  found = Measured(programs, settings["repetitions"])
  rows = []
  for name in ("dispatcher", "attention", "relative_attention"):
    for length in lengths:
      key = f"{name} {length}"
      row = dict(name=name, length=length, width=width, cache="ring") | found.row(key)
      row |= {
        "cache_mib": programs[key].cache_mib,
        "over_attention": found.ratio(key, f"{BASELINE} {length}"),
        "over_shortest": found.ratio(key, f"{name} {lengths[0]}"),
      }
      if f"{key} again" in programs:
        row["recomputing"] = found.row(f"{key} again")
        row["times_faster"] = found.ratio(f"{key} again", key)
      rows.append(row | {"num_heads": 1 if name == "dispatcher" else heads})
  repetitions = settings["sum_repetitions"]
  for name, rank in (("we", 2), ("me", 1), ("she", 3)):
    length, narrow = settings[name]
    programs = extractor_programs(length, narrow, rank, with_pass=True)
    rows += sum_rows(name, length, narrow, Measured(programs, repetitions))
  sweep = []
  for length in settings["sweep"]:
    wide = settings["sweep_width"]
    programs = extractor_programs(length, wide, 2)
    found = Measured(programs, repetitions)
    sweep.append(
      {
        "length": length,
        "width": wide,
        "plain_microseconds": found.row("plain")["microseconds"],
        "online_microseconds": found.row("online")["microseconds"],
        "online_over_plain": found.ratio("online", "plain"),
      }
    )
  return {"rows": rows, "sweep": sweep, "online_pays_from": pays_from(sweep)}


def sum_rows(name, length, width, found):
  rows = []
  for cache in ("plain", "online"):
    if cache not in found.programs:
      continue
    row = dict(name=name, length=length, width=width, cache=cache) | found.row(cache)
    row["cache_mib"] = found.programs[cache].cache_mib
    row["recomputing"] = found.row("recomputing")
    row["times_faster"] = found.ratio("recomputing", cache)
    if cache == "online":
      row["over_plain"] = found.ratio("online", "plain")
    rows.append(row)
  return rows


def pays_from(sweep):
  """The first length from which on the online cache costs less; None: it never does."""
  found = None
  for row in sorted(sweep, key=lambda row: -row["length"]):
    if row["online_over_plain"] >= 1:
      break
    found = row["length"]
  return found


def build(settings, model):
  """A model of flat settings, and its parameters as `init` gives them."""
  import jax
  import jax.numpy as jnp

  from dpjax import config
  from dpjax.models.build import build_model

  built = build_model(config.from_dict({"model": model}).model)
  tokens = jnp.zeros((1, 2), jnp.int32)
  return built, jax.jit(built.init)(jax.random.key(SEED), tokens)["params"]


def model_settings(settings, name, length):
  """Of the model of a row, less the defaults."""
  keys = ("num_layers", "width", "feed_forward_width", "vocab_size")
  model = {key: settings[key] for key in keys} | MODELS[name] | {"max_length": length}
  if name in ("attention", "relative_attention"):
    model["num_heads"] = settings["num_heads"]
  return model


def model_programs(model, params, length, settings):
  """Greedy by the cache, and the window again."""
  import jax
  import jax.numpy as jnp

  from dpjax import ops

  def step(params, state, _):
    cache, token_b = state
    output = model.apply({"params": params}, token_b[:, None], cache=cache)
    token_b = jnp.argmax(output.logits[:, 0], axis=-1).astype(jnp.int32)
    return (output.cache, token_b), token_b

  def again(params, tokens):
    logits = model.apply({"params": params}, tokens).logits
    return jnp.argmax(logits, axis=-1)

  cache = model.init_cache(1)
  carries = isinstance(cache.layers[0], ops.OnlineConvolutionCache)
  if carries:
    tokens = length // settings["model_repetitions"]
  else:
    tokens = min(settings["model_tokens"], length)
    cache = filled(cache, length - tokens)
  state = cache, jnp.zeros(1, jnp.int32)
  window = jnp.arange(length, dtype=jnp.int32)[None] % settings["vocab_size"]
  separate = jax.jit(model.unstack)(params)
  loop = Loop(step, separate, state, tokens, carries=carries)
  return loop, Pass(again, params, window)


def compare_models(settings):
  """A row for every model and length."""
  import jax

  rows = []
  for length in settings["lengths"]:
    programs, sizes = {}, {}
    for name in MODELS:
      model, params = build(settings, model_settings(settings, name, length))
      loop, again = model_programs(model, params, length, settings)
      programs |= {name: loop, f"{name} again": again}
      sizes[name] = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "cache_mib": mib(jax.eval_shape(functools.partial(model.init_cache, 1))),
      }
      print(
        f"{name}, T = {length}: compiled in {loop.compile_seconds:.0f} + "
        f"{again.compile_seconds:.0f} s",
        flush=True,
      )
    found = Measured(programs, settings["model_repetitions"])
    for name in MODELS:
      rows.append(
        {"name": name, "length": length}
        | found.row(name)
        | sizes[name]
        | {
          "settings": model_settings(settings, name, length),
          "recomputing": found.row(f"{name} again"),
          "times_faster": found.ratio(f"{name} again", name),
          "over_attention": found.ratio(name, BASELINE),
        }
      )
  return rows


def read_text(path):
  """[N], 0 the space and the letters from 1 on, of a file or made up."""
  import numpy as np

  if path is None:
    generator = np.random.default_rng(SEED)
    text = generator.integers(1, 1 + LETTERS, TEXT_SIZE)
    ends = np.cumsum(2 + generator.poisson(MORE_LETTERS, TEXT_SIZE)) - 1
    text[ends[ends < TEXT_SIZE]] = SPACE
    return text.astype(np.int32)
  with (lzma.open if str(path).endswith(".xz") else open)(path, "rb") as file:
    data = np.frombuffer(file.read(TEXT_SIZE).strip(), np.uint8)
  is_letter = (data >= ord("a")) & (data <= ord("z"))
  if not len(data) or not np.all(is_letter | (data == ord(" "))):
    raise ValueError(f"text: expected letters a to z and spaces, got others in {path}")
  return np.where(is_letter, data.astype(np.int32) - ord("a") + 1, SPACE).astype(np.int32)


def pick_rows(text, length, batch):
  """[B, T] windows; those whose second halves are nearest to the text's factor."""
  import numpy as np

  count = len(text) // length
  if count < batch:
    raise ValueError(f"text: expected {batch * length} characters, got {len(text)}")
  windows = text[: count * length].reshape(count, length)
  spaces = (windows[:, length // 2 :] == SPACE).mean(axis=1)
  away = np.abs(spaces - (text == SPACE).mean())
  return windows[np.argsort(away, kind="stable")[:batch]]


def pooling_settings(settings, name):
  """Of the model "vanilla" or "whitespace", less the defaults."""
  first, between, last = settings["pooled_layers"]
  model = {key: settings[key] for key in ("width", "num_heads", "feed_forward_width")} | {
    "mixer": "relative_attention",
    "positions": "none",
    "activation": "gelu",
    "vocab_size": 1 + LETTERS,
    "max_length": settings["pooled_length"],
  }
  if name == "vanilla":
    return model | {"num_layers": first + between + last}
  return model | {
    "boundaries": "whitespace",
    "space_ids": (SPACE,),
    "num_layers": between,
    "first_layers": first,
    "last_layers": last,
  }


def compare_pooling(settings, text):
  """A row for every batch: the hourglass over the model without pooling."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  built = {}
  for name in ("vanilla", "whitespace"):
    model, params = build(settings, pooling_settings(settings, name))
    built[name] = model, jax.jit(model.unstack)(params)

  def make_step(model):
    def step(params, cache, token_b):
      output = model.apply({"params": params}, token_b[:, None], cache=cache)
      return output.cache, jnp.argmax(output.logits[:, 0], axis=-1)

    return step

  length = settings["pooled_length"]
  rows = []
  for batch in settings["batches"]:
    tokens = pick_rows(text, length, batch).T
    prefix, inputs = (jnp.asarray(x) for x in np.split(tokens, 2))
    programs = {}
    for name, (model, params) in built.items():
      cache = model.init_cache(batch)
      programs[name] = Loop(make_step(model), params, cache, len(inputs), inputs)
      programs[name].advance(prefix)
    found = Measured(programs, settings["pooled_repetitions"])
    ends = np.asarray(inputs) == SPACE
    rows.append(
      {
        "batch": batch,
        "length": length,
        "shortening_factor": ends.size / float(ends.sum()),
        # In a batch the middle layers step if any row's segment ends.
        "middle_steps": float(ends.any(axis=1).mean()),
        "over_vanilla": found.ratio("whitespace", "vanilla"),
      }
      | {
        name: found.row(name, batch) | {"cache_mib": programs[name].cache_mib} for name in programs
      }
    )
    print(f"B = {batch}: {rows[-1]['over_vanilla']:.3f} of vanilla", flush=True)
  return rows


def make_bars(report):
  """What the library promises of the rows, and whether it holds."""
  lengths, operators = report["settings"]["lengths"], report["operators"]["rows"]

  def find(rows, **wanted):
    return next(x for x in rows if all(x[key] == y for key, y in wanted.items()))

  longest = find(operators, name="dispatcher", length=lengths[-1])
  online = find(operators, name="we", cache="online")
  hourglass = find(report["pooling"], batch=1)
  bars = [
    (
      f"Dispatcher, T = {lengths[-1]}: times faster than recomputing",
      longest["times_faster"],
      "at least",
      400,
    ),
    (
      f"Dispatcher, T = {lengths[-1]} over T = {lengths[0]}",
      longest["over_shortest"],
      "at most",
      3,
    ),
    (
      f"WE, {online['length']} tokens: online over plain cache",
      online["over_plain"],
      "at most",
      0.15,
    ),
    ("hourglass, whitespace, B = 1, over vanilla", hourglass["over_vanilla"], "at most", 0.55),
  ]
  return [
    {
      "what": what,
      "value": value,
      "kind": kind,
      "bar": bar,
      "met": value >= bar if kind == "at least" else value <= bar,
    }
    for what, value, kind, bar in bars
  ]


def table(heads, rows):
  """Markdown lines; the first column is text, the others numbers."""

  def line(cells):
    return "| " + " | ".join(cells) + " |"

  return [line(heads), "|---|" + "---:|" * (len(heads) - 1), *map(line, rows), ""]


def number(value, digits=3):
  """Of so many digits that count; "-" for None."""
  if value is None:
    return "-"
  if value == 0 or not math.isfinite(value):
    return f"{value:g}"
  places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
  return f"{value:,.{places}f}"


def make_tables(report):
  """The report in Markdown."""
  lines = table(
    (
      "operator, cache",
      "T",
      "D",
      "µs a token",
      "recomputing, µs",
      "times faster",
      "over attention",
      "over plain",
      "cache, MiB",
      "temporary, MiB",
    ),
    [
      (
        f"{NAMES[row['name']]}, {row['cache']}",
        str(row["length"]),
        str(row["width"]),
        number(row["microseconds"]),
        number(row.get("recomputing", {}).get("microseconds")),
        *(
          number(row.get(key))
          for key in ("times_faster", "over_attention", "over_plain", "cache_mib", "temporary_mib")
        ),
      )
      for row in report["operators"]["rows"]
    ],
  )
  lines += table(
    ("WE, L", "D", "plain, µs a token", "online, µs a token", "online / plain"),
    [
      (
        str(row["length"]),
        str(row["width"]),
        number(row["plain_microseconds"]),
        number(row["online_microseconds"]),
        number(row["online_over_plain"]),
      )
      for row in report["operators"]["sweep"]
    ],
  )
  start = report["operators"]["online_pays_from"]
  lines += ["The online cache costs less " + (f"from L = {start} on." if start else "nowhere."), ""]
  lines += table(
    (
      "model",
      "T",
      "µs a token",
      "tokens / s",
      "recomputing, ms",
      "times faster",
      "over attention",
      "cache, MiB",
      "temporary, MiB",
    ),
    [
      (
        NAMES[row["name"]],
        str(row["length"]),
        number(row["microseconds"]),
        number(row["tokens_per_second"]),
        number(row["recomputing"]["microseconds"] / 1e3),
        *(
          number(row[key])
          for key in ("times_faster", "over_attention", "cache_mib", "temporary_mib")
        ),
      )
      for row in report["models"]
    ],
  )
  lines += table(
    (
      "batch of the hourglass",
      "vanilla, µs a step",
      "whitespace, µs a step",
      "whitespace / vanilla",
      "shortening factor",
      "steps of the middle",
      "cache, MiB",
    ),
    [
      (
        str(row["batch"]),
        number(row["vanilla"]["microseconds"]),
        number(row["whitespace"]["microseconds"]),
        number(row["over_vanilla"]),
        number(row["shortening_factor"]),
        number(row["middle_steps"]),
        f"{number(row['vanilla']['cache_mib'])} / {number(row['whitespace']['cache_mib'])}",
      )
      for row in report["pooling"]
    ],
  )
  text = report["text"]
  lines += [
    f"Text: {text['name']}, {text['characters']:,} characters, shortening factor "
    f"{text['shortening_factor']:.2f}.",
    "",
  ]
  lines += table(
    ("bar", "value", "", "met"),
    [
      (
        bar["what"],
        number(bar["value"]),
        f"{bar['kind']} {bar['bar']:g}",
        "yes" if bar["met"] else "no",
      )
      for bar in report["bars"]
    ],
  )
  return "\n".join(lines)


@style.applied()
def draw_figure(report, path):
  """Tokens a second by model at each length, and the hourglass's ratio by batch."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  blue, orange, gray = "C0", "C1", "0.6"
  lengths = report["settings"]["lengths"]
  figure = pyplot.figure(figsize=(13, 3.8))
  axes = figure.subplots(1, len(lengths) + 1)
  speeds = [
    speed
    for x in report["models"]
    for speed in (x["tokens_per_second"], x["recomputing"]["tokens_per_second"])
  ]
  for i, (axis, length) in enumerate(zip(axes, lengths, strict=False)):
    rows = [x for x in report["models"] if x["length"] == length]
    fast = [x["tokens_per_second"] for x in rows]
    slow = [x["recomputing"]["tokens_per_second"] for x in rows]
    places = range(len(rows))
    axis.hlines(places, slow, fast, color=gray, linewidth=1.5, zorder=1)
    for shape, color, values, label in (
      ("o", blue, fast, "with the cache"),
      ("s", orange, slow, "the window again"),
    ):
      axis.plot(values, places, shape, color=color, markersize=8, label=label)
      for x, y in zip(values, places, strict=True):
        axis.annotate(
          number(x, 2), (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8
        )
    axis.set_xscale("log")
    axis.set_xlim(min(speeds) / 3, max(speeds) * 3)
    axis.set_ylim(len(rows) - 0.5, -0.7)
    names = [NAMES[x["name"]].replace(" ", "\n") for x in rows]
    axis.set_yticks(places, names if i == 0 else [])
    axis.set_xlabel("tokens a second")
    axis.set_title(f"T = {length}")
  axes[0].legend(fontsize=8, loc="lower left")
  axis, rows = axes[-1], report["pooling"]
  heights = [x["over_vanilla"] for x in rows]
  bars = axis.bar(range(len(rows)), heights, 0.6, color=blue)
  axis.bar_label(bars, [f"{x:.2f}" for x in heights], fontsize=8)
  axis.set_xticks(range(len(rows)), [str(x["batch"]) for x in rows])
  axis.set_xlabel("rows of the batch")
  axis.axhline(1, color=gray, linewidth=1)
  axis.set_ylim(0, max(1.1, *heights) * 1.08)
  axis.set_title("hourglass: time / that without pooling")
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def describe_text(path, text):
  """Of a file, its name alone."""
  return {
    "name": "made-up words" if path is None else pathlib.Path(path).name,
    "characters": len(text),
    "shortening_factor": len(text) / float((text == SPACE).sum()),
  }


def main():
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument(
    "--out", help="path, no suffix; results/generation; nothing is written if --quick"
  )
  parser.add_argument("--text", help="a file like text8, plain or .xz; made-up words")
  parser.add_argument("--quick", action="store_true", help="small, few repetitions")
  arguments = parser.parse_args()
  timing.restart_with_quiet_allocator()

  quick, path = arguments.quick, arguments.text
  settings = QUICK if quick else SETTINGS
  text = read_text(path)
  command = "python benchmarks/generation.py" + " --quick" * quick
  command += f" --text {pathlib.Path(path).name}" if path else ""
  begin = time.perf_counter()
  report = {
    "command": command,
    "machine": timing.describe_machine() | {"command": command},
    "seed": SEED,
    "settings": settings,
    "text": describe_text(path, text),
    "operators": compare_operators(settings),
  }
  print(f"operators: {time.perf_counter() - begin:.0f} s", flush=True)
  report["models"] = compare_models(settings)
  print(f"models: {time.perf_counter() - begin:.0f} s", flush=True)
  report["pooling"] = compare_pooling(settings, text)
  report["bars"] = make_bars(report)
  report["minutes"] = (time.perf_counter() - begin) / 60
  print(make_tables(report))
  if arguments.out or not quick:
    out = pathlib.Path(arguments.out or "results/generation")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
