"""Corpora whose archives are read by Python's own modules, on small ones of their form."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import itertools
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile

import pytest
import tensorflow_datasets as tfds

from dpjax.data.builders import base, text8
from dpjax.data.builders.lm1b import Lm1b
from dpjax.data.builders.penn_treebank import PennTreebank
from dpjax.data.builders.text8 import Text8
from dpjax.data.builders.wikitext import (
  WikiText2,
  WikiText2Raw,
  WikiText103,
  WikiText103Raw,
)

# Blank lines, one without words, and what other readers take for the end of a line.
LINES = (
  " = Se\u00f1or = \n",
  "\n",
  " \n",
  " a \r b \u2028 \u05d0\u05d1 \U0001f600 \x85 \n",
)
SPLITS = {
  "train": "".join(LINES) * 97,
  "validation": "valid" + "".join(LINES) * 7 + " no end",
  "test": "test" + "".join(LINES) * 11,
}
STEMS = {"train": "train", "validation": "valid", "test": "test"}
WIKITEXT = {
  WikiText2: "wikitext-2/wiki.{}.tokens",
  WikiText103: "wikitext-103/wiki.{}.tokens",
  WikiText2Raw: "wikitext-2-raw/wiki.{}.raw",
  WikiText103Raw: "wikitext-103-raw/wiki.{}.raw",
}
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
TEXT8 = " ".join(ALPHABET[i % 26 : i % 26 + 1 + i % 7] for i in range(4000))[:18013]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
  monkeypatch.setattr(base, "RECORD_BYTES", 499)
  monkeypatch.setattr(base, "SHARD_BYTES", 2503)
  monkeypatch.setattr(text8, "PIECE_BYTES", 1009)


def zipped(members):
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
    for name, content in members.items():
      archive.writestr(name, content)
  return buffer.getvalue()


def tarred(members):
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
    for name, content in members.items():
      info = tarfile.TarInfo(name)
      info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  return buffer.getvalue()


def wikitext_members(builder_class):
  return {
    WIKITEXT[builder_class].format(stem): SPLITS[split].encode() for split, stem in STEMS.items()
  }


def ptb_members(prefix):
  folder = f"{prefix}simple-examples"
  others = ("ptb.char.train.txt", "ptb-train.txt", "ptb.valid.txt~", "old.ptb.test.txt")
  return (
    {f"{folder}/": b"", f"{folder}/README": b"r"}
    | {f"{folder}/data/{name}": b"another\n" for name in others}
    | {f"{folder}/data/ptb.{stem}.txt": SPLITS[split].encode() for split, stem in STEMS.items()}
  )


def lm1b_members():
  """Shards in an order that is not theirs, and the text of the splits."""
  train = [i * 37 % 100 for i in range(1, 100)]
  heldout = [i * 7 % 50 for i in range(50)]
  folder = f"{LM1B}/training-monolingual.tokenized.shuffled"
  shards = {f"{folder}/news.en-{i:05d}-of-00100": f"shard {i} {LINES[3]}".encode() for i in train}
  folder = f"{LM1B}/heldout-monolingual.tokenized.shuffled"
  others = {
    f"{folder}/news.en.heldout-{i:05d}-of-00050": f"heldout {i} .\n\n".encode() for i in heldout
  }
  splits = {
    "train": b"".join(shards.values()).decode(),
    "validation": "heldout 1 .\n\n",
    "test": "heldout 0 .\n\n",
  }
  return {f"{LM1B}/": b"", f"{LM1B}/README": b"r"} | others | shards, splits


def cases():
  """By name: the builder, its archive's name and content, and the splits in it."""
  parts = {"train": TEXT8[:-1800], "validation": TEXT8[-1800:-900], "test": TEXT8[-900:]}
  members, lm1b_splits = lm1b_members()
  return {
    "text8": (Text8, "text8.zip", zipped({"text8": TEXT8}), parts),
    "lm1b": (Lm1b, f"{LM1B}.tar.gz", tarred(members), lm1b_splits),
  } | {
    x.name: (x, f"{WIKITEXT[x].split('/')[0]}-v1.zip", zipped(wikitext_members(x)), SPLITS)
    for x in WIKITEXT
  }


CASES = cases()


def set_file(monkeypatch, builder_class, content, url=None, checksum=None):
  """Makes the builder expect this archive, and look for it there."""
  (file,) = builder_class.FILES
  changed = dataclasses.replace(
    file,
    url=url or file.url,
    checksum=checksum or f"sha256:{hashlib.sha256(content).hexdigest()}",
    size=len(content),
  )
  monkeypatch.setattr(builder_class, "FILES", (changed,))


def make(builder_class, tmp_path):
  builder = builder_class(data_dir=tmp_path / "data", file_format="array_record")
  manual_dir = tmp_path / "manual"
  manual_dir.mkdir(exist_ok=True)
  builder.download_and_prepare(
    download_dir=tmp_path / "downloads",
    download_config=tfds.download.DownloadConfig(manual_dir=manual_dir),
  )
  return builder


