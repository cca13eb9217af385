"""Draws the pictures of the documentation with the operators that they explain.

python docs/draw_pictures.py

They are as wide as a phone, `WIDTH`, so that their text is readable on one.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from dpjax import ops

FOLDER = Path(__file__).parent / "pictures"
SENTENCE = "the cat sat on"
GATE, COLOURS = 0.6, "Blues"
WIDTH = 4.2  # inches: about 360 points, a small screen
SMALL, USUAL = 7, 8  # font sizes, points


def dispatched(length: int, levels: int) -> np.ndarray:
  """[T, T]: how much position t (row) reads of position s after some levels."""
  gates = jnp.full((1, length, 1, levels), GATE)
  return np.asarray(ops.dispatch_matrix(gates)[0, 0])


def convolved(length: int) -> np.ndarray:
  """[T, T]: the same for an Extractor whose taps fade."""
  taps = jnp.exp(-0.25 * jnp.arange(length))
  return np.asarray(ops.causal_convolution(jnp.eye(length)[None], taps)[0])


def pooled(text: str) -> tuple[np.ndarray, np.ndarray]:
  """[T, T], the same for token pooling by spaces; [T], where segments end."""
  ends = jnp.asarray([[int(letter == " ") for letter in text]])
  segments = ops.pool_segments(jnp.eye(len(text))[None], ends, int(ends.sum()))
  null = jnp.zeros_like(segments[:, :1])
  read = ops.upsample_segments(jnp.concatenate([null, segments], axis=1), ends)
  return np.asarray(read[0]), np.asarray(ends[0])


def panel(axes, matrix: np.ndarray, title: str, labels: str = "") -> None:
  """One matrix: a row reads a column. Zero is white."""
  axes.imshow(np.where(matrix == 0, np.nan, matrix), cmap=COLOURS, vmin=-0.2, vmax=1)
  axes.set_title(title, fontsize=USUAL)
  ticks = range(len(matrix)) if labels else []
  shown = [letter.replace(" ", "␣") for letter in labels]
  axes.set_xticks(ticks, shown, fontsize=SMALL)
  axes.set_yticks(ticks, shown, fontsize=SMALL)
  axes.tick_params(length=0, pad=2)


def overview() -> Figure:
  """What each family reads in one sentence."""
  figure, panels = plt.subplots(1, 3, figsize=(WIDTH, 1.75), layout="constrained")
  length = len(SENTENCE)
  matrices = {
    "Dispatcher": dispatched(length, ops.num_levels(length)),
    "Extractor": convolved(length),
    "token pooling": pooled(SENTENCE)[0],
  }
  for axes, (title, matrix) in zip(panels, matrices.items(), strict=True):
    panel(axes, matrix, title, SENTENCE)
  return figure


def shift_and_sum() -> Figure:
  """Reach after each level."""
  figure, panels = plt.subplots(1, 4, figsize=(WIDTH, 1.45), layout="constrained")
  for levels, axes in enumerate(panels, start=1):
    shift = 2 ** (levels - 1)
    panel(axes, dispatched(16, levels), f"shift {shift}:\nreach {2 * shift}")
  return figure


def transforms() -> Figure:
  """A transform of length T wraps around; one of 2 T does not."""
  length = 24
  inputs = np.where(np.arange(length) % 11 == 9, 1.0, 0.1)
  taps = np.exp(-0.3 * np.arange(length))

  def by_transform(size):
    product = np.fft.rfft(inputs, size) * np.fft.rfft(taps, size)
    return np.fft.irfft(product, size)[:length]

  figure, axes = plt.subplots(figsize=(WIDTH, 2.4), layout="constrained")
  direct = ops.causal_convolution(jnp.asarray(inputs, jnp.float32)[None, :, None], taps)[0, :, 0]
  axes.plot(by_transform(length), "C3--", label="transform of length T: wraps around")
  axes.plot(by_transform(2 * length), "C0", linewidth=4, alpha=0.4, label="of length 2 T")
  axes.plot(direct, "k.", label="dpjax.ops.causal_convolution")
  axes.set(ylim=(0, None))
  axes.set_xlabel("position", fontsize=USUAL)
  axes.set_ylabel("output", fontsize=USUAL)
  axes.tick_params(labelsize=SMALL)
  axes.legend(frameon=False, fontsize=SMALL)
  return figure


def cells(axes, row: float, texts, colours, width: float = 1.0) -> None:
  """A row of boxes."""
  for place, (text, colour) in enumerate(zip(texts, colours, strict=True)):
    box = plt.Rectangle((place * width, row), width * 0.94, 0.8, color=colour, ec="none")
    axes.add_patch(box)
    centre = (place * width + width * 0.47, row + 0.4)
    axes.text(*centre, text, ha="center", va="center", fontsize=SMALL)


def pooling() -> Figure:
  """Tokens, segments in a static number of slots, and what each token reads."""
  ends = pooled(SENTENCE)[1]
  ids = np.asarray(ops.segment_ids(ends[None])[0])
  read = np.cumsum(ends)
  closed, places = int(ends.sum()), ops.bucket_sizes(len(SENTENCE) + 1, 4)[1]
  palette = [plt.get_cmap("Set3")(i) for i in range(12)]
  words = SENTENCE.split(" ")
  slots = ["null", *words[:closed], *["" for _ in range(places - closed - 1)]]
  figure, axes = plt.subplots(figsize=(WIDTH, 1.9), layout="constrained")
  shown = [letter.replace(" ", "␣") for letter in SENTENCE]
  cells(axes, 3, shown, [palette[i] for i in ids])
  width = len(SENTENCE) / len(slots)
  greys = [(0.93, 0.93, 0.93)] * (places - closed - 1)
  cells(axes, 1.6, slots, [(0.8, 0.8, 0.8), *palette[:closed], *greys], width)
  colours = [(0.8, 0.8, 0.8) if i == 0 else palette[i - 1] for i in read]
  cells(axes, 0.2, [slots[i] for i in read], colours)
  for row, text in ((3, "tokens"), (1.6, f"{places} places\nfor segments"), (0.2, "read")):
    axes.text(-0.3, row + 0.4, text, ha="right", va="center", fontsize=USUAL)
  axes.set(xlim=(-3.9, len(SENTENCE)), ylim=(0, 4))
  axes.axis("off")
  return figure


def caches() -> Figure:
  """The working values that the Dispatcher's cache keeps, and those that a step reads."""
  levels, now = 4, 17
  figure, axes = plt.subplots(figsize=(WIDTH, 1.5), layout="constrained")
  for k in range(levels):
    places = np.arange(now + 1)
    age = now - places
    is_kept, is_read = (age >= 1) & (age <= 2**k), age == 2**k
    colours = np.where(is_read, "C0", np.where(is_kept, "lightsteelblue", "whitesmoke"))
    cells(axes, levels - k, [""] * now + ["t"], [*colours[:-1], "moccasin"])
    axes.text(-0.3, levels - k + 0.4, f"level {k}", ha="right", va="center", fontsize=USUAL)
  axes.set(xlim=(-3, now + 1), ylim=(0.8, levels + 1))
  axes.axis("off")
  return figure


