"""What the three papers report, and our configuration for each number.

Rows that the paper only plots have no number; `claims` quotes its text.

Sources: Cetoli, CLASP 2022, aclanthology.org/2022.clasp-1.3; Chen 2023, arXiv:2308.07661;
Nawrot et al. 2023, arXiv:2211.09761.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from dpjax.errors import UserError, unknown

# Scores, as runs report them.
PERPLEXITY = "perplexity"
BITS = "bits_per_character"
FACTOR = "shortening_factor"


@dataclasses.dataclass(frozen=True)
class Row:
  """One experiment.

  Attributes:
    name: unique in its table.
    label: the paper's name for it.
    config: "FILE:VARIANT" of configs/.
    group: rows of one group share a text and are compared.
    paper: the paper's numbers, by score.
    is_starred: whether the paper found it better than its baselines, p < 0.05.
    after: the name of the row whose parameters it starts from, or "".
    place: its position on a figure's axis, or None.
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
    name: PAPER-tableN or PAPER-figN.
    title: what it shows.
    claims: what the paper says about it.
    scores: the scores that are reported; rows are compared by the first.
    rows: the experiments.
    baselines: name suffixes of the rows that others are tested against.
    axis: the meaning of a row's `place`; "" without an axis.
  """

  name: str
  title: str
  claims: tuple[str, ...] = ()
  scores: tuple[str, ...] = ()
  rows: tuple[Row, ...] = ()
  baselines: tuple[str, ...] = ()
  axis: str = ""

  @property
  def source(self) -> str:
    """The paper, and the table or figure in it."""
    paper, _, place = self.name.partition("-")
    kind, number = ("Table", place[5:]) if place.startswith("table") else ("Fig.", place[3:])
    part = " (English)" if self.name == "pooling-fig3" else ""
    return f"{_PAPERS[paper]}, {kind} {number}{part}"


_PAPERS = {
  "dispatcher": "Cetoli, CLASP 2022",
  "extractors": "Chen 2023",
  "pooling": "Nawrot et al. 2023",
}
_TEXTS = {"ptb": "PTB", "wikitext2": "WikiText2", "wikitext103": "WikiText103", "lm1b": "1BW"}
_DISPATCHER = {
  "msa": ("masked self-attention", (40.58, 55.05, 22.56, 66.52)),
  "dispatcher": ("plain Dispatcher", (35.40, 50.23, 24.39, 53.32)),
  "finetuned": ("Dispatcher after OpenWebText", (18.95, 22.74, 20.38, 36.76)),
}
POOLING = {
  "none": "vanilla",
  "fixed2": "fixed, 2",
  "fixed3": "fixed, 3",
  "fixed4": "fixed, 4",
  "gumbel": "Gumbel",
  "entropy": "entropy",
  "unigram": "Unigram",
  "whitespace": "whitespaces",
}
_POOLING_TEXTS = {
  "text8": ("text8", "text8.py:"),
  "wiki40b_en": ("wiki40b, English", "wiki40b.py:en,"),
  "cc100": ("cc-100, English", "cc100.py:"),
  "wiki40b_fi": ("wiki40b, Finnish", "wiki40b.py:fi,"),
  "wiki40b_he": ("wiki40b, Hebrew", "wiki40b.py:he,"),
  "wiki40b_vi": ("wiki40b, Vietnamese", "wiki40b.py:vi,"),
}
# Bits per character/shortening factor, in the order of the two above; *: starred.
_POOLING_TABLE1 = """
  1.143/1.0 1.149/2.0 1.155/3.0 1.166/4.0 1.136*/4.6 1.138*/4.1 1.134*/5.0 1.133*/5.7
  1.091/1.0 1.084/2.0 1.093/3.0 1.102/4.0 1.080/4.7  1.083/4.1  1.078*/5.0 1.077*/5.6
  1.225/1.0 1.224/2.0 1.229/3.0 1.240/4.0 1.212*/4.6 1.218*/3.8 1.212*/4.8 1.214*/5.2
  0.945/1.0 0.946/2.0 0.951/3.0 0.961/4.0 0.941/2.6  0.949/4.1  0.937/2.1  0.955/7.9
  1.274/1.0 1.279/2.0 1.290/3.0 1.304/4.0 1.281/4.7  1.276/3.6  1.270*/1.9 1.284/3.8
  1.065/1.0 1.060/2.0 1.068/3.0 1.087/4.0 1.061/4.3  1.072/4.2  1.058/4.0  1.057*/4.4
