"""The style of all figures of the project: colours, dashes, fonts and ticks."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Okabe and Ito's colour-blind safe palette, without yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")


class Line(TypedDict):
  """Keyword arguments of `matplotlib.axes.Axes.plot`."""

  color: str
  linestyle: str


@contextlib.contextmanager
def applied(font_size: float = 10) -> Iterator[None]:
  """Applies the project's style within a block, or to a function as the decorator `@applied()`.

  Matplotlib's "C0", "C1", ... are `COLOURS`. Also save the figure inside the block. The font size
  is in points.
  """
  import matplotlib
  from matplotlib import rcsetup

  with matplotlib.rc_context(
    {
      "axes.axisbelow": True,
      "axes.formatter.limits": (-9, 9),  # No powers of ten.
      "axes.formatter.useoffset": False,
      "axes.grid": True,
      "axes.prop_cycle": rcsetup.cycler(color=COLOURS),
      "axes.spines.right": False,
      "axes.spines.top": False,
      "axes.titlesize": "medium",
      "font.size": font_size,
      "grid.color": "0.88",
      "legend.edgecolor": "none",
      "legend.fontsize": "medium",
      "lines.linewidth": 0.15 * font_size,
      "lines.markersize": 0.6 * font_size,
      "pdf.fonttype": 42,  # Publishers want TrueType.
    }
  ):
    yield


def line(i: int) -> Line:
  """The colour and dash of line i: each colour in turn, then again with the next dash."""
  return {
    "color": COLOURS[i % len(COLOURS)],
    "linestyle": _DASHES[i // len(COLOURS) % len(_DASHES)],
  }


def plain(text: str) -> str:
  r"""A text that matplotlib draws as it is: "$\frac{1}$" -> "\$\frac{1}\$", no formula."""
  return text.replace("$", r"\$")


def table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
  """Lays out a table in columns: the first left-aligned, the others right-aligned."""
  cells = [[str(cell) for cell in row] for row in (heads, *rows)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  lines = [
    "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
    for first, *rest in cells
  ]
  return "\n".join(lines)


def finish(figure: "Figure") -> None:
  """Formats the ticks of all axes as plain numbers: 0.6 and 20,000, not powers of ten.

  Call it last, within `applied`. Ticks given as a list stay as they are.
  """
  from matplotlib import ticker
  from matplotlib.scale import LogTransform

  for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
    low, high = sorted(map(abs, axis.get_view_interval()))
    locator = axis.get_major_locator()
    is_log = isinstance(locator, ticker.LogLocator)
    transform = axis.get_transform()
    if is_log and low > 0 and isinstance(transform, LogTransform) and transform.base == 10:
      is_x = axis.axis_name == "x"  # where labels are side by side
      axis.set_minor_locator(ticker.NullLocator())
      if high < 10 * low:
        axis.set_major_locator(ticker.MaxNLocator(4 if is_x else 6, steps=[1, 2, 5, 10]))
      elif high < (30 if is_x else 1000) * low:
        axis.set_major_locator(ticker.LogLocator(subs=(1, 3) if is_x else (1, 2, 5)))
    if is_log or (isinstance(locator, ticker.AutoLocator) and high >= 10_000):
      axis.set_major_formatter(lambda x, _: f"{x:,.10g}")
