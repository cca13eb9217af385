"""The names of parameters in files of earlier versions, and those of today.

An older model had `layers` or an `hourglass`, with the layers or another hourglass as its
middle. Blocks in turn lay in `period`, and those after the last whole period in `rest`.
"""

import re
from collections.abc import Callable, Container, Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import traverse_util

from dpjax.layers.common import Params

_IN_STACK = r"(?=(?:mixer|feed_forward)(?:_norm)?/|(?:period|rest)/place_\d+/)"
_STACK = r"(layers|stages_\d+/(?:first|last))"


def _stage(match: re.Match[str]) -> str:
  depth = match[1].count("/")
  return f"stages_{depth}/"


# Each pattern that matches the start of a path changes it, in this order.
_CHANGES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
  (r"relative_positions/", "shared_positions/"),
  (rf"hourglass/(?:middle/)+{_IN_STACK}", "layers/"),
  (r"hourglass/(?:middle/)*middle_out_norm/", "layers/out_norm/"),
  (r"hourglass/(?:middle/)*middle_positions/", "shared_positions/"),
  (r"hourglass/((?:middle/)*)", _stage),
  (r"(stages_\d+)/boundary_predictor/", r"\1/boundaries/"),
  (r"(stages_\d+)/middle_norm/", r"\1/inner_norm/"),
  (r"(stages_\d+)/relative_positions/", r"\1/shared_positions/"),
  (r"(stages_\d+)/middle_in$", r"\1/widen"),
  (r"(stages_\d+)/middle_out$", r"\1/narrow"),
  (r"(stages_\d+)/middle_padding$", r"\1/padding"),
  (r"(stages_\d+)/(first|last)_out_norm/", r"\1/\2/out_norm/"),
  (rf"{_STACK}/(?:period|rest)/place_(\d+)/", r"\1/blocks_\2/"),
  (rf"{_STACK}/{_IN_STACK}", r"\1/blocks_0/"),
]
_OLD = re.compile(rf"(layers|hourglass/(?:middle/)*(?:first|middle|last))/{_IN_STACK}")


def renamed(params: Params) -> Params:
  """A model's parameters, or a tree like them, by today's names; with these, as they are.

    layers/mixer/out/kernel                    ->  layers/blocks_0/mixer/out/kernel
    hourglass/first/mixer/out/kernel           ->  stages_0/first/blocks_0/mixer/out/kernel
    hourglass/middle/period/place_1/mixer/...  ->  layers/blocks_1/mixer/...

  Arrays of `period` and `rest` are joined along the axis of layers. Models without a
  `dpjax.models.Stack` in one of these places stay as they are.
  """
  flat = by_name(params, "/")
  if not any(map(_OLD.match, flat)):
    return params
  parts: dict[str, list[jax.Array]] = {}
  for path in sorted(flat):  # "period" comes before "rest"
    parts.setdefault(_rename(path), []).append(flat[path])
  return traverse_util.unflatten_dict({path: join(x) for path, x in parts.items()}, sep="/")


def _rename(path: str) -> str:
  for pattern, replacement in _CHANGES:
    path = re.sub(f"^{pattern}", replacement, path)
  outer, frozen, inner = path.partition("/boundaries/frozen/")
  return f"{outer}{frozen}{_rename(inner)}" if frozen else path


def find_parts(names: Iterable[str], expected: Container[str]) -> dict[str, list[str]]:
  """The names in a file of the parts of each array.

    ["params.layers.rest.place_0.mixer.taps", "params.layers.period.place_0.mixer.taps"]
      ->  {"params.layers.blocks_0.mixer.taps": [the second, the first]}

  Args:
    names: the names in a file, joined by dots. The parameters may be anywhere in its tree, like
      the moments in an optimizer's state.
    expected: today's names. A name that is one of them, or that cannot become one, stays.

  Returns:
    For each of today's names those in the file, in the order in which `join` takes their arrays.
  """
  parts: dict[str, list[str]] = {}
  for name in sorted(names):  # "period" comes before "rest"
    parts.setdefault(_find(name, expected), []).append(name)
  return parts


def _find(name: str, expected: Container[str]) -> str:
  if name in expected:
    return name
  keys = name.split(".")
  for i in range(len(keys)):
    path = _rename("/".join(keys[i:]))
    new = ".".join([*keys[:i], *path.split("/")])
    if new in expected:
      return new
  return name


def join(parts: Sequence[jax.Array]) -> jax.Array:
  """Joins parts of an array along its first axis."""
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
  """The shape of the result of `join`."""
  first, *others = shapes
  if not others:
    return first
  return (first[0] + sum(shape[0] for shape in others), *first[1:])


def by_name(tree: Params, separator: str = ".") -> dict[str, jax.Array]:
  """The arrays of a tree, or their shapes, by their keys, joined by dots as in files."""
  leaves = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator=separator): x for path, x in leaves}
