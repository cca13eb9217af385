r"""Decodes tokens to text a few at a time, for display.

For the bytes of "e\u00e9 e", one by one:

  push([101])  ->  "e"      push([195])  ->  ""   (half a character)
  push([169])  ->  "\u00e9"      push([32, 101])  ->  " e"      finish()  ->  ""
"""

import itertools
from collections.abc import Sequence

import numpy as np

from dpjax.text.tokenizer import Tokenizer, as_ids

_WHOLE = ("characters", "wordpiece")  # their tokens never change the text before them
_OPEN = 3  # the most bytes that a character lacking one has, each U+FFFD by itself


class TextStream:
  """Decodes tokens as they arrive, and never changes earlier output.

    "".join(push(ids) for ids in parts) + finish() = tokenizer.decode(all ids)

  After a prompt, this is what `decode` adds to the prompt's text. Text is returned at once, but up
  to three final U+FFFD that may begin a character wait for the next token, and bytes that a BPE
  decodes together for their end. Where the text of a token depends on those before it (WordPiece,
  and others' SentencePiece), each push decodes all tokens again.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: str = ""):
    """Begins a text of this tokenizer, or goes on from a prompt."""
    self._tokenizer = tokenizer
    self._open = 0 if tokenizer.kind in _WHOLE else _OPEN
    once = tokenizer.encode(" a").tolist()
    self._forgets = tokenizer.decode(2 * once) == 2 * tokenizer.decode(once)
    self._begin()
    if prompt:
      ids = tokenizer.encode(prompt)
      self.push(ids)
      self._shown = len(tokenizer.decode(self._ids))
      # A space at its end may have no token; the next word then brings it again.
      self._drops_space = prompt[-1].isspace() and not tokenizer.decode(ids)[-1:].isspace()

  def push(self, ids: Sequence[int] | np.ndarray) -> str:
    """Takes the next tokens, [N], and returns the new text that is certain, perhaps "".

    An id outside 0 .. V - 1 raises a `ValueError`, and the call then has no effect.
    """
    self._ids += as_ids(ids, self._tokenizer.vocab_size).tolist()
    is_open = self._tokenizer.open_ids.__contains__
    num_open = len([*itertools.takewhile(is_open, reversed(self._ids))])
    text = self._tokenizer.decode(self._ids[: len(self._ids) - num_open])
    end = text[-self._open :] if self._open else ""  # which a later token can change
    certain = len(text) - len(end) + len(end.rstrip("\N{REPLACEMENT CHARACTER}"))
    new = self._drop_space(text[self._shown : certain])
    self._shown = max(self._shown, certain)
    if self._forgets and certain == len(text) and not num_open:
      self._ids, self._shown = [], 0
    return new

  def finish(self) -> str:
    """Ends the text: returns the rest, and begins a new text."""
    rest = self._drop_space(self._tokenizer.decode(self._ids)[self._shown :])
    self._begin()
    return rest

  def _begin(self) -> None:
    self._ids: list[int] = []  # all tokens, or those whose text is not certain
    self._shown = 0  # how many characters of their text were given out
    self._drops_space = False  # whether the prompt has the space of the next word

  def _drop_space(self, new: str) -> str:
    if new and self._drops_space:
      self._drops_space = False
      return new.removeprefix(" ")
    return new
