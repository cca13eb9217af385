"""Checks that boundaries fulfil the contract: `dpjax.testing.check_boundaries(MyBoundaries)`."""

import dataclasses
import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from dpjax.errors import UserError
from dpjax.layers.boundaries import Boundaries, BoundaryOutput, StageOutput
from dpjax.layers.common import Params
from dpjax.layers.mixer import Context
from dpjax.testing.relations import check, choose, close_in_bfloat16, draw_zeros, expect

_BATCH = 2
_LENGTH = 17
_PREDICTOR_WIDTH = 7
# Sizes of chunks, and how many tokens of each row are real.
_CHUNKS = [(5, (5, 2)), (1, (1, 1)), (7, (0, 7)), (1, (1, 0)), (9, (9, 6)), (1, (1, 1))]
# Where the documents of each row begin.
_STARTS = ((0, 1, 6, 7), (0, 4, 13))


def check_boundaries(
  make: Callable[..., Boundaries],
  *,
  width: int = 6,
  vocab_size: int = 5,
  relations: Collection[str] | None = None,
) -> None:
  """Checks boundaries with small random vectors and tokens, in evaluation, float32 and bfloat16.

  Parameters begin as the module initializes them; those that are zero are drawn from N(0, 0.01).

  Args:
    make: makes the module: its class, or `functools.partial` of the class with settings. Called
      with those of `width=`, `predictor_width=` and `dtype=` that it declares, as by a model.
    width: D.
    vocab_size: the tokens are 0, 1, ..., `vocab_size` - 1.
    relations: names of `BOUNDARY_RELATIONS`; None checks all.

  Raises:
    AssertionError: names the relation that the boundaries break, and says where to look.
    ValueError: `make` makes no `dpjax.layers.Boundaries`, or a relation is unknown.
  """
  names = choose(relations, BOUNDARY_RELATIONS)
  case = _Case(make, width, vocab_size)
  module = case.module  # A class that cannot be instantiated raises its own error.
  if not isinstance(module, Boundaries):
    raise UserError(f"make: expected a subclass of dpjax.layers.Boundaries, got {module!r}")
  check(case, names, BOUNDARY_RELATIONS)


