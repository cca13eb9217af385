"""Times a cached token against a pass over the window: operators, models, token pooling.

  python benchmarks/generation.py --parts=models --out results/generation

Float32, one token of every row a step, in a compiled scan over tokens that carries the cache; times
are of one token. Programs begin with a cache that is full except for the tokens that are measured:
random numbers, with the length set. The parts:

  operators  shift-and-sum and attention, base "cached"; "window" is one pass over all T positions
  models     6 layers of the papers' models, greedy, base "cached"
  pooling    the pooling paper's model, 2 + 8 + 2 layers with boundaries at spaces, base "no
             pooling", 12 layers. Words are random, with text8's 4.9 letters on average
  peers      `dpjax.generation.Generator` in float32 (the base) and bfloat16, beside PyTorch
             (`benchmarks/torch_generation.py`), eager and compiled, and beside the products of
             just one token: every matrix of the model once, from memory
  prompts    a prompt and the first 16 tokens by a `Generator`, which pads the prompt to a power of
             2 or the window and splits the parameters by layer, and by PyTorch in eager mode

In "peers" neither the prompt nor the first 16 tokens are timed. In both, "compiled in" is the
seconds of the first run, with all its tokens.
"""

import functools
import importlib.util
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from dpjax import config, ops
from dpjax.generation.generator import Generator
from dpjax.models.build import build_model
from dpjax.text.characters import Bytes

SIZES = dict(num_layers=6, width=512, feed_forward_width=2048, vocab_size=10_000)
QUICK = dict(num_layers=2, width=32, feed_forward_width=64, vocab_size=101)
# As in configs/: dispatcher_ptb.py, extractors_childrens_books.py, pooling_text8.py.
RELATIVE = dict(
  mixer=dict(name="relative_attention", num_heads=8), positions="none", activation="gelu"
)
MODELS: dict[str, dict[str, Any]] = {
  "Dispatcher": dict(mixer=dict(name="dispatcher")),
  "WE": dict(mixer=dict(name="we"), norm_position="pre", positions="learned"),
  "attention": dict(mixer=dict(name="attention", num_heads=8)),
  "relative attention": RELATIVE,
}
MORE_LETTERS = 3.9  # of a word, after the first


def draw(*shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def filled(cache: Any, length: int) -> Any:
  """Fills the cache with rows of `length` random tokens."""

  def fill(leaf):
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return draw(*leaf.shape) if is_float else jnp.full_like(leaf, length)

  return jax.tree.map(fill, cache) if length else cache


def scanned(step: Callable) -> Any:
  """A jitted scan of step over inputs: (params, cache, inputs) -> (cache, outputs)."""

  def scan(params, cache, inputs):
    return jax.lax.scan(functools.partial(step, params), cache, inputs)

  return jax.jit(scan, donate_argnums=1)


def loop(step: Callable, cache: Any, inputs: Any, params: Any = None) -> harness.Program:
  """Seconds per token in a scan of step: (params, cache, input) -> (cache, output)."""
  tokens = len(jax.tree.leaves(inputs)[0])
  start = time.perf_counter()
  compiled = scanned(step).lower(params, cache, inputs).compile()
  seconds = time.perf_counter() - start

  def run() -> float:
    own = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
    start = time.perf_counter()
    jax.block_until_ready(compiled(params, own, inputs))
    return (time.perf_counter() - start) / tokens

  facts = {
    "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
    "compile_seconds": seconds,
    "cache_mib": sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) / 2**20,
  }
  return harness.Program(run, facts)


def operators(quick: bool) -> Iterator[harness.Case]:
  width, heads = (32, 2) if quick else (512, 8)
  for length in (64,) if quick else (512, 4096):
    tokens, levels = min(length, 64), ops.num_levels(length)
    values, gates = draw(1, length, 1, width), jax.nn.sigmoid(draw(1, length, 1, levels))
    yield harness.Case(
      f"shift_and_sum, T {length} D {width}",
      "cached",
      {
        "cached": loop(
          lambda _, cache, x: ops.shift_and_sum_cached(*x, cache)[::-1],
          filled(ops.init_shift_and_sum_cache(1, 1, width, levels), length - tokens),
          (draw(tokens, 1, 1, 1, width), jax.nn.sigmoid(draw(tokens, 1, 1, 1, levels))),
        ),
        "window": harness.compiled(ops.shift_and_sum, values, gates),
      },
    )
    shape = heads, width // heads
    q_bthe = draw(1, length, *shape)
    yield harness.Case(
      f"causal_attention, T {length} H {heads} D {width}",
      "cached",
      {
        "cached": loop(
          lambda _, cache, x: ops.causal_attention_cached(*x, cache)[::-1],
          filled(ops.init_attention_cache(1, length, *shape), length - tokens),
          tuple(draw(3, tokens, 1, 1, *shape)),
        ),
        "window": harness.compiled(ops.causal_attention, q_bthe, q_bthe, q_bthe),
      },
    )


