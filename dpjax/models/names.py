"""The names of parameters in files of before."""

from dpjax.layers.common import Params


def renamed(params: Params) -> Params:
  """Placeholder."""
  return params
