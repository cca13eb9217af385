"""Sums over the batches of a text, and the scores computed from them."""

import math
import sys
from collections.abc import Mapping


def text_scores(nats: float, counts: Mapping[str, float]) -> dict[str, float]:
  """Converts the nats of a whole text to scores per token, word, character and byte.

    perplexity           = exp(nats / tokens)
    perplexity_per_word  = exp(nats / words)
    bits_per_character   = nats / ln 2 / characters
    bits_per_byte        = nats / ln 2 / bytes

  All but the scores per token are comparable across tokenizers. Bits need tokens that
  represent the whole text (`dpjax.text.tokenizer.Tokenizer.keeps_text`): a lower-cased text
  takes fewer bits for as many characters.

  Args:
    nats: -ln P(tokens), the sum over all tokens.
    counts: the number of "tokens" and "words" (each line end is one, as in word-level benchmarks)
      and, unless tokenization loses some of the text, of "characters" and "bytes".

  Returns:
    "nats_per_token" and the scores above; an overflowing perplexity is infinite.
  """
  scores = {
    "nats_per_token": nats / counts["tokens"],
    "perplexity": _exp(nats / counts["tokens"]),
    "perplexity_per_word": _exp(nats / counts["words"]),
  }
  bits = nats / math.log(2)
  for unit in ("character", "byte"):
    if f"{unit}s" in counts:
      scores[f"bits_per_{unit}"] = bits / counts[f"{unit}s"]
  return scores


def add(sums: Mapping[str, float], metrics: Mapping | None) -> dict[str, float]:
  """Adds the sums of a batch in float64; for names ending in "_max", keeps the maximum."""
  added = dict(sums)
  for name, value in (metrics or {}).items():
    value = float(value)
    is_max = name.endswith("_max")
    added[name] = max(sums.get(name, value), value) if is_max else sums.get(name, 0.0) + value
  return added


def boundary_scores(sums: Mapping[str, float]) -> dict[str, float]:
  """Scores of the boundaries of a model with token pooling.

    boundary_loss            = boundary_nats / count
    p_ones                   = boundaries / count
    shortening_factor        = count / boundaries
    shortening_factor_padded = positions / slots, T over the S of each batch
    segments_mean            = segments / rows, of a window
    shortening_factor_2      = segments_in_2 / boundaries_2, of a second pooling; and so on
    p_ones_drawn             = drawn / count, the expected share in training
    p_ones_rounded           = rounded / count, the share in evaluation; p_ones_drawn_2 and
                               p_ones_rounded_2 over segments_in_2; and so on
    precision                = hits / boundaries
    recall                   = hits / targets
    f1                       = 2 hits / (boundaries + targets)
    accuracy                 = agreements / count
    enrichment               = (start_nats / boundaries) / (nats / count): how surprising tokens
                               that begin a segment are, relative to all; in evaluation

  Args:
    sums: from `dpjax.training.losses.Objective.sums`, added up over batches.

  Returns:
    The above and "segments_max"; precision to accuracy only for boundaries with targets, drawn
    and rounded only if training draws and evaluation rounds. x / 0 is infinite, 0 / 0 is nan.
    {} without token pooling.
  """
  if "boundaries" not in sums:
    return {}
  boundaries = sums["boundaries"]
  count = sums["count"]
  scores = {
    "boundary_loss": _ratio(sums["boundary_nats"], count),
    "p_ones": _ratio(boundaries, count),
    "shortening_factor": _ratio(count, boundaries),
    "shortening_factor_padded": _ratio(sums["positions"], sums["slots"]),
    "segments_mean": _ratio(sums["segments"], sums["rows"]),
    "segments_max": sums["segments_max"],
  }
  if "start_nats" in sums:
    scores["enrichment"] = _ratio(
      _ratio(sums["start_nats"], boundaries), _ratio(sums["nats"], count)
    )
  if "targets" in sums:
    hits = sums["hits"]
    targets = sums["targets"]
    scores["precision"] = _ratio(hits, boundaries)
    scores["recall"] = _ratio(hits, targets)
    scores["f1"] = _ratio(2 * hits, boundaries + targets)
    scores["accuracy"] = _ratio(sums["agreements"], count)
  for name, value in sums.items():
    stem, _, stage = name.partition("_")
    inputs = sums.get(f"segments_in_{stage}", count)
    if stem == "boundaries" and stage:
      scores[f"shortening_factor_{stage}"] = _ratio(inputs, value)
    elif stem in ("drawn", "rounded"):
      scores[f"p_ones_{name}"] = _ratio(value, inputs)
  return scores


def for_json(scores: Mapping[str, float]) -> dict[str, float | None]:
  """The scores with None for numbers that are not finite, which JSON lacks."""
  return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def _ratio(numerator: float, denominator: float) -> float:
  if denominator:
    return numerator / denominator
  return math.inf if numerator else math.nan


def _exp(value: float) -> float:
  return math.inf if value > math.log(sys.float_info.max) else math.exp(value)
