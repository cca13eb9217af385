"""Runs: trained models with their settings, vocabulary and data."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.run.from_torch import load_torch as load_torch
  from dpjax.run.run import Run as Run
  from dpjax.run.run import load as load
  from dpjax.run.run import table as table
  from dpjax.run.training import check_frozen as check_frozen
  from dpjax.run.training import tokenize as tokenize
  from dpjax.run.training import train as train
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
