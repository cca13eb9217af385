"""Encoding in parts: the same by one process or several, and after a kill at any place."""

import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from dpjax.data import encoding
from dpjax.data.encoding import Encoder, encode_text
from dpjax.text.tokens import train_tokenizer
from dpjax.text.unigram import UnigramBoundaries, train_unigram
from tests import helpers

PARTS = [f"the {word} of\n a{'b' * i} " for i, word in enumerate(["cat", "bee", "ant"] * 5)]
TEXT = "".join(PARTS)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(helpers.ROOT)}


def make_encoder(with_boundaries=False):
  unigram = UnigramBoundaries(train_unigram(PARTS, 17)) if with_boundaries else None
  return Encoder(train_tokenizer("characters", PARTS), np.dtype(np.uint16), unigram)


def read(folder, with_boundaries=False):
  arrays = [np.fromfile(folder / "train.bin", np.uint16)]
  if with_boundaries:
    arrays.append(np.fromfile(folder / "train.boundaries.bin", np.uint8))
  return arrays


@pytest.mark.parametrize("with_boundaries", [False, True])
def test_processes_give_what_one_gives(tmp_path, with_boundaries):
  encoder = make_encoder(with_boundaries)
  results = []
  for processes in (1, 2):
    folder = tmp_path / str(processes)
    folder.mkdir()
    results.append(encode_text(PARTS, 0, encoder, folder, "train", processes))
    tokens, *boundaries = read(folder, with_boundaries)
    np.testing.assert_array_equal(tokens, encoder.tokenizer.encode(TEXT))
    if boundaries:
      expected = encoder.unigram.of_tokens(TEXT, encoder.tokenizer)
      np.testing.assert_array_equal(boundaries[0], expected)
  assert (
    results[0]
    == results[1]
    == {
      "tokens": len(TEXT),
      "characters": len(TEXT),
      "words": len(TEXT.split()) + TEXT.count("\n"),
      "bytes": len(TEXT.encode()),
      "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
    }
  )


