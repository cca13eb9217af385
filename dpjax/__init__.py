"""dpjax: language models cheaper than self-attention.

`import dpjax` costs nothing; each name below is loaded when it is first used, so that
`dpjax.ops` needs JAX alone.
"""

import importlib

__version__ = "0.1.0"

_MODULES = ("complexity", "config", "data", "decoding", "generation", "interop", "layers",
            "models", "ops", "plots", "segmentation", "significance", "text", "training")
_NAMES = {
  "UserError": "dpjax.errors",
  "build_model": "dpjax.models.build",
  "generate": "dpjax.run",
  "register_boundaries": "dpjax.registry",
  "register_mixer": "dpjax.registry",
  "register_optimizer": "dpjax.registry",
  "register_schedule": "dpjax.registry",
  "load": "dpjax.run",
  "train": "dpjax.run",
}


def __getattr__(name: str):
  if name in _MODULES:
    return importlib.import_module(f"dpjax.{name}")
  if name in _NAMES:
    return getattr(importlib.import_module(_NAMES[name]), name)
  raise AttributeError(f"module 'dpjax' has no attribute '{name}'")


def __dir__() -> list[str]:
  return sorted([*_MODULES, *_NAMES, "__version__"])
