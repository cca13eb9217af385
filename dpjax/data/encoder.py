"""A tokenizer with the model fitted for boundaries of the text, and their files.

tokenizer.json, unigram.model (fitted for any type of boundaries)
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dpjax import files
from dpjax.errors import UserError
from dpjax.text.factory import tokenizer_from_json
from dpjax.text.tokenizer import Tokenizer

_FITTED = "unigram.model"


class TextBoundaries(Protocol):
  """Boundaries that follow from the text; see `dpjax.layers.boundaries.TextBoundaries`."""

  @property
  def key(self) -> Any:
    """A JSON value that identifies the boundaries."""
    ...

  def fit(self, texts: Iterable[str]) -> bytes:
    """Fits a model to the train split."""
    ...

  def compute(self, text: str, tokenizer: Tokenizer, fitted: bytes) -> np.ndarray:
    """0 or 1 for each token of a text."""
    ...


@dataclasses.dataclass(frozen=True)
class Encoder:
  """Encodes a part of a text.

  Attributes:
    tokenizer: gives the ids.
    boundaries: None, or gives the boundaries of the text.
    fitted: the model that they fitted to the train split; b"" if none.
  """

  tokenizer: Tokenizer
  boundaries: TextBoundaries | None = None
  fitted: bytes = b""

  def __call__(self, part: str) -> list[np.ndarray]:
    """The tokens' ids and, with `boundaries`, their boundaries."""
    ids = self.tokenizer.encode(part).astype(self.dtype)
    if self.boundaries is None:
      return [ids]
    ends = np.asarray(self.boundaries.compute(part, self.tokenizer, fitted=self.fitted))
    if ends.shape != ids.shape or not np.isin(ends, (0, 1)).all():
      raise UserError(
        f"model.boundaries: expected 0 or 1 for each of {len(ids)} tokens of a text, got "
        f"{ends.shape} of {ends.dtype}"
      )
    return [ids, ends.astype(np.uint8)]

  @property
  def dtype(self) -> np.dtype:
    """The dtype of the tokens on disk."""
    return np.dtype(np.uint16 if self.tokenizer.vocab_size <= 2**16 else np.int32)

  def write(self, folder: Path) -> None:
    """Writes its files."""
    if self.fitted:
      (folder / _FITTED).write_bytes(self.fitted)
    content = self.tokenizer.to_json()
    (folder / "tokenizer.json").write_text(content, encoding="utf-8", newline="\n")


def open_encoder(folder: Path, boundaries: TextBoundaries | None) -> Encoder:
  """Reads the files of an encoder."""
  path = folder / "tokenizer.json"
  try:
    tokenizer = tokenizer_from_json(files.read_file(path).decode())
    path = folder / _FITTED
    fitted = files.read_file(path) if path.exists() else b""
    encoder = Encoder(tokenizer, boundaries, fitted)
    if boundaries is not None:
      encoder("")
  except (OSError, ValueError) as error:
    raise UserError(f"{path}: expected a readable file of a run's data, got {error}") from error
  return encoder
