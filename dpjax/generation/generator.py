"""Streams a trained model's continuations of prompts; `.decode` works token by token."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import PRNGKeyArray, PyTree

from dpjax.config import rules, schema
from dpjax.config.schema import Sample
from dpjax.config.setting import ConfigDict
from dpjax.errors import UserError
from dpjax.generation import decode
from dpjax.generation.precision import only_cast, with_dtype
from dpjax.generation.sample_text import SampleText
from dpjax.layers.common import Params
from dpjax.models.build import build_boundaries, pad_id
from dpjax.models.language_model import LanguageModel, LanguageModelCache
from dpjax.models.stage import PoolingHints
from dpjax.ops import attention_cache
from dpjax.text.tokenizer import Tokenizer

# Tokens per call, with cached steps and with full passes.
_CHUNK = 16
_CHUNK_OF_PASSES = 4


class Sampling(TypedDict, total=False):
  """The keywords of `Generator.stream`, for type checkers."""

  seed: int
  num_samples: int
  stop: str | Sequence[str]
  length: int | None
  temperature: float | None
  top_k: int | None
  top_p: float | None
  overflow: str | None
  dtype: str | None


class Piece(NamedTuple):
  """New text of one row, and whether its end token or a stop text has ended it.

  The text is "" while a character is incomplete, or while it may be the beginning of a stop.
  """

  text: str
  num_tokens: int
  is_stopped: bool


@dataclasses.dataclass
class _Row:
  """A sample so far.

  Attributes:
    tokens: those of the prompt and the new ones.
    max_tokens: the maximum number of tokens.
    text: turns new tokens into text.
  """

  tokens: list[int]
  max_tokens: int
  text: SampleText

  @property
  def is_complete(self) -> bool:
    return self.text.is_stopped or len(self.tokens) == self.max_tokens

  def add(self, tokens: list[int]) -> Piece:
    """Adds new tokens, up to the end of the sample."""
    text, num_used = self.text.push(tokens)
    self.tokens += tokens[:num_used]
    if self.is_complete:
      text += self.text.finish()
    return Piece(text, num_used, self.text.is_stopped)


class _Unstacked(struct.PyTreeNode):
  """A model with unstacked layers, and its parameters."""

  model: LanguageModel = struct.field(pytree_node=False)
  params: Params


class _Stepper(NamedTuple):
  """How a model reads single tokens.

  Attributes:
    model: the model with unstacked layers.
    by_layer: maps the parameters to those of `model`. Those that its steps only read in the dtype
      of the model are in that dtype, so that steps read fewer bytes and compute the same.
  """

  model: LanguageModel
  by_layer: Callable[[Params], Params]


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
    self._stepper: _Stepper | None = None
    self._begin = jax.jit(self._begin_rows, static_argnames="slots")
    self._resize = jax.jit(self._resize_cache, static_argnames="slots")
    self._advance = {
      is_cached: jax.jit(function, donate_argnames="state")
      for is_cached, function in ((True, self._advance_steps), (False, self._advance_passes))
    }

  def stream(
    self,
    params: Params,
    prompts: Sequence[str],
    *,
    seed: int = 0,
    num_samples: int = 1,
    stop: str | Sequence[str] = (),
    **settings: Any,
  ) -> Iterator[list[Piece]]:
    """Continues prompts, all of their samples at once.

    Args:
      params: the parameters of the model.
      prompts: any number of prompts of any lengths; "" starts a text.
      seed: the draws of sample i of prompt j depend only on (seed, i, j), not on other rows.
      num_samples: the number of continuations of each prompt.
      stop: a text, or several, that end a sample where one of them first appears among its new
        text; it is not part of the sample. A stop may end within a token or span several.
      **settings: in place of those of the run's configuration, `config.sample`; None takes that.
        length: the maximum number of new tokens in a sample.
        temperature, top_k, top_p: see `dpjax.generation.sample`.
        overflow: what to do, for all rows, once a text exceeds the model's window of M
          tokens. "slide": each token takes a full pass over the M tokens before it. "continue":
          the cache continues; each Dispatcher layer reaches back 2**K - 1 tokens, each Extractor
          or relative attention layer M - 1. Attention and learned positions end with the window.
          "error": raises an error.
        dtype: "model", or "bfloat16" for weights and a computation in 16 bits, which read half the
          bytes for each token; the text of a seed then differs.

    Returns:
      Lists with a `Piece` for each row, until all are complete: prompt 0's samples, prompt 1's, ...

    Raises:
      ValueError: a setting is out of range, a prompt is too long or has characters outside
        the vocabulary, or the model cannot continue beyond its window.
    """
    sample = self._sample_with(settings)
    rules.check_seed(seed)
    if type(num_samples) is not int or num_samples < 1:
      raise UserError(f"num_samples: expected an integer of at least 1, got {num_samples}")
    if not prompts or isinstance(prompts, str | bytes):
      raise UserError(f"prompts: expected at least one text, got {prompts!r}")
    for prompt in prompts:
      if not isinstance(prompt, str):
        raise UserError(f"prompt: expected a text, got {prompt!r}")
      _check_characters(self._tokenizer, prompt)
      self.check_prompt(prompt, sample)
    stops = _stop_texts(stop)
    rows = []
    for prompt in prompts:
      tokens = self._tokenizer.encode(prompt).tolist()
      if self._tokenizer.begins_texts or not tokens:
        tokens = [self._tokenizer.start_id, *tokens]
      for _ in range(num_samples):
        text = SampleText(self._tokenizer, prompt, stops)
        rows.append(_Row([*tokens], len(tokens) + sample.length, text))
    keys = _row_keys(seed, len(prompts), num_samples)
    generator = self._in_bfloat16 if sample.dtype == "bfloat16" else self
    return generator._pieces(params, rows, keys, sample)

  def check_prompt(self, prompt: str, sample: Sample | ConfigDict, name: str = "prompt") -> None:
    """Raises a `UserError` unless a prompt and its continuation fit into the model's window.

    Args:
      prompt: the text to continue.
      sample: the length of the continuation, and what to do beyond the window.
      name: what messages call the prompt.
    """
    window = self._window
    length = len(self._tokenizer.encode(prompt))
    if self._tokenizer.begins_texts:
      length += 1
    if sample.overflow != "continue":
      if length > window:
        raise UserError(f"{name}: expected 1 to {window} tokens (the model's window), got {length}")
      longest = window + 1 - max(1, length)
      if sample.overflow == "error" and sample.length > longest:
        raise UserError(
          f"length: expected at most {longest} after a {name} of {length} tokens (the "
          f"model's window has {window}), got {sample.length}; or another overflow"
        )
      return
    if not self._has_cache:
      raise UserError("overflow: expected slide or error, as the model has no cache, got continue")
    bounded = getattr(self._model, "bounded_parts", ())
    if bounded and max(1, length) + sample.length - 1 > window:
      raise UserError(
        f"overflow: expected slide or error, as {' and '.join(bounded)} cannot go beyond the "
        f"model's window of {window} tokens, got continue"
      )

  def _sample_with(self, settings: Mapping[str, Any]) -> Sample:
    """The run's settings, those of a call in their places."""
    names = [name for name in schema.settings_of(Sample) if name != "prompt"]
    for name in settings:
      if name not in names:
        raise TypeError(f"stream() got an unexpected keyword argument {name!r}")
    sample = {name: getattr(self._sample, name) for name in names}
    sample |= {name: value for name, value in settings.items() if value is not None}
    rules.check_sampling(sample)
    return Sample(**sample)

  @cached_property
  def _in_bfloat16(self) -> "Generator":
    model = with_dtype(self._model, jnp.bfloat16)
    return Generator(self._settings, self._sample, model, self._tokenizer)

  def _pieces(
    self,
    params: Params,
    rows: Sequence[_Row],
    keys: PRNGKeyArray,
    sample: Sample,
  ) -> Iterator[list[Piece]]:
    draw = {
      "temperature": jnp.float32(sample.temperature),
      "top_k": jnp.int32(min(sample.top_k, self._tokenizer.vocab_size)),
      "top_p": jnp.float32(sample.top_p),
    }
    slides = sample.overflow == "slide"
    is_cached = self._has_cache
    if is_cached:
      longest = max(len(row.tokens) for row in rows)
      size = 1 << (longest - 1).bit_length()  # few sizes, so few programs
      if longest <= self._window:
        size = min(size, self._window)
      full = self._full_cache(len(rows))
      # A stage's layers may read `size` segments and null groups at once.
      slots = self._num_slots(full, size)
      prompts, lengths = _pad([row.tokens for row in rows], size)
      state = self._begin(params, prompts, lengths, keys, slots=slots)
      step_params = self._by_layer(params)
    else:
      full = ()
      slots = 0
      state = self._slide(rows)
      step_params = params
    while active := [row for row in rows if not row.is_complete]:
      longest = max(len(row.tokens) for row in active)
      if is_cached and slides and longest > self._window:
        is_cached = False
        state = self._slide(rows)
        step_params = params
      elif is_cached:
        more = self._num_slots(full, longest)
        if more > slots:
          slots = more
          state = state._replace(cache=self._resize(state.cache, slots=more))
      state, tokens = self._advance[is_cached](step_params, state, keys, draw)
      pieces = []
      for row, new in zip(rows, np.asarray(tokens).tolist(), strict=True):
        if row.is_complete:
          pieces.append(Piece("", 0, row.text.is_stopped))
          continue
        # With a cache the row's state may go beyond the window, but then all rows slide next.
        most = min(row.max_tokens, self._window + 1) if is_cached and slides else row.max_tokens
        pieces.append(row.add(new[: most - len(row.tokens)]))
      yield pieces

  def _slide(self, rows: Sequence[_Row]) -> decode.State:
    """The state of rows when the model reads only their last window."""
    windows = [row.tokens[-self._window : -1] for row in rows]
    tokens, counts = _pad(windows, self._window, pad_id(self._settings))
    lengths = np.array([len(row.tokens) for row in rows], np.int32)
    last = np.array([row.tokens[-1] for row in rows], np.int32)
    num_before = jnp.asarray(lengths - 1 - counts)
    window = decode.WindowCache(jnp.asarray(tokens), jnp.asarray(counts), num_before)
    return decode.State(jnp.asarray(last), jnp.asarray(lengths), window)

  def _by_layer(self, params: Params) -> Params:
    """The parameters as single-token steps read them, without copying any in a step."""
    if self._stepper is None:
      self._stepper = self._make_stepper(params)
    return self._stepper.by_layer(params)

  def _make_stepper(self, params: Params) -> _Stepper:
    """Asks the model which parameters it casts, without computing anything."""

    def unstack(params: Params) -> _Unstacked:
      model, params = self._model.unstack(params)
      return _Unstacked(model, params)

    shapes = jax.eval_shape(unstack, params)
    dtype = jnp.dtype(getattr(self._model, "dtype", jnp.float32))
    is_cast = jax.tree.map(lambda _: False, shapes.params)
    if dtype != jnp.float32:  # the dtype of the parameters

      def step(params, token, cache, keys):
        return self._step(shapes.model, params, keys)(token, cache, None)

      keys = jax.eval_shape(lambda: _row_keys(0, 1, 1))
      token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
      is_cast = only_cast(step, shapes.params, token, self._full_cache(1), keys, dtype=dtype)

    def by_layer(params: Params) -> Params:
      params = unstack(params).params
      return jax.tree.map(lambda x, is_cast: x.astype(dtype) if is_cast else x, params, is_cast)

    return _Stepper(shapes.model, jax.jit(by_layer))

  def _full_cache(self, batch: int) -> PyTree[jax.ShapeDtypeStruct]:
    """The shapes of the cache of B rows, with all slots."""
    return jax.eval_shape(lambda: self._model.init_cache(batch))

  def _num_slots(self, full: PyTree[jax.ShapeDtypeStruct], longest: int) -> int:
    """The slots of the caches for the next call."""
    return attention_cache.num_slots(full, longest - 1 + _CHUNK, self._window)

  def _resize_cache(self, cache: LanguageModelCache, *, slots: int) -> LanguageModelCache:
    return attention_cache.resize_caches(cache, self._full_cache(len(cache.length)), slots)

  def _step(self, model: LanguageModel, params: Params, keys: PRNGKeyArray) -> decode.Step:
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

  def _full_pass(self, params: Params, keys: PRNGKeyArray) -> decode.Step:
    """The same by passes over the last window, where earlier tokens keep their segments."""

    def next_logits(tokens, num_before):
      inputs = {}
      if self._draws_boundaries:
        inputs["pooling"] = PoolingHints(noise=_noise(keys, num_before, tokens.shape[1]))
      return self._model.apply({"params": params}, tokens, deterministic=True, **inputs).logits

    return decode.sliding_window(next_logits)

  def _begin_rows(self, params, prompt, lengths, keys, *, slots: int) -> decode.State:
    cache = self._resize_cache(self._model.init_cache(len(prompt)), slots=slots)
    step = self._step(self._model, params, keys)
    return decode.begin(step, cache, prompt, lengths, chunk=self._window)

  def _advance_steps(self, params, state, keys, draw) -> tuple[decode.State, jax.Array]:
    assert self._stepper is not None  # `params` are from `_by_layer`.
    step = self._step(self._stepper.model, params, keys)
    return decode.advance(step, state, keys, num_tokens=_CHUNK, **draw)

  def _advance_passes(self, params, state, keys, draw) -> tuple[decode.State, jax.Array]:
    step = self._full_pass(params, keys)
    return decode.advance(step, state, keys, num_tokens=_CHUNK_OF_PASSES, **draw)


