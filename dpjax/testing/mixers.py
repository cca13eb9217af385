"""Checks that a token mixer fulfils the contract: `dpjax.testing.check_mixer(MyMixer)`."""

import dataclasses
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import InvalidRngError
from jax.typing import ArrayLike
from jaxtyping import PyTree

from dpjax.errors import UserError
from dpjax.generation.precision import only_cast
from dpjax.layers.common import Params
from dpjax.layers.mixer import Context, Mixer
from dpjax.testing.relations import check, choose, close_in_bfloat16, draw_zeros, expect

_BATCH, _LENGTH = 2, 11
# Sizes of chunks, and how many tokens of each row are real.
_CHUNKS = [(5, (5, 2)), (1, (1, 1)), (5, (0, 4)), (1, (1, 1)), (5, (4, 3))]
# The row and the positions of each document.
_DOCUMENTS = [
  *((0, slice(0, 1)), (0, slice(1, 12)), (0, slice(12, 14)), (0, slice(14, 18))),
  *((1, slice(0, 5)), (1, slice(5, 8)), (1, slice(8, 18))),
]
_ROW_OF_DOCUMENTS = 18


def check_mixer(
  make: Callable[..., Mixer],
  *,
  width: int = 6,
  max_length: int = 13,
  reach: int | None = None,
  dropout: str = "",
  gradients: Callable[[Params], Params] = lambda tree: tree,
  rounding_between_documents: float = 0.0,
  relations: Collection[str] | None = None,
) -> None:
  """Checks a mixer with small random inputs, in float32 and bfloat16.

  Parameters begin as the mixer initializes them; those that are zero are drawn from N(0, 0.01).

  Args:
    make: the mixer's class, or a function that makes the mixer; called with `max_length=` and
      `dtype=`. `functools.partial` sets other fields.
    width: D.
    max_length: the longest T, at least 11.
    reach: the number of positions up to the farthest one that an output depends on, itself
      included; None for all.
    dropout: the field with a dropout rate, off by default; "" without one, or for several.
    gradients: selects, from a tree like the parameters, those with a nonzero gradient.
    rounding_between_documents: the largest change of an output by another document of its row,
      relative to the largest output. By default there must be none; 1e-6 suits a mixer that
      adds up numbers of several documents, and subtracts those of the others.
    relations: names of `RELATIONS`; None checks all.

  Raises:
    AssertionError: names the relation that the mixer breaks, and says where to look.
    ValueError: `make` makes no `dpjax.layers.Mixer`, `max_length` is too small, or a relation is
      unknown.
  """
  if max_length < _LENGTH:
    raise ValueError(f"max_length: expected at least {_LENGTH}, got {max_length}")
  names = choose(relations, RELATIONS)
  case = _Case(make, width, max_length, reach, dropout, gradients, rounding_between_documents)
  module = case()  # A class that cannot be instantiated raises its own error.
  if not isinstance(module, Mixer):
    raise UserError(f"make: expected a subclass of dpjax.layers.Mixer, got {module!r}")
  check(case, names, RELATIONS)


@dataclasses.dataclass(frozen=True)
class _Case:
  """A mixer with the arguments of `check_mixer`."""

  make: Callable[..., Mixer]
  width: int
  max_length: int
  reach: int | None
  dropout: str
  gradients: Callable[[Params], Params]
  rounding_between_documents: float

  def __call__(self, **settings) -> Mixer:
    return self.make(**{"max_length": self.max_length, **settings})

  def draw(self, length: int = _LENGTH, seed: int = 0) -> jax.Array:
    normal = np.random.default_rng(seed).standard_normal((_BATCH, length, self.width))
    return jnp.asarray(normal, jnp.float32)

  def draw_params(self, module: Mixer) -> Params:
    return draw_zeros(jax.jit(module.init)(jax.random.key(0), self.draw()).get("params", {}))

  def with_params(self, module: Mixer) -> Callable[..., Any]:
    """The mixer as a function, with parameters; with `method="step"` its cached path."""
    return partial(_apply, module, self.draw_params(module))


def _apply(module: Mixer, params: Params, *args: Any, **options: Any) -> Any:
  return module.apply({"params": params}, *args, **options)


