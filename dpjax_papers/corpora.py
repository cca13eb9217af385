r"""The papers' corpora and vocabularies, by name.

  penn_treebank  Mikolov's preparation of the Wall Street Journal, from the manual folder
  wikitext2, wikitext103, wikitext2_raw, wikitext103_raw
  lm1b           One Billion Word Benchmark
  openwebtext    web pages that Reddit links to
  text8          the first 10^8 cleaned characters of Wikipedia
  wiki40b_LANGUAGE, cc100_LANGUAGE
                 Wikipedia, and web pages, in en, fi, he or vi, as the pooling paper uses them
  childrens_books

wiki40b and cc100 are cleaned (`dpjax_papers.cleaning`) and cut to the first 400M characters for
training, 2M each for validation and test; wiki40b_fi_raw and so on are the articles as published.
text8_tiny, lm1b_tiny and so on are small pieces of these, for the "tiny" configurations.
"""

import ast
import csv
import functools
import lzma
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpjax.data.readers import BLOCK_BYTES, damage, line_pattern, read_records
from dpjax.data.remote import File, Files, Source, register_vocabulary
from dpjax.data.sources import register_corpus
from dpjax.data.text_file import SPLITS
from dpjax.errors import UserError
from dpjax_papers import archives
from dpjax_papers.cleaning import LANGUAGES, clean_chunks

Pieces = Iterator[tuple[str, str]]  # pairs of a split and a piece of its text

TINY = (1_000_000, 50_000, 50_000)  # characters of train, valid and test
POOLING = (400_000_000, 2_000_000, 2_000_000)
SMALL = (2_000_000, 100_000, 100_000)


def first_characters(pieces: Pieces, sizes: Iterable[int]) -> Pieces:
  """The first characters of each split, whose pieces may come in any order."""
  left: dict[str, int] = dict(zip(SPLITS, sizes, strict=True))
  for split, piece in pieces:
    if piece := piece[: left[split]]:
      left[split] -= len(piece)
      yield split, piece
    if not any(left.values()):
      return


def cleaned(texts: Mapping[str, Iterable[str]], language: str, sizes: Iterable[int]) -> Pieces:
  """The first clean characters of each split; a missing one begins where the last one ends."""
  rest: Iterator[str] = iter(())
  for split, size in zip(SPLITS, sizes, strict=True):
    if split in texts:
      rest = clean_chunks(texts[split], language)
    while size and (piece := next(rest, "")):
      if len(piece) > size:
        rest = _chain(piece[size:], rest)
        piece = piece[:size]
      size -= len(piece)
      yield split, piece


def _chain(piece: str, rest: Iterator[str]) -> Iterator[str]:
  yield piece
  yield from rest


PENN_TREEBANK = "simple-examples.tgz"


def read_penn_treebank(files: Files) -> Pieces:
  """Penn Treebank in Mikolov's preparation: the Wall Street Journal, from the manual folder.

  One sentence on each line, in lower case; 10,000 words, with N for numbers and `<unk>` for all
  other words. Sections 0-20, 21-22 and 23-24 are train, validation and test: 929,589, 73,760 and
  82,430 tokens with an `<eos>` for each line. The licence (LDC99T42) forbids redistribution, so
  nothing is downloaded. Source: Mikolov et al. 2010, "Recurrent neural network based language
  model", fit.vutbr.cz/~imikolov/rnnlm; Marcus et al. 1993.
  """
  archive = files.manual_dir / PENN_TREEBANK
  if not archive.exists():
    raise UserError(
      f"penn_treebank: expected {PENN_TREEBANK} (or a folder penn_treebank with train.txt, "
      f"valid.txt, test.txt) in the folder {files.manual_dir}, got neither. The corpus may not be "
      "downloaded for you: with a licence of the Linguistic Data Consortium "
      "(catalog.ldc.upenn.edu/LDC99T42) take the archive from Mikolov's page, "
      f"www.fit.vutbr.cz/~imikolov/rnnlm/{PENN_TREEBANK}, and put it there."
    )
  name = "simple-examples/data/ptb.{}.txt"
  return archives.tar_members(archive, {x: (re.escape(name.format(x)), 1) for x in SPLITS})


