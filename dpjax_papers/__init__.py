"""The papers' corpora and tools: a plugin of dpjax, found by its entry point like any other."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:
  from dpjax import lazy

  __getattr__ = lazy.modules(__name__)
