"""Subwords, learned and of files: SentencePiece, BPE of several families, WordPiece."""

import functools
import io
import json
import re
import time
from collections import Counter

import numpy as np
import pytest
import sentencepiece
import tokenizers as library
from tokenizers import decoders, normalizers, pre_tokenizers

from dpjax.data import text_file
from dpjax.errors import UserError
from dpjax.text import pieces
from dpjax.text.tokenizer import tokenizer_from_json, train_tokenizer

LINES = ["the cat sat on the mat\n", "the dog sat on the log\n"] * 7


@pytest.mark.parametrize("variant", ["sentencepiece_unigram", "sentencepiece_bpe"])
def test_texts_of_sentencepiece(variant):
  for size, message in ((5000, r"expected at most \d+ "), (67, r"expected at least \d+ ")):
    with pytest.raises(ValueError, match=f"^data.tokenizer.vocab_size: {message}"):
      train_tokenizer(variant, LINES, vocab_size=size)
  with pytest.raises(ValueError, match="^data.path: expected a text"):
    train_tokenizer(variant, ["\n", "\n\n"], vocab_size=300)
  # One long line is learned from: SentencePiece itself drops lines above its limit.
  text = 1000 * "the cat sat on the mat and the dog on the log "
  tokenizer = train_tokenizer(variant, [text], vocab_size=275)
  ids = tokenizer.encode(text)
  assert len(ids) < len(text) and tokenizer.decode(ids) == text


@pytest.mark.parametrize("variant", ["sentencepiece_unigram", "sentencepiece_bpe"])
@pytest.mark.parametrize("spaces", [0, 1])  # SentencePiece by itself takes no rare characters.
def test_sentencepiece_of_a_text_without_spaces_is_lossless(variant, spaces):
  lines = [*["今天天气很好。我们去公园玩。\n"] * 300, *["a b\n"] * spaces]
  tokenizer = train_tokenizer(variant, lines, vocab_size=273)
  text = "今天 很好\n  AC\u2581GT \n"
  assert tokenizer.lossless and tokenizer.decode(tokenizer.encode(text)) == text


def train_sentencepiece(path, lines=LINES, **settings):
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **settings
  )
  path.write_bytes(model.getvalue())
  return str(path)


def test_loaded_sentencepiece_ends_lines_with_its_end_of_sentence(tmp_path):
  """With SentencePiece's own settings: no line end, and white space is lost."""
  file = train_sentencepiece(tmp_path / "foreign.model", vocab_size=17)
  processor = sentencepiece.SentencePieceProcessor(model_file=file)
  tokenizer = train_tokenizer("sentencepiece_unigram", [], file=file)
  ids = tokenizer.encode("the  cat\n\nsat on")
  expected = [*processor.encode("the cat"), 2, 2, *processor.encode("sat on")]
  assert processor.eos_id() == tokenizer.start_id == 2
  assert ids.tolist() == expected
  assert tokenizer.decode(ids) == "the cat\n\nsat on"
  assert tokenizer.vocab_size == 17 and not tokenizer.lossless


def test_gpt2s_files(tmp_path):
  reference = library.ByteLevelBPETokenizer()
  marks = dict(special_tokens=["<|endoftext|>"], show_progress=False)
  lines = [*LINES, "\n\n  indented\n\n\nlines\t and 's 22 words\n"]
  reference.train_from_iterator(lines, vocab_size=300, **marks)
  reference.save_model(str(tmp_path), "small")
  reference.save_model(str(tmp_path))
  text = "a cat\nsat\n\non  the\n   mat\n\n\n\n the dog's 22\r\n\r\nx\t\n \ny\n\n"
  for name in ("small-merges.txt", ""):
    tokenizer = train_tokenizer("bpe", [], file=str(tmp_path / name))
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids
    assert tokenizer.lossless and tokenizer.vocab_size == reference.get_vocab_size()
    # The mark between documents is one token.
    ids = tokenizer_from_json(tokenizer.to_json()).encode("one\n<|endoftext|>\ntwo").tolist()
    assert ids.count(reference.token_to_id("<|endoftext|>")) == 1
  # Files that lack one another, or are of another kind.
  (tmp_path / "vocab.json").unlink()
  (tmp_path / "small-vocab.json").write_text("{")
  model = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
  (tmp_path / "tokenizer.json").write_text(model.to_str())
  for name in ("", "small-merges.txt", "vocabulary.txt", "tokenizer.json"):
    with pytest.raises(ValueError, match=f"^data.tokenizer.file: expected .*{tmp_path / name}"):
      train_tokenizer("bpe", [], file=str(tmp_path / name))


