r"""Shows where a model ends its segments in a text, beside the entropy of its predictions.

  dpjax segmentation runs/gumbel --text="the quick brown fox" --out=segments.png

Prints the text with a mark at the end of each segment, and draws it with --out. The default
text is the beginning of the run's test split, of up to 120 tokens.

  the␣|quick␣|brow|n␣|fox     a space is ␣, a line end \n; \ before a |, · or ␣ of the text
  the␣|quick␣||brow|n␣|fox    || where a segment of segments ends, in a model with two stages
  the·␣quick·␣brow·n·␣fox     · between tokens, where some are longer than a character

Source: the pooling paper, Fig. 2.
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpjax.analysis import plots, style
from dpjax.errors import UserError
from dpjax.text.tokenizer import TextStream

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from dpjax.run import Run


class Stage(NamedTuple):
  """A pooling of segments, [T] as in `Segmentation`; probabilities are nan within a segment."""

  boundaries: np.ndarray
  probabilities: np.ndarray | None


class Segmentation(NamedTuple):
  """A text of T tokens with a model's boundaries and entropies.

  Attributes:
    pieces: the text of each token.
    boundaries: [T], bool; True where a segment ends with the token.
    entropies: [T], float32, nats; the entropy of the model's prediction after the token.
    probabilities: [T], float32; the predictor's probability of a boundary, None without one.
    surprisals: [T - 1], float32, nats, of each token after the first, given those before it.
    inner: the further stages of a model that has them.
  """

  pieces: list[str]
  boundaries: np.ndarray
  entropies: np.ndarray
  probabilities: np.ndarray | None
  surprisals: np.ndarray | None = None
  inner: tuple[Stage, ...] = ()

  def depths(self) -> np.ndarray:
    """[T], how many stages end a segment at each token."""
    return np.sum([self.boundaries, *(stage.boundaries for stage in self.inner)], axis=0)

  def enrichment(self, seed: int | None = None) -> float:
    """The mean surprisal of tokens that begin a segment, with that of all tokens as 1.

    With a seed, of as many tokens drawn at random: chance. nan without a token behind a boundary,
    or if the model holds one for impossible.
    """
    assert self.surprisals is not None
    begins = self.boundaries[:-1]
    if seed is not None:
      begins = np.random.default_rng(seed).permutation(begins)
    if not (begins.any() and np.isfinite(self.surprisals).all()):
      return float("nan")
    return float(self.surprisals[begins].mean() / self.surprisals.mean())


def segment(run: "Run", text: str | np.ndarray) -> Segmentation:
  """Reads a text with a model, in a window that begins with the text.

    the model's softmax after "a" is (0.5, 0.5)  ->  entropies[0] = ln 2 = 0.693

  The text may be given as tokens, [T], from 1 to the model's window.

  Raises:
    ValueError: there are more tokens, or none, or the model has no token pooling.
  """
  import jax
  import jax.numpy as jnp

  from dpjax.models import build
  from dpjax.ops import conditional_entropy

  tokens = run.tokenizer.encode(text) if isinstance(text, str) else text
  tokens = np.asarray(tokens, np.int32)
  if not 1 <= len(tokens) <= run.window:
    expected = f"1 to {run.window} tokens (the model's window)"
    raise UserError(f"text: expected {expected}, got {len(tokens)}")

  @jax.jit
  def read(params, tokens_bt):
    rngs = {"dropout": jax.random.key(0)}  # Some boundaries are sampled.
    output: Any = run.model.apply({"params": params}, tokens_bt, rngs=rngs)
    stages, stage = [], output
    while stage is not None and stage.boundaries is not None:
      logits = stage.boundary_logits
      stages.append((stage.boundaries, None if logits is None else jax.nn.sigmoid(logits)))
      stage = stage.inner
    log_p_btv = jax.nn.log_softmax(output.logits.astype(jnp.float32))[:, :-1]
    surprisals = -jnp.take_along_axis(log_p_btv, tokens_bt[:, 1:, None], axis=2)[..., 0]
    rows = stages, conditional_entropy(output.logits), surprisals
    return jax.tree.map(lambda row: row[0].astype(jnp.float32), rows)

  stages, entropies, surprisals = jax.device_get(read(run.params, tokens[None]))
  if not stages:
    raise UserError("run: expected a model with token pooling, got one without")
  (boundaries, probabilities), inner = stages[0], []
  last = np.flatnonzero(boundaries > 0.5)  # the last token of each segment
  outer = build.build_boundaries(run.config.model) if stages[1:] else ()
  for of_stage, (ends, chances) in zip(outer, stages[1:], strict=False):
    last = np.append([-1] * of_stage.has_null_group, last).astype(int)  # -1: before the text
    ends, is_token = ends[: len(last)] > 0.5, last >= 0
    if chances is not None:
      of_segments, chances = chances[: len(last)], np.full(len(tokens), np.nan, np.float32)
      chances[last[is_token]] = of_segments[is_token]
    last = last[ends]
    inner.append(Stage(np.isin(np.arange(len(tokens)), last), chances))
  pieces = split(run.tokenizer, tokens)
  return Segmentation(pieces, boundaries > 0.5, entropies, probabilities, surprisals, tuple(inner))


def split(tokenizer, tokens: np.ndarray) -> list[str]:
  """The text that each token adds, or the token's own text if it adds none."""
  stream = TextStream(tokenizer)
  return [stream.push([i]) or tokenizer.decode([i]) for i in tokens]


