"""Streamed text is the decoded text, in whatever parts its tokens come."""

import numpy as np
import pytest
import tokenizers as library

from dpjax.text.pieces import BytePairs
from dpjax.text.tokenizer import TextStream, tokenizer_classes, train_tokenizer
from tests import helpers
from tests.text.test_subwords import FAMILIES, family, train_sentencepiece

LINES = [
  "the cat sat, on the  mat.\n",
  "\n",
  "  don't \u00e9\u6f22 \N{GRINNING FACE}!\n",
  "the cat's mats   \u2581 (two) \n\n",
] * 5
SIZES = {"sentencepiece_unigram": 283, "sentencepiece_bpe": 283, "wordpiece": 67, "bpe": 283}
# Models of others: white space lost or kept in front of lines that end sentences.
FOREIGN = {"lost": True, "kept": False}
TOKENIZERS = [*tokenizer_classes()]
SOME = [*TOKENIZERS, *FOREIGN, "across characters"]
NAMES = [*SOME, *FAMILIES, "metaspace"]
TEXTS = [
  "the cat  sat.\n\n on  the mat (\u00e9\u6f22\N{GRINNING FACE}), don't\n",
  "  \n   \ufffd\ufffd x\u0301 \N{GRINNING FACE}\ufffd\u2581mats" + 41 * " " + "the \n",
  41 * " " + "on",
]


def foreign_sentencepiece(folder, *, lost: bool):
  file = train_sentencepiece(
    folder / "foreign.model",
    ["the cat sat on the mat", "the  dog sat"] * 7,
    vocab_size=283,
    hard_vocab_limit=False,
    byte_fallback=True,
    remove_extra_whitespaces=lost,
    allow_whitespace_only_pieces=not lost,
    control_symbols=["<a>", "<b>"],
  )
  return train_tokenizer("sentencepiece_unigram", [], file=file)


def bpe_across_characters():
  """All tokens of a row of one character begin and end within it."""
  alphabet = library.pre_tokenizers.ByteLevel.alphabet()
  middle = "\u00bc\u012b\u00e6"  # the bytes BC A2 | E6 of two U+6F22 (E6 BC A2)
  pieces = [*sorted(alphabet), middle[:2], middle]
  raw = library.Tokenizer(
    library.models.BPE(
      {piece: i for i, piece in enumerate(pieces)},
      [(middle[0], middle[1]), (middle[:2], middle[2])],
    )
  )
  raw.decoder = library.decoders.ByteLevel()
  raw.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
  raw.add_special_tokens(["<|endoftext|>"])
  raw.model.unk_token = "<|endoftext|>"  # as some files have, though bytes leave nothing unknown
  return BytePairs(raw)


def metaspace():
  """BPE whose pieces begin with the mark of a space, which a text's first piece loses."""
  raw = library.Tokenizer(library.models.BPE())
  raw.pre_tokenizer = library.pre_tokenizers.Metaspace()
  raw.decoder = library.decoders.Metaspace()
  raw.train_from_iterator(LINES, library.trainers.BpeTrainer(vocab_size=61, show_progress=False))
  return BytePairs(raw)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
  folder = tmp_path_factory.mktemp("models")
  sizes = {name: helpers.vocabulary(name, SIZES.get(name, 0)) for name in TOKENIZERS}
  result = {name: train_tokenizer(name, LINES, **sizes[name]) for name in TOKENIZERS}
  result |= {name: foreign_sentencepiece(folder, lost=lost) for name, lost in FOREIGN.items()}
  result |= {name: BytePairs(family(name)) for name in FAMILIES}
  return result | {"across characters": bpe_across_characters(), "metaspace": metaspace()}


def streamed(tokenizer, parts) -> str:
  stream = TextStream(tokenizer)
  return "".join([*(stream.push(part) for part in parts), stream.finish()])


def rows(tokenizer):
  """Rows of ids: texts, and random ones of few or many kinds."""
  yield from map(tokenizer.encode, TEXTS)
  rng = np.random.default_rng(7)
  pieces = tokenizer.encode("\u6f22\N{GRINNING FACE} \n\n  x")
  for count in (1, 2, 5, 83):
    for length in (5, 97):
      some = rng.integers(tokenizer.vocab_size, size=count)
      yield rng.choice(some, length)
      yield rng.choice(np.append(some[:2], pieces), length)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_are_the_decoded_text(tokenizers, name):
  tokenizer = tokenizers[name]
  rng = np.random.default_rng(11)
  for ids in (*rows(tokenizer), np.arange(tokenizer.vocab_size)[::-1]):
    text = tokenizer.decode(ids)
    assert streamed(tokenizer, ids[:, None]) == text
    assert streamed(tokenizer, np.split(ids, np.sort(rng.integers(len(ids), size=9)))) == text
  ids = tokenizer.encode(TEXTS[0])
  for cut in range(len(ids) + 1):
    assert streamed(tokenizer, [ids[:cut], [], ids[cut:]]) == tokenizer.decode(ids)
  stream = TextStream(tokenizer)
  assert stream.finish() == "" and stream.push([]) == "" and stream.finish() == ""


