"""The program of an exported model: `dpjax.runs.numpy_model`, with the functions of plugins."""

import ast
import builtins
import dis
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dpjax.config import registry, sections
from dpjax.config.registry import Registry
from dpjax.errors import UserError
from dpjax.runs import numpy_model

# The table of the program for each kind of component.
_TABLES = {registry.mixers: "MIXERS", registry.boundaries: "BOUNDARIES"}
_END = "\n\ndef main("  # What a plugin adds goes before it.


def check_function(component: str, function: Callable) -> None:
  """Raises a `UserError` unless a component's function can be copied into `numpy_model`."""
  expected = f"{component}: expected numpy_function to be a function"
  name = getattr(function, "__name__", repr(function))
  if not isinstance(function, types.FunctionType) or not name.isidentifier():
    raise UserError(f"{expected} with a name, got {name}")
  available = vars(builtins) | vars(numpy_model)
  if name in available:
    raise UserError(f"{expected} with a name that dpjax.runs.numpy_model lacks, got {name}")
  try:
    text = _text(function)
  except OSError as error:
    raise UserError(f"{expected} in a file, got {name}") from error
  # As a part of the program, which is read without the plugin's imports from __future__.
  code = compile(text, name, "exec", dont_inherit=True)
  unknown = {
    x
    for x in _global_names(code)
    if x not in available or function.__globals__.get(x, available[x]) is not available[x]
  }
  if foreign := (unknown | {*function.__code__.co_freevars} | _foreign_imports(text)) - {name}:
    raise UserError(
      f"{expected} that uses only names of dpjax.runs.numpy_model, such as np, linear and part, "
      f"got {name}, which uses {', '.join(sorted(foreign))}"
    )


def missing(models: Sequence[Mapping]) -> list[str]:
  """The components of models without a function in NumPy, by name."""
  names = [
    name
    for components, name in _components(models)
    if name not in _known(components) and components.numpy_function(name) is None
  ]
  return sorted(names)


def write(models: Sequence[Mapping]) -> str:
  """The program for models, none of whose components is `missing`; checks the added functions."""
  program = Path(numpy_model.__file__).read_text(encoding="utf-8")
  assert program.count(_END) == 1
  added = ""
  for components, name in _components(models):
    function = components.numpy_function(name)
    if name not in _known(components) and function is not None:
      check_function(name, function)
      table = _TABLES[components]
      added += f"\n\n{_text(function)}\n\n{table}[{name!r}] = {function.__name__}\n"
  return program.replace(_END, added + _END)


def _components(models: Sequence[Mapping]) -> list[tuple[Registry, str]]:
  """The registry and the name of each component, once."""
  found = {
    (components, name): None
    for model in models
    for components, names in sections.component_names(model).items()
    for name in sorted(names)
  }
  return [*found]


def _known(components: Registry) -> Mapping[str, Callable]:
  return getattr(numpy_model, _TABLES[components])


def _global_names(code: types.CodeType) -> set[str]:
  """The global names that code reads, also within its functions and classes."""
  read = ("LOAD_GLOBAL", "LOAD_NAME")
  names = {x.argval for x in dis.get_instructions(code) if x.opname in read}
  for constant in code.co_consts:
    if isinstance(constant, types.CodeType):
      names |= _global_names(constant)
  return names


def _foreign_imports(text: str) -> set[str]:
  """What a function's text imports besides NumPy and the standard library, which all users have."""
  names = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names.add("." * node.level + (node.module or ""))
  return {x for x in names if x.partition(".")[0] not in {"numpy", *sys.stdlib_module_names}}


def _text(function: Callable) -> str:
  return textwrap.dedent(inspect.getsource(function))