"""


def _dispatcher_rows() -> list[Row]:
  rows = []
  for i, (text, group) in enumerate(_TEXTS.items()):
    for model, (label, numbers) in _DISPATCHER.items():
      config, after = f"configs/{model}_{text}.py", ""
      if model == "finetuned":
        config, after = f"configs/dispatcher_finetuned.py:{text}", "openwebtext/dispatcher"
      paper = {PERPLEXITY: numbers[i]}
      rows.append(Row(f"{text}/{model}", label, config, group, paper, after=after))
  name, config = "openwebtext/dispatcher", "configs/dispatcher_openwebtext.py"
  return [*rows, Row(name, "pre-training on OpenWebText", config, "OpenWebText")]


def _pooling_row(variant: str, label: str, text: str = "text8", paper=None, **settings) -> Row:
  group, file = _POOLING_TEXTS[text]
  name = variant.replace(",middle_", "_middle").replace(",", "_")
  config = f"configs/pooling_{file}{variant}"
  return Row(f"{text}/{name}", label, config, group, paper or {}, **settings)


def _pooling_table1_rows() -> list[Row]:
  names = [(text, *name) for text in _POOLING_TEXTS for name in POOLING.items()]
  rows = []
  for (text, name, label), numbers in zip(names, _POOLING_TABLE1.split(), strict=True):
    bits, factor = numbers.split("/")
    paper = {BITS: float(bits.rstrip("*")), FACTOR: float(factor)}
    rows.append(_pooling_row(name, label, text, paper, is_starred=bits.endswith("*")))
  return rows


def _pooling_table2_rows() -> list[Row]:
  papers = {"fixed2": (1.149, 1.180), "entropy": (1.138, 1.151), "whitespace": (1.133, 1.144)}
  forms = ("", "average"), (",subsampling", "last token")
  return [
    _pooling_row(name + suffix, f"{POOLING[name]}, {form}", paper={BITS: bits})
    for name, numbers in papers.items()
    for (suffix, form), bits in zip(forms, numbers, strict=True)
  ]


def _pooling_fig3_rows() -> list[Row]:
  rows = [_pooling_row("none", "vanilla", place=1)]
  rows += [_pooling_row(f"fixed{k}", f"fixed, {k}", place=k) for k in (2, 3, 4)]
  # The last pieces and the first prior are those of Table 1.
  for size in (200, 500, 1000, 3000, 5000, 10_000):
    name = "unigram" if size == 10_000 else f"unigram_{size}"
    rows.append(_pooling_row(name, f"Unigram, {size} pieces"))
  for prior in (0.20, 0.25, 0.30, 0.37, 0.45):
    name = "gumbel" if prior == 0.20 else f"gumbel_{prior:.2f}"
    rows.append(_pooling_row(name, f"Gumbel, alpha {prior:.2f}"))
  return rows


def _pooling_fig4_rows() -> list[Row]:
  return [
    _pooling_row(f"{name},middle_{layers}", POOLING[name], place=layers + 4)
    for name in ("none", "fixed2", "entropy", "unigram", "whitespace")
    for layers in range(4, 17, 2)
  ]


_EXTRACTORS = {
  "she": "SHE",
  "he": "HE",
  "attention_32": "attention, 32 heads",
  "we": "WE",
  "attention_1": "attention, 1 head",
  "me": "ME",
}


def _extractors(figure: str, title: str, claim: str, labels=_EXTRACTORS, places=(None,), axis=""):
  rows = []
  for name, label in labels.items():
    for place in places:
      end = "" if place is None else f"_{place}"
      # Two layers and a window of 32 are in both figures.
      variant = f"{name},{figure}{end}".replace("fig11_2", "fig10_32") if end else name
      config = f"configs/extractors_childrens_books.py:{variant}"
      rows.append(Row(name + end, label, config, "children's books", place=place))
  scores = ("median_cost", PERPLEXITY, BITS)
  return Table(f"extractors-{figure}", title, (claim,), scores, tuple(rows), axis=axis)


_TABLES = (
  Table(
    "dispatcher-table1",
    "Test perplexity of the Dispatcher beside masked self-attention",
    (
      "The Dispatcher is ahead of masked self-attention on PTB, WikiText2 and 1BW, and "
      "behind it on WikiText103 (Sec. 3.5).",
    ),
    # WordPiece loses text, so there are no bits.
    (PERPLEXITY, "perplexity_authors_protocol", "perplexity_per_word"),
    tuple(_dispatcher_rows()),
  ),
  _extractors(
    "fig7",
    "Training costs of self-attention by its heads",
    "32 heads are the best, and 1 head the worst.",
    {f"attention_{n}": f"attention, {n} head{'s' * (n > 1)}" for n in (2**i for i in range(8))},
  ),
  _extractors(
    "fig8",
    "Training costs of the Extractors and of self-attention",
    "The order of the costs, the lowest first: SHE < HE < attention of 32 heads ~ WE "
    "< attention of 1 head ~ ME.",
  ),
  _extractors(
    "fig10",
    "Training costs over the context window",
    "The larger the window, the larger the gap between SHE and attention of 32 heads.",
    places=(8, 16, 32, 64),
    axis="context window",
  ),
  _extractors(
    "fig11",
    "Training costs over the number of layers",
    "More layers are better.",
    places=(1, 2, 4, 8),
    axis="layers",
  ),
  Table(
    "pooling-table1",
    "Bits per character and shortening factor of dynamic token pooling",
    (
      "*: better than no pooling and than fixed segments, p < 0.05 in a paired t-test over "
      "3 seeds.",
    ),
    (BITS, FACTOR, "shortening_factor_padded", "f1"),
    tuple(_pooling_table1_rows()),
    baselines=("none", "fixed2", "fixed3", "fixed4"),
  ),
  Table(
    "pooling-table2",
    "Segments as averages and as their last token, bits per character",
    ("Averages are better for all three kinds of boundaries.",),
    (BITS, FACTOR),
    tuple(_pooling_table2_rows()),
  ),
  Table(
    "pooling-fig3",
    "Bits per character over the shortening factor",
    (
      "More pieces, or a smaller prior, make longer segments.",
      "At the same factor dynamic pooling needs fewer bits than fixed segments.",
    ),
    (BITS, FACTOR),
    tuple(_pooling_fig3_rows()),
    axis="shortening factor",
  ),
  Table(
    "pooling-fig4",
    "Bits per character over the number of layers",
    ("Dynamic pooling is ahead at every depth.",),
    (BITS, FACTOR),
    tuple(_pooling_fig4_rows()),
    axis="layers",
  ),
)
TABLES = {table.name: table for table in _TABLES}


def find(names: str) -> list[Table]:
  """The tables in a comma-separated list of names, or all for "all".

  Raises:
    ValueError: a name has no table.
  """
  chosen = [*TABLES] if names == "all" else [*dict.fromkeys(names.split(","))]
  for name in chosen:
    if name not in TABLES:
      raise unknown("TABLE", ("all", *TABLES), name)
  return [TABLES[name] for name in chosen]


def select(tables: Sequence[Table], names: Sequence[str]) -> list[tuple[Table, Row]]:
  """Returns the rows of `names` in this order, or all rows, with their tables.

  Among all rows, those that other rows start from come first.

  Raises:
    ValueError: a row is in no table, or in two.
  """
  rows = [(table, row) for table in tables for row in table.rows]
  if not names:
    firsts = {(table.name, row.after) for table, row in rows}
    order = {table.name: i for i, table in enumerate(tables)}
    return sorted(
      rows,
      key=lambda x: (order[x[0].name], bool(x[1].after), (x[0].name, x[1].name) not in firsts),
    )
  chosen = []
  for name in names:
    found = [(table, row) for table, row in rows if row.name == name]
    if not found:
      raise unknown("rows", [row.name for _, row in rows], name)
    if len(found) > 1:
      several = ", ".join(table.name for table, _ in found)
      raise UserError(f"rows: expected a row of one table, got {name} of {several}")
    chosen += found
  return chosen