@pytest.mark.parametrize("name", SOME)
def test_text_comes_with_its_tokens(tokenizers, name):
  tokenizer, stream = tokenizers[name], TextStream(tokenizers[name])
  ids = tokenizer.encode(9 * TEXTS[0])
  text = ""
  for n, i in enumerate(ids.tolist(), 1):
    text += stream.push([i])
    # All that is not half a character, at once.
    decoded = tokenizer.decode(ids[:n])
    assert decoded.startswith(text)
    assert not decoded[len(text) :].strip("\ufffd") and len(decoded) - len(text) <= 3


def test_half_a_character_waits(tokenizers):
  stream = TextStream(tokenizers["bytes"])
  parts = [stream.push([i]) for i in "\u00e9\u6f22.".encode()]
  assert parts == ["", "\u00e9", "", "", "\u6f22", "."]
  assert stream.push([0xE6, 0xBC]) == ""
  with pytest.raises(ValueError, match=r"ids: expected 0 \.\. 255, got 105 \.\. 256"):
    stream.push([105, 256])  # which has no effect
  assert stream.push([ord("x")]) == "\ufffdx"  # what was half a character stays one
  assert stream.push([0xE6, 0xBC]) == "" and stream.finish() == "\ufffd"


@pytest.mark.parametrize("name", ["characters", "bytes", "sentencepiece_bpe", "bpe"])
def test_work_does_not_grow_with_the_text(tokenizers, name, monkeypatch):
  tokenizer = tokenizers[name]
  stream, decoded = TextStream(tokenizer), []
  decode = tokenizer.decode
  monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or decode(ids))
  for i in tokenizer.encode("".join(LINES)):
    stream.push([i])
  assert max(decoded) < 9


@pytest.mark.parametrize("name", FOREIGN)
def test_long_rows_of_spaces_and_marks(tokenizers, name):
  tokenizer, decode = tokenizers[name], tokenizers[name].decode
  the = tokenizer.encode("the").tolist()
  shown = {i: decode([*the, i]) for i in range(tokenizer.vocab_size)}
  end, *_ = (i for i, text in shown.items() if text == "the\n")  # else a byte
  *_, space = (i for i, text in shown.items() if text == "the ")  # before it a byte
  mark, other, *_ = (i for i, text in shown.items() if text == "the")
  first, *rest = tokenizer.encode("\u6f22")[-3:].tolist()  # its bytes
  assert decode([*the, first, *rest]) == "the\u6f22"
  rows = [
    [*the, *197 * [space], *the],
    [*the, end, *197 * [space], *the],  # a line's first spaces are lost, some or all
    [end, space, mark, other, mark, space, *the],
    [*the, end, space, *197 * [mark, other], *the],
    [*197 * [mark, other], *the],
    [*the, *197 * [other, mark], space, *the],
    [mark, *the, first, mark, *rest, *the, first, *rest],  # a mark ends a character
  ]
  rows += [[*197 * [space], *the]] if name == "lost" else []
  for ids in rows:
    assert streamed(tokenizer, [[i] for i in ids]) == decode(ids)


def test_a_row_of_bytes_waits_for_its_end(tokenizers):
  """The decoder of Llama 2 makes U+FFFD of all of a row of bytes that ends too early."""
  tokenizer = tokenizers["llama 2"]
  stream = TextStream(tokenizer)
  *_, at, first, last = tokenizer.encode("cat\u00e9").tolist()
  assert tokenizer.decode([at, first, last, first]) == "at" + 3 * "\ufffd"
  assert stream.push([at]) == "at"
  assert [stream.push([i]) for i in (first, last, first)] == ["", "", ""]
  assert stream.push([at]) == 3 * "\ufffd" + "at"
  assert [stream.push([i]) for i in (first, last)] == ["", ""]
  assert stream.finish() == "\u00e9"


@pytest.mark.parametrize("name", ["characters", "wordpiece", "lost", "kept", "metaspace"])
def test_a_text_goes_on_from_its_prompt(tokenizers, name):
  tokenizer = tokenizers[name]
  count, loses_space = 0, np.array_equal(tokenizer.encode("on "), tokenizer.encode("on"))
  for text in ("the cat sat on the mat", "don't\nsat \u6f22\ufffd on", 37 * "\u6f22" + " the"):
    ids = tokenizer.encode(text)
    for cut in range(len(ids)):
      prompt = tokenizer.decode(ids[:cut])
      if not np.array_equal(tokenizer.encode(prompt), ids[:cut]):
        continue  # within a character, say
      expected, count = tokenizer.decode(ids), count + 1
      is_word_end = expected[len(prompt) :].startswith(" ")
      for before in [prompt, prompt + " "][: 1 + (loses_space and is_word_end)]:
        stream = TextStream(tokenizer, before)
        result = [*map(stream.push, ids[cut:, None]), stream.finish()]
        assert before + "".join(result) == expected
  assert count > 15 and loses_space == (name in ("wordpiece", "lost"))
  # Without a prompt, a text begins; as it does after its end.
  assert stream.push(ids) + stream.finish() == expected == streamed(tokenizer, [ids])