def build(settings: dict[str, Any]) -> tuple[Any, Any]:
  """A model with these settings, and its parameters from `init`."""
  model = build_model(config.from_dict({"model": settings}).model)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
  return model, params


def greedy(model: Any, params: Any, cache: Any, tokens: int) -> harness.Program:

  def step(params, state, _):
    cache, token_b = state
    output, cache = model.apply({"params": params}, token_b[:, None], cache, method="step")
    token_b = jnp.argmax(output.logits[:, 0], axis=-1).astype(jnp.int32)
    return (cache, token_b), token_b

  state = cache, jnp.zeros(1, jnp.int32)
  model, params = model.unstack(params)
  return loop(step, state, jnp.zeros(tokens), params)


def models(quick: bool) -> Iterator[harness.Case]:
  sizes = QUICK if quick else SIZES
  for length in (64,) if quick else (512, 4096):
    for name, settings in MODELS.items():
      model, params = build(sizes | settings | {"max_length": length})
      cache = model.init_cache(1)
      tokens = min(length, 64)
      window = jnp.arange(length, dtype=jnp.int32)[None] % sizes["vocab_size"]
      yield harness.Case(
        f"{name}, T {length}",
        "cached",
        {
          "cached": greedy(model, params, filled(cache, length - tokens), tokens),
          "window": harness.compiled(
            lambda p, tokens, m=model: m.apply({"params": p}, tokens).logits, params, window
          ),
        },
      )


def made_up_words(rows: int, length: int) -> np.ndarray:
  """[rows, length], 0 the space and letters from 1 on."""
  generator = np.random.default_rng(0)
  text = generator.integers(1, 27, rows * length)
  ends = np.cumsum(2 + generator.poisson(MORE_LETTERS, text.size)) - 1
  text[ends[ends < text.size]] = 0
  return text.reshape(rows, length).astype(np.int32)


def pooling(quick: bool) -> Iterator[harness.Case]:
  length = 64 if quick else 512
  sizes = (QUICK if quick else SIZES) | RELATIVE | {"vocab_size": 27, "max_length": length}
  layers = (1, 2, 1) if quick else (2, 8, 2)
  first, middle, last = layers
  pooled = dict(boundaries=dict(name="whitespace", space_ids=(0,)), num_layers=middle)
  pooled |= dict(first=dict(num_layers=first), last=dict(num_layers=last))
  built = {
    "no pooling": build(sizes | {"num_layers": sum(layers)}),
    "whitespace": build(sizes | pooled),
  }
  for batch in (1, 2) if quick else (1, 2, 4, 8):
    prefix, tokens = np.split(made_up_words(batch, length), 2, axis=1)
    programs = {}
    for name, (model, params) in built.items():
      stepped, params = model.unstack(params)

      def step(params, cache, token_b, model=stepped):
        output, cache = model.apply({"params": params}, token_b[:, None], cache, method="step")
        return cache, jnp.argmax(output.logits[:, 0], axis=-1)

      cache, _ = scanned(step)(params, model.init_cache(batch), jnp.asarray(prefix.T))
      programs[name] = loop(step, cache, jnp.asarray(tokens.T), params)
    yield harness.Case(f"words, {batch} rows, T {length}", "no pooling", programs)


def timed(run: Callable[[], float]) -> harness.Program:
  """A compiled program, with the seconds of its first run."""
  start = time.perf_counter()
  run()
  return harness.Program(run, {"compile_seconds": time.perf_counter() - start})


def generated(
  settings: dict, dtype: str, batch: int, prompt: int, tokens: int, *, reads_prompt: bool = False
) -> Any:
  """Seconds with a `Generator`, and its model and parameters.

  They are those of one token of all rows, or of the prompt and the first 16 tokens.
  """
  model, params = build(settings)
  model_config = config.from_dict({"model": settings}).model
  generator = Generator(model_config, config.Sample(), model, Bytes())
  text = "".join("a" if x else " " for x in made_up_words(1, prompt)[0])

  def run() -> float:
    start = time.perf_counter()
    pieces = generator.stream(params, [text] * batch, length=tokens, temperature=0.0, dtype=dtype)
    next(pieces)
    if reads_prompt:
      return time.perf_counter() - start
    start = time.perf_counter()
    count = sum(rows[0].num_tokens for rows in pieces)
    return (time.perf_counter() - start) / count

  return timed(run), model, params


