"""Exact operation and parameter counts of a token mixer.

  python -m dpjax_papers.complexity --length=128 --width=128 --num_heads=32
  python -m dpjax_papers.complexity --inference=64

l context window, t tokens so far (including the new one), d width, n heads, K levels.

Local attention reads w tokens and a short convolution k of them. Mamba-2 has expand 2, a state of
N = 128 features, a convolution of k = 4 tokens, and heads of P = 2d/n features; its counts are
those of the recurrence, token by token. A logarithm or a root counts as an exponentiation.

Source: "Attention Is Not All You Need Anymore", Sec. 7, Tables 3 to 7, for attention, SHE,
HE, WE and ME. Its rules, kept for the others too: training is the forward pass over one
sequence of l tokens; token t reads t tokens; a product with a [p, q] matrix takes p q
multiplications and (p - 1) q additions a token; no biases. An Extractor's counts are those of
the direct sum, not of an FFT. The counts for tokens t = 1 .. l add up to those of training.

One difference: attention's additions in inference are those of Table 5 before simplification,

  (3 (d-1) d/n + t (d/n - 1) + (t-1) d/n + (t-1)) n + (d-1) d = 2td + 4d^2 - 5d - n.

The simplified form, 2td - tn + t + 4d^2 - 5d - 1, agrees only for a single head; with more heads
it is inconsistent with Tables 3 and 7.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from dpjax.analysis import style
from dpjax.errors import UserError

EXTRACTORS = ("she", "he", "we", "me")
REACHES = {"local_attention": 256, "short_convolution": 3, "mamba2": 4}  # as in the layers
STATE_WIDTH = 128
MIXERS = ("attention", "dispatcher", "dispatcher_multihead", *EXTRACTORS, *REACHES)
ONE_HEAD = (*EXTRACTORS, "short_convolution")


@dataclasses.dataclass(frozen=True)
class Counts:
  """Operations and parameters of a mixer; `+` adds two field by field.

  Divisions are in the softmax, in attention's scaling by sqrt(d/n), and in the sigmoid,
  exponentiations in the softmax and the sigmoid; subtractions count as additions.
  """

  multiplications: int = 0
  additions: int = 0
  divisions: int = 0
  exponentiations: int = 0
  parameters: int = 0

  @property
  def operations(self) -> int:
    """Table 7's total arithmetic operations: all but the parameters."""
    return sum(dataclasses.astuple(self)) - self.parameters

  def __add__(self, other: "Counts") -> "Counts":
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Counts(*(a + b for a, b in pairs))


