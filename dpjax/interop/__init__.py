"""Converts models trained elsewhere."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.interop.torch_checkpoints import from_torch as from_torch
  from dpjax.interop.torch_checkpoints import to_torch as to_torch
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
