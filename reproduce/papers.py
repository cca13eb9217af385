"""What the three papers report, and the experiment of ours that belongs to each number.

A row's name is also that of its runs' folder. Where a paper only draws a figure, its rows
have no numbers, and the table says what its text claims of them.

Sources: Cetoli, CLASP 2022, aclanthology.org/2022.clasp-1.3; Chen 2023, arXiv:2308.07661;
Nawrot et al. 2023, arXiv:2211.09761.
"""

import dataclasses
import difflib
from collections.abc import Mapping

from dpjax.errors import UserError

# Scores, as runs report them.
PERPLEXITY = "perplexity"
BITS = "bits_per_character"
FACTOR = "shortening_factor"


@dataclasses.dataclass(frozen=True)
class Row:
  """One experiment.

  Attributes:
    name: of its runs' folder, "ptb/msa".
    label: of its line in the table.
    config: "FILE:VARIANT" of configs/.
    group: rows of one group share a text and are compared; "PTB".
    paper: the paper's numbers, by score; {}: it draws them only.
    is_starred: the paper found it better than its baselines, p < 0.05.
    after: the name of the row whose parameters it begins with; "": none.
    place: its place on a figure's axis, or None.
  """

  name: str
  label: str
  config: str
  group: str = ""
  paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
  is_starred: bool = False
  after: str = ""
  place: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
  """A table or a figure of a paper.

  Attributes:
    name: "dispatcher-table1".
    title: what it shows.
    source: where it stands.
    scores: that are reported, the first one being compared.
    rows: its experiments, in the paper's order.
    claims: what the paper says of numbers that it does not print.
    baselines: the last parts of the names of the rows that others are tested against, by
      paired t-tests over seeds; (): there is no test.
    axis: of a figure, what `Row.place` is.
    kind: "runs", or what is done in the place of training: "counts", "step_times".
  """

  name: str
  title: str
  source: str
  scores: tuple[str, ...] = ()
  rows: tuple[Row, ...] = ()
  claims: tuple[str, ...] = ()
  baselines: tuple[str, ...] = ()
  axis: str = ""
  kind: str = "runs"


_TEXTS = {"ptb": "PTB", "wikitext2": "WikiText2", "wikitext103": "WikiText103", "lm1b": "1BW"}
_DISPATCHER = {
  "msa": ("masked self-attention", (40.58, 55.05, 22.56, 66.52)),
  "dispatcher": ("plain Dispatcher", (35.40, 50.23, 24.39, 53.32)),
  "finetuned": ("Dispatcher after OpenWebText", (18.95, 22.74, 20.38, 36.76)),
}
_POOLING = {
  "none": "vanilla",
  "fixed2": "fixed, 2",
  "fixed3": "fixed, 3",
  "fixed4": "fixed, 4",
  "gumbel": "Gumbel",
  "entropy": "entropy",
  "unigram": "Unigram",
  "whitespace": "whitespaces",
}
# Bits per character and shortening factor, in the order of _POOLING; *: starred.
_POOLING_TEXTS = {
  "text8": (
    "text8",
    "configs/pooling_text8.py:{}",
    """
    1.143 1.0  1.149 2.0  1.155 3.0  1.166 4.0  1.136* 4.6  1.138* 4.1  1.134* 5.0
    1.133* 5.7""",
  ),
  "wiki40b_en": (
    "wiki40b, English",
    "configs/pooling_wiki40b.py:en,{}",
    """
    1.091 1.0  1.084 2.0  1.093 3.0  1.102 4.0  1.080 4.7  1.083 4.1  1.078* 5.0
    1.077* 5.6""",
  ),
  "cc100": (
    "cc-100, English",
    "configs/pooling_cc100.py:{}",
    """
    1.225 1.0  1.224 2.0  1.229 3.0  1.240 4.0  1.212* 4.6  1.218* 3.8  1.212* 4.8
    1.214* 5.2""",
  ),
  "wiki40b_fi": (
    "wiki40b, Finnish",
    "configs/pooling_wiki40b.py:fi,{}",
    """
    0.945 1.0  0.946 2.0  0.951 3.0  0.961 4.0  0.941 2.6  0.949 4.1  0.937 2.1
    0.955 7.9""",
  ),
  "wiki40b_he": (
    "wiki40b, Hebrew",
    "configs/pooling_wiki40b.py:he,{}",
    """
    1.274 1.0  1.279 2.0  1.290 3.0  1.304 4.0  1.281 4.7  1.276 3.6  1.270* 1.9
    1.284 3.8""",
  ),
  "wiki40b_vi": (
    "wiki40b, Vietnamese",
    "configs/pooling_wiki40b.py:vi,{}",
    """
    1.065 1.0  1.060 2.0  1.068 3.0  1.087 4.0  1.061 4.3  1.072 4.2  1.058 4.0
    1.057* 4.4""",
  ),
}