def count_operations(
  mixer: str,
  *,
  length: int,
  width: int,
  position: int | None = None,
  num_heads: int = 1,
  adjustment: bool = True,
  output_projection: bool = True,
  reach: int | None = None,
) -> Counts:
  """Counts a sublayer's forward pass over a sequence, or over one more token, Tables 3 to 6.

    >>> count_operations("me", length=128, width=128)
    Counts(multiplications=1056768, additions=1040384, divisions=0, exponentiations=0, \
parameters=128)
    >>> count_operations("attention", length=128, width=128, num_heads=32, position=10).operations
    136480

  The Dispatcher (Alg. 1 of its paper) has K = ceil(log2(l)) levels, values [d/n, d/n], gates
  [d/n, K] with a sigmoid, 1 / (1 + exp(-x)), and an output [d/n, d/n], shared by the heads; the
  multi-head one has them [d, d], [d, n K] and [d, d], and no sigmoid. Level k has gates and
  sums for the l - 2**k tokens with a token 2**k before them.

  Args:
    mixer: one of `MIXERS`.
    length: l, tokens of the sequence and of the context window.
    width: d.
    position: t of one more token, from 1 to l, when all tokens before it are cached; None
      counts training. Only the parameters, those of the whole sublayer, then depend on l.
    num_heads: n, a divisor of d; 1 for Extractors and short convolutions, which have none.
    adjustment: whether SHE, HE and WE use Eq. 24.
    output_projection: whether they use Eq. 25. HE without both is just its extraction.
    reach: w of local attention, k of a short convolution and of Mamba-2; None: 256, 3, 4.

  Raises:
    ValueError: an argument is out of range, or it is set for a mixer that does not have it.
  """
  if mixer not in MIXERS:
    raise UserError(f"mixer: expected one of {', '.join(MIXERS)}, got {mixer}")
  for name, value in {"length": length, "width": width, "num_heads": num_heads}.items():
    _check_size(name, value)
  if width % num_heads:
    raise UserError(f"num_heads: expected a divisor of the width {width}, got {num_heads}")
  if mixer in ONE_HEAD and num_heads != 1:
    raise UserError(f"num_heads: expected 1 with the mixer {mixer}, got {num_heads}")
  for name, value in {"adjustment": adjustment, "output_projection": output_projection}.items():
    if mixer not in ("she", "he", "we") and not value:
      raise UserError(f"{name}: expected True with the mixer {mixer}, got {value}")
  if reach is None:
    reach = REACHES.get(mixer, length)
  elif mixer not in REACHES:
    raise UserError(f"reach: expected None with the mixer {mixer}, got {reach}")
  _check_size("reach", reach)
  num_levels = max(1, (length - 1).bit_length())  # as in the layer
  # New tokens; pairs of one and a token it reads; pairs of one and a level at which it reads.
  if position is None:
    first = min(length, reach)  # tokens, whose t-th reads t
    tokens, reads = length, first * (first + 1) // 2 + (length - first) * reach
    level_reads = sum(max(length - 2**level, 0) for level in range(num_levels))
  elif type(position) is int and 1 <= position <= length:
    tokens, reads, level_reads = 1, min(position, reach), (position - 1).bit_length()
  else:
    raise UserError(f"position: expected an integer from 1 to the length {length}, got {position}")
  if mixer in ("attention", "local_attention"):
    linear, each = _linear(tokens, width), num_heads * reads
    scores = Counts(width * reads, (width - num_heads) * reads, divisions=each)
    softmax = Counts(0, num_heads * (reads - tokens), divisions=each, exponentiations=each)
    mixed = Counts(width * reads, width * (reads - tokens))
    return linear + linear + linear + scores + softmax + mixed + linear
  if mixer == "short_convolution":
    gated = Counts((reads + 2 * tokens) * width, (reads - tokens) * width, parameters=reach * width)
    linear = _linear(tokens, width)
    return linear + linear + linear + gated + linear
  if mixer == "mamba2":
    return _count_mamba2(width, num_heads, reach, tokens, reads)
  if mixer not in EXTRACTORS:  # A Dispatcher's matrix of a head's size is applied to each head.
    is_multihead = mixer == "dispatcher_multihead"
    heads = 1 if is_multihead else num_heads
    size, each = width // heads, num_heads * level_reads
    linear = _linear(tokens * heads, size)
    columns = num_levels * (num_heads if is_multihead else 1)
    gates = Counts(each * size, each * (size - 1), parameters=size * columns)
    if not is_multihead:
      gates += Counts(0, each, divisions=each, exponentiations=each)
    return linear + gates + Counts(width * level_reads, width * level_reads) + linear
  sums, size = (reads - tokens) * width, width**2 if mixer == "she" else width
  inner = reads * (width - 1) * width if mixer == "she" else 0
  taps = length * (1 if mixer == "me" else size)
  counts, linear = Counts(reads * size, inner + sums, parameters=taps), _linear(tokens, width)
  if mixer == "he":
    counts += linear
  if mixer != "me" and adjustment:
    counts += linear + Counts(tokens * width)
  if mixer != "me" and output_projection:
    counts += linear
  return counts


def _count_mamba2(width: int, heads: int, taps: int, tokens: int, reads: int) -> Counts:
  inner = 2 * width
  mixed, states = inner + 2 * STATE_WIDTH, inner * STATE_WIDTH
  parameters = (taps + 1) * mixed + 3 * heads + inner
  columns = 2 * inner + 2 * STATE_WIDTH + heads
  counts = Counts(parameters=parameters + width * (columns + inner))
  counts += Counts(reads * mixed, reads * mixed)  # the convolution with its bias
  # Each token: matrices, silu of what is mixed, softplus with its bias, decays, states, skip.
  each = Counts(width * (columns + inner), (width - 1) * columns + (inner - 1) * width)
  each += Counts(mixed, mixed, mixed, mixed)
  each += Counts(0, 2 * heads, 0, 2 * heads)
  each += Counts(heads, 0, 0, heads)
  each += Counts(inner + 3 * states, states + states - inner)
  each += Counts(inner, inner)
  # The gate y silu(z), and the norm with its gain.
  each += Counts(2 * inner, inner, inner, inner)
  each += Counts(2 * inner, inner, inner + 1, 1)
  return counts + Counts(*(tokens * count for count in dataclasses.astuple(each)))


