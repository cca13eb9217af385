"""Tokenizing that was stopped goes on, and holds little of a text in memory."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dpjax import files
from dpjax.data import corpus as corpus_lib
from dpjax.data import encoding
from dpjax.data import tokens as tokens_lib
from dpjax.data.encoding import Encoder
from dpjax.data.text import load_corpus
from dpjax.data.tokens import tokenize
from dpjax.layers import Unigram
from tests import helpers

TEXTS = [f"Text {i} is\n{'long ' * (i % 13)}and ends." for i in range(400)] + [""]
UNIGRAM = Unigram(1, size=27)


@pytest.fixture
def small_parts(monkeypatch):
  monkeypatch.setattr(corpus_lib, "CHUNK_BYTES", 97)
  monkeypatch.setattr(encoding, "KEEP_BYTES", 1000)


@pytest.fixture
def corpus(tmp_path):
  path = tmp_path / "texts.jsonl"
  path.write_text("\n".join(json.dumps({"text": x}) for x in TEXTS))
  return load_corpus(path=path, split_fractions=(0.6, 0.2, 0.2))


def content(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def stop_after(monkeypatch, number, encoded, error=KeyboardInterrupt):
  """Lets the encoding of a part fail, after some."""

  def encode(self, part):
    if len(encoded) >= number:
      raise error("stopped")
    encoded.append(part)
    return call(self, part)

  call = Encoder.__call__
  monkeypatch.setattr(Encoder, "__call__", encode)


@pytest.mark.parametrize(
  "kind, boundaries", [("bpe", None), ("characters", UNIGRAM)], ids=["bpe", "unigram"]
)
def test_it_goes_on_where_it_was_stopped(
  tmp_path, corpus, small_parts, monkeypatch, kind, boundaries
):
  made = dict(boundaries=boundaries, vocab_size=300)
  all_parts = []
  with monkeypatch.context() as patch:
    stop_after(patch, 10**6, all_parts)
    tokenize(corpus, tmp_path / "whole", kind, **made)
  whole = content(tmp_path / "whole")
  learn = tokens_lib._learn
  for number in range(50):  # Any two runs are stopped at other places of the splits.
    with monkeypatch.context() as patch:
      stop_after(patch, 57, [])
      # The vocabulary is kept, too.
      patch.setattr(tokens_lib, "_learn", learn if number == 0 else lambda *_: 1 / 0)
      with contextlib.suppress(KeyboardInterrupt):
        tokenize(corpus, tmp_path / "parts", kind, **made)
        break
    assert (tmp_path / "parts.partial" / files.PROGRESS).exists()
    assert not (tmp_path / "parts").exists()
    (tmp_path / "parts.partial" / f"{files.PROGRESS}.{'7' * 16}.tmp").touch()  # of a killed process
  assert 5 < number < 49 and len(all_parts) > 300
  assert content(tmp_path / "parts") == whole
  assert not (tmp_path / "parts.partial").exists()


def test_another_text_begins_anew(tmp_path, corpus, small_parts, monkeypatch):
  folder = tmp_path / "tokens"
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    stop_after(patch, 150, [])
    tokenize(corpus, folder, "bytes", boundaries=UNIGRAM)
  assert (tmp_path / "tokens.partial" / "train.boundaries.bin").exists()
  # Of other settings, nothing is left over; of the same, the text may have changed nevertheless.
  tokens = tokenize(corpus, folder, "bytes")
  assert {x.name for x in folder.iterdir()} >= {"train.bin", "train.documents.bin"}
  assert not (folder / "train.boundaries.bin").exists() and not (folder / "unigram.model").exists()
  text = "".join(corpus.splits["train"])
  assert tokens.tokenizer.decode(tokens.splits["train"]) == text
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    stop_after(patch, 150, [])
    tokenize(corpus, tmp_path / "again", "bytes")
  state = json.loads((tmp_path / "again.partial" / files.PROGRESS).read_text())
  state["splits"]["train"]["counts"]["sha256"] = "0" * 64
  (tmp_path / "again.partial" / files.PROGRESS).write_text(json.dumps(state))
  path = tmp_path / "again.partial" / "train.bin"
  path.write_bytes(bytes(path.stat().st_size))
  assert content(tokenize(corpus, tmp_path / "again", "bytes").folder) == content(folder)


def test_sources_and_documents_go_on(tmp_path, corpus, small_parts, monkeypatch):
  (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"text": x[::-1]}) for x in TEXTS))
  mixture = f"{tmp_path}/texts.jsonl=1,{tmp_path}/other.jsonl=2"
  mixed = load_corpus(mixture=mixture, documents="isolated", data_dir=tmp_path)
  whole = tokenize(mixed, tmp_path / "whole", "bytes")
  for number in (200, 250):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
      stop_after(patch, number, [])
      tokenize(mixed, tmp_path / "parts", "bytes")
  parts = tokenize(mixed, tmp_path / "parts", "bytes")
  assert parts.counts == whole.counts and content(parts.folder) == content(whole.folder)
  assert np.all(np.diff(parts.documents["train"]) > 0)


SCRIPT = """
import resource, sys
from dpjax.data import encoding
from dpjax.data import tokens as tokens_lib
from dpjax.data.text import load_corpus
from dpjax.data.tokens import tokenize
encoding.KEEP_BYTES = 2**22
begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = tokenize(load_corpus(path=sys.argv[1]), sys.argv[2], "bytes")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin, tokens.counts["train"]["sha256"])
"""


def run(*arguments):
  command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
  return subprocess.Popen(command, cwd=helpers.ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_process_is_followed_by_another_in_little_memory(tmp_path):
  path, line = tmp_path / "big.jsonl", json.dumps({"text": "A line of some words. " * 40}) + "\n"
  with path.open("w") as file:
    for i in range(200):
      file.write(line.replace("some", f"{i}") * 1000)
  size = path.stat().st_size / 1024
  progress = tmp_path / "tokens.partial" / files.PROGRESS
  process = run(path, tmp_path / "tokens")
  while not progress.exists() or json.loads(progress.read_text())["splits"]["train"]["groups"] < 20:
    assert process.poll() is None
    time.sleep(0.01)
  os.kill(process.pid, signal.SIGKILL)
  process.wait()
  before = (tmp_path / "tokens.partial" / "train.bin").stat()
  grown, digest = run(path, tmp_path / "tokens").communicate()[0].split()
  again, whole = run(path, tmp_path / "whole").communicate()[0].split()
  after = (tmp_path / "tokens" / "train.bin").stat()
  assert (after.st_ino, after.st_size > before.st_size) == (before.st_ino, True) and digest == whole
  assert (tmp_path / "tokens/train.bin").read_bytes() == (tmp_path / "whole/train.bin").read_bytes()
  # Of a mapped file, the whole would count.
  assert max(int(grown), int(again)) < size / 2
