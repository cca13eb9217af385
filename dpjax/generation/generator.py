"""Streams a trained model's continuations of prompts; `.decode` works token by token."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax.config import registry, rules, sections
from dpjax.config.schema import Sample
from dpjax.config.setting import ConfigDict
from dpjax.errors import UserError
from dpjax.generation import decode
from dpjax.models.build import build_boundaries, pad_id
from dpjax.models.language_model import LanguageModel, LanguageModelCache
from dpjax.models.stage import PoolingHints
from dpjax.ops import attention_cache
from dpjax.text.tokenizer import TextStream, Tokenizer

# Tokens per call, with cached steps and with full passes.
_CHUNK, _CHUNK_OF_PASSES = 16, 4


class Piece(NamedTuple):
  """New text of one row, "" while a character is incomplete; whether a stop token has ended it."""

  text: str
  num_tokens: int
  is_stopped: bool


class Sampling(TypedDict, total=False):
  """The settings of `Generator.stream`, for type checkers."""

  length: int | None
  temperature: float | None
  top_k: int | None
  top_p: float | None
  overflow: str | None
  dtype: str | None
  seed: int
  num_samples: int
  stop: Sequence[str]


class Generator:
  """Generates text with a model; compiles once for each number of rows and size of prompts."""

  def __init__(
    self,
    settings: ConfigDict,
    sample: Sample | ConfigDict,
    model: LanguageModel,
    tokenizer: Tokenizer,
  ):
    """Takes `config.model` and `config.sample` of a run, its model and tokenizer."""
    self._settings = settings
    self._sample = sample
    self._model = model
    self._tokenizer = tokenizer
    self._window = settings.max_length
    self._draws_boundaries = any(x.samples_in_eval for x in build_boundaries(settings))
    # A custom model may lack the attribute.
    self._has_cache = getattr(model, "has_cache", False)
    self._stepped = model
    self._by_layer = jax.jit(self._unstack) if self._has_cache else None
    self._begin = jax.jit(self._begin_rows, static_argnames="slots")
    self._resize = jax.jit(self._resize_cache, static_argnames="slots")
    self._advance = {
      is_cached: jax.jit(partial(self._advance_rows, is_cached=is_cached), donate_argnames="state")
      for is_cached in (True, False)
    }

  def stream(
    self,
    params: Mapping,
    prompts: Sequence[str],
    *,
    length: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    overflow: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    num_samples: int = 1,
    stop: Sequence[str] = (),
  ) -> Iterator[list[Piece]]:
    """Continues prompts, all of their samples at once.

    Settings that are None come from the run's configuration, `config.sample`.

    Args:
      params: the parameters of the model.
      prompts: any number of prompts of any lengths; "" starts a text.
      length: the maximum number of new tokens in a sample.
      temperature: see `dpjax.generation.sample`, also for the next two.
      top_k: 0 means all.
      top_p: in (0, 1].
      overflow: what to do, for all rows, once a text exceeds the model's window of M
        tokens. "slide": each token takes a full pass over the M tokens before it. "continue":
        the cache continues; each Dispatcher layer reaches back 2**K - 1 tokens, each Extractor
        or relative attention layer M - 1. Attention and learned positions end with the window.
        "error": raises an error.
      dtype: "model", or "bfloat16" for weights and a computation in 16 bits, which read half the
        bytes for each token; the text of a seed then differs.
      seed: the draws of sample i of prompt j depend only on (seed, i, j), not on other rows.
      num_samples: the number of continuations of each prompt.
      stop: texts of tokens that end a sample, as a tokenizer's end token does; they are not part
        of it.

    Returns:
      Lists with a `Piece` for each row, until all are complete: prompt 0's samples, prompt 1's, ...

    Raises:
      ValueError: a setting is out of range, a prompt is too long or has characters outside
        the vocabulary, or the model cannot continue beyond its window.
    """
    settings: dict[str, Any] = dict(
      length=length,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      overflow=overflow,
      dtype=dtype,
    )
    settings |= {name: getattr(self._sample, name) for name, x in settings.items() if x is None}
    rules.check_sampling(settings)
    rules.check_seed(seed)
    if type(num_samples) is not int or num_samples < 1:
      raise UserError(f"num_samples: expected an integer of at least 1, got {num_samples}")
    if not prompts or isinstance(prompts, str):
      raise UserError(f"prompts: expected at least one text, got {prompts!r}")
    for prompt in prompts:
      if not isinstance(prompt, str):
        raise UserError(f"prompt: expected a text, got {prompt!r}")
      _check_characters(self._tokenizer, prompt)
      check_prompt(self._settings, self._tokenizer, prompt, "prompt", settings)
    if settings["overflow"] == "continue" and not self._has_cache:
      raise UserError(
        "overflow: expected slide or error with a mixer that has no cache, got continue"
      )
    stop_ids = self._stop_ids(stop) | ({self._tokenizer.end_id} - {None})
    samples = [(j, i) for j in range(len(prompts)) for i in range(num_samples)]
    # Draws of other implementations depend on the number of rows.
    key = jax.random.key(seed, impl="threefry2x32")
    keys = jnp.stack([jax.random.fold_in(jax.random.fold_in(key, i), j) for j, i in samples])
    texts, start = [self._tokenizer.encode(x).tolist() for x in prompts], self._tokenizer.start_id
    begins = self._tokenizer.begins_texts
    rows = [[start] * (begins or not texts[j]) + texts[j] for j, _ in samples]
    streams = [TextStream(self._tokenizer, prompts[j]) for j, _ in samples]
    draw = dict(
      temperature=jnp.float32(settings["temperature"]),
      top_k=jnp.int32(min(settings["top_k"], self._tokenizer.vocab_size)),
      top_p=jnp.float32(settings["top_p"]),
    )
    ends = [len(row) + settings["length"] for row in rows]
    slides = settings["overflow"] == "slide"
    maker = self._in_bfloat16 if settings["dtype"] == "bfloat16" else self
    return maker._pieces(params, rows, streams, keys, draw, ends, stop_ids, slides)

  @cached_property
  def _in_bfloat16(self) -> "Generator":
    model = _with_dtype(self._model, jnp.dtype(jnp.bfloat16))
    return Generator(self._settings, self._sample, model, self._tokenizer)

  def _pieces(self, params, rows, streams, keys, draw, ends, stop_ids, slides):
    is_stopped, is_cached = [False] * len(rows), self._has_cache
    if self._by_layer is not None:
      layer_params = self._by_layer(params)  # so that single-token steps copy none
      longest = max(map(len, rows))
      size = 1 << (longest - 1).bit_length()  # few sizes, so few programs
      size = min(size, self._window) if longest <= self._window else size
      full = jax.eval_shape(lambda: self._model.init_cache(len(rows)))
      # A middle reads `size` segments and null groups at once.
      slots = self._num_slots(full, size)
      state = self._begin(params, *_pad(rows, size), keys, slots=slots)
    else:
      layer_params, state, slots, full = params, self._slide(rows), 0, None
    while active := [i for i, row in enumerate(rows) if not is_stopped[i] and len(row) < ends[i]]:
      longest = max(len(rows[i]) for i in active)
      if is_cached and slides and longest > self._window:
        is_cached, layer_params, state = False, params, self._slide(rows)
      elif is_cached:
        more = self._num_slots(full, longest)
        if more > slots:
          slots = more
          state = state._replace(cache=self._resize(state.cache, slots=more))
      state, tokens = self._advance[is_cached](layer_params, state, keys, draw)
      pieces = [Piece("", 0, has_stopped) for has_stopped in is_stopped]
      tokens = np.asarray(tokens).tolist()
      for i in active:
        # With a cache the row's state may go beyond the window, but then all rows slide next.
        end = min(ends[i], self._window + 1) if is_cached and slides else ends[i]
        new = tokens[i][: end - len(rows[i])]
        count = next((n for n, token in enumerate(new) if token in stop_ids), None)
        is_stopped[i] = count is not None
        num_used = len(new) if count is None else count + 1
        rows[i] += new[:num_used]
        text = streams[i].push(new[:count])
        if is_stopped[i] or len(rows[i]) == ends[i]:
          text += streams[i].finish()
        pieces[i] = Piece(text, num_used, is_stopped[i])
      yield pieces

  def _stop_ids(self, stop: Sequence[str]) -> set[int]:
    stop, stop_ids = [stop] if isinstance(stop, str) else stop, set()
    texts = [self._tokenizer.decode([i]) for i in range(self._tokenizer.vocab_size if stop else 0)]
    for text in stop:
      ids = {i for i, other in enumerate(texts) if other == text}
      if not ids or not text:
        raise UserError(f"stop: expected texts of one token each, got {text!r}")
      stop_ids |= ids
    return stop_ids

  def _slide(self, rows: Sequence[Sequence[int]]) -> decode.State:
    """The state of rows when the model reads only their last window."""
    windows = [row[-self._window : -1] for row in rows]
    tokens, counts = _pad(windows, self._window, pad_id(self._settings))
    lengths = np.array([*map(len, rows)], np.int32)
    window = map(jnp.asarray, (tokens, counts, lengths - 1 - counts))
    last = jnp.asarray([row[-1] for row in rows], jnp.int32)
    return decode.State(last, jnp.asarray(lengths), decode.WindowCache(*window))

  def _unstack(self, params):
    """The parameters by layer, with matrices in the dtype of the layer's products.

    Layers round them to it in any case, as when a prompt is read with the parameters themselves.
    """
    dtype = getattr(self._model, "dtype", jnp.float32)

    def cast(path, x):
      names = {getattr(key, "key", key) for key in path}
      # A frozen model has its own dtype; the residual projection of routing is float32.
      if x.ndim < 2 or names & {"frozen", "residual"}:
        return x
      return x.astype(dtype)

    # Set while this is traced; the same whatever the parameters.
    self._stepped, params = self._model.unstack(params)
    return jax.tree.map_with_path(cast, params)

  def _num_slots(self, full: LanguageModelCache, longest: int) -> int:
    """The slots of the caches for the next call; `full` are their largest shapes."""
    return attention_cache.num_slots(full, longest - 1 + _CHUNK, self._window)

  def _resize_cache(self, cache: LanguageModelCache, *, slots: int) -> LanguageModelCache:
    full = jax.eval_shape(lambda: self._model.init_cache(len(cache.length)))
    return attention_cache.resize_caches(cache, full, slots)

  def _step(self, model, params, keys) -> decode.Step:
    """A cached step of a model, whose draws are fixed for each position."""

    def step(tokens, cache, lengths):
      pooling = None
      if self._draws_boundaries:
        pooling = PoolingHints(noise=_noise(keys, cache.length, tokens.shape[1]))
      output, cache = model.apply(
        {"params": params}, tokens, cache, lengths=lengths, pooling=pooling, method="step"
      )
      return output.logits, cache

    return step

  def _full_pass(self, params, keys) -> decode.Step:
    """The same by passes over the last window, where earlier tokens keep their segments."""

    def next_logits(tokens, num_before):
      inputs = {}
      if self._draws_boundaries:
        inputs["pooling"] = PoolingHints(noise=_noise(keys, num_before, tokens.shape[1]))
      return self._model.apply({"params": params}, tokens, deterministic=True, **inputs).logits

    return decode.sliding_window(next_logits)

  def _begin_rows(self, params, prompt, lengths, keys, *, slots: int):
    cache = self._resize_cache(self._model.init_cache(len(prompt)), slots=slots)
    step = self._step(self._model, params, keys)
    return decode.begin(step, cache, prompt, lengths, chunk=self._window)

  def _advance_rows(self, params, state, keys, draw, *, is_cached: bool):
    if is_cached:
      step = self._step(self._stepped, params, keys)
      num_tokens = _CHUNK
    else:
      step = self._full_pass(params, keys)
      num_tokens = _CHUNK_OF_PASSES
    return decode.advance(step, state, keys, num_tokens=num_tokens, **draw)


def _with_dtype(x: Any, dtype: jnp.dtype) -> Any:
  """Sets the computation dtype of all modules nested in `x`."""
  if isinstance(x, tuple):
    return tuple(_with_dtype(y, dtype) for y in x)
  if not isinstance(x, nn.Module):
    return x
  names = {field.name for field in dataclasses.fields(x)} - {"parent", "name"}
  changes: Any = {name: _with_dtype(getattr(x, name), dtype) for name in names}
  if "dtype" in names:
    changes["dtype"] = dtype
  return x.clone(**changes)


def check_prompt(
  model: ConfigDict, tokenizer: Tokenizer, prompt: str, name: str, settings: Mapping
) -> None:
  """Checks that a prompt, called `name`, and its continuation fit into the model's window."""
  length, window = tokenizer.begins_texts + len(tokenizer.encode(prompt)), model.max_length
  if settings["overflow"] != "continue":
    if length > window:
      raise UserError(f"{name}: expected 1 to {window} tokens (the model's window), got {length}")
    longest = window + 1 - max(1, length)
    if settings["overflow"] == "error" and settings["length"] > longest:
      raise UserError(
        f"length: expected at most {longest} after a {name} of {length} tokens (the "
        f"model's window has {window}), got {settings['length']}; or another overflow"
      )
    return
  mixers = dict.fromkeys(x["name"] for x in sections.mixers_in(model).values())
  bounded = [x for x in mixers if not getattr(registry.mixers.component(x), "is_unbounded", True)]
  if not registry.boundaries.component(model.boundaries.name).is_unbounded:
    bounded.append(f"{model.boundaries.name} boundaries")
  if model.positions == "learned":
    bounded.append("learned positions")
  if bounded and max(1, length) + settings["length"] - 1 > window:
    raise UserError(
      f"overflow: expected slide or error with {' and '.join(bounded)}, which ends with "
      f"the model's window of {window} tokens, got continue"
    )


