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
# A window is right after the 3 bytes of a cut character, and may end with three U+FFFD of 3 bytes.
_KEPT, _LONGEST = 16, 64


class TextStream:
  """Decodes tokens as they arrive, and never changes earlier output.

    "".join(push(ids) for ids in parts) + finish() = tokenizer.decode(all ids)

  After a prompt, this is what `decode` adds to the prompt's text. Text is returned at once, but up
  to three final U+FFFD that may begin a character wait for the next token, and bytes that a BPE
  decodes together for their end. A push decodes its own tokens and a few before them.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: str = ""):
    """Begins a text of this tokenizer, or goes on from a prompt."""
    self._tokenizer = tokenizer
    self._open = 0 if tokenizer.kind in _WHOLE else _OPEN
    # Stand for what came before a window: SentencePiece decodes the first piece in another way.
    self._words = tokenizer.encode("a").tolist()
    self._lines = tokenizer.encode("a\n").tolist()
    self._length_word = len(tokenizer.decode(self._words))
    self._empty: dict[int, bool] = {}
    self._begin()
    if prompt:
      self.push(tokenizer.encode(prompt))
      shown = tokenizer.decode(self._window + self._waiting)
      self._shown = len(shown)
      # A space at its end may have no token; the next word then brings it again.
      self._drops_space = prompt[-1].isspace() and not shown[-1:].isspace()

  def push(self, ids: Sequence[int] | np.ndarray) -> str:
    """Takes the next tokens, [N], and returns the new text that is certain, perhaps "".

    An id outside 0 .. V - 1 raises a `ValueError`, and the call then has no effect.
    """
    new = as_ids(ids, self._tokenizer.vocab_size).tolist()
    self._waiting += new
    is_open = self._tokenizer.open_ids.__contains__
    num_open = len(list(itertools.takewhile(is_open, reversed(new))))
    if num_open == len(new):
      return ""
    whole = len(self._waiting) - num_open
    new, self._waiting = self._waiting[:whole], self._waiting[whole:]
    for i in new:
      if not self._is_empty(i):
        self._marks.clear()
      elif i in self._marks:
        continue  # a row of marks can be long, and says no more than its first ones
      else:
        self._marks.add(i)
      self._window.append(i)
    text = self._tokenizer.decode(self._window)
    end = text[-self._open :] if self._open else ""  # which a later token can change
    certain = len(text) - len(end) + len(end.rstrip("\N{REPLACEMENT CHARACTER}"))
    certain = max(self._shown, certain)
    new = self._drop_space(text[self._shown : certain])
    self._shown = certain
    if not text:  # marks and dropped spaces, of which one is as good as many
      self._window = list(dict.fromkeys(self._window))
    elif len(self._window) > _LONGEST:
      self._shorten(text)
    return new

  def finish(self) -> str:
    """Ends the text: returns the rest, and begins a new text."""
    text = self._tokenizer.decode(self._window + self._waiting)
    rest = self._drop_space(text[self._shown :])
    self._begin()
    return rest

  def _begin(self) -> None:
    self._window: list[int] = []  # the last tokens, without those that wait
    self._waiting: list[int] = []  # open ones, whose text is not certain
    self._shown = 0  # how many characters of the window's text were given out
    self._marks: set[int] = set()  # the tokens without text at the window's end
    self._drops_space = False  # whether the prompt has the space of the next word

  def _drop_space(self, new: str) -> str:
    if new and self._drops_space:
      self._drops_space = False
      return new.removeprefix(" ")
    return new

  def _shorten(self, text: str) -> None:
    """Drops the oldest tokens of the window that the open text does not need."""
    start, kept = len(self._window), 0
    while start and kept < _KEPT:
      start -= 1
      kept += not self._is_empty(self._window[start])
    before = self._lines if text.endswith("\n") else self._words
    waiting = len(text) - self._shown
    self._window = before + self._window[start:]
    self._shown = len(self._tokenizer.decode(self._window)) - waiting

  def _is_empty(self, i: int) -> bool:
    """Whether a token has no text in any context, such as a mark."""
    if i not in self._empty:
      text = self._tokenizer.decode([*self._words, i])
      self._empty[i] = len(text) == self._length_word
    return self._empty[i]
