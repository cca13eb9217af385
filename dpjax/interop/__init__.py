"""Models trained elsewhere, as configurations and parameters of dpjax."""

from dpjax.interop.torch_checkpoints import from_torch

__all__ = ["from_torch"]
