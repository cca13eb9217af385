"""Scores of a text that add up over batches, and the figures that people compare."""

import math
from collections.abc import Mapping


def text_scores(nats: float, counts: Mapping[str, int]) -> dict[str, float]:
  """Turns the nats of a whole text into figures per token, word, character and byte.

    perplexity           = exp(nats / tokens)
    perplexity_per_word  = exp(nats / words)
    bits_per_character   = nats / ln 2 / characters
    bits_per_byte        = nats / ln 2 / bytes

  Perplexity per token depends on the tokenizer; the other three do not, so models with
  different tokenizers can be compared by them (where the tokenizer is lossless).

  Args:
    nats: -ln P(text), the sum over all its tokens.
    counts: how many "tokens", "words", "characters" and "bytes" the text has, each at
      least 1. Words are separated by white space, and each line end counts as one, as
      word-level benchmarks have it.

  Returns:
    "nats_per_token" and the four above; an overflowing perplexity is infinite.
  """
  return {
    "nats_per_token": nats / counts["tokens"],
    "perplexity": _exp(nats / counts["tokens"]),
    "perplexity_per_word": _exp(nats / counts["words"]),
    "bits_per_character": nats / math.log(2) / counts["characters"],
    "bits_per_byte": nats / math.log(2) / counts["bytes"],
  }


def for_json(scores: Mapping[str, float]) -> dict[str, float | None]:
  """The scores with None for what is not finite, which JSON has no number for."""
  return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def _exp(value: float) -> float:
  try:
    return math.exp(value)
  except OverflowError:
    return math.inf