def _dispatcher_table1() -> Table:
  rows = []
  for i, (text, group) in enumerate(_TEXTS.items()):
    for model, (label, numbers) in _DISPATCHER.items():
      if model == "finetuned":
        config, after = f"configs/dispatcher_finetuned.py:{text}", "openwebtext/dispatcher"
      else:
        config, after = f"configs/{model}_{text}.py", ""
      rows.append(
        Row(f"{text}/{model}", label, config, group, {PERPLEXITY: numbers[i]}, after=after)
      )
  rows.append(
    Row(
      "openwebtext/dispatcher",
      "pre-training on OpenWebText",
      "configs/dispatcher_openwebtext.py",
      "OpenWebText",
    )
  )
  return Table(
    "dispatcher-table1",
    "Test perplexity of the Dispatcher beside masked self-attention",
    "Cetoli, CLASP 2022, Table 1",
    (PERPLEXITY, "perplexity_per_word"),  # WordPiece loses text, so there are no bits.
    tuple(rows),
    (
      "The Dispatcher is ahead of masked self-attention on PTB, WikiText2 and 1BW, and "
      "behind it on WikiText103 (Sec. 3.5).",
    ),
  )


def _pooling_row(name, label, config, text, numbers, *, is_starred=False, place=None):
  group, file, _ = _POOLING_TEXTS[text]
  return Row(f"{text}/{name}", label, file.format(config), group, numbers, is_starred, "", place)


def _pooling_table1() -> Table:
  rows = []
  for text, (_, _, numbers) in _POOLING_TEXTS.items():
    words = numbers.split()
    for i, (name, label) in enumerate(_POOLING.items()):
      bits, factor = words[2 * i : 2 * i + 2]
      paper = {BITS: float(bits.rstrip("*")), FACTOR: float(factor)}
      rows.append(_pooling_row(name, label, name, text, paper, is_starred=bits.endswith("*")))
  return Table(
    "pooling-table1",
    "Bits per character and shortening factor of dynamic token pooling",
    "Nawrot et al. 2023, Table 1",
    (BITS, FACTOR, "shortening_factor_padded", "f1"),
    tuple(rows),
    (
      "*: better than no pooling and than fixed segments, p < 0.05 in a paired t-test over "
      "3 seeds.",
    ),
    baselines=("none", "fixed2", "fixed3", "fixed4"),
  )


def _pooling_table2() -> Table:
  # Averages and sub-sampling.
  papers = {"fixed2": (1.149, 1.180), "entropy": (1.138, 1.151), "whitespace": (1.133, 1.144)}
  rows = []
  for name, numbers in papers.items():
    for suffix, label, bits in (
      ("", "average", numbers[0]),
      (",subsampling", "last token", numbers[1]),
    ):
      rows.append(
        _pooling_row(
          name + suffix.replace(",", "_"),
          f"{_POOLING[name]}, {label}",
          name + suffix,
          "text8",
          {BITS: bits},
        )
      )
  return Table(
    "pooling-table2",
    "Segments as averages and as their last token, bits per character",
    "Nawrot et al. 2023, Table 2",
    (BITS, FACTOR),
    tuple(rows),
    ("Averages are better for all three kinds of boundaries.",),
  )


def _pooling_fig3() -> Table:
  sizes = (200, 500, 1000, 3000, 5000, 10_000)
  priors = (0.20, 0.25, 0.30, 0.37, 0.45)
  rows = [_pooling_row("none", "vanilla", "none", "text8", {}, place=1)]
  rows += [
    _pooling_row(f"fixed{k}", f"fixed, {k}", f"fixed{k}", "text8", {}, place=k) for k in (2, 3, 4)
  ]
  # The last pieces and the first prior are those of Table 1.
  names = [f"unigram_{x}" for x in sizes[:-1]] + ["unigram"]
  rows += [
    _pooling_row(name, f"Unigram, {x} pieces", name, "text8", {})
    for x, name in zip(sizes, names, strict=True)
  ]
  names = ["gumbel"] + [f"gumbel_{x:.2f}" for x in priors[1:]]
  rows += [
    _pooling_row(name, f"Gumbel, alpha {x:.2f}", name, "text8", {})
    for x, name in zip(priors, names, strict=True)
  ]
  return Table(
    "pooling-fig3",
    "Bits per character over the shortening factor",
    "Nawrot et al. 2023, Fig. 3 (English)",
    (BITS, FACTOR),
    tuple(rows),
    (
      "More pieces, or a smaller prior, make longer segments.",
      "At the same factor dynamic pooling needs fewer bits than fixed segments.",
    ),
    axis="shortening factor",
  )


def _pooling_fig4() -> Table:
  rows = []
  for name in ("none", "fixed2", "entropy", "unigram", "whitespace"):
    for layers in (4, 6, 8, 10, 12, 14, 16):
      rows.append(
        _pooling_row(
          f"{name}_middle{layers}",
          _POOLING[name],
          f"{name},middle_{layers}",
          "text8",
          {},
          place=layers + 4,
        )
      )
  return Table(
    "pooling-fig4",
    "Bits per character over the number of layers",
    "Nawrot et al. 2023, Fig. 4",
    (BITS, FACTOR),
    tuple(rows),
    ("Dynamic pooling is ahead at every depth.",),
    axis="layers",
  )