# The first author's site has the same files as Amazon S3 had. Their checksums are from
# datasets/wikitext/dataset_infos.json of github.com/huggingface/datasets.
WIKITEXT = {
  version: File(f"https://wikitext.smerity.com/{version}-v1.zip", checksum=f"sha256:{digits}")
  for version, digits in {
    "wikitext-2": "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    "wikitext-103": "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    "wikitext-2-raw": "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    "wikitext-103-raw": "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
  }.items()
}


def read_wikitext(files: Files, version: str) -> Pieces:
  """WikiText-2 and WikiText-103: good and featured articles of Wikipedia, as in the archives.

  Each line is a paragraph, a heading or empty; rare words are `<unk>` except in the "raw" versions,
  and numbers look like `1 @,@ 000`. With an `<eos>` for each line, WikiText-2 has 2,088,628 tokens
  for training and a vocabulary of 33,278, WikiText-103 has 103,227,021 and 267,735; validation and
  test have 217,646 and 245,569 tokens in both. Source: Merity et al. 2016, "Pointer Sentinel
  Mixture Models", arxiv.org/abs/1609.07843, Table 1.
  """
  path = files.get(WIKITEXT[version])
  ending = "raw" if version.endswith("raw") else "tokens"
  for split in SPLITS:
    for piece in archives.zip_member(path, f"{version}/wiki.{split}.{ending}"):
      yield split, piece


LM1B = File(
  "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz",
  # tensorflow_datasets/datasets/lm1b/checksums.tsv of github.com/tensorflow/datasets.
  checksum="sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e",
)
_HELDOUT = r"heldout-monolingual\.tokenized\.shuffled/news\.en\.heldout-{}-of-00050"
_LM1B_MEMBERS = {
  "train": (r"training-monolingual\.tokenized\.shuffled/news\.en-\d{5}-of-00100", 99),
  "valid": (_HELDOUT.format("00001"), 1),
  "test": (_HELDOUT.format("00000"), 1),
}


def read_lm1b(files: Files) -> Pieces:
  """The One Billion Word Benchmark: sentences of news in a random order, one on each line.

  Train is the 99 training shards; test is the first of the 50 held-out shards, as in the
  literature (Jozefowicz et al. 2016, "Exploring the Limits of Language Modeling"); validation is
  the second, as the papers name none. Source: Chelba et al. 2013, arxiv.org/abs/1312.3005;
  statmt.org/lm-benchmark.
  """
  yield from archives.tar_members(files.get(LM1B), _LM1B_MEMBERS)


OPENWEBTEXT = "Skylion007/openwebtext"
END_OF_PAGE = "<|endoftext|>"


def read_openwebtext(files: Files) -> Pieces:
  """OpenWebText: 8,013,769 English web pages that Reddit links to (Gokaslan and Cohen 2019).

  Source: https://huggingface.co/datasets/Skylion007/openwebtext, 80 Parquet files, 39.8 GB of text.
  No splits are published: document i, counted over all files, is validation if i % 1000 == 998,
  test if i % 1000 == 999, and train otherwise, so that every part contributes to each split. Each
  document is followed by a line end and the line <|endoftext|>, GPT-2's mark.
  """
  paths = archives.hub_parquet(files, "openwebtext", OPENWEBTEXT, "plain_text", "train")
  texts = (text for path in paths for text in read_records(path, ["text"]))
  for i, text in enumerate(texts):
    yield {998: "valid", 999: "test"}.get(i % 1000, "train"), f"{text}\n{END_OF_PAGE}\n"


TEXT8 = File(
  "http://mattmahoney.net/dc/text8.zip",
  # Setup.hs of github.com/d61h6k4/tensorflow-text8-input-data.
  checksum="sha256:a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
)


def read_text8(files: Files) -> Pieces:
  """text8: the first 10^8 cleaned characters of the English Wikipedia of March 2006.

  Letters a to z and single spaces, digits spelt out, one line without an end. Splits: 90M, 5M and
  5M characters, in order (Mikolov et al. 2012, "Subword language modeling with neural networks").
  """
  text = "".join(archives.zip_member(files.get(TEXT8), "text8"))
  second = len(text) - len(text) // 20
  first = second - len(text) // 20
  yield from (("train", text[:first]), ("valid", text[first:second]), ("test", text[second:]))