def test_bpe_learns_from_words_of_any_length(monkeypatch):
  text = "1,2\n\n\n  'tis 12 \u00e9\u00e9\n   x+=y\t the cat's   \n" * 50
  expected = train_tokenizer("bpe", [text], vocab_size=300).to_json()
  short = re.compile(pieces._LONG.pattern.replace("4096", "32"), re.S)
  monkeypatch.setattr(pieces, "_LONG", short)
  assert train_tokenizer("bpe", [text], vocab_size=300).to_json() == expected
  monkeypatch.undo()
  for word in ("ACGT" * 50_000, "a" * 200_000, " " * 200_000):
    began = time.process_time()
    tokenizer = train_tokenizer("bpe", [word], vocab_size=262)
    assert time.process_time() - began < 5 and len(tokenizer.encode(word)) <= 12_500


# The rule of Llama 3, which is that of GPT-4, short.
_RULE = (
  r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
  r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILY_LINES = [
  "One.\nTwo (three).\n\nFour\n  five {\n}\n  x;\n/one/two.\n/\n\n\n 12 345\n1. a\n",
  "the cat's\n\n sat on\n\tthe mat\r\n on\r\n\r\n \n the \n mat\n",
] * 9


def _byte_level(rule=None, normalizer=None, **options):
  """Byte-level BPE whose words are cut by a regular expression, None: by nothing."""
  raw = library.Tokenizer(library.models.BPE())
  options = {"add_prefix_space": False, "use_regex": False, **options}
  cuts = [pre_tokenizers.Split(library.Regex(rule), "isolated")] if rule else []
  raw.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(**options)])
  if normalizer:
    raw.normalizer = normalizer
  raw.decoder = decoders.ByteLevel()
  sizes = dict(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  marks = dict(special_tokens=["<|mark|>"], show_progress=False)
  raw.train_from_iterator(FAMILY_LINES, library.trainers.BpeTrainer(**sizes, **marks))
  return raw


def _byte_fallback(normalizer, *stripped):
  """BPE over characters and marks for spaces, with bytes for those it has not."""
  raw = library.Tokenizer(library.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
  raw.normalizer = normalizer
  raw.decoder = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
  )
  marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
  words = [f" {word}" for line in FAMILY_LINES for word in line.split()]
  words += 9 * ["\n\n", "\n\n\n"]
  raw.train_from_iterator(
    words, library.trainers.BpeTrainer(vocab_size=310, special_tokens=marks, show_progress=False)
  )
  content = json.loads(raw.to_str())
  del content["added_tokens"][3:]
  return library.Tokenizer.from_str(json.dumps(content))


def family(name):
  """A small tokenizer of the library, as the files of a family of models have it."""
  return library.Tokenizer.from_str(_file(name))


@functools.cache  # Training twice can give others.
def _file(name):
  return _TRAIN[name]().to_str()


_SPACE = normalizers.Replace(" ", "\u2581")
_TRAIN = {
  "gpt-2": lambda: _byte_level(use_regex=True),
  "llama 3": lambda: _byte_level(_RULE),
  "gpt-4o": lambda: _byte_level(_RULE.replace(r"+[\r\n]*", r"+[\r\n/]*")),
  "qwen": lambda: _byte_level(_RULE, normalizers.NFC()),
  "space in front": lambda: _byte_level(use_regex=True, add_prefix_space=True),
  "no rule": _byte_level,
  "gemma": lambda: _byte_fallback(_SPACE),
  "llama 2": lambda: _byte_fallback(
    normalizers.Sequence([normalizers.Prepend("\u2581"), _SPACE]), decoders.Strip(" ", 1, 0)
  ),
}
# Whether a text without a normalisation comes back whole.
FAMILIES = {name: name != "space in front" for name in _TRAIN}


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request, tmp_path_factory):
  """A family's name, the library's tokenizer, and the one that is loaded of its file."""
  raw = family(request.param)
  file = tmp_path_factory.mktemp("family") / "tokenizer.json"
  raw.save(str(file))
  return request.param, raw, train_tokenizer("bpe", [], file=str(file))


def test_families_have_the_ids_of_the_library(of_family):
  name, raw, tokenizer = of_family
  texts = ["", "a", " \n the\t12\r\n", "\n<|mark|> \none<|mark|>\n\n", "\u00e9\u6f22\u2003};\n\n"]
  for text in texts:
    expected = raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == expected
    if FAMILIES[name]:
      assert tokenizer.decode(expected) == text
  # Qwen's normalises; the mark for a space comes back as one; a space is put in front.
  assert tokenizer.lossless == (name in ("gpt-2", "llama 3", "gpt-4o", "no rule"))
  assert tokenizer.decode([tokenizer.start_id]) == "\n"


def test_the_chunks_of_a_text_have_its_ids(of_family, tmp_path, monkeypatch):
  name, raw, tokenizer = of_family
  if name not in ("gpt-2", "llama 3", "gpt-4o", "qwen"):
    return  # Their words do not end with lines.
  text = "one two\nthree.\n/four\n\n five)\n7\nsix\n" * 9
  (tmp_path / "a.txt").write_text(text)
  expected = raw.encode(text, add_special_tokens=False).ids
  for size in range(37, 60, 2):
    monkeypatch.setattr(text_file, "CHUNK_BYTES", size)
    parts = [*text_file.TextFile(tmp_path / "a.txt", 0, len(text))]
    assert len(parts) > 5
    assert [i for part in parts for i in tokenizer.encode(part).tolist()] == expected


