"""Encoding in parts: counts, tokens and boundaries of the text, and after a kill."""

import hashlib
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


@pytest.mark.parametrize("with_boundaries", [False, True])
def test_all_is_of_the_whole_text(tmp_path, with_boundaries):
  unigram = UnigramBoundaries(train_unigram(PARTS, 17)) if with_boundaries else None
  encoder = Encoder(train_tokenizer("characters", PARTS), unigram and unigram.of_tokens)
  result = encode_text(PARTS, 0, encoder, tmp_path, "train")
  tokens = np.fromfile(tmp_path / "train.bin", np.uint16)
  np.testing.assert_array_equal(tokens, encoder.tokenizer.encode(TEXT))
  if unigram:
    found = np.fromfile(tmp_path / "train.boundaries.bin", np.uint8)
    np.testing.assert_array_equal(found, unigram.of_tokens(TEXT, encoder.tokenizer))
  assert result == {
    "tokens": len(TEXT),
    "characters": len(TEXT),
    "words": len(TEXT.split()) + TEXT.count("\n"),
    "bytes": len(TEXT.encode()),
    "sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
  }


def test_parts_stay_in_order_and_few_are_held(tmp_path):
  """However long one takes; memory does not grow with the text."""
  import time

  taken, written = [], []

  class Slow(Encoder):
    def __call__(self, part):
      time.sleep(0.002 * (len(taken) % 3))
      return super().__call__(part)

  def parts():
    for i in range(97):
      taken.append(i)
      assert len(taken) - len(written) < 9
      yield f"{i} "

  tokenizer = train_tokenizer("bytes", ())
  for part, arrays in encoding._in_threads(Slow(tokenizer), parts()):
    written.append(tokenizer.decode(arrays[0]))
    assert part == written[-1]
  assert written == [f"{i} " for i in range(97)]


def test_a_complete_split_is_kept(tmp_path):
  encoder = Encoder(train_tokenizer("characters", PARTS))
  result = encode_text(PARTS, 0, encoder, tmp_path, "train")
  assert encode_text(iter([1 / 3]), 0, encoder, tmp_path, "train") == result  # not looked at
  # Another begins anew, whatever a kill has left of it.
  (tmp_path / "test.bin").write_bytes(b"half")
  encode_text(PARTS[:2], 0, encoder, tmp_path, "test")
  assert (tmp_path / "test.bin").stat().st_size == 2 * len("".join(PARTS[:2]))


SCRIPT = """
import sys
from dpjax.data import chunks, corpora, encoding, prepared
chunks.CHUNK_BYTES = 101
encode = encoding.Encoder.__call__
seen = []
def encode_or_stop(self, part):
  seen.append(part)
  if len(sys.argv) == 2 and "test" in part:
    sys.stdout.write("now\\n")
    sys.stdout.flush()
    sys.stdin.read()
  return encode(self, part)
encoding.Encoder.__call__ = encode_or_stop
prepared.prepare(corpora.load_corpus(path="texts"), "data", "bytes")
print(any("train" in part for part in seen))
"""


def test_prepared_data_after_a_kill(tmp_path):
  (tmp_path / "texts").mkdir()
  for split, number in (("train", 500), ("valid", 31), ("test", 37)):
    (tmp_path / "texts" / f"{split}.txt").write_text(f"{split} text, a line\n" * number)
  command = [sys.executable, "-c", SCRIPT]
  settings = dict(cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(helpers.ROOT)})
  process = subprocess.Popen(
    [*command, "stop"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **settings
  )
  assert process.stdout.read(3) == b"now"
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert not (tmp_path / "data").exists() and (tmp_path / "data.partial" / "train.json").exists()
  done = subprocess.run(command, check=True, capture_output=True, **settings)
  assert done.stdout == b"False\n"
  for split in ("train", "valid", "test"):
    text = (tmp_path / "texts" / f"{split}.txt").read_bytes()
    assert (tmp_path / "data" / f"{split}.bin").read_bytes()[::2] == text
  assert not (tmp_path / "data.partial").exists()