WIKI40B = "google/wiki40b"
# Enough of each split for the pooling paper's text: cleaning removes less than a fifth.
WIKI40B_HEAD = {"train": 520 * 10**6, "valid": 4 * 10**6, "test": 4 * 10**6}


def wiki40b_articles(
  files: Files, language: str, *, is_head: bool = False
) -> dict[str, Iterator[str]]:
  r"""Wiki-40B: articles of 41 Wikipedias (Guo et al., LREC 2020), about 90/5/5 % of them a split.

  Source: https://huggingface.co/datasets/google/wiki40b, Parquet files of the text of TFDS's
  wiki40b 1.3. Articles are as published, with marker lines, one directly after another:

    "\n_START_ARTICLE_\nAhti\n_START_PARAGRAPH_\nAhti on ..._NEWLINE_Se ..."

  Some languages (he, sk ...) store Python's representation of the bytes, which is decoded. The head
  of a split ends with a complete article.
  """

  def read(split: str) -> Iterator[str]:
    stem = "validation" if split == "valid" else split
    paths = archives.hub_parquet(files, "wiki40b", WIKI40B, language, stem)
    articles = (_decoded(text, path) for path in paths for text in read_records(path, ["text"]))
    return archives.head(articles, WIKI40B_HEAD[split] if is_head else math.inf)

  return {split: read(split) for split in SPLITS}


def _decoded(text: str, path: Path) -> str:
  """An article, decoded if it is Python's representation of bytes."""
  if not text.startswith(("b'", 'b"')):
    return text
  try:
    return ast.literal_eval(text).decode()
  except (SyntaxError, ValueError) as error:
    raise UserError(
      f"{path}: expected articles, as text or as Python prints their "
      f"bytes, got {text[:40]!r} ... ({error})"
    ) from error


CC100_URL = "https://data.statmt.org/cc-100"
CC100_BYTES = 2**28
CC100_CHARACTERS = 520 * 10**6


def cc100_documents(files: Files, language: str) -> dict[str, Iterator[str]]:
  """CC-100: web pages of Common Crawl of 2018 in a hundred languages; the beginning of one.

  Source: https://data.statmt.org/cc-100/en.txt.xz (82 GB packed; also fi, he, vi); Conneau et al.,
  ACL 2020. By hand: put cc100-en.txt.xz, or its first 256 MiB, into the manual folder.

  One split, "train": the first documents of the file's first 256 MiB, unchanged, until they reach
  520M characters, enough for the pooling paper's 404M after cleaning. A blank line ends a document.
  """
  name = f"{language}.txt.xz"
  file = File(f"{CC100_URL}/{name}", f"cc100-{name}", head_bytes=CC100_BYTES)
  return {"train": archives.head(_cut_documents(files, file), CC100_CHARACTERS)}


def _cut_documents(files: Files, file: File) -> Iterator[str]:
  """The documents of an .xz file, or the complete ones of its beginning, blank lines included.

  Raises a `UserError` if the file is not .xz, damaged, or not UTF-8.
  """
  path, rest = files.get(file), b""
  try:
    with lzma.open(path) as content:
      while block := content.read1(BLOCK_BYTES):
        *documents, rest = (rest + block).split(b"\n\n")
        for document in documents:
          yield document.decode() + "\n\n"
    yield rest.decode()
  except EOFError:  # Only the beginning; `rest` holds an incomplete document.
    return
  except (lzma.LZMAError, UnicodeDecodeError) as error:
    expected = "UTF-8 text packed by xz, or the beginning of such a file"
    raise damage(path, expected, error) from error


# Project Gutenberg asks programs to use its mirrors; the site itself blocks them.
GUTENBERG = "https://gutenberg.pglaf.org/cache/epub"
BOOKS = Path(__file__).with_name("childrens_books.tsv")
END_OF_BOOK = "<|endofbook|>"