def products(model: Any, params: Any, dtype: str, batch: int, tokens: int) -> harness.Program:
  """Multiplies each matrix of a model by one vector per row, in float32 or bfloat16."""
  kernels = [
    x.reshape(x.shape[0], -1).astype(dtype)
    for path, x in jax.tree.leaves_with_path(model.unstack(params)[1])
    if path[-1].key == "kernel"
  ]

  def step(kernels, carry, _):
    for kernel in kernels:
      rows = jnp.ones((batch, len(kernel)), dtype) + carry
      y = ops.dot_general(rows, kernel, (((1,), (0,)), ((), ())))
      carry = (1e-6 * y[:, :1]).astype(dtype)
    return carry, carry[:, 0]

  return loop(step, jnp.zeros((batch, 1), dtype), jnp.zeros(tokens), kernels)


def torch_program(settings: dict, *, reads_prompt: bool = False, **options: Any) -> Any:
  """The same by `benchmarks/torch_generation.py`, in a separate process."""
  if importlib.util.find_spec("torch") is None:
    return "PyTorch is not installed"
  options |= {"model": config.from_dict({"model": settings}).model.to_dict()}
  options |= {"reads_prompt": reads_prompt}
  file = pathlib.Path(__file__).with_name("torch_generation.py")
  process = harness.Process([str(file), json.dumps(options)])
  process.read()
  count = 1 if reads_prompt else options["tokens"]
  return timed(lambda: process.ask()["seconds"] / count)


def peers(quick: bool) -> Iterator[harness.Case]:
  sizes = (QUICK if quick else SIZES) | {"vocab_size": 256, "max_length": 64 if quick else 512}
  pooled = RELATIVE | dict(boundaries=dict(name="whitespace", space_ids=(32,)))
  cases = [(MODELS["attention"], "attention", *x) for x in ((1, 16), (16, 16), (1, 400), (16, 400))]
  cases += [(MODELS["attention"], "attention", *x) for x in ((4, 16), (4, 400), (64, 16))]
  of_others = {name: MODELS[name] for name in ("Dispatcher", "WE", "relative attention")}
  for name, settings in (of_others | {"pooled": pooled}).items():
    cases += [(settings, name, 1, 16), (settings, name, 16, 16)]
  for settings, name, batch, prompt in cases[:1] if quick else cases:
    tokens = 48 if quick or batch > 4 else 96
    settings = sizes | settings
    programs: dict[str, Any] = {}
    for dtype, named in (("model", "float32"), ("bfloat16", "bfloat16")):
      programs[named], model, params = generated(settings, dtype, batch, prompt, tokens)
      programs[f"products, {named}"] = products(model, params, named, batch, 16)
    for named, compiles in itertools.product(("float32", "bfloat16"), (False, True)):
      if name == "attention" and (not compiles or (batch, prompt) in ((1, 16), (16, 16))):
        label = f"PyTorch{', compiled' * compiles}, {named}"
        options = dict(batch=batch, prompt=prompt + 16, tokens=tokens - 16, dtype=named)
        programs[label] = torch_program(settings, compile=compiles, **options)
    yield harness.Case(f"{name}, batch {batch}, prompt {prompt}", "float32", programs)


def prompts(quick: bool) -> Iterator[harness.Case]:
  sizes = (QUICK if quick else SIZES) | {"vocab_size": 256, "max_length": 64 if quick else 512}
  sizes |= MODELS["attention"]
  for batch, prompt in ((2, 32),) if quick else itertools.product((1, 16), (64, 256, 400)):
    programs: dict[str, Any] = {}
    for dtype, named in (("model", "float32"), ("bfloat16", "bfloat16")):
      programs[named], *_ = generated(sizes, dtype, batch, prompt, 16, reads_prompt=True)
      options = dict(batch=batch, prompt=prompt, tokens=16, dtype=named, compile=False)
      programs[f"PyTorch, {named}"] = torch_program(sizes, reads_prompt=True, **options)
    yield harness.Case(f"attention, batch {batch}, prompt {prompt}", "float32", programs)


if __name__ == "__main__":
  PARTS = (operators, models, pooling, peers, prompts)
  harness.main(__doc__, {part.__name__: part for part in PARTS}, name="generation")