def _close(
  output: ArrayLike, expected: ArrayLike, message: str, scale: PyTree[jax.Array] | None = None
) -> None:
  """Checks equality up to the rounding of sums of size `scale`, by default of all `expected`."""
  atol = 1e-5 * _largest(expected if scale is None else scale)
  np.testing.assert_allclose(output, expected, rtol=1e-5, atol=atol, err_msg=message)


def _largest(tree: PyTree[ArrayLike]) -> float:
  return max((float(np.abs(x).max(initial=0)) for x in jax.tree.leaves(tree)), default=0.0)


def _causality(case: _Case) -> None:
  """An output depends only on its row's inputs up to its position, as far back as `reach` says.

  Look at shifts, masks, sums and norms over positions or rows, and at `reach`, an
  argument of `check_mixer`: a field of that name has no effect.
  """
  mix = case.with_params(case())
  distance_ts = np.arange(_LENGTH)[:, None] - np.arange(_LENGTH)
  # Whether an output position depends on an input position, by derivatives.
  depends_btcs = (np.array(jax.jit(jax.jacrev(mix))(case.draw())) != 0).any(axis=(2, 5))
  same = np.zeros((_LENGTH, _LENGTH), bool)
  rows = np.arange(_BATCH)
  for row in rows:
    same |= depends_btcs[row, :, row]
  depends_btcs[rows, :, rows] = False
  expect(not same[distance_ts < 0].any(), "an output depends on later inputs")
  expect(not depends_btcs.any(), "an output depends on another row")
  reach = 1 + distance_ts[same].max(initial=-1)
  expected = min(case.reach or _LENGTH, _LENGTH)
  expect(reach == expected, f"an output depends on {reach} positions, expected {expected}")


def _lengths(case: _Case) -> None:
  """A shorter input gives the beginning of the longest input's outputs, with the shape [B, T, D].

  Look at padding to a size, at divisions by T, at positions counted from the end, and at shapes of
  parameters, which may depend on `max_length`, but not on T.
  """
  mix = case.with_params(case())
  inputs = case.draw(case.max_length)
  lengths = (1, 2, 7, case.max_length)
  outputs = jax.jit(lambda x: [mix(x[:, :length]) for length in lengths])(inputs)
  for length, output in zip(lengths, outputs, strict=True):
    shape = _BATCH, length, case.width
    expect(output.shape == shape, f"expected the shape {shape}, got {output.shape}")
    _close(output, outputs[-1][:, :length], f"T = {length}")


def _single_position(case: _Case) -> None:
  """A mixer with max_length = 1 works, and none of its parameters is empty.

  Look at sizes such as log2(max_length) and max_length - 1.
  """
  inputs = case.draw(1)
  module = case(max_length=1)
  output, variables = jax.jit(module.init_with_output)(jax.random.key(0), inputs)
  expect(output.shape == inputs.shape, f"got the shape {output.shape}")
  expect(np.isfinite(output).all(), "an output is not finite")
  expect(all(x.size for x in jax.tree.leaves(variables)), "a parameter is empty")


def _refusals(case: _Case) -> None:
  """Inputs that are not [B, T, D] or longer than `max_length` raise a `ValueError`.

  Its message has the shape, or max_length and T. `dpjax.layers.Mixer.__call__` checks both.
  """
  longer = case.max_length + 1
  long = case.draw(longer)
  row = case.draw()[0]
  cases = [
    (long, ("max_length", str(case.max_length), str(longer))),
    (row, (str(row.shape)[1:-1],)),
  ]
  for inputs, words in cases:
    try:
      jax.eval_shape(case().init, jax.random.key(0), inputs)
    except ValueError as error:
      has_words = all(word in str(error) for word in words)
      expect(has_words, f"expected {', '.join(words)} in the message, got: {error}")
    else:
      raise AssertionError(f"an input of shape {inputs.shape} is taken")