def read(builder):
  """The splits' records."""
  return {
    split: [record["text"] for record in builder.as_data_source(split)]
    for split in builder.info.splits
  }


def check(builder, splits):
  records = read(builder)
  assert list(records) == ["train", "validation", "test"]
  for split, text in splits.items():
    assert b"".join(records[split]) == text.encode()
    sizes = [len(record.decode()) for record in records[split]]
    assert max(sizes) <= 499
    assert all(250 < size for size in sizes[:-1])
    assert all(
      before.endswith(b"\n") or after.startswith(b" ")
      for before, after in itertools.pairwise(records[split])
    )


def give(tmp_path, name, content):
  """Puts a file into the manual folder."""
  path = tmp_path / "manual" / name
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(content)
  return path


@pytest.fixture
def address(tmp_path):
  """A folder as a web site."""

  class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
      pass

  folder = tmp_path / "site"
  folder.mkdir()
  handler = functools.partial(Handler, directory=folder)
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
  thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
  thread.start()
  yield f"http://127.0.0.1:{server.server_port}"
  server.shutdown()
  thread.join()
  server.server_close()


@pytest.mark.parametrize("name", CASES)
def test_archive_in_the_manual_folder(name, tmp_path, monkeypatch):
  builder_class, archive, content, splits = CASES[name]
  set_file(monkeypatch, builder_class, content)
  give(tmp_path, archive, content)
  builder = make(builder_class, tmp_path)
  assert builder.name == name
  check(builder, splits)


@pytest.mark.parametrize("name", ["text8", "wikitext2", "lm1b"])
def test_archive_that_is_served(name, tmp_path, address, monkeypatch):
  builder_class, archive, content, splits = CASES[name]
  (tmp_path / "site" / archive).write_bytes(content)
  set_file(monkeypatch, builder_class, content, f"{address}/{archive}")
  check(make(builder_class, tmp_path), splits)


def test_what_is_served_must_have_the_checksum(tmp_path, address, monkeypatch):
  _, archive, content, _ = CASES["text8"]
  (tmp_path / "site" / archive).write_bytes(content)
  set_file(monkeypatch, Text8, content, f"{address}/{archive}", f"sha256:{'0' * 64}")
  with pytest.raises(ValueError, match=archive):
    make(Text8, tmp_path)
  assert not Text8(data_dir=tmp_path / "data", file_format="array_record").is_prepared()


@pytest.mark.parametrize("form", ["./", "", "files"])
def test_penn_treebank_from_the_manual_folder(form, tmp_path):
  members = ptb_members("" if form == "files" else form)
  if form == "files":
    for name, content in members.items():
      if "/data/" in name:
        give(tmp_path, name.split("/")[-1], content)
  else:
    give(tmp_path, "simple-examples.tgz", tarred(members))
  builder = make(PennTreebank, tmp_path)
  assert builder.name == "penn_treebank"
  check(builder, SPLITS)


def test_penn_treebank_is_not_downloaded(tmp_path):
  give(tmp_path, "ptb.train.txt", b"all alone")
  with pytest.raises(ValueError, match="expected simple-examples.tgz .or ptb.train.txt"):
    make(PennTreebank, tmp_path)
  assert PennTreebank.FILES == ()


def test_shards_are_many_and_small(tmp_path, monkeypatch):
  builder_class, archive, content, _ = CASES["text8"]
  set_file(monkeypatch, builder_class, content)
  give(tmp_path, archive, content)
  builder = make(Text8, tmp_path)
  # 16,213 characters, 499 in a record, up to 5 of these in a shard.
  lengths = builder.info.splits["train"].shard_lengths
  assert len(lengths) == 7
  assert set(lengths[:-1]) == {5}
  files = sorted(path.name for path in builder.data_path.iterdir())
  assert len([name for name in files if "train" in name]) == 7
  assert not [name for name in files if "partial" in name]


def spoil(content):
  """Other bytes near the beginning of what is compressed."""
  return content[:97] + b"\xff" * 23 + content[120:]


