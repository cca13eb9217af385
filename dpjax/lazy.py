"""Imports the modules and the public names of a package at their first use."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, cast


def modules(package: str) -> Callable[[str], Any]:
  """Returns the `__getattr__` of a package that imports its modules at their first use.

  Such a module is `dpjax.interop.hnet`.
  """

  def get(name: str) -> Any:
    is_public = name.isidentifier() and not name.startswith("_")
    if is_public and importlib.util.find_spec(f"{package}.{name}"):
      return importlib.import_module(f"{package}.{name}")
    raise AttributeError(f"module '{package}' has no attribute '{name}'")

  return get


def public_names(package: str) -> tuple[Callable, Callable, list[str]]:
  """`__getattr__`, `__dir__` and `__all__` of a package, read from its own source.

  Its modules are attributes, too; see `modules`.

  A package lists its public names once, as imports for type checkers:

    if TYPE_CHECKING:
      from dpjax.layers.dispatcher import Dispatcher
    else:
      from dpjax import lazy

      __getattr__, __dir__, __all__ = lazy.public_names(__name__)
  """
  module: Any = sys.modules[package]
  tree = ast.parse(module.__spec__.loader.get_source(package))
  (block,) = (node.body for node in tree.body if isinstance(node, ast.If))
  imports = [node for node in block if isinstance(node, ast.ImportFrom)]
  sources = {alias.name: cast(str, node.module) for node in imports for alias in node.names}
  get_module = modules(package)

  def get(name: str) -> Any:
    if name not in sources:
      return get_module(name)
    if sources[name] == package:
      return importlib.import_module(f"{package}.{name}")
    return getattr(importlib.import_module(sources[name]), name)

  def names() -> list[str]:
    return sorted([*sources, *(name for name in vars(module) if name.startswith("__"))])

  return get, names, sorted(sources)