# jax.nn.dot_product_attention mixes the two dtypes itself.
@jax.numpy_dtype_promotion("standard")
def _bfloat16(case: _Case) -> None:
  """In bfloat16, outputs and gradients are those of float32 up to rounding.

  Both have the same inputs and parameters, rounded to bfloat16. Outputs have the dtype of the
  field `dtype` (without one, of the inputs); parameters stay float32. Look at sums over positions,
  which need float32, and at the dtype of the result.
  """
  exact = case()
  rounded = case(dtype=jnp.bfloat16)
  params = case.draw_params(rounded)
  inputs = case.draw().astype(jnp.bfloat16)
  dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
  expect(dtypes <= {"float32"}, f"expected parameters of float32, got {dtypes}")
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)

  def run(module, dtype):
    def loss(params):
      output = _apply(module, params, inputs.astype(dtype))
      expect(output.dtype == dtype, f"expected outputs of {dtype}, got {output.dtype}")
      return jnp.sum(output.astype(jnp.float32) ** 2), output

    (_, output), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return {"output": output, "gradient": case.gradients(grads)}

  expected = jax.tree.leaves_with_path(run(exact, jnp.dtype("float32")))
  outputs = jax.tree.leaves(run(rounded, jnp.dtype("bfloat16")))
  for (path, want), got in zip(expected, outputs, strict=True):
    close_in_bfloat16(got, want, jax.tree_util.keystr(path))


def _dropout(case: _Case) -> None:
  """Dropout is drawn from the "dropout" key, only in training; without the key it raises.

  Look at `context.deterministic` and at `make_rng("dropout")`.
  """
  if not case.dropout:
    return
  mix = case.with_params(case(**{case.dropout: 0.5}))
  inputs = case.draw()

  @jax.jit
  def train(seed):
    return mix(inputs, deterministic=False, rngs={"dropout": jax.random.key(seed)})

  exact = case.with_params(case())
  output, expected = jax.jit(lambda x: (mix(x), exact(x)))(inputs)
  np.testing.assert_array_equal(output, expected, "outside of training")
  draws = [train(seed) for seed in range(17)]
  np.testing.assert_array_equal(draws[0], train(0), "two draws by one key")
  atol = 1e-3 * _largest(expected)
  for other, words in ((expected, "drops nothing"), (draws[0], "ignores the key")):
    expect(any(not np.allclose(draw, other, atol=atol) for draw in draws), words)
  # A forgotten key is an error, not a constant mask.
  try:
    jax.eval_shape(lambda: mix(inputs, deterministic=False))
  except InvalidRngError as error:
    expect("dropout" in str(error), f"asks for another key: {error}")
  else:
    raise AssertionError("training without a key is no error")


def _no_key(case: _Case) -> None:
  """Without dropout, training needs no key and gives the same outputs as evaluation.

  Look at `make_rng`, which a rate of 0 should not reach.
  """
  mix = case.with_params(case())
  both = jax.jit(lambda x: (mix(x, deterministic=False), mix(x)))
  np.testing.assert_array_equal(*both(case.draw()))


def _initial_values(case: _Case) -> None:
  """`init_std` is the standard deviation of the initial weights; `out_scale` a factor of "out".

  Otherwise the model's settings `init_std` and `scale_outputs` have no effect on the mixer.
  `dpjax.layers.linear(self, features, name)` begins as `init_std` says; the output layer also takes
  `scale=self.out_scale`.
  """

  def initialize(**settings):
    module = case().clone(**settings)
    params = jax.jit(module.init)(jax.random.key(0), case.draw()).get("params", {})
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}

  def changed(params, factor):
    """The names of arrays that are so many times the usual ones; all others must be equal."""
    names = [name for name in usual if not np.array_equal(params[name], usual[name])]
    for name in names:
      np.testing.assert_array_equal(params[name], factor * usual[name], f"{name} by {factor}")
    return names

  usual = initialize(init_std=0.5)
  widened = changed(initialize(init_std=1.0), 2)
  expect(not usual or len(widened) > 0, "init_std has no effect")
  scaled = changed(initialize(init_std=0.5, out_scale=0.25), 0.25)
  has_out = "['out']['kernel']" in usual
  expect(not has_out or "['out']['kernel']" in scaled, "out_scale has no effect on out")


