"""Analysis of runs (losses and segments), and the device resources of a step."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.analysis import calibrate as calibrate
  from dpjax.analysis import compilation as compilation
  from dpjax.analysis import curves as curves
  from dpjax.analysis import devices as devices
  from dpjax.analysis import page as page
  from dpjax.analysis import plots as plots
  from dpjax.analysis import reading as reading
  from dpjax.analysis import style as style
  from dpjax.analysis.page import look as look
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
