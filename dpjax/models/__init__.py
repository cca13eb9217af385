"""Complete models, built by hand or from a configuration."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.models.build import build_model as build_model
  from dpjax.models.hourglass import Hourglass as Hourglass
  from dpjax.models.hourglass import HourglassCache as HourglassCache
  from dpjax.models.language_model import LanguageModel as LanguageModel
  from dpjax.models.language_model import LanguageModelCache as LanguageModelCache
  from dpjax.models.language_model import LanguageModelOutput as LanguageModelOutput
  from dpjax.models.stack import Stack as Stack
  from dpjax.models.stage import PoolingHints as PoolingHints
  from dpjax.models.stage import Stage as Stage
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
