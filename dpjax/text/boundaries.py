"""Boundaries that follow from the text."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from dpjax.text.tokenizer import Tokenizer


class TextBoundaries:
  """Boundaries that follow from the text, and are computed once, when it is prepared.

  Subclasses are dataclasses of the settings on which the boundaries depend.
  """

  @property
  def key(self) -> Any:
    """These settings as JSON: the class's name and all fields."""
    fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
    return [type(self).__name__, *([x.name, str(getattr(self, x.name))] for x in fields)]

  def fit(self, texts: Iterable[str]) -> bytes:
    """Computes what `compute` needs from the train split, in parts; stored with the tokens."""
    return b""

  def compute(self, text: str, tokenizer: Tokenizer, fitted: bytes) -> np.ndarray:
    """[N], 0 or 1 for each token of a text.

    Args:
      text: a part of a text, possibly empty. Parts do not split words.
      tokenizer: one whose tokens are characters or bytes.
      fitted: the result of `fit`.
    """
    raise NotImplementedError
