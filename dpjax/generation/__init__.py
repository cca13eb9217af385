"""Generates text with a trained model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.generation.decode import advance as advance
  from dpjax.generation.decode import begin as begin
  from dpjax.generation.decode import init_window as init_window
  from dpjax.generation.decode import sliding_window as sliding_window
  from dpjax.generation.generator import Generator as Generator
  from dpjax.generation.generator import Piece as Piece
  from dpjax.generation.sampling import sample as sample
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