_START = re.compile(
  r"^\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG E-?(?:BOOK|TEXT)[^*]*\*{3}.*\n|"
  r"^\*END[* ]THE SMALL PRINT.*\*END\*.*\n",
  re.M,  # the latter until about 2003
)
_END = re.compile(
  r"^(?:\*{3} ?END OF (?:THE|THIS) PROJECT GUTENBERG|"
  r"End of (?:the |this )?Project Gutenberg)",
  re.M | re.I,
)
_CREDIT = re.compile(
  r"note: project gutenberg|"
  r"(?:this )?(?:e-?text|e-?book|file) (?:was )?(?:prepared|produced|made|scanned)\b|"
  r"(?:produced|prepared|transcribed|scanned|digiti[sz]ed) (?:and \w+ )?(?:by|from)\b",
  re.I,
)


def read_childrens_books(files: Files) -> Pieces:
  """106 English children's books of Project Gutenberg, 35 MB, 100/3/3 complete books per split.

  The list, our choice, is childrens_books.tsv beside this module (id, split, title, author).
  Source: https://www.gutenberg.org/ebooks/ID, fetched as pgID.txt from Project Gutenberg's mirror.
  Header, licence, footer and initial credits are removed, line ends are LF, and a line
  <|endofbook|> separates two books.
  """
  with BOOKS.open(encoding="utf-8") as table:
    rows = [*csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)]
  for split, name in zip(SPLITS, ("train", "validation", "test"), strict=True):
    for i, number in enumerate(row["id"] for row in rows if row["split"] == name):
      book = read_book(files.get(File(f"{GUTENBERG}/{number}/pg{number}.txt")))
      yield split, f"{END_OF_BOOK}\n" * (i > 0) + book


def read_book(path: Path) -> str:
  """The text of a book without Project Gutenberg's header and footer.

  Raises:
    UserError: the file is not UTF-8, or Project Gutenberg's first or last line is missing.
  """
  try:
    text = path.read_text(encoding="utf-8-sig")  # also makes line ends LF
  except UnicodeDecodeError as error:
    raise UserError(f"{path}: expected a book in UTF-8, got {error}") from error
  starts = list(_START.finditer(text))
  end = _END.search(text, starts[-1].end()) if starts else None
  if end is None:
    raise UserError(
      f"{path}: expected a book between the lines *** START OF THE PROJECT GUTENBERG EBOOK ... *** "
      f"and *** END OF ..., got none of the {'second' if starts else 'first'}"
    )
  text = _drop_blank(text[starts[-1].end() : end.start()])
  while _CREDIT.match(text):
    text = _drop_blank(text.partition("\n\n")[2])
  return text.rstrip() + "\n"


def _drop_blank(text: str) -> str:
  return re.sub(r"\A(?:[^\S\n]*\n)+", "", text)


def _register(name: str, source: Source, tiny: tuple[int, ...] = ()) -> None:
  """Registers a corpus and, with the sizes of its splits, a small piece of it."""
  register_corpus(name, source)
  if tiny:
    title = f"{source.title}; the first {tiny[0]:,}, {tiny[1]:,} and {tiny[2]:,} characters"

    def read(files: Files) -> Pieces:
      return first_characters(source.read(files), tiny)

    register_corpus(f"{name}_tiny", Source(title, read, source.licence, "", source.source))


def _read_all(texts, language: str, files: Files) -> Pieces:
  """All of the texts of a language."""
  yield from ((split, text) for split, rest in texts(files, language).items() for text in rest)


def _read_clean(texts, language: str, sizes: tuple[int, ...], files: Files) -> Pieces:
  """The first clean characters of the texts of a language."""
  yield from cleaned(texts(files, language), language, sizes)


def _register_languages(name: str, texts, head, title: str, marks: str, **about: Any) -> None:
  """Registers a corpus in several languages: clean, a tiny piece of that, and as published."""
  for language in LANGUAGES:
    each = f"{name}_{language}"
    clean = "clean and cut as in the pooling paper"
    for suffix, sizes, size in (("", POOLING, "0.4 GB"), ("_tiny", TINY, "1 MB")):
      read = functools.partial(_read_clean, head, language, sizes)
      source = Source(f"{title} ({language}), {clean}", read, **{**about, "size": size})
      register_corpus(each + suffix, source)
    read = functools.partial(_read_all, texts, language)
    source = Source(f"{title} ({language}), as published", read, documents=marks, **about)
    register_corpus(f"{each}_raw", source)


