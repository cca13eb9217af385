"""A sample ends before the first stop text, however its tokens come and wherever the stop lies."""

import numpy as np
import pytest

from dpjax.generation.sample_text import SampleText
from dpjax.text.characters import BytesWithEnds
from dpjax.text.tokenizer import TextStream, train_tokenizer

TEXT = "the action of the \u00e9tation, ion  and \u6f22 ions. The end"
CASES = [
  (["ion ", "."], "the act"),
  ("\u00e9", "the action of the "),
  (["act", "the action", "ction"], "the "),  # "act" ends first
  (["the action", "ction"], ""),  # the longer of two that end there
  (["n o", "of the \u00e9", "of the x"], "the actio"),
  (["io", "ti"], "the ac"),
  (["ionx", "\u6f22 ions"], "the action of the \u00e9tation, ion  and "),
  (["end", "d"], "the action of the \u00e9tation, ion  an"),
  (["end"], TEXT.removesuffix("end")),
  (["endless", "x"], TEXT),
  ([], TEXT),
]


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
  """Where the first stop begins and ends, character by character."""
  for end in range(1, len(text) + 1):
    if sizes := [len(stop) for stop in stops if text[:end].endswith(stop)]:
      return end - max(sizes), end
  return None


@pytest.mark.parametrize("name", ["characters", "bytes", "bytes_with_ends", "bpe", "wordpiece"])
@pytest.mark.parametrize(("stops", "expected"), CASES)
def test_a_sample_ends_before_the_first_stop(name, stops, expected):
  sizes = {"bpe": 270, "wordpiece": 60}
  tokenizer = train_tokenizer(name, [TEXT], **{"vocab_size": sizes[name]} if name in sizes else {})
  tokens = tokenizer.encode(TEXT).tolist()
  written = tokenizer.decode(tokens)
  stops = [stops] if isinstance(stops, str) else stops
  found = first_stop(written, stops)
  if tokenizer.lossless:
    assert written[: found[0] if found else None] == expected
  stream, certain = TextStream(tokenizer), ""
  num_needed = len(tokens)
  for count, token in enumerate(tokens, 1):
    certain += stream.push([token])
    if found and len(certain) >= found[1]:
      num_needed = count
      break
  rng = np.random.default_rng(0)
  for longest in (1, 4, 50):
    sample, texts, num_used, rest = SampleText(tokenizer, "", stops), [], 0, tokens
    while rest and not sample.is_stopped:
      size = rng.integers(1, longest + 1)
      text, used = sample.push(rest[:size])
      texts.append(text)
      num_used, rest = num_used + used, rest[size:]
      assert written.startswith("".join(texts))  # nothing is taken back
    assert "".join(texts) + sample.finish() == written[: found[0] if found else None]
    assert (num_used, sample.is_stopped) == (num_needed, bool(found))


def test_the_end_token_counts_and_text_that_waits_is_not_lost():
  sample = SampleText(BytesWithEnds(), "", ["abcd"])
  assert sample.push([*b"xab"]) == ("x", 3)
  assert sample.push([ord("c"), 255, ord("d")]) == ("", 2)
  assert sample.is_stopped and sample.finish() == "abc"