def _check_size(name: str, value: object) -> None:
  if type(value) is not int or not 1 <= value < 2**31:
    raise UserError(f"{name}: expected an integer of at least 1 below 2**31, got {value}")


def _linear(times: int, width: int) -> Counts:
  return Counts(times * width**2, times * width * (width - 1), parameters=width**2)


def count_pattern(mixers: Sequence[str], num_layers: int, *, num_heads: int, **sizes) -> Counts:
  """Counts the alternating mixers of a stack of layers; see `count_operations`."""
  _check_size("num_layers", num_layers)
  counts = Counts()
  for i, mixer in enumerate(mixers):
    one = count_operations(mixer, num_heads=1 if mixer in ONE_HEAD else num_heads, **sizes)
    turns = len(range(i, num_layers, len(mixers)))
    counts += Counts(*(turns * count for count in dataclasses.astuple(one)))
  return counts


def table(
  *, length: int, width: int, num_heads: int, position: int | None = None
) -> dict[str, Counts]:
  """Counts every mixer, by row: Table 7 with the Dispatcher and the later ones.

  See `count_operations`. Attention and the Dispatchers have a row with 1 head and one with
  `num_heads`.
  """

  def count(mixer: str, **settings) -> Counts:
    return count_operations(mixer, length=length, width=width, position=position, **settings)

  rows, named = {}, ("attention", "Dispatcher", "multi-head Dispatcher")
  for mixer, name in zip(MIXERS, named, strict=False):
    for heads in (1, num_heads):
      rows[f"{name}, {heads} {'head' if heads == 1 else 'heads'}"] = count(mixer, num_heads=heads)
  rows |= {mixer.upper(): count(mixer) for mixer in EXTRACTORS}
  rows["HE, extraction alone"] = count("he", adjustment=False, output_projection=False)
  for mixer, reach in REACHES.items():
    heads = 1 if mixer in ONE_HEAD else num_heads
    name = "Mamba-2, convolution" if mixer == "mamba2" else mixer.replace("_", " ")
    rows[f"{name} of {reach}"] = count(mixer, num_heads=heads)
  return rows


def main(arguments: Sequence[str] | None = None) -> None:
  """Prints the table described by the command line."""
  about = "Counts operations and parameters of one sublayer, for each token mixer."
  parser = argparse.ArgumentParser(prog="python -m dpjax_papers.complexity", description=about)
  parser.add_argument("--length", type=int, default=128, help="l, the context window")
  parser.add_argument("--width", type=int, default=128, help="d")
  parser.add_argument("--num_heads", type=int, default=32, help="n, a divisor of d")
  about = "count one more token, the T-th, instead"
  parser.add_argument("--inference", type=int, metavar="T", help=about)
  parser.add_argument(
    "--pattern", help="a,b: also count a stack of layers that alternates these mixers"
  )
  parser.add_argument("--num_layers", type=int, help="layers of the stack; default: one per mixer")
  options = parser.parse_args(arguments)
  sizes = dict(length=options.length, width=options.width, num_heads=options.num_heads)
  try:
    rows = table(**sizes, position=options.inference)
    if options.pattern is not None:
      mixers = options.pattern.split(",")
      layers = len(mixers) if options.num_layers is None else options.num_layers
      name = f"{', '.join(mixers)} in {layers} layers"
      rows[name] = count_pattern(mixers, layers, position=options.inference, **sizes)
    elif options.num_layers is not None:
      raise UserError(f"num_layers: expected it with --pattern, got {options.num_layers} alone")
  except UserError as error:
    sys.exit(f"--{error}".replace("--position", "--inference"))
  title = f"Training, forward: {options.length} tokens, width {options.width}"
  if options.inference is not None:
    title = f"Inference: token {options.inference} of {options.length}, width {options.width}"
  names = [field.name for field in dataclasses.fields(Counts)]
  names.insert(-1, "operations")
  cells = [[row, *(f"{getattr(x, name):,}" for name in names)] for row, x in rows.items()]
  print(f"{title}\n\n{style.table(['', *names], cells)}")


if __name__ == "__main__":
  main()
