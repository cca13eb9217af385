"""The text of a sample, which arrives token by token and ends at a stop text."""

from collections.abc import Sequence

from dpjax.text.tokenizer import TextStream, Tokenizer


class SampleText:
  """Decodes the new tokens of a sample, up to the tokenizer's end token or the first stop text.

    stops ["ion ", "."], tokens "act", "io", "n o", "f."  ->  "act", "", and the sample has ended

  The first stop is the one that ends first; of several that end there, the longest. Text that may
  begin a stop waits for the next token. The text of the prompt does not count.

  Attributes:
    is_stopped: whether the end token or a stop text has ended the sample.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: str, stops: Sequence[str]):
    """Begins the continuation of a prompt; `stops` are texts that are not empty."""
    self.is_stopped = False
    self._end_id = tokenizer.end_id
    self._stream = TextStream(tokenizer, prompt)
    self._stops = stops
    self._waiting = ""
    self._has_found_stop = False

  def push(self, tokens: list[int]) -> tuple[str, int]:
    """Takes new tokens; returns the new text that is certain, and the number of tokens used.

    Those after the end are not used. The text lacks the stop that ends it.
    """
    before = tokens
    if self._end_id is not None and self._end_id in tokens:
      before = tokens[: tokens.index(self._end_id)]
    # A stop may end with any token.
    parts = [[token] for token in before] if self._stops else [before]
    text = ""
    num_used = 0
    for part in parts:
      text += self._cut(self._stream.push(part))
      num_used += len(part)
      if self.is_stopped:
        return text, num_used
    if len(before) < len(tokens):
      self.is_stopped = True
      num_used += 1
    return text, num_used

  def finish(self) -> str:
    """Returns the rest of the text, after the last token."""
    if self._has_found_stop:
      return ""
    text = self._cut(self._stream.finish())
    return text if self._has_found_stop else text + self._waiting

  def _cut(self, new: str) -> str:
    """The text up to the first stop, or else up to what may begin one."""
    text = self._waiting + new
    found = [(text.find(stop), stop) for stop in self._stops if stop in text]
    if found:
      self.is_stopped = self._has_found_stop = True
      begin, _ = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
      return text[:begin]
    longest = max(map(len, self._stops), default=0)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    begins_stop = (n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops))
    certain = len(text) - next(begins_stop, 0)
    self._waiting = text[certain:]
    return text[:certain]
