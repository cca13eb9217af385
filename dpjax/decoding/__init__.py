"""From a trained model to text."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.decoding.generate import advance as advance
  from dpjax.decoding.generate import begin as begin
  from dpjax.decoding.generate import init_window as init_window
  from dpjax.decoding.generate import sliding_window as sliding_window
  from dpjax.decoding.sampling import sample as sample
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
