"""Models and parameters in another precision."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.typing import DTypeLike
from jaxtyping import PyTree

T = TypeVar("T", bound=nn.Module)

# Operations that move numbers of their first operand and change none.
_LAYOUTS = {
  "broadcast_in_dim",
  "copy",
  "copy_p",
  "dynamic_slice",
  "expand_dims",
  "gather",
  "reshape",
  "rev",
  "sharding_constraint",
  "slice",
  "squeeze",
  "transpose",
}
# Operations that call a function, with the same operands and results, and where it is.
_CALLS = {
  "checkpoint": "jaxpr",
  "closed_call": "call_jaxpr",
  "core_call": "call_jaxpr",
  "custom_jvp_call": "call_jaxpr",
  "custom_vjp_call": "call_jaxpr",
  "jit": "jaxpr",
  "pjit": "jaxpr",
  "remat2": "jaxpr",
}


def only_cast(
  function: Callable, params: PyTree, *others: PyTree, dtype: DTypeLike
) -> PyTree[bool]:
  """Finds the parameters that `function(params, *others)` reads only after a cast to `dtype`.

    x @ params["kernel"].astype(dtype), params["decay"] ** t  ->  {"kernel": True, "decay": False}

  The function gives the same results for parameters that are stored in `dtype` where the tree is
  True. It is traced, not run: arguments may be `jax.ShapeDtypeStruct`s. A parameter may be
  reshaped, sliced and the like before its cast. What is not known here, or what a loop hands on
  from step to step, counts as a use in the parameter's own dtype.

  Args:
    function: a pure function.
    params: a tree of arrays.
    *others: further arguments.
    dtype: that of the casts.

  Returns:
    A tree of bools like `params`.
  """
  leaves, structure = jax.tree.flatten(params)
  jaxpr = jax.make_jaxpr(function)(params, *others).jaxpr
  is_cast = _only_cast(jaxpr, [False] * len(jaxpr.outvars), jnp.dtype(dtype))
  return jax.tree.unflatten(structure, is_cast[: len(leaves)])


def with_dtype(module: T, dtype: DTypeLike) -> T:
  """Sets the field `dtype` of a module, and of all modules in its fields."""
  names = {field.name for field in dataclasses.fields(module)} - {"parent", "name"}

  def change(x):
    return with_dtype(x, dtype) if isinstance(x, nn.Module) else x

  changes = {}
  for name in names:
    field = getattr(module, name)
    changes[name] = jax.tree.map(change, field, is_leaf=lambda x: isinstance(x, nn.Module))
  if "dtype" in names:
    changes["dtype"] = jnp.dtype(dtype)
  return module.clone(**changes)


def _only_cast(jaxpr: Jaxpr, results: Sequence[bool], dtype: jnp.dtype) -> list[bool]:
  """Whether each input is used only after a cast, if that holds for the uses of its results."""
  is_cast: dict[Var, bool] = {}

  def use(variable: Var | Literal, is_only_cast: bool) -> None:
    if isinstance(variable, Var):
      is_cast[variable] = is_cast.get(variable, True) and is_only_cast

  for variable, is_only_cast in zip(jaxpr.outvars, results, strict=True):
    use(variable, is_only_cast)
  for equation in reversed(jaxpr.eqns):
    outputs = [is_cast.get(variable, True) for variable in equation.outvars]
    uses = _uses(equation, outputs, dtype)
    for variable, is_only_cast in zip(equation.invars, uses, strict=True):
      use(variable, is_only_cast)
  return [is_cast.get(variable, True) for variable in jaxpr.invars]


def _uses(equation: JaxprEqn, results: list[bool], dtype: jnp.dtype) -> list[bool]:
  """Whether an operation only casts each operand, if that holds for the uses of its results."""
  name = equation.primitive.name
  settings = equation.params
  nothing = [False] * len(equation.invars)
  if name == "convert_element_type":
    return [settings["new_dtype"] == dtype]
  if name in _LAYOUTS:
    return [results[0], *nothing[1:]]
  if name == "optimization_barrier":
    return results
  if name in _CALLS:
    return _only_cast(_open(settings[_CALLS[name]]), results, dtype)
  if name == "cond":
    branches = [_only_cast(_open(x), results, dtype) for x in settings["branches"]]
    return [False, *map(all, zip(*branches, strict=True))]
  if name == "scan":
    body = _open(settings["jaxpr"])
    return _only_cast(body, [False] * len(body.outvars), dtype)
  if name == "while":
    return _uses_of_while(equation, dtype)
  return nothing


def _uses_of_while(equation: JaxprEqn, dtype: jnp.dtype) -> list[bool]:
  condition = _open(equation.params["cond_jaxpr"])
  body = _open(equation.params["body_jaxpr"])
  num_carried = len(body.outvars)
  of_condition = _only_cast(condition, [False], dtype)
  of_body = _only_cast(body, [False] * num_carried, dtype)
  of_carried = zip(of_condition[-num_carried:], of_body[-num_carried:], strict=True)
  return [*of_condition[:-num_carried], *of_body[:-num_carried], *map(all, of_carried)]


def _open(jaxpr: Any) -> Jaxpr:
  """The jaxpr of a `ClosedJaxpr`, or the jaxpr itself."""
  return getattr(jaxpr, "jaxpr", jaxpr)
