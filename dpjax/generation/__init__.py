"""Generates text with a trained model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from dpjax.generation.generator import Generator as Generator
  from dpjax.generation.generator import Piece as Piece
  from dpjax.generation.loop import advance as advance
  from dpjax.generation.loop import begin as begin
  from dpjax.generation.loop import init_window as init_window
  from dpjax.generation.loop import sliding_window as sliding_window
  from dpjax.generation.sampling import sample as sample
else:
  from dpjax import lazy

  __getattr__, __dir__, __all__ = lazy.public_names(__name__)
