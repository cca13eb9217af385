"""OpenWebText: 8,013,769 English web pages that Reddit links to (Gokaslan and Cohen 2019).

Source: https://huggingface.co/datasets/Skylion007/openwebtext, 80 Parquet files, 39.8 GB of text.

No splits are published: document i, counted over all files, is validation if i % 1000 == 998, test
if i % 1000 == 999, and train otherwise, so that every part contributes to each split. Each document
is followed by a line end and the line <|endoftext|>, GPT-2's mark.
"""

from collections.abc import Iterator

from dpjax.data.corpus import line_pattern
from dpjax.data.sources import Files, Source, reading

REPOSITORY = "Skylion007/openwebtext"
SEPARATOR = "<|endoftext|>"


def read(files: Files) -> Iterator[tuple[str, str]]:
  """The documents of all files."""
  paths = reading.hub_parquet(files, "openwebtext", REPOSITORY, "plain_text", "train")
  texts = (text for path in paths for text in reading.parquet_texts(path))
  for i, text in enumerate(texts):
    yield {998: "valid", 999: "test"}.get(i % 1000, "train"), f"{text}\n{SEPARATOR}\n"


SOURCE = Source(
  "OpenWebText, web pages",
  read,
  "CC0 for the packaging; the pages are their authors'",
  "40 GB; download 24 GB",
  "Gokaslan et al. 2019, skylion007.github.io/OpenWebTextCorpus",
  documents=line_pattern(SEPARATOR),
)