_register(
  "penn_treebank",
  Source(
    "Penn Treebank, words, as Mikolov prepared it",
    read_penn_treebank,
    "LDC; research only, not to be had without a licence",
    "6 MB; by hand",
    "Mikolov et al. 2010",
  ),
)
for _name, _version, _title, _size in (
  ("wikitext2", "wikitext-2", "WikiText-2, words", "13 MB"),
  ("wikitext103", "wikitext-103", "WikiText-103, words", "540 MB"),
  ("wikitext2_raw", "wikitext-2-raw", "WikiText-2 with all of its words", "13 MB"),
  ("wikitext103_raw", "wikitext-103-raw", "WikiText-103 with all of its words", "550 MB"),
):
  _register(
    _name,
    Source(
      _title,
      functools.partial(read_wikitext, version=_version),
      "CC BY-SA 3.0",
      _size,
      "Merity et al. 2016, arXiv:1609.07843",
      # A title is a line " = Robert Boulter = " between blank ones; headings have more =.
      documents=r"(?<=\n \n)(?= = [^=\n][^\n]* = \n \n)",
    ),
  )
_register(
  "lm1b",
  Source(
    "One Billion Word Benchmark, sentences in a random order",
    read_lm1b,
    "none stated",
    "4.2 GB; download 1.8 GB",
    "Chelba et al. 2013, arXiv:1312.3005",
    documents=r"\n",
  ),
  tiny=SMALL,
)
_register(
  "openwebtext",
  Source(
    "OpenWebText, web pages",
    read_openwebtext,
    "CC0 for the packaging; the pages are their authors'",
    "40 GB; download 24 GB",
    "Gokaslan et al. 2019, skylion007.github.io/OpenWebTextCorpus",
    documents=line_pattern(END_OF_PAGE),
  ),
  tiny=SMALL,
)
_register(
  "text8",
  Source(
    "text8, the first 100M cleaned characters of Wikipedia",
    read_text8,
    "GFDL, CC BY-SA 3.0",
    "100 MB; download 31 MB",
    "Mahoney 2006, mattmahoney.net/dc/textdata.html",
  ),
  tiny=TINY,
)
_register_languages(
  "wiki40b",
  wiki40b_articles,
  functools.partial(wiki40b_articles, is_head=True),
  "Wiki40B, Wikipedia in one language",
  r"(?=\n_START_ARTICLE_\n)",
  licence="CC BY-SA 3.0",
  size="en 9.4 GB, download 6.2 GB (of clean text 0.6 GB); he, download 0.8 GB; fi, vi: not known",
  source="Guo et al. 2020, aclanthology.org/2020.lrec-1.297",
)
_register_languages(
  "cc100",
  cc100_documents,
  cc100_documents,
  "CC-100, the beginning of the web pages of one language",
  r"\n\n",
  licence="none claimed; Common Crawl's terms of use",
  size="0.5 GB; download 0.3 GB",
  source="Conneau et al. 2020, arXiv:1911.02116",
)
_register(
  "childrens_books",
  Source(
    "106 children's books of Project Gutenberg",
    read_childrens_books,
    "public domain in the USA",
    "35 MB",
    "Project Gutenberg, gutenberg.org; the list is ours",
    documents=line_pattern(END_OF_BOOK),
  ),
)

register_vocabulary(
  "bert_base_cased",
  File("hf://google-bert/bert-base-cased/vocab.txt", name="bert_base_cased_vocab.txt"),
)
# Checksums: tiktoken_ext/openai_public.py of openai/tiktoken.
register_vocabulary(
  "gpt2",
  File(
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe",
    name="gpt2_merges.txt",
    checksum="sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
  ),
  File(
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/encoder.json",
    name="gpt2_vocab.json",
    checksum="sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
  ),
)
