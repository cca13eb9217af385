"""dpjax: language models cheaper than self-attention.

`import dpjax` costs nothing; each name below is loaded at its first use, so that `dpjax.ops`
needs only JAX.
"""

from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
  from dpjax import analysis as analysis
  from dpjax import config as config
  from dpjax import data as data
  from dpjax import generation as generation
  from dpjax import interop as interop
  from dpjax import layers as layers
  from dpjax import models as models
  from dpjax import ops as ops
  from dpjax import runs as runs
  from dpjax import testing as testing
  from dpjax import text as text
  from dpjax import training as training
  from dpjax.analysis import plots as plots
  from dpjax.analysis.page import look as look
  from dpjax.config.registry import register_boundaries as register_boundaries
  from dpjax.config.registry import register_mixer as register_mixer
  from dpjax.config.registry import register_optimizer as register_optimizer
  from dpjax.config.registry import register_schedule as register_schedule
  from dpjax.errors import UserError as UserError
  from dpjax.models.build import build_model as build_model
  from dpjax.runs import load as load
  from dpjax.runs import train as train
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
