"""The One Billion Word benchmark: English sentences of news, tokenised and shuffled, one a line.

Train is the 99 training shards; test is the first of the 50 held-out shards, as in the literature
(Jozefowicz et al. 2016, "Exploring the Limits of Language Modeling"); validation is the second, as
the papers name none. Source: Chelba et al. 2013, arxiv.org/abs/1312.3005; statmt.org/lm-benchmark.
"""

from collections.abc import Iterator

from dpjax.data.sources import File, Files, Source, reading

ARCHIVE = File(
  "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
  # tensorflow_datasets/datasets/lm1b/checksums.tsv of github.com/tensorflow/datasets.
  checksum="sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
)
_HELDOUT = r"heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-{}-of-00050"
MEMBERS = {
  "train": (r"training-monolingual\.tokenized\.shuffled/news\.en-\d{5}-of-00100", 99),
  "valid": (_HELDOUT.format("00001"), 1),
  "test": (_HELDOUT.format("00000"), 1),
}


def read(files: Files) -> Iterator[tuple[str, str]]:
  """The shards of the three splits."""
  yield from reading.tar_members(files.get(ARCHIVE), MEMBERS)


SOURCE = Source(
  "One Billion Word Benchmark, sentences in a random order",
  read,
  "none stated",
  "4.2 GB; download 1.8 GB",
  "Chelba et al. 2013, arXiv:1312.3005",
  documents=r"\n",
)
