"""Runs: trained models with their settings, vocabulary and data."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.runs.from_torch import load_torch as load_torch
  from dpjax.runs.launch import check_frozen as check_frozen
  from dpjax.runs.launch import train as train
  from dpjax.runs.prepare import tokenize_only as tokenize_only
  from dpjax.runs.run import Run as Run
  from dpjax.runs.run import load as load
  from dpjax.runs.run import table as table
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
