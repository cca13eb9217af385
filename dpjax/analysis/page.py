r"""Shows how models read a text: their segments, surprisals, and what each position reads.

`look` makes a self-contained HTML page that shows all runs side by side, token by token.
`describe` marks the segments in the text, for a terminal:

  the␣|quick␣|brow|n␣|fox     a space is ␣, a line end \n; \ before a |, · or ␣ of the text
  the␣|quick␣||brow|n␣|fox    || where a segment of segments ends, in a model with two stages
  the·␣quick·␣brow·n·␣fox     · between tokens, where some are longer than a character

Source: the pooling paper, Fig. 2.
"""

import base64
import html
import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

if TYPE_CHECKING:
  from dpjax.analysis.reading import Layer, Segmentation
  from dpjax.runs import Run


class _Image(TypedDict):
  """A matrix of weights: a PNG in base 64, and the largest weight of each row."""

  name: str
  png: str
  largest: list[float]


class _Images(TypedDict):
  """The images of a layer."""

  name: str
  images: list[_Image]


# The tokens in a matrix, and whether each head has its own: the first that fits into a page.
_SIZES = (
  (512, True),
  (512, False),
  (256, True),
  (256, False),
  (128, True),
  (128, False),
  (0, False),
)
_MAX_SHOWN = 1000  # tokens that a terminal shows
_MAX_IMAGE_BYTES = 500_000  # for all runs together


class Page(str):
  """An HTML page, which notebooks display."""

  __slots__ = ()

  def _repr_html_(self) -> str:
    style = "width: 100%; height: 45em; border: 0"
    return f'<iframe srcdoc="{html.escape(self)}" style="{style}"></iframe>'


def look(runs: "Run | Sequence[Run]", text: str) -> Page:
  """Makes a page that shows how one or several runs read a text.

  It is a self-contained HTML file. Boundaries, surprisals and scores come from
  `dpjax.analysis.reading.segment`, and what a position reads from `dpjax.analysis.reading.layers`.

  Raises:
    ValueError: the text has no tokens, or more than 10,000.
  """
  from dpjax.analysis import reading

  several = runs if isinstance(runs, Sequence) else [runs]
  return write(several, text, [reading.segment(run, text) for run in several])


def write(runs: Sequence["Run"], text: str, segmentations: Sequence["Segmentation"]) -> Page:
  """The page of `look`, for segmentations that are known."""
  from dpjax.analysis import reading

  layers = [reading.layers(run, text) for run in runs]
  for size, has_heads in _SIZES:
    images = [[_images(layer, size, has_heads) for layer in of_run if size] for of_run in layers]
    pngs = [x["png"] for of_run in images for layer in of_run for x in layer["images"]]
    if sum(map(len, pngs)) <= _MAX_IMAGE_BYTES:
      break
  content = [_describe(*parts) for parts in zip(runs, segmentations, images, strict=True)]
  template = Path(__file__).with_name("look.html").read_text(encoding="utf-8")
  # The text must not close the script element that holds it.
  return Page(template.replace("{content}", json.dumps(content).replace("<", "\\u003c")))


def _describe(run: "Run", segmentation: "Segmentation", layers: list[_Images]) -> dict[str, object]:
  """A run as JSON."""
  import jax

  scores = segmentation.scores
  has_bits = math.isfinite(scores["bits_per_byte"])
  names = ["bits_per_byte" if has_bits else "nats_per_token"]
  names += [x for x in scores if re.fullmatch(r"shortening_factor(_\d)?|enrichment|f1", x)]
  parts = [f"{run.tokenizer.name} of {run.tokenizer.vocab_size:,} entries", f"step {run.step:,}"]
  size = sum(leaf.size for leaf in jax.tree.leaves(run.params))
  return {
    "name": run.workdir.name if run.workdir else run.name,
    "about": f"{run.name}; {size:,} parameters; {'; '.join(parts)}",
    "scores": {name.replace("_", " "): f"{scores[name]:.4g}" for name in names},
    "pieces": segmentation.pieces,
    "bits": _numbers(segmentation.surprisals.astype(np.float64) / np.log(2)),
    "stages": [
      {"ends": stage.boundaries.astype(int).tolist(), "chances": _after(stage.probabilities)}
      for stage in segmentation.stages
    ],
    "targets": None if segmentation.targets is None else _after(segmentation.targets),
    "layers": layers,
  }


def _after(before: np.ndarray | None) -> list[float | None] | None:
  """Moves values from before each token to after; None after the last token, which is not read."""
  return None if before is None else [*_numbers(before[1:].astype(np.float64)), None]


def _numbers(values: np.ndarray) -> list[float | None]:
  return [round(x, 6) if np.isfinite(x) else None for x in values.tolist()]


def _images(layer: "Layer", size: int, has_heads: bool) -> _Images:
  """The mean over heads of a layer's weights as an image, and with `has_heads` each head's."""
  weights = layer.weights[:, :size, :size]
  images = {"mean of heads" if len(weights) > 1 else "all": weights.mean(axis=0)}
  if has_heads and len(weights) > 1:
    images |= {f"head {head}": x for head, x in enumerate(weights, 1)}
  return {"name": layer.name, "images": [_image(name, x) for name, x in images.items()]}


def _image(name: str, weights: np.ndarray) -> _Image:
  """[T, T] as an 8-bit PNG, scaled so that each row's largest weight is 255, and these weights."""
  largest = weights.max(axis=1, initial=0)
  rows = np.round(255 * weights / np.maximum(largest, 1e-30)[:, None]).astype(np.uint8)

  def chunk(content: bytes) -> bytes:
    return struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))

  header = struct.pack(">IIBBBBB", rows.shape[1], rows.shape[0], 8, 0, 0, 0, 0)
  pixels = zlib.compress(np.pad(rows, ((0, 0), (1, 0))).tobytes(), 9)  # each row's filter
  png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR" + header) + chunk(b"IDAT" + pixels) + chunk(b"IEND")
  return {
    "name": name,
    "png": base64.b64encode(png).decode(),
    "largest": [float(f"{x:.3g}") for x in np.nan_to_num(largest)],
  }


def describe(segmentation: "Segmentation") -> str:
  """The text, up to 1,000 tokens of it, with its segments, and the scores, for a terminal."""
  from dpjax.analysis import reading

  first, *inner = [stage.boundaries.sum() for stage in segmentation.stages] or [None]
  segments = "" if first is None else f", {first or 'no'} closed segments"
  segments += "".join(f", {count or 'none'} of stage {i}" for i, count in enumerate(inner, 2))
  size = len(segmentation.pieces)
  more = f" ... ({size - _MAX_SHOWN:,} tokens more)" if size > _MAX_SHOWN else ""
  lines = [
    f"{reading.render(segmentation.truncate(_MAX_SHOWN))}{more}\n",
    f"{size:,} tokens{segments}; mean conditional entropy {segmentation.entropies.mean():.4f} nats",
  ]
  if segmentation.stages and np.isfinite(enrichment := segmentation.enrichment()):
    lines.append(
      f"enrichment {enrichment:.4f}: the surprisal of tokens that begin a segment, with that of "
      f"all as 1; of as many tokens at random {segmentation.enrichment(seed=0):.4f}"
    )
  return "\n".join(lines)
