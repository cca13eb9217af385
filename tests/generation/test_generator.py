"""Texts of small models that were not trained, within their windows and beyond them."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import dpjax
from dpjax import models
from dpjax.config import registry, schema
from dpjax.generation import generator as generator_lib
from dpjax.generation.generator import Generator, Sampling, _noise
from dpjax.models import PoolingHints
from dpjax.models.build import build_model, pad_id
from dpjax.ops import attention_cache
from dpjax.text.characters import Bytes
from dpjax.text.tokenizer import train_tokenizer
from tests import helpers
from tests.generation.test_sample_text import first_stop

ONE = dict(num_layers=1)
POOLED = dict(mixer="relative_attention", positions="none", first=ONE, last=ONE, **ONE)
WINDOW, LETTERS = 21, "abcdefg hij\n"


def make(tokenizer=None, seed=2, mixer="dispatcher", boundaries="none", sample=False, **changes):
  """A generator and parameters for it, of weights so large that it is sure of itself.

  `sample` is a setting of some boundaries; without a seed there are no parameters.
  """
  tokenizer = tokenizer or train_tokenizer("characters", [LETTERS])
  config = dpjax.config.default()
  config.model.mixer = helpers.component(registry.mixers, mixer, num_heads=3, head_width=4)
  config.model.boundaries = helpers.component(
    registry.boundaries, boundaries, space_ids=tokenizer.space_ids, sample=sample
  )
  usual = dict(num_layers=2, width=12, feed_forward_width=20, max_length=WINDOW)
  config.model.update(dict(vocab_size=tokenizer.vocab_size, **usual) | changes)
  model, params = build_model(config.model), {}
  if seed is not None:
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 3), jnp.int32))["params"]
    params = jax.tree.map(lambda x: 6 * x, params)
  return Generator(config.model, dpjax.config.Sample(), model, tokenizer), params


def write(maker, prompts, **settings) -> list[str]:
  generator, params = maker
  rows = zip(*generator.stream(params, prompts, **settings), strict=True)
  return ["".join(piece.text for piece in row) for row in rows]


@functools.cache
def pass_by_hand(generator):
  """The logits after the tokens [1, N], padded to a window, the first of them at a place."""
  model, reach = generator._model, generator._window

  @jax.jit
  def call(params, tokens, count, position, keys):
    noise = _noise(keys, position, reach)
    pooling = PoolingHints(noise=noise) if generator._draws_boundaries else None
    return model.apply({"params": params}, tokens, pooling=pooling).logits[0, count - 1]

  return call


@functools.cache
def step_by_hand(generator):
  """The logits after one more token, with the cache of those before."""
  model = generator._model

  @jax.jit
  def call(params, token, cache, keys):
    noise = _noise(keys, cache.length, 1)
    pooling = PoolingHints(noise=noise) if generator._draws_boundaries else None
    output, cache = model.apply({"params": params}, token, cache, pooling=pooling, method="step")
    return output.logits[0, 0], cache

  return call


def by_hand(
  maker, prompt: str, length: int, *, temperature: float, key: jax.Array, goes_on: bool
) -> tuple[list[int], list[bool]]:
  """A row alone, token by token: a full pass over the last window for each.

  Or, where the cache goes on, a step of one token for each, those of the prompt too.

  Returns:
    The tokens, and for each whether another one was almost as good.
  """
  generator, params = maker
  tokenizer = generator._tokenizer
  row = tokenizer.encode(prompt).tolist() or [tokenizer.start_id]
  reach, before, is_close = generator._window, len(row), []
  if goes_on:
    cache = generator._model.init_cache(1)
    for token in row[:-1]:
      _, cache = step_by_hand(generator)(params, np.array([[token]]), cache, key[None])
  for _ in range(length):
    seen = row[-reach:]
    if goes_on:
      last = np.array([row[-1:]])
      logits, cache = step_by_hand(generator)(params, last, cache, key[None])
    else:
      # Behind what is real stands anything: the model is causal.
      tokens = np.zeros((1, reach), np.int32)
      tokens[0, : len(seen)] = seen
      position = np.array([len(row) - len(seen)], np.int32)
      logits = pass_by_hand(generator)(params, tokens, len(seen), position, key[None])
    if temperature:
      noise = jax.random.gumbel(jax.random.fold_in(key, len(row)), logits.shape)
      logits = logits / temperature + noise
    best, second = np.sort(np.asarray(logits))[:-3:-1]
    is_close.append(bool(best - second < 1e-3))
    row.append(int(jnp.argmax(logits)))
  return row[before:], is_close


@pytest.fixture(scope="module")
def dispatcher():
  return make()


def test_a_character_that_stays_incomplete_is_shown_at_the_end():
  maker = make(Bytes(), mixer="me")
  # Nothing but the first byte of two is ever drawn.
  maker[1]["logits"]["bias"] = maker[1]["logits"]["bias"].at[0xC3].add(1e4)
  assert write(maker, ["a"], length=3) == ["\ufffd" * 3]


def test_text_comes_as_it_is_made(dispatcher):
  generator, params = dispatcher
  settings = dict(length=20, seed=4, overflow="continue")
  pieces = [chunk[0] for chunk in generator.stream(params, ["abc"], **settings)]
  assert len(pieces) > 1 and all(piece.text for piece in pieces)
  assert sum(piece.num_tokens for piece in pieces) == 20


def test_prompts_of_a_bucket_and_other_settings_compile_nothing(dispatcher):
  generator, _ = dispatcher
  write(dispatcher, ["abcde"], length=5)
  before = generator._begin._cache_size(), generator._advance[True]._cache_size()
  for prompt, settings in itertools.product(
    ["abcdef", "abcdefg "], [dict(temperature=0.0), dict(top_k=3), dict(top_p=0.6), dict(length=2)]
  ):
    write(dispatcher, [prompt], **dict(length=3, seed=8) | settings)
  after = generator._begin._cache_size(), generator._advance[True]._cache_size()
  assert after == before


WRONG = [
  (dict(prompts=["abc\u00e4x"]), "prompt: expected characters of the vocabulary, got '\u00e4' "),
  (dict(prompts=["a" * 22]), r"prompt: expected 1 to 21 tokens .* got 22"),
  (dict(prompts=[]), "prompts: expected at least one text, got"),
  (dict(prompts="abc"), "prompts: expected at least one text, got 'abc'"),
  (dict(prompts=b"abc"), "prompts: expected at least one text, got b'abc'"),
  (dict(prompts=["abc", 5]), "prompt: expected a text, got 5"),
  (dict(num_samples=0), "num_samples: expected an integer of at least 1, got 0"),
  (dict(seed=2**32), "seed: expected below"),
  *(
    (dict(stop=x), "stop: expected texts that are not empty, got ") for x in ("", ["a", ""], [3], 3)
  ),
  (dict(stop=b"a"), "stop: expected texts, got b'a'"),
  (dict(top_p=0.0), "top_p: expected above 0, got 0.0"),
  (dict(length=20, overflow="error"), "length: expected at most 19 after a prompt of"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_input_is_refused_at_once(dispatcher, settings, message):
  generator, params = dispatcher
  settings = {"prompts": ["abc"], **settings}
  with pytest.raises(ValueError, match=message):
    generator.stream(params, **settings)  # before the first token is asked for


def test_only_settings_of_samples_are_taken(dispatcher):
  generator, params = dispatcher
  for name in ("lenght", "prompt"):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
      generator.stream(params, ["abc"], **{name: "a"})


def test_models_that_end_with_their_window_say_so():
  last = dict(mixer=dpjax.config.mixer("attention"))
  pooled = dict(boundaries="fixed", last=last, positions="learned")
  for settings, what in (
    (dict(mixer="attention"), "SelfAttention"),
    (dict(mixer="we", positions="learned"), "learned positions"),
    (dict(mixer="dispatcher", **pooled), "SelfAttention and learned positions"),
  ):
    generator, params = make(**settings, seed=None)
    message = f"overflow: expected slide or error, as {what} cannot go beyond the"
    with pytest.raises(ValueError, match=message):
      generator.stream(params, ["abc"], length=20, overflow="continue")
    generator.stream(params, ["abc"], length=19, overflow="continue")
  # The model itself is asked, whatever its settings are called.
  attention = make(mixer="attention", seed=None)[0]._model
  generator = Generator(
    make(seed=None)[0]._settings, dpjax.config.Sample(), attention, generator._tokenizer
  )
  with pytest.raises(ValueError, match="error, as SelfAttention cannot go beyond"):
    generator.stream(params, ["abc"], length=20, overflow="continue")
  generator, params = without_cache()
  with pytest.raises(
    ValueError, match="overflow: expected slide or error, as the model has no cache"
  ):
    generator.stream(params, ["abc"], length=3, overflow="continue")


def test_from_a_folder_with_the_settings_of_the_run(finished):
  workdir, run, _ = finished
  text = dpjax.load(workdir).generate("the ")[0]
  settings = dict(run.config.sample)
  assert settings.pop("prompt") and settings["length"] == len(text) == 9
  assert [text] == run.generate("the ") == run.generate("the ", **settings)
  assert text == "".join(x[0].text for x in run.stream("the ", length=9))
  first, second = run.generate(["the ", "a"])
  assert [text] == first and len(second) == 1


class Averages(dpjax.layers.Mixer):
  """A mixer without a cache: the mean of all positions so far."""

  @nn.compact
  def mix(self, inputs, context, cache):
    sums = jnp.cumsum(inputs, axis=1)
    counts = jnp.arange(1, inputs.shape[1] + 1, dtype=inputs.dtype)[None, :, None]
    return nn.Dense(inputs.shape[2])(sums / counts), cache


def without_cache():
  generator, params = make()
  model = generator._model
  stack = model.core.layers
  block = stack.blocks[0].clone(mixer=Averages(max_length=WINDOW))
  model = model.clone(core=model.core.clone(layers=stack.clone(blocks=(block,))))
  params = model.init(jax.random.key(3), jnp.zeros((1, 3), jnp.int32))["params"]
  params = jax.tree.map(lambda x: 6 * x, params)
  return Generator(generator._settings, generator._sample, model, generator._tokenizer), params


def draw_case(maker, rng) -> dict:
  """Prompts of any lengths, and settings that these allow."""
  mixer = maker[0]._settings.mixer.name
  beyond = rng.choice(["slide", "slide", "slide", "continue", "error"])
  if not maker[0]._has_cache and beyond == "continue":
    beyond = "slide"
  sizes, count = rng.integers(0, WINDOW + 1, size=3).tolist(), 1
  if rng.integers(4) == 0:
    sizes, count = sizes[:1], 3
  longest = WINDOW + 1 - max(1, *sizes)
  is_unbounded = beyond == "slide" or (beyond == "continue" and mixer != "attention")
  length = int(rng.integers(1, 2 * WINDOW + 4 if is_unbounded else longest + 1))
  prompts = ["".join(rng.choice(list(LETTERS), size)) for size in sizes]
  return dict(
    prompts=prompts,
    num_samples=count,
    length=length,
    overflow=str(beyond),
    temperature=float(rng.choice([0.0, 0.7, 1.6])),
    seed=int(rng.integers(100)),
  )


def check_case(maker, case: dict, rng) -> None:
  """Each row is the row alone, up to a token that another one almost was."""
  generator, params = maker
  decode, rows = generator._tokenizer.decode, []
  settings = dict(temperature=case["temperature"], goes_on=case["overflow"] == "continue")
  for j, prompt in enumerate(case["prompts"]):
    for i in range(case["num_samples"]):
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(case["seed"]), i), j)
      rows.append((prompt, *by_hand(maker, prompt, case["length"], key=key, **settings)))
  # Some of what the longest prompt's row, or another, writes at first ends rows.
  _, written, _ = max(rows, key=lambda row: len(row[0])) if rng.integers(3) else rows[0]
  begins = rng.choice(min(5, len(written)), rng.integers(0, 3))
  stop = [decode(written[i : i + rng.integers(1, 4)]) for i in begins]
  chunks = generator.stream(params, **case, stop=stop)
  for (_, tokens, is_close), pieces in zip(rows, zip(*chunks, strict=True), strict=True):
    text = decode(tokens)
    found = first_stop(text, stop)
    certain, used = found or (len(tokens), len(tokens))
    text_of_row = "".join(piece.text for piece in pieces)
    if any(is_close[:used]):
      certain = min(certain, is_close.index(True))
      text_of_row = text_of_row[:certain]
    else:
      ends = sum(piece.num_tokens for piece in pieces), pieces[-1].is_stopped
      assert ends == (used, found is not None), (case, stop)
    assert text_of_row == text[:certain], (case, stop)


CASES = {
  "dispatcher": None,
  **{name: dict(mixer=name) for name in ("attention", "he")},
  "relative_attention": dict(mixer="relative_attention", positions="none"),
  "words": dict(boundaries="whitespace", **POOLED),
  "drawn": dict(boundaries="gumbel", sample=True, **POOLED),
  "routing": dict(boundaries="routing", **POOLED),
  "no cache": None,
}


@pytest.mark.parametrize("name", [helpers.slow_unless(x == "dispatcher", x) for x in CASES])
def test_a_row_is_the_row_alone(name, dispatcher, monkeypatch):
  number = [*CASES].index(name)
  rng = np.random.default_rng(5 + number)
  if name == "dispatcher":
    # The longer row stops in the chunk in which it would leave the window.
    case = dict(prompts=["abc hij def gab cd", "abc"], num_samples=1, length=30, overflow="slide")
    for seed in range(3):
      check_case(dispatcher, dict(**case, temperature=1.0, seed=seed), rng)
    maker = dispatcher
  else:
    monkeypatch.setattr(generator_lib, "_CHUNK", (16, 5, 7)[number % 3])
    monkeypatch.setattr(generator_lib, "_CHUNK_OF_PASSES", (4, 3, 1)[number % 3])
    monkeypatch.setattr(attention_cache, "_SMALL_BYTES", 0)
    monkeypatch.setattr(attention_cache, "_LEAST_SLOTS", 4)
    maker = without_cache() if name == "no cache" else make(**CASES[name])
  for _ in range(8):
    check_case(maker, draw_case(maker, rng), rng)


def test_a_text_depends_on_neither_the_default_random_keys_nor_the_other_rows(dispatcher):
  draw = dict(length=12, temperature=1.0, seed=3)
  both = write(dispatcher, ["abc hij", "abc"], **draw)
  with jax.default_prng_impl("rbg"):
    assert write(dispatcher, ["abc hij", "abc"], **draw) == both
    assert write(dispatcher, ["abc hij"], **draw) == both[:1]


def is_attention(x):
  return isinstance(x, attention_cache.AttentionCache)


@pytest.mark.parametrize(
  "changes",
  [
    dict(mixer="attention", num_layers=1),
    helpers.slow_unless(False, dict(boundaries="whitespace", **POOLED)),
  ],
  ids=["attention", "words"],
)
def test_a_large_cache_grows_with_its_rows(changes, monkeypatch):
  # The second fills what a middle holds: a padded prompt and its null group.
  calls = [
    (["abc", "ab cdefg"], dict(length=19, overflow="error", temperature=0.7)),
    (["ab cdefghi"], dict(length=5, overflow="error")),
  ]
  maker = make(max_length=29, **changes)
  expected, slots = [write(maker, prompts, **settings) for prompts, settings in calls], []
  monkeypatch.setattr(generator_lib, "_CHUNK", 4)
  monkeypatch.setattr(attention_cache, "_SMALL_BYTES", 0)
  monkeypatch.setattr(attention_cache, "_LEAST_SLOTS", 4)
  generator, params = make(max_length=29, **changes)
  advance = generator._advance[True]

  def spy(params, state, *rest):
    caches = jax.tree.leaves(state.cache, is_leaf=is_attention)
    slots.append(next(x.slots for x in caches if is_attention(x)))
    return advance(params, state, *rest)

  generator._advance[True] = spy
  texts = [write((generator, params), prompts, **settings) for prompts, settings in calls]
  assert texts == expected and slots[:5] == [16, 16, 29, 29, 29]


class Fading(dpjax.layers.Mixer):
  """Sums of what came before, whose decay of almost 1 is float32 whatever the dtype."""

  @nn.compact
  def mix(self, inputs, context, cache):
    width = inputs.shape[2]
    decay = self.param("decay", nn.initializers.constant(0.999), (width, 1), jnp.float32)
    values = nn.Dense(width, dtype=self.dtype, name="values")(inputs).astype(jnp.float32)

    def add(state_bd, value_bd):
      state_bd = decay[None, :, 0] * state_bd + value_bd
      return state_bd, state_bd

    start = jnp.zeros_like(values[:, 0]) if cache is None else cache
    end, sums = jax.lax.scan(add, start, values.swapaxes(0, 1))
    sums = (1 - decay[None, None, :, 0]) * sums.swapaxes(0, 1)
    return nn.Dense(width, dtype=self.dtype, name="out")(sums.astype(self.dtype)), end

  def init_cache(self, batch, width):
    return jnp.zeros((batch, width))


def test_only_what_a_layer_casts_is_rounded():
  generator, _ = make(seed=None, dtype="bfloat16")
  stack = generator._model.core.layers
  block = stack.blocks[0].clone(mixer=Fading(max_length=WINDOW, dtype=jnp.bfloat16))
  core = models.Hourglass(stack.clone(blocks=(block,)))
  model = generator._model.clone(core=core)
  tokens = np.random.default_rng(3).integers(12, size=(2, WINDOW))
  params = jax.jit(model.init)(jax.random.key(1), tokens)["params"]
  generator = Generator(generator._settings, generator._sample, model, generator._tokenizer)
  by_layer = generator._by_layer(params)
  for layer in by_layer["layers"].values():
    assert layer["mixer"]["decay"].dtype == jnp.float32
    for name in ("values", "out"):
      assert layer["mixer"][name]["kernel"].dtype == jnp.bfloat16
  step = jax.jit(functools.partial(generator._stepper.model.apply, method="step"))
  cache, logits = model.init_cache(2), []
  for t in range(WINDOW):
    output, cache = step({"params": by_layer}, tokens[:, t : t + 1], cache)
    logits.append(output.logits)
  expected = jax.jit(model.apply)({"params": params}, tokens).logits.astype(jnp.float32)
  got = jnp.concatenate(logits, axis=1).astype(jnp.float32)
  np.testing.assert_allclose(got, expected, rtol=0, atol=0.03 * abs(expected).max())


@pytest.mark.parametrize(
  "settings",
  [dict(mixer=name, **ONE) for name in helpers.builtin(registry.mixers)]
  + [dict(boundaries=name, **POOLED) for name in ("gumbel", "routing")],
  ids=[*helpers.builtin(registry.mixers), "gumbel", "routing"],
)
def test_matrices_are_stored_in_bfloat16(settings):
  generator, _ = make(seed=None, dtype="bfloat16", **settings)
  tokens = jnp.zeros((1, 3), jnp.int32)
  params = jax.eval_shape(generator._model.init, jax.random.key(0), tokens)["params"]
  by_layer = jax.eval_shape(generator._make_stepper(params).by_layer, params)
  for path, x in jax.tree.leaves_with_path(by_layer):
    is_matrix = x.ndim > 1 and path[-2].key != "residual"  # float32 in routing
    assert x.dtype == jnp.bfloat16 or not is_matrix, jax.tree_util.keystr(path)
    if path[-1].key == "scale":
      assert x.dtype == jnp.float32, jax.tree_util.keystr(path)


def test_bfloat16_weights_of_a_float32_model(dispatcher):
  generator, params = dispatcher
  text = write(dispatcher, ["abc"], length=9, dtype="bfloat16", overflow="continue")[0]
  assert len(text) == 9
  rounded, _ = make(seed=None, dtype="bfloat16")
  assert generator._in_bfloat16._model == rounded._model
  by_layer = rounded._by_layer(params)
  kernel = by_layer["layers"]["blocks_0"]["feed_forward"]["hidden"]["kernel"]
  assert kernel.dtype == jnp.bfloat16
  model, exact = rounded._model.unstack(params)
  tokens, cache = np.array([[1, 3, 2]]), model.init_cache(1)

  @jax.jit
  def run(params):
    output, _ = model.apply({"params": params}, tokens, cache, method="step")
    return output.logits

  np.testing.assert_array_equal(run(by_layer), run(exact))


def test_padding_is_a_token_that_ends_no_segment_if_there_is_one():
  config = dpjax.config.default()
  config.model.vocab_size = 3
  assert pad_id(config.model) == 0
  for ids, expected in ({(0, 2): 1, (0, 1, 2): 0}).items():
    config.model.boundaries = dpjax.config.boundaries("spacebyte", space_ids=ids)
    assert pad_id(config.model) == expected


def test_type_checkers_know_every_setting_of_samples():
  keywords = inspect.signature(Generator.stream).parameters.values()
  names = {x.name for x in keywords if x.kind is x.KEYWORD_ONLY}
  names |= schema.settings_of(schema.Sample).keys() - {"prompt"}
  assert Sampling.__annotations__.keys() == names