def _gradients(case: _Case) -> None:
  """Every number of every parameter has a finite, nonzero gradient.

  Look at parameters that are not used, and at `stop_gradient`, `round` and `argmax`.
  """
  module = case()
  inputs = case.draw(case.max_length)

  def loss(params):
    return jnp.sum(_apply(module, params, inputs) * inputs[:, ::-1])

  grads = case.gradients(jax.jit(jax.grad(loss))(case.draw_params(module)))
  for path, grad in jax.tree.leaves_with_path(grads):
    is_right = (jnp.isfinite(grad) & (grad != 0)).all()
    expect(is_right, f"{jax.tree_util.keystr(path)}: {grad}")


def _chunks(case: _Case) -> None:
  """With a cache, chunks of any size, with padding, give the same outputs as whole rows.

  Look at whether padding enters the cache (`lengths`; 0 is a length, too), at the shapes and
  dtypes of the cache, which must stay, and at chunks longer than `max_length`, unless the class
  says `is_unbounded = False`.
  """
  if not case().has_cache:
    return
  module = case()
  inputs = case.draw()
  mix = case.with_params(module)
  step = jax.jit(partial(mix, method="step"))
  full = jax.jit(mix)(inputs)
  plans = [_CHUNKS]
  if module.is_unbounded:
    plans.append([(case.max_length + 2, (8, 3)), (5, (3, 5)), (5, (0, 3))])
  for plan in plans:
    cache = module.init_cache(_BATCH, case.width)
    seen = [0] * _BATCH
    types = jax.tree.map(jax.typeof, cache)
    for size, lengths in plan:
      chunk = np.full((_BATCH, size, case.width), 1e3, np.float32)
      for row, length in enumerate(lengths):
        chunk[row, :length] = inputs[row, seen[row] : seen[row] + length]
      output, cache = step(chunk, cache, lengths=jnp.asarray(lengths, jnp.int32))
      expect(np.isfinite(output).all(), "an output is not finite")
      after = jax.tree.map(jax.typeof, cache)
      expect(after == types, f"expected a cache {types}, got {after}")
      for row, length in enumerate(lengths):
        expected = full[row, seen[row] :][:length]
        _close(output[row, :length], expected, f"row {row} from position {seen[row]} on", full)
        seen[row] += length


def _tokens(case: _Case) -> None:
  """With a cache, tokens one by one, without `lengths`, give the same outputs as whole rows.

  One compiled program serves all of them. Look at positions, which the cache must count,
  and at shapes that depend on the number of earlier tokens.
  """
  if not case().has_cache:
    return
  module = case()
  inputs = case.draw()
  mix = case.with_params(module)
  traces = []

  @jax.jit
  def step(token, cache):
    traces.append(token)
    return mix(token, cache, method="step")

  cache = module.init_cache(_BATCH, case.width)
  outputs = []
  for t in range(_LENGTH):
    output, cache = step(inputs[:, t : t + 1], cache)
    outputs.append(output)
  expect(len(traces) == 1, f"expected one program for all tokens, got {len(traces)}")
  _close(jnp.concatenate(outputs, 1), jax.jit(mix)(inputs), "all tokens")


def _bfloat16_steps(case: _Case) -> None:
  """With a cache in bfloat16, parameters stored in bfloat16 give the outputs of whole rows.

  Generation stores the parameters in bfloat16 that a step reads only after a cast to it. Look at
  parameters that whole rows read in float32 and cached steps in bfloat16.
  """
  if not case().has_cache:
    return
  dtype = jnp.bfloat16
  module = case(dtype=dtype)
  params = case.draw_params(module)
  inputs = case.draw().astype(dtype)
  cache = module.init_cache(_BATCH, case.width)

  step = partial(_apply, module, method="step")
  is_cast = only_cast(step, params, inputs[:, :1], cache, dtype=dtype)
  stored = jax.tree.map(lambda x, is_cast: x.astype(dtype) if is_cast else x, params, is_cast)
  jitted = jax.jit(step)
  outputs = []
  for t in range(_LENGTH):
    output, cache = jitted(stored, inputs[:, t : t + 1], cache)
    outputs.append(output)
  expected = jax.jit(partial(_apply, module))(params, inputs)
  close_in_bfloat16(jnp.concatenate(outputs, 1), expected, "all tokens")