DAMAGED = {
  "text8, not a zip": (Text8, b"no zip", "expected a zip archive of text8"),
  "text8, no member": (Text8, zipped({"other": "a"}), "expected a zip archive of text8"),
  "text8, not ASCII": (Text8, zipped({"text8": "a" * 997 + "\u00e9"}), "text8, whole and"),
  "wikitext, not a zip": (WikiText2, b"no zip", "expected a zip archive with wikitext-2"),
  "wikitext, of another": (
    WikiText2,
    CASES["wikitext103"][2],
    "archive with wikitext-2/wiki.train.tokens",
  ),
  "wikitext, not UTF-8": (
    WikiText2,
    zipped(wikitext_members(WikiText2) | {"wikitext-2/wiki.test.tokens": b"a\xe9\n"}),
    "archive with wikitext-2/wiki.test.tokens in UTF-8",
  ),
  "wikitext, bytes changed": (
    WikiText2,
    spoil(CASES["wikitext2"][2]),
    "archive with wikitext-2/wiki.train.tokens",
  ),
  "wikitext, cut": (
    WikiText2,
    CASES["wikitext2"][2][:-97],
    "archive with wikitext-2/wiki.train.tokens",
  ),
  "lm1b, bytes changed": (Lm1b, spoil(CASES["lm1b"][2]), "expected a tar.gz archive"),
  "lm1b, not a tar": (Lm1b, b"no tar", "expected a tar.gz archive with 99 members"),
  "lm1b, no tar in it": (Lm1b, gzip.compress(b"a" * 9973), "expected a tar.gz archive"),
  "lm1b, cut": (Lm1b, CASES["lm1b"][2][:-997], "expected a tar.gz archive"),
  "lm1b, a shard less": (
    Lm1b,
    tarred({k: v for k, v in lm1b_members()[0].items() if "n-00001" not in k}),
    "expected 99 members .*got 98",
  ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_archive(name, tmp_path, monkeypatch):
  builder_class, content, message = DAMAGED[name]
  path = give(tmp_path, builder_class.FILES[0].url.rsplit("/")[-1], content)
  set_file(monkeypatch, builder_class, content)
  with pytest.raises(ValueError, match=f"{path}: .*{message}|{path}: {message}"):
    make(builder_class, tmp_path)


def test_text8_with_one_letter_changed(tmp_path, monkeypatch):
  buffer = io.BytesIO()
  with zipfile.ZipFile(buffer, "w") as archive:  # not packed, so that it can be found
    archive.writestr("text8", TEXT8)
  content = bytearray(buffer.getvalue())
  content[content.index(TEXT8[:50].encode()) + 7] ^= 1
  set_file(monkeypatch, Text8, bytes(content))
  give(tmp_path, "text8.zip", bytes(content))
  with pytest.raises(ValueError, match="text8.zip: expected text8, whole .*CRC"):
    make(Text8, tmp_path)


def test_empty_split(tmp_path, monkeypatch):
  members = wikitext_members(WikiText2) | {"wikitext-2/wiki.valid.tokens": b""}
  set_file(monkeypatch, WikiText2, zipped(members))
  give(tmp_path, "wikitext-2-v1.zip", zipped(members))
  with pytest.raises(ValueError, match="wikitext2: expected text in the split validation"):
    make(WikiText2, tmp_path)


def test_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
  _, archive, content, splits = CASES["text8"]
  set_file(monkeypatch, Text8, content)
  give(tmp_path, archive, content)
  pieces = text8._read

  def broken(path, begin, end):
    yield from pieces(path, begin, end)
    if begin:
      raise OSError(28, "No space left on device")

  monkeypatch.setattr(text8, "_read", broken)
  with pytest.raises(OSError, match="No space left"):
    make(Text8, tmp_path)
  builder = Text8(data_dir=tmp_path / "data", file_format="array_record")
  assert not builder.is_prepared()
  assert not list((tmp_path / "data").rglob("*record*"))
  monkeypatch.setattr(text8, "_read", pieces)
  check(make(Text8, tmp_path), splits)


KILLED = """
import os, signal, sys
import tensorflow_datasets as tfds
from dpjax.data.builders import base, text8
from dpjax.data.builders.text8 import Text8
data_dir, manual_dir, fate = sys.argv[1:]
base.RECORD_BYTES, base.SHARD_BYTES, text8.PIECE_BYTES = 499, 2503, 1009
Text8.FILES = (base.File("http://127.0.0.1:1/text8.zip"),)
pieces = text8._read
def read(path, begin, end):
  for i, piece in enumerate(pieces(path, begin, end)):
    if fate == "killed" and i == 11:
      os.kill(os.getpid(), signal.SIGKILL)
    yield piece
text8._read = read
builder = Text8(data_dir=data_dir, file_format="array_record")
builder.download_and_prepare(
  download_config=tfds.download.DownloadConfig(manual_dir=manual_dir))
size = sum(len(record["text"]) for record in builder.as_data_source("train"))
print(size, "tensorflow" in sys.modules, builder.is_prepared())
"""


def run(tmp_path, fate):
  arguments = [str(tmp_path / "data"), str(tmp_path / "manual"), fate]
  return subprocess.run(
    [sys.executable, "-W", "error", "-c", KILLED, *arguments],
    capture_output=True,
    text=True,
    timeout=180,
  )


def test_killed_and_made_again_quietly_without_tensorflow(tmp_path):
  give(tmp_path, "text8.zip", CASES["text8"][2])
  killed = run(tmp_path, "killed")
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert list((tmp_path / "data").rglob("*.partial"))  # it was in the middle
  builder = Text8(data_dir=tmp_path / "data", file_format="array_record")
  assert not builder.is_prepared()
  with pytest.raises(KeyError, match="has not been generated"):
    builder.as_data_source("train")
  again = run(tmp_path, "spared")
  assert again.returncode == 0, again.stderr
  assert (again.stdout, again.stderr) == ("16213 False True\n", "")
  check(make(Text8, tmp_path), CASES["text8"][3])  # as it is: nothing is made anew