@dataclasses.dataclass(frozen=True)
class _Case:
  """Boundaries with the arguments of `check_boundaries`."""

  make: Callable[..., Boundaries]
  width: int
  vocab_size: int

  def __call__(self, **settings: Any) -> Boundaries:
    usual = {"width": self.width, "predictor_width": _PREDICTOR_WIDTH, "dtype": jnp.float32}
    fields = inspect.signature(self.make).parameters
    takes_any = any(field.kind is field.VAR_KEYWORD for field in fields.values())
    supplied = {**usual, **settings}
    return self.make(**{name: x for name, x in supplied.items() if takes_any or name in fields})

  @property
  def module(self) -> Boundaries:
    return self()

  def draw(self, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Vectors [B, T, D] and tokens [B, T]."""
    generator = np.random.default_rng(seed)
    hidden = generator.standard_normal((_BATCH, _LENGTH, self.width))
    tokens = generator.integers(self.vocab_size, size=(_BATCH, _LENGTH))
    return jnp.asarray(hidden, jnp.float32), jnp.asarray(tokens, jnp.int32)

  def initial(self, module: Boundaries, dtype: DTypeLike = jnp.float32) -> Params:
    """The parameters as the module draws them, for vectors of a dtype."""
    hidden, tokens = self.draw()
    init = jax.jit(nn.init(_find_with_residual, module))
    return init(jax.random.key(0), hidden.astype(dtype), tokens).get("params", {})

  def params(self) -> Params:
    return draw_zeros(self.initial(self.module))

  def find(self) -> Callable[..., BoundaryOutput]:
    """The compiled module, (hidden, tokens, **keywords) -> output."""
    return jax.jit(partial(self.module.apply, {"params": self.params()}))


def _find_with_residual(
  module: Boundaries, hidden: jax.Array, tokens: jax.Array
) -> tuple[BoundaryOutput, jax.Array]:
  """What a model calls of boundaries."""
  return module(hidden, tokens), module.residual(hidden)


def _outputs(case: _Case) -> None:
  """In evaluation, boundaries are [B, T] of 0 and 1; logits and probabilities are finite, [B, T].

  Look at soft boundaries, and at comparisons with nan.
  """
  output = case.find()(*case.draw())
  shape = _BATCH, _LENGTH
  for name in ("boundaries", "logits", "probabilities"):
    value = getattr(output, name)
    if value is not None:
      expect(value.shape == shape, f"{name}: expected the shape {shape}, got {value.shape}")
      expect(np.isfinite(value).all(), f"{name}: a number is not finite")
  values = {*np.unique(output.boundaries).tolist()}
  expect(values <= {0, 1}, f"expected boundaries of 0 and 1, got {values}")
  if output.probabilities is not None:
    is_share = (output.probabilities >= 0) & (output.probabilities <= 1)
    expect(is_share.all(), "a probability is not in [0, 1]")


def _causality(case: _Case) -> None:
  """A boundary depends only on its row's tokens and vectors up to its position.

  Look at shifts, sums over the whole row, and at T, which may not matter.
  """
  find = case.find()
  hidden, tokens = case.draw()
  other_hidden, other_tokens = case.draw(seed=3)
  output = find(hidden, tokens)
  for t in range(_LENGTH):
    # Row 0 differs from position t on.
    after = np.arange(_LENGTH) >= t
    changed_btd = hidden.at[0].set(jnp.where(after[:, None], other_hidden[0], hidden[0]))
    changed_bt = tokens.at[0].set(jnp.where(after, other_tokens[0], tokens[0]))
    changed = find(changed_btd, changed_bt)
    _compare(changed, output, (0, slice(0, t)), f"with another end from position {t} on")
    _compare(changed, output, (1, slice(None)), "with another row beside it")
  for length in (1, 2, 7):
    part = find(hidden[:, :length], tokens[:, :length])
    _compare(part, output, (slice(None), slice(0, length)), f"T = {length}")


def _compare(output: BoundaryOutput, expected: BoundaryOutput, where: tuple, message: str) -> None:
  """Compares boundaries, logits and probabilities at some positions."""
  np.testing.assert_array_equal(
    output.boundaries[where], expected.boundaries[where], f"boundaries, {message}"
  )
  for name in ("logits", "probabilities"):
    got = getattr(output, name)
    want = getattr(expected, name)
    expect((got is None) == (want is None), f"{name}: not always given, {message}")
    if got is not None:
      np.testing.assert_allclose(
        got[where], want[where], rtol=1e-4, atol=1e-5, err_msg=f"{name}, {message}"
      )


def _first_token(case: _Case) -> None:
  """If the reader has no null group, the first token of each row and document is a boundary.

  Its tokens have no earlier segment to read. Look at `reader`, and at position 0.
  """
  if case.module.reader.num_null:
    return
  output = case.find()(*case.draw())
  expect((output.boundaries[:, 0] == 1).all(), "the first token of a row is no boundary")
  if case.module.separates_documents:
    starts = _document_starts()
    output = case.find()(*case.draw(), document_starts=starts)
    is_right = (output.boundaries[starts == 1] == 1).all()
    expect(is_right, "the first token of a document is no boundary")


def _chunks(case: _Case) -> None:
  """With a cache, chunks of any size, with padding, give the boundaries of whole rows.

  Look at what `find` knows of earlier tokens, which is only the cache and `context.num_before`, at
  whether padding enters the cache (`context.lengths`), and at the cache's shapes and dtypes.
  """
  module = case.module
  if not module.has_cache:
    return
  hidden, tokens = case.draw()
  expected = case.find()(hidden, tokens)
  step = jax.jit(partial(module.apply, {"params": case.params()}, method="step"))
  cache = module.init_cache(_BATCH, case.width)
  types = jax.tree.map(jax.typeof, cache)
  seen = np.zeros(_BATCH, np.int32)
  for size, lengths in _CHUNKS:
    chunk_btd = np.full((_BATCH, size, case.width), 1e3, np.float32)
    chunk_bt = np.full((_BATCH, size), case.vocab_size - 1, np.int32)
    for row, length in enumerate(lengths):
      part = row, slice(seen[row], seen[row] + length)
      chunk_btd[row, :length] = hidden[part]
      chunk_bt[row, :length] = tokens[part]
    context = Context(lengths=jnp.asarray(lengths, jnp.int32), num_before=jnp.asarray(seen))
    output = step(chunk_btd, chunk_bt, cache, context)
    cache = output.cache
    after = jax.tree.map(jax.typeof, cache)
    expect(after == types, f"expected a cache {types}, got {after}")
    for row, length in enumerate(lengths):
      got = jax.tree.map(lambda x: x[row, :length], output._replace(cache=()))  # noqa: B023
      part = row, slice(seen[row], seen[row] + length)
      want = jax.tree.map(lambda x: x[part], expected._replace(cache=()))  # noqa: B023
      _compare(got, want, (...,), f"row {row} from position {seen[row]} on")
    seen = seen + np.asarray(lengths, np.int32)


def _documents(case: _Case) -> None:
  """Each document of a row has the boundaries that it would have alone.

  Look at what `find` reads before the start of a document (`context.document_starts`), and at
  positions, which count from there. If that is not so, say `separates_documents = False`.
  """
  if not case.module.separates_documents:
    return
  hidden, tokens = case.draw()
  find = case.find()
  packed = find(hidden, tokens, document_starts=_document_starts())
  for row, starts in enumerate(_STARTS):
    for start, end in zip(starts, (*starts[1:], _LENGTH), strict=True):
      # The document in a row of its own, filled up behind it.
      alone_btd = jnp.roll(hidden, -start, axis=1)
      alone_bt = jnp.roll(tokens, -start, axis=1)
      alone = find(alone_btd, alone_bt)
      got = jax.tree.map(lambda x: x[row, start:end], packed._replace(cache=()))  # noqa: B023
      want = jax.tree.map(lambda x: x[row, : end - start], alone._replace(cache=()))  # noqa: B023
      _compare(got, want, (...,), f"the document of row {row} from position {start} on")


def _counts(case: _Case) -> None:
  """`count_segments` and `max_segments` agree with the boundaries.

  The model is compiled for so many segments: with too few, its results are nan.
  """
  hidden, tokens = case.draw()
  found = np.asarray(case.find()(hidden, tokens).boundaries).sum(axis=1)
  counted = case.module.count_segments(np.asarray(tokens))
  if counted is not None:
    np.testing.assert_array_equal(counted, found, "count_segments")
  most = case.module.max_segments(_LENGTH)
  if most is not None:
    expect(found.max() <= most, f"max_segments: expected at least {found.max()}, got {most}")


def _bfloat16(case: _Case) -> None:
  """In bfloat16, logits, probabilities, residuals and gradients are those of float32, rounded.

  Both have the same vectors and parameters, rounded to bfloat16; a field `dtype` says so.
  Parameters stay float32, and a cache keeps its dtypes. Without logits and probabilities,
  boundaries are the same. Look at sums over positions, which need float32, and at `init_cache`.
  """
  rounded = case(dtype=jnp.bfloat16)
  hidden, tokens = case.draw()
  hidden = hidden.astype(jnp.bfloat16)
  params = draw_zeros(case.initial(rounded, jnp.bfloat16))
  dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
  expect(dtypes <= {"float32"}, f"expected parameters of float32, got {dtypes}")
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)

  def run(module, dtype):
    def loss(params):
      find = nn.apply(_find_with_residual, module)
      found, residual = find({"params": params}, hidden.astype(dtype), tokens)
      numbers = {"residual": residual}
      for name in ("logits", "probabilities"):
        if getattr(found, name) is not None:
          numbers[name] = getattr(found, name)
      total = sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in numbers.values())
      return total, (found, numbers)

    (_, (found, numbers)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return found, {"output": numbers, "gradient": grads}

  want, expected = run(case.module, jnp.float32)
  found, outputs = run(rounded, jnp.bfloat16)
  pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(outputs), strict=True)
  for (path, exact), output in pairs:
    close_in_bfloat16(output, exact, jax.tree_util.keystr(path))
  if want.logits is None and want.probabilities is None:
    np.testing.assert_array_equal(found.boundaries, want.boundaries, "boundaries")
  if not rounded.has_cache:
    return
  cache = rounded.init_cache(_BATCH, case.width)
  types = jax.tree.map(jax.typeof, cache)
  context = Context(num_before=jnp.zeros(_BATCH, jnp.int32))
  step = jax.jit(partial(rounded.apply, {"params": params}, method="step"))
  output = step(hidden, tokens, cache, context)
  after = jax.tree.map(jax.typeof, output.cache)
  expect(after == types, f"expected a cache {types}, got {after}")


def _initial_values(case: _Case) -> None:
  """A field `init_std` is the standard deviation of the initial weights.

  Otherwise the model's setting `init_std` has no effect on the boundaries that declare it.
  """
  if "init_std" not in {field.name for field in dataclasses.fields(case.module)}:
    return
  usual = case.initial(case.module.clone(init_std=0.5))
  widened = case.initial(case.module.clone(init_std=1.0))
  changed = []
  for (path, before), after in zip(
    jax.tree.leaves_with_path(usual), jax.tree.leaves(widened), strict=True
  ):
    if not np.array_equal(before, after):
      name = jax.tree_util.keystr(path)
      np.testing.assert_array_equal(after, 2 * before, f"{name} by 2")
      changed.append(name)
  expect(not usual or len(changed) > 0, "init_std has no effect")


def _loss(case: _Case) -> None:
  """The loss is a finite sum over the tokens that count, with finite gradients.

  The losses of two parts of a batch add up to the whole's; with `reads_share` all get the same
  "boundary_share". Tokens of weight 0 after the others change nothing. Look at means over a batch
  or a row.
  """
  module = case.module
  hidden, tokens = case.draw()
  params = case.params()
  generator = np.random.default_rng(2)
  logits = jnp.asarray(generator.standard_normal((*tokens.shape, case.vocab_size)), jnp.float32)
  given = jnp.asarray(generator.integers(2, size=tokens.shape), jnp.int32)
  # The last tokens of row 1 are padding.
  weights = jnp.ones(tokens.shape).at[1, -4:].set(0)
  noise = jnp.full(tokens.shape, 0.5) if module.is_stochastic else None

  def loss(params, rows, end):
    part = rows, slice(0, end)
    output = module.apply({"params": params}, hidden[part], tokens[part], noise=_at(noise, part))
    assert isinstance(output, BoundaryOutput)
    stage = StageOutput(output.boundaries, output.logits, output.probabilities)
    batch = {"tokens": tokens[part], "weights": weights[part], "boundaries": given[part]}
    if module.reads_share:
      batch["boundary_share"] = jnp.float32(0.3)
    # Parameters may serve the loss alone.
    bound = module.bind({"params": params})
    total, _ = bound.loss(stage, batch, logits[part] if module.reads_logits else None)
    return total

  def run(rows, end=_LENGTH):
    return jax.jit(jax.value_and_grad(partial(loss, rows=rows, end=end)))(params)

  shape = jax.eval_shape(partial(loss, rows=slice(0, 2), end=_LENGTH), params).shape
  expect(shape == (), f"expected one number, got the shape {shape}")
  whole, grads = run(slice(0, 2))
  finite = [np.isfinite(x).all() for x in jax.tree.leaves((whole, grads))]
  expect(all(finite), "a loss or a gradient is not finite")
  first, _ = run(slice(0, 1))
  second, _ = run(slice(1, 2))
  close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  close(first + second, whole, err_msg="the two rows apart")
  shorter, _ = run(slice(1, 2), end=_LENGTH - 4)
  close(shorter, second, err_msg="without padding")


def _at(x: jax.Array | None, part: tuple) -> jax.Array | None:
  return None if x is None else x[part]


def _document_starts() -> jax.Array:
  starts = np.zeros((_BATCH, _LENGTH), np.int32)
  for row, positions in enumerate(_STARTS):
    starts[row, list(positions)] = 1
  return jnp.asarray(starts)


BOUNDARY_RELATIONS: dict[str, Callable[[_Case], None]] = {
  "outputs": _outputs,
  "causality": _causality,
  "first_token": _first_token,
  "chunks": _chunks,
  "documents": _documents,
  "counts": _counts,
  "bfloat16": _bfloat16,
  "initial_values": _initial_values,
  "loss": _loss,
}