def _documents(case: _Case) -> None:
  """Each document of a row gives the same outputs and gradients as alone, and changes no other.

  Look at whether a position reads before the start of its document (`document_starts`), at
  positions, which count from there, and at rows that are longer than `max_length`. A class that
  says `separates_documents = False` must not do all that: it would be refused rows of documents.
  """
  if not case().separates_documents:
    _documents_are_mixed(case)
    return
  module = case()
  params = case.draw_params(module)
  inputs = case.draw(_ROW_OF_DOCUMENTS)
  weights = case.draw(_ROW_OF_DOCUMENTS, seed=5)

  def packed(params, x):
    return _apply(module, params, x, document_starts=_document_starts())

  @partial(jax.jit, static_argnums=0)
  def run(mix, x):
    def loss(params, x):
      output = mix(params, x)
      return jnp.sum(output * weights), output

    (_, output), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return {"output": output, "by parameters": grads[0], "by inputs": grads[1]}

  outputs = run(packed, inputs)
  expected = run(partial(_apart, module), inputs)
  for name, of_group in expected.items():
    paths = jax.tree.leaves_with_path(outputs[name])
    for (path, got), want in zip(paths, jax.tree.leaves(of_group), strict=True):
      _close(got, want, f"{name}{jax.tree_util.keystr(path)} of packed documents", of_group)
  for row, part in _DOCUMENTS:
    changed = run(packed, inputs.at[row, part].add(1.0))
    difference = np.array(abs(changed["output"] - outputs["output"]))
    expect(difference[row, part].max() > 0, "a document has no effect on itself")
    difference[row, part] = 0
    message = f"an output changes by {difference.max():.1g} with another document"
    most = case.rounding_between_documents * _largest(outputs["output"])
    expect(difference.max() <= most, message)


def _documents_are_mixed(case: _Case) -> None:
  """Fails if a mixer that says otherwise reads the starts of documents and keeps them apart."""
  module = case(max_length=_ROW_OF_DOCUMENTS)
  params = case.draw_params(module)

  @jax.jit
  def run(x):
    # The base class refuses the starts where a mixer is called.
    context = Context(document_starts=_document_starts())
    packed, _ = module.apply({"params": params}, x, context, None, method="mix")
    return packed, _apply(module, params, x), _apart(module, params, x)

  packed, whole, apart = run(case.draw(_ROW_OF_DOCUMENTS))
  reads_starts = not np.array_equal(packed, whole)
  is_apart = np.allclose(packed, apart, rtol=1e-5, atol=1e-5 * _largest(apart))
  expect(
    not (reads_starts and is_apart),
    "documents are kept apart: set `separates_documents = True` on the class",
  )


def _document_starts() -> jax.Array:
  starts = np.zeros((_BATCH, _ROW_OF_DOCUMENTS), np.int32)
  for row, part in _DOCUMENTS:
    starts[row, part.start] = 1
  return jnp.asarray(starts)


def _apart(module: Mixer, params: Params, x: jax.Array) -> jax.Array:
  """The outputs of a row of documents, each computed in a row of its own, filled up behind it."""
  rows = [jnp.pad(x[row, part], ((0, _LENGTH), (0, 0)))[:_LENGTH] for row, part in _DOCUMENTS]
  y = _apply(module, params, jnp.stack(rows))
  outputs = [y_td[: part.stop - part.start] for (_, part), y_td in zip(_DOCUMENTS, y, strict=True)]
  return jnp.concatenate(outputs).reshape(x.shape)


RELATIONS: dict[str, Callable[[_Case], None]] = {
  "causality": _causality,
  "lengths": _lengths,
  "single_position": _single_position,
  "refusals": _refusals,
  "bfloat16": _bfloat16,
  "dropout": _dropout,
  "no_key": _no_key,
  "initial_values": _initial_values,
  "gradients": _gradients,
  "chunks": _chunks,
  "tokens": _tokens,
  "bfloat16_steps": _bfloat16_steps,
  "documents": _documents,
}