SPEED = {  # programs of results/long_rows.json, with their labels, colours and styles
  "attention": ("attention", "C7", "o-"),
  "attention, PyTorch": ("attention, PyTorch", "C7", "s--"),
  "Mamba-2": ("Mamba-2", "C3", "o-"),
  "Gated DeltaNet": ("Gated DeltaNet", "C4", "o-"),
  "WE": ("WE", "C2", "o-"),
  "dispatcher": ("Dispatcher", "C0", "o-"),
}


def speed() -> Figure:
  """The seconds of a layer's training over the length of a row, the same number of tokens."""
  text = (FOLDER.parents[1] / "results/long_rows.json").read_text(encoding="utf-8")
  cases = json.loads(text)["parts"]["layers"]["cases"]
  cases = [case for case in cases if "quiet" in case["rows"]["attention"]]
  lengths = [case["length"] for case in cases]
  figure, axes = plt.subplots(figsize=(WIDTH, 2.8), layout="constrained")
  for name, (label, colour, style) in SPEED.items():
    seconds = [case["rows"][name]["quiet"]["milliseconds"] / 1000 for case in cases]
    axes.plot(lengths, seconds, style, color=colour, label=label, markersize=4)
  axes.set(xscale="log", yscale="log")
  axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
  axes.minorticks_off()
  axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
  axes.set_xlabel("tokens in a row, 32,768 in all", fontsize=USUAL)
  axes.set_ylabel("seconds", fontsize=USUAL)
  axes.tick_params(labelsize=SMALL)
  axes.legend(frameon=False, fontsize=SMALL)
  return figure


PICTURES = [overview, speed, shift_and_sum, transforms, pooling, caches]


def main() -> None:
  """Writes all pictures."""
  FOLDER.mkdir(exist_ok=True)
  for picture in PICTURES:
    picture().savefig(FOLDER / f"{picture.__name__}.png", dpi=200, pil_kwargs={"optimize": True})


if __name__ == "__main__":
  main()
