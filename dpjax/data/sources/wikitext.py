"""WikiText-2 and WikiText-103: good and featured articles of Wikipedia, as in the archives.

Each line is a paragraph, a heading or empty; rare words are `<unk>` except in the "raw" versions,
and numbers look like `1 @,@ 000`. With an `<eos>` for each line, WikiText-2 has 2,088,628 tokens
for training and a vocabulary of 33,278, WikiText-103 has 103,227,021 and 267,735; validation and
test have 217,646 and 245,569 tokens in both. Source: Merity et al. 2016, "Pointer Sentinel Mixture
Models", arxiv.org/abs/1609.07843, Table 1.
"""

import functools
from collections.abc import Iterator

from dpjax.data.sources import File, Files, Source, reading

# The first author's own address has the same files as Amazon S3 had. Their checksums are from
# datasets/wikitext/dataset_infos.json of github.com/huggingface/datasets.
ADDRESS = "https://wikitext.smerity.com"
_VERSIONS = {
  "wikitext-2": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
  "wikitext-103": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
  "wikitext-2-raw": "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
  "wikitext-103-raw": "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
}
ARCHIVES = {
  version: File(f"{ADDRESS}/{version}-v1.zip", checksum=f"sha256:{digits}")
  for version, digits in _VERSIONS.items()
}


def read(files: Files, version: str) -> Iterator[tuple[str, str]]:
  """The three members of an archive."""
  path = files.get(ARCHIVES[version])
  ending = "raw" if version.endswith("raw") else "tokens"
  for split in ("train", "valid", "test"):
    for piece in reading.zip_member(path, f"{version}/wiki.{split}.{ending}"):
      yield split, piece


def _source(version: str, title: str, size: str) -> Source:
  return Source(
    title,
    functools.partial(read, version=version),
    "CC BY-SA 3.0",
    size,
    "Merity et al. 2016, arXiv:1609.07843",
    # A title is a line " = Robert Boulter = " between blank ones; headings have more =.
    documents=r"(?<=\n \n)(?= = [^=\n][^\n]* = \n \n)",
  )


_RAW = "as it was written, with all of its words"
SOURCES = {
  "wikitext2": _source("wikitext-2", "WikiText-2, words", "13 MB"),
  "wikitext103": _source("wikitext-103", "WikiText-103, words", "540 MB"),
  "wikitext2_raw": _source("wikitext-2-raw", f"WikiText-2 {_RAW}", "13 MB"),
  "wikitext103_raw": _source("wikitext-103-raw", f"WikiText-103 {_RAW}", "550 MB"),
}