def _check_characters(tokenizer: Tokenizer, prompt: str) -> None:
  unknown = tokenizer.unknown_id
  if unknown is None or unknown not in tokenizer.encode(prompt):
    return
  words = prompt if tokenizer.name == "characters" else prompt.split()
  outside = dict.fromkeys(word for word in words if unknown in tokenizer.encode(word))
  got = " ".join(map(repr, outside)) or repr(prompt)
  raise UserError(f"prompt: expected characters of the vocabulary, got {got}")


def _stop_texts(stop: str | Sequence[str]) -> list[str]:
  stops = [stop] if isinstance(stop, str) or not isinstance(stop, Sequence) else list(stop)
  if isinstance(stop, bytes):  # whose parts are numbers
    raise UserError(f"stop: expected texts, got {stop!r}")
  for text in stops:
    if not isinstance(text, str) or not text:
      raise UserError(f"stop: expected texts that are not empty, got {text!r}")
  return stops


def _pad(rows: Sequence[Sequence[int]], size: int, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Rows padded to one size, and their lengths."""
  padded = np.full((len(rows), size), fill, np.int32)
  for i, row in enumerate(rows):
    padded[i, : len(row)] = row
  return padded, np.array([len(row) for row in rows], np.int32)


def _row_keys(seed: int, num_prompts: int, num_samples: int) -> PRNGKeyArray:
  """A key for each row, which depends on neither number."""
  # Draws of other implementations depend on the number of rows.
  key = jax.random.key(seed, impl="threefry2x32")
  keys = []
  for j in range(num_prompts):
    for i in range(num_samples):
      keys.append(jax.random.fold_in(jax.random.fold_in(key, i), j))
  return jnp.stack(keys)


def _noise(keys: jax.Array, num_before: jax.Array, length: int) -> jax.Array:
  """[B, T] in (0, 1), determined by a row's key and the position in the row."""

  def at(key, position):
    # Token 0 is not drawn, so no token is drawn from this key.
    key = jax.random.fold_in(jax.random.fold_in(key, 0), position)
    return jax.random.uniform(key, (), minval=2.0**-24)

  position_bt = num_before[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
  return jax.vmap(jax.vmap(at, in_axes=(None, 0)))(keys, position_bt)
