from collections import Counter

import numpy as np
import pytest

from dpjax.text.factory import tokenizer_from_json, train_tokenizer

VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] The the cat Cat ##s sat < > un ##k . never".split()
LINES = [" \n", "The cats sat .\n", "the Cat sat <unk>.\n", "\n", "the the cat \u6f22\n"]


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
  return str(path)


def test_restricted_vocabulary_is_in_the_authors_order(file):
  # Cased pieces of each raw line, then lower-cased: "Cat" and "cat" become one.
  tokenizer = train_tokenizer(
    "wordpiece", LINES, file=file, lower_pieces=True, restrict_vocabulary=True
  )
  pieces = ("the cat ##s sat . the cat sat < un ##k > . the the cat [UNK]").split()
  counts = Counter(pieces)
  order = sorted(counts, key=lambda piece: (-counts[piece], piece))
  assert order[:4] == ["the", "cat", ".", "sat"]
  expected = ["<unk>", "<pad>", "<sos>", "<eos>", *order]
  assert tokenizer.vocab_size == len(expected) == 14
  assert [tokenizer.decode([i]) for i in range(4, 14)] == [
    piece.removeprefix("##") for piece in order
  ]
  ids = {piece: i for i, piece in enumerate(expected)}
  assert tokenizer.encode("".join(LINES)).tolist() == [
    ids[piece]
    for piece in (
      "<eos> the cat ##s sat . <eos> the cat sat < un ##k > . <eos> <eos> the the cat [UNK] <eos>"
    ).split()
  ]
  assert tokenizer.encode("never").tolist() == [ids["<unk>"]]  # not of the train split
  assert tokenizer.start_id == ids["<eos>"] and not tokenizer.lossless


def test_full_vocabulary_has_the_files_ids(file):
  tokenizer = train_tokenizer("wordpiece", [], file=file, lower_text=True)
  assert tokenizer.vocab_size == 17
  assert tokenizer.encode("THE cats\n?").tolist() == [6, 7, 9, 3, 1]
  assert tokenizer.decode([6, 7, 9, 3, 6]) == "the cats\nthe"


def test_file_without_a_line_end_gets_one(tmp_path):
  (tmp_path / "vocab.txt").write_text("[UNK]\nthe\n")
  tokenizer = train_tokenizer("wordpiece", [], file=str(tmp_path / "vocab.txt"))
  assert tokenizer.vocab_size == 3
  assert tokenizer.encode("the\nx").tolist() == [1, 2, 0]


def test_lower_pieces_without_restriction(file):
  tokenizer = train_tokenizer("wordpiece", [], file=file, lower_pieces=True)
  assert tokenizer.vocab_size == 15  # "The" and "the", "Cat" and "cat" are one
  assert tokenizer.encode("The Cat").tolist() == tokenizer.encode("the cat").tolist()
  assert tokenizer.decode(tokenizer.encode("The Cats\nsat")) == "the cats\nsat"


@pytest.mark.parametrize("lines", ["the\n[UNK]\nthe", "the\ncat"])
def test_file_with_a_piece_twice_or_without_unknown(tmp_path, lines):
  (tmp_path / "vocab.txt").write_text(lines)
  with pytest.raises(ValueError, match="data.tokenizer.file: expected a WordPiece"):
    train_tokenizer("wordpiece", [], file=str(tmp_path / "vocab.txt"))


def test_learned_vocabulary():
  chunks = ["the cats sat\n", "the cat's mats\n"] * 5
  tokenizer = train_tokenizer("wordpiece", chunks, vocab_size=29)
  assert tokenizer.vocab_size <= 29
  assert tokenizer.decode(tokenizer.encode("the cats\nmats")) == "the cats\nmats"
  with pytest.raises(ValueError, match=r"data.tokenizer.vocab_size: expected at least \d\d"):
    train_tokenizer("wordpiece", chunks, vocab_size=5)


def test_learned_and_restricted():
  chunks = ["the cats sat\n", "The cat's mats\n"] * 5
  tokenizer = train_tokenizer(
    "wordpiece", chunks, vocab_size=29, lower_pieces=True, restrict_vocabulary=True
  )
  again = tokenizer_from_json(tokenizer.to_json())
  ids = again.encode("".join(chunks))
  assert set(ids.tolist()) == set(range(3, tokenizer.vocab_size))
  assert again.start_id == 3 and np.sum(ids == 3) == 10
