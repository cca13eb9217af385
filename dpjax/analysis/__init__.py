"""Analysis of runs (losses, segments, significance) and of mixers (operations)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.analysis import calibrate as calibrate
  from dpjax.analysis import complexity as complexity
  from dpjax.analysis import plots as plots
  from dpjax.analysis import runs as runs
  from dpjax.analysis import segmentation as segmentation
  from dpjax.analysis import significance as significance
  from dpjax.analysis import style as style
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