def test_what_a_file_says_of_batches_is_not_for_texts(tmp_path):
  raw = family("llama 3")
  expected = raw.encode(FAMILY_LINES[0]).ids
  raw.enable_truncation(5)
  raw.enable_padding(length=500)
  raw.model.dropout = 0.5
  raw.save(str(tmp_path / "tokenizer.json"))
  tokenizer = train_tokenizer("bpe", [], file=str(tmp_path / "tokenizer.json"))
  assert tokenizer.encode(FAMILY_LINES[0]).tolist() == expected


# Changes to a small tokenizer.json, and what is said of them. A panic is no Exception.
WRONG = {
  "answer: .*charsmap": lambda content: content.update(
    normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
  ),
  "answer: .*parenthesis": lambda content: content["pre_tokenizer"].update(
    type="Split", pattern={"Regex": "(x+x+"}, behavior="Isolated", invert=False
  ),
  "answer: ": lambda content: content.update(model=[]),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_file_that_breaks_the_library(tmp_path, message):
  content = json.loads(family("no rule").to_str())
  WRONG[message](content)
  file = tmp_path / "tokenizer.json"
  file.write_text(json.dumps(content))
  with pytest.raises(UserError, match=f"^data.tokenizer.file: .*{file}.*{message}") as caught:
    train_tokenizer("bpe", [], file=str(file))
  assert "\n" not in str(caught.value)
  with pytest.raises(UserError, match=f"^tokenizer.json: expected .*{message}"):
    tokenizer_from_json(json.dumps({"format": 1, "name": "bpe", "tokenizer": content}))


def test_a_text_that_breaks_the_library_is_named(tmp_path):
  _byte_level("(x+x+)+y").save(str(tmp_path / "tokenizer.json"))
  tokenizer = train_tokenizer("bpe", [], file=str(tmp_path / "tokenizer.json"))
  with pytest.raises(UserError, match="^tokenizer: expected .* answer: .*retry-limit"):
    tokenizer.encode("x" * 61)


def test_normalised_text_is_lost(tmp_path):
  """A model that normalises is not lossless, though it keeps all white space."""
  whole = dict(remove_extra_whitespaces=False, add_dummy_prefix=False, byte_fallback=True)
  whole |= dict(allow_whitespace_only_pieces=True, user_defined_symbols=["\n"])
  sizes = dict(vocab_size=283, hard_vocab_limit=False, normalization_rule_name="nfkc")
  file = train_sentencepiece(tmp_path / "nfkc.model", **sizes, **whole)
  tokenizer = train_tokenizer("sentencepiece_unigram", [], file=file)
  assert tokenizer.decode(tokenizer.encode("  a  b\n\u00e9")) == "  a  b\n\u00e9"
  assert not tokenizer.lossless and not tokenizer.keeps_text(tokenizer.encode("a"))


VOCABULARY = "[PAD] [UNK] [CLS] [SEP] [MASK] The the cat Cat ##s sat < > un ##k . never".split()
CASED_LINES = [" \n", "The cats sat .\n", "the Cat sat <unk>.\n", "\n", "the the cat \u6f22\n"]


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "vocab.txt"
  path.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
  return str(path)


def test_restricted_vocabulary_is_in_the_authors_order(file):
  # Cased pieces of each raw line, then lower-cased: "Cat" and "cat" become one.
  tokenizer = train_tokenizer(
    "wordpiece", CASED_LINES, file=file, lower_pieces=True, restrict_vocabulary=True
  )
  pieces = ("the cat ##s sat . the cat sat < un ##k > . the the cat [UNK]").split()
  counts = Counter(pieces)
  order = sorted(counts, key=lambda piece: (-counts[piece], piece))
  assert order[:4] == ["the", "cat", ".", "sat"]
  expected = ["<unk>", "<pad>", "<sos>", "<eos>", *order]
  assert tokenizer.vocab_size == len(expected) == 14
  ids = {piece: i for i, piece in enumerate(expected)}
  text = (
    "<eos> the cat ##s sat . <eos> the cat sat < un ##k > . <eos> <eos> the the cat [UNK] <eos>"
  )
  assert tokenizer.encode("".join(CASED_LINES)).tolist() == [ids[piece] for piece in text.split()]
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


def test_learned_and_restricted():
  chunks = ["the cats sat\n", "The cat's mats\n"] * 5
  with pytest.raises(ValueError, match=r"data.tokenizer.vocab_size: expected at least \d\d"):
    train_tokenizer("wordpiece", chunks, vocab_size=5)
  settings = dict(vocab_size=29, lower_pieces=True, restrict_vocabulary=True)
  tokenizer = train_tokenizer("wordpiece", chunks, **settings)
  again = tokenizer_from_json(tokenizer.to_json())
  ids = again.encode("".join(chunks))
  assert set(ids.tolist()) == set(range(3, tokenizer.vocab_size))
  assert again.start_id == 3 and np.sum(ids == 3) == 10