@pytest.mark.parametrize("with_boundaries", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 7, 14])
def test_goes_on_where_it_was_stopped(tmp_path, monkeypatch, stop, with_boundaries):
  monkeypatch.setattr(encoding, "COMMIT_BYTES", 40)
  encoder = make_encoder(with_boundaries)

  class Stop(Exception):
    pass

  def stopping():
    for i, part in enumerate(PARTS):
      if i == stop:
        raise Stop
      yield part

  with pytest.raises(Stop):
    encode_text(stopping(), 0, encoder, tmp_path, "train", 1)
  # A kill may leave more in the files than the note knows of.
  with (tmp_path / "train.bin").open("ab") as file:
    file.write(b"\x07\x07\x07")
  encoded = []
  call = Encoder.__call__
  monkeypatch.setattr(
    Encoder, "__call__", lambda self, part: encoded.append(part) or call(self, part)
  )
  result = encode_text(PARTS, 0, encoder, tmp_path, "train", 1)
  assert result["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
  assert result["tokens"] == len(TEXT)
  # Three parts or four are between two notes.
  assert len(PARTS) - stop <= len(encoded) <= len(PARTS) - stop + 4
  whole = tmp_path / "whole"
  whole.mkdir()
  encode_text(PARTS, 0, encoder, whole, "train", 1)
  found, expected = read(tmp_path, with_boundaries), read(whole, with_boundaries)
  for array, one in zip(found, expected, strict=True):
    np.testing.assert_array_equal(array, one)
  assert encode_text(PARTS, 0, encoder, tmp_path, "train", 1) == result


@pytest.mark.parametrize("change", ["first", "shorter", "longer"])
def test_another_text_is_encoded_anew(tmp_path, monkeypatch, change):
  monkeypatch.setattr(encoding, "COMMIT_BYTES", 40)
  encoder = make_encoder()
  encode_text(PARTS, 0, encoder, tmp_path, "train", 1)
  parts = {
    "first": [PARTS[0].replace("cat", "tac"), *PARTS[1:]],
    "shorter": PARTS[:-1],
    "longer": [*PARTS, "the end"],
  }[change]
  result = encode_text(parts, 0, encoder, tmp_path, "train", 1)
  text = "".join(parts)
  assert result["sha256"] == hashlib.sha256(text.encode()).hexdigest()
  np.testing.assert_array_equal(read(tmp_path)[0], encoder.tokenizer.encode(text))


@pytest.mark.parametrize("damage", ["no json", "[]", '{"parts": 3}', None])
def test_a_damaged_note_costs_time_alone(tmp_path, monkeypatch, damage):
  monkeypatch.setattr(encoding, "COMMIT_BYTES", 40)
  encoder = make_encoder()
  encode_text(PARTS, 0, encoder, tmp_path, "train", 1)
  if damage is None:
    (tmp_path / "train.bin").write_bytes(b"short")
  else:
    (tmp_path / "train.json").write_text(damage)
  encode_text(PARTS, 0, encoder, tmp_path, "train", 1)
  np.testing.assert_array_equal(read(tmp_path)[0], encoder.tokenizer.encode(TEXT))


def test_a_process_that_dies_costs_little(tmp_path, monkeypatch):
  """As when memory is short: what is done stays, and the next call goes on."""
  from dpjax.data import corpora, prepared

  monkeypatch.setattr(corpora, "CHUNK_BYTES", 101)
  monkeypatch.setattr(encoding, "COMMIT_BYTES", 211)
  texts = tmp_path / "texts"
  texts.mkdir()
  for split in ("train", "valid", "test"):
    (texts / f"{split}.txt").write_text(f"{split} text, a line\n" * 97)
  corpus = corpora.load_corpus(path=texts)
  submit = encoding.concurrent.futures.ProcessPoolExecutor.submit
  calls = []

  def submit_and_kill(pool, *arguments):
    calls.append(arguments)
    if len(calls) == 13:
      for process in list(pool._processes.values()):
        process.kill()
    return submit(pool, *arguments)

  monkeypatch.setattr(encoding.concurrent.futures.ProcessPoolExecutor, "submit", submit_and_kill)
  with pytest.raises(encoding.EncodingError, match="^data: expected processes that encode"):
    prepared.prepare(corpus, tmp_path / "data", "bytes", processes=2)
  note = json.loads((tmp_path / "data.partial" / "train.json").read_text())
  assert note["parts"] >= 3 and not (tmp_path / "data").exists()
  calls.clear()
  calls.extend(range(99))
  data = prepared.prepare(corpus, tmp_path / "data", "bytes", processes=2)
  assert bytes(data.splits["train"].astype(np.uint8)) == (texts / "train.txt").read_bytes()


SCRIPT = """
import sys
from pathlib import Path
from dpjax.data import corpora, encoding, prepared
corpora.CHUNK_BYTES = 101
encoding.COMMIT_BYTES = 211
written = encoding._write_note
def write_note(note, files, parts, counter, result=None):
  written(note, files, parts, counter, result)
  if len(sys.argv) == 2 and parts > 20:
    print("now", flush=True)
    sys.stdin.read()
encoding._write_note = write_note
prepared.prepare(corpora.load_corpus(path="texts"), "data", "bytes")
"""


def test_prepared_data_after_a_kill(tmp_path):
  (tmp_path / "texts").mkdir()
  for split, number in (("train", 500), ("valid", 31), ("test", 37)):
    (tmp_path / "texts" / f"{split}.txt").write_text(f"{split} text, a line\n" * number)
  command = [sys.executable, "-c", SCRIPT]
  process = subprocess.Popen(
    [*command, "stop"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
  )
  assert process.stdout.readline() == b"now\n"
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert not (tmp_path / "data").exists()
  note = json.loads((tmp_path / "data.partial" / "train.json").read_text())
  assert note["parts"] > 20 and note["result"] is None
  done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, check=True)
  assert done.returncode == 0
  for split in ("train", "valid", "test"):
    text = (tmp_path / "texts" / f"{split}.txt").read_bytes()
    assert (tmp_path / "data" / f"{split}.bin").read_bytes()[::2] == text
  assert not (tmp_path / "data.partial").exists()