_EXTRACTORS = {
  "she": "SHE",
  "he": "HE",
  "we": "WE",
  "me": "ME",
  "attention_1": "attention, 1 head",
  "attention_32": "attention, 32 heads",
}
_COST = "median_cost"
_GAP = ("The larger the window, the larger the gap between SHE and attention of 32 heads.",)
_ORDER = (
  "The order of the costs, the lowest first: SHE < HE < attention of 32 heads ~ WE "
  "< attention of 1 head ~ ME."
)


def _extractors(name, title, source, words, places=(None,), axis="", claims=(_ORDER,)):
  rows = []
  for word in words:
    label = _EXTRACTORS.get(word) or f"attention, {word.partition('_')[2]} heads"
    for place in places:
      figure = "" if place is None else f"_{place}"
      variant = word if place is None else f"{word},{name.partition('-')[2]}_{place}"
      # Two layers and a window of 32 are in both figures.
      variant = variant.replace("fig11_2", "fig10_32")
      rows.append(
        Row(
          f"{word}{figure}",
          label,
          f"configs/extractors_childrens_books.py:{variant}",
          "children's books",
          place=place,
        )
      )
  return Table(name, title, source, (_COST, PERPLEXITY, BITS), tuple(rows), claims, axis=axis)


COUNTS = ("multiplications", "additions", "divisions", "exponentiations", "parameters")
# Table 7, by the names of `dpjax.analysis.complexity.table`: `COUNTS`.
TABLE_7 = {
  "attention, 1 head": (10_502_144, 10_420_096, 16_512, 8_256, 65_536),
  "attention, 32 heads": (10_502_144, 10_416_128, 528_384, 264_192, 65_536),
  "SHE": (139_476_992, 139_411_456, 0, 0, 2_129_920),
  "HE": (7_364_608, 7_282_688, 0, 0, 65_536),
  "WE": (5_267_456, 5_201_920, 0, 0, 49_152),
  "ME": (1_056_768, 1_040_384, 0, 0, 128),
}

# The most valuable first, for who has little time.
BY_VALUE = (
  "extractors-table7",
  "dispatcher-table1",
  "extractors-fig8",
  "pooling-table1",
  "dispatcher-fig2",
  "pooling-fig5",
  "pooling-table2",
  "pooling-fig3",
  "extractors-fig11",
  "extractors-fig10",
  "extractors-fig7",
  "pooling-fig4",
)
TABLES = {
  table.name: table
  for table in (
    _dispatcher_table1(),
    Table(
      "dispatcher-fig2",
      "Seconds of a training step over the number of tokens",
      "Cetoli, CLASP 2022, Fig. 2",
      claims=("The Dispatcher's time grows far more slowly than that of masked self-attention.",),
      axis="tokens",
      kind="step_times",
    ),
    Table(
      "extractors-table7",
      "Operations and parameters of a layer, d = l = 128",
      "Chen 2023, Table 7",
      kind="counts",
    ),
    _extractors(
      "extractors-fig7",
      "Training costs of self-attention by its heads",
      "Chen 2023, Fig. 7",
      tuple(f"attention_{2**i}" for i in range(8)),
      claims=("32 heads are the best, and 1 head the worst.",),
    ),
    _extractors(
      "extractors-fig8",
      "Training costs of the Extractors and of self-attention",
      "Chen 2023, Fig. 8",
      ("she", "he", "attention_32", "we", "attention_1", "me"),
    ),
    _extractors(
      "extractors-fig10",
      "Training costs over the context window",
      "Chen 2023, Fig. 10",
      ("she", "he", "attention_32", "we", "attention_1", "me"),
      (8, 16, 32, 64),
      "context window",
      _GAP,
    ),
    _extractors(
      "extractors-fig11",
      "Training costs over the number of layers",
      "Chen 2023, Fig. 11",
      ("she", "he", "attention_32", "we", "attention_1", "me"),
      (1, 2, 4, 8),
      "layers",
      ("More layers are better.",),
    ),
    _pooling_table1(),
    _pooling_table2(),
    _pooling_fig3(),
    _pooling_fig4(),
    Table(
      "pooling-fig5",
      "Time and memory of a training step over the shortening factor",
      "Nawrot et al. 2023, Fig. 5",
      claims=(
        "Factor 2: over 40% less time and memory; factor 4: 2.5 times faster, 50% to "
        "60% less memory.",
      ),
      axis="shortening factor",
      kind="step_times",
    ),
  )
}


def find(names: str) -> list[Table]:
  """The tables of a list of names with commas, or of "all".

  Raises:
    ValueError: one has no table.
  """
  if names == "all":
    return [TABLES[name] for name in BY_VALUE]
  for name in names.split(","):
    if name not in TABLES:
      near = difflib.get_close_matches(name, TABLES, n=1, cutoff=0.0)[0]
      raise UserError(
        f"TABLE: expected all, report, or of {', '.join(TABLES)}, "
        f"got {name!r}; the nearest is {near}"
      )
  return [TABLES[name] for name in dict.fromkeys(names.split(","))]