def _check_characters(tokenizer: Tokenizer, prompt: str) -> None:
  unknown = tokenizer.unknown_id
  if unknown is None or unknown not in tokenizer.encode(prompt):
    return
  words = prompt if tokenizer.name == "characters" else prompt.split()
  outside = dict.fromkeys(word for word in words if unknown in tokenizer.encode(word))
  got = " ".join(map(repr, outside)) or repr(prompt)
  raise UserError(f"prompt: expected characters of the vocabulary, got {got}")


def _pad(rows: Sequence[Sequence[int]], size: int, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Rows padded to one size, and their lengths."""
  padded = np.full((len(rows), size), fill, np.int32)
  for i, row in enumerate(rows):
    padded[i, : len(row)] = row
  return padded, np.array([*map(len, rows)], np.int32)


def _noise(keys: jax.Array, num_before: jax.Array, length: int) -> jax.Array:
  """[B, T] in (0, 1), determined by a row's key and the position in the row."""

  def at(key, position):
    # Token 0 is not drawn, so no token is drawn from this key.
    key = jax.random.fold_in(jax.random.fold_in(key, 0), position)
    return jax.random.uniform(key, (), minval=2.0**-24)

  position_bt = num_before[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
  return jax.vmap(jax.vmap(at, in_axes=(None, 0)))(keys, position_bt)