def render(segmentation: Segmentation) -> str:
  """Writes the text with a | after each closed segment, one for each stage.

    pieces "a", " ", "b", boundaries 0, 1, 0  ->  "a␣|b"

  A · separates the tokens of a segment if some are longer than a character.
  """
  join = "·" if any(len(piece) > 1 for piece in segmentation.pieces) else ""
  pairs = zip(segmentation.pieces, segmentation.depths(), strict=True)
  text = "".join(visible(piece) + (depth * "|" or join) for piece, depth in pairs)
  return text if segmentation.boundaries[-1] else text.removesuffix(join)


def visible(piece: str) -> str:
  r"""Makes every character of a text visible and unambiguous.

  Unprintable characters are escaped as in a Python string; the marks get a backslash.

    >>> print(visible("a b|c\n"))
    a␣b\|c\n
  """
  marked = re.sub(r"[|·␣\\]", r"\\\g<0>", piece).replace(" ", "␣")
  return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in marked)


@style.applied()
def draw(segmentation: Segmentation) -> "Figure":
  """Draws entropies, and predictors' probabilities; a line ends each closed segment.

  It is wider where a segment of a further stage ends, too.
  """
  from matplotlib.figure import Figure

  count, depths = len(segmentation.pieces), segmentation.depths()
  chances = [x.probabilities for x in (segmentation, *segmentation.inner)]
  curves = [(number, x) for number, x in enumerate(chances, 1) if x is not None]
  rows = 1 + len(curves)
  canvas = Figure(figsize=(max(5.0, 0.14 * count + 1), 1 + 1.6 * rows), layout="constrained")
  panels, positions = canvas.subplots(rows, sharex=True, squeeze=False)[:, 0], np.arange(count)
  panels[0].bar(positions, segmentation.entropies, color=style.COLOURS[5])
  panels[0].set(ylabel="conditional\nentropy (nats)", xlim=(-0.5, count - 0.5))
  for axes, (number, values) in zip(panels[1:], curves, strict=True):
    is_end = ~np.isnan(values)
    axes.plot(positions[is_end], values[is_end], color=style.COLOURS[1], marker=".")
    stage = f", stage {number}" if segmentation.inner else ""
    axes.set(ylabel=f"probability\nof a boundary{stage}", ylim=(-0.05, 1.05))
  for axes in panels:
    axes.grid(False)  # Lines across are ends of segments.
    for end in np.flatnonzero(depths):
      axes.axvline(end + 0.5, color="0.4", linewidth=0.8 * depths[end], linestyle="--")
  labels = [*map(visible, segmentation.pieces)]
  turn = 90 * (max(map(len, labels)) > 2)
  # Dollars of a text set no formulas.
  panels[-1].set_xticks(positions, labels, rotation=turn, fontsize=8, parse_math=False)
  panels[-1].set_xlabel("token")
  style.finish(canvas)
  return canvas


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints and draws the segmentation described by the command line."""
  from dpjax.commands import flags as command_line

  about = "The segments of a text and the conditional entropies, by a run's model."
  parser, path = argparse.ArgumentParser(prog="dpjax segmentation", description=about), os.path
  parser.add_argument("run_folder", type=path.expanduser, help="of dpjax train")
  parser.add_argument("--text", help="by default the beginning of the test split")
  about = f"a file: {', '.join(plots.SUFFIXES)}"
  parser.add_argument("--out", type=path.expanduser, help=about)
  with command_line.parsed(parser, arguments) as options:
    from dpjax import run as run_lib

    if options.out:
      plots.check_suffix(options.out)
    command_line.check_platform()
    run = run_lib.load(options.run_folder)
    beginning = run.tokens("test")[: min(120, run.window)] if options.text is None else options.text
    result = segment(run, beginning)
    print(render(result))
    counts = [(number, stage.boundaries.sum()) for number, stage in enumerate(result.inner, 2)]
    stages = "".join(f", {count} of stage {number}" for number, count in counts)
    print(
      f"\n{len(result.pieces)} tokens, {result.boundaries.sum()} closed segments{stages}; mean "
      f"conditional entropy {result.entropies.mean():.4f} nats"
    )
    if np.isfinite(result.enrichment()):
      print(
        f"enrichment {result.enrichment():.4f}: the surprisal of tokens that begin a segment, with "
        f"that of all as 1; of as many tokens at random {result.enrichment(seed=0):.4f}"
      )
    if options.out:
      plots.write(draw(result), options.out)
