import functools
import io
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers as library
from tokenizers import decoders, normalizers, pre_tokenizers

from dpjax.errors import UserError
from dpjax.text import subwords
from dpjax.text import tokenizer as tokenizer_lib
from dpjax.text.tokens import tokenizer_from_json, train_tokenizer

LINES = ["the cat sat on the mat\n", "the dog sat on the log\n"] * 7


@pytest.mark.parametrize("kind", ["sentencepiece_unigram", "sentencepiece_bpe"])
def test_texts_of_sentencepiece(kind):
  for size, message in ((5000, r"expected at most \d+ "), (67, r"expected at least \d+ ")):
    with pytest.raises(ValueError, match=f"^data.tokenizer_size: {message}"):
      train_tokenizer(kind, LINES, vocab_size=size)
  with pytest.raises(ValueError, match="^data.path: expected a text"):
    train_tokenizer(kind, ["\n", "\n\n"], vocab_size=300)
  # One long line is learned from: SentencePiece itself drops lines above its limit.
  text = 1000 * "the cat sat on the mat and the dog on the log "
  tokenizer = train_tokenizer(kind, [text], vocab_size=275)
  ids = tokenizer.encode(text)
  assert len(ids) < len(text) and tokenizer.decode(ids) == text


def train_sentencepiece(path, lines=LINES, **settings):
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **settings
  )
  path.write_bytes(model.getvalue())
  return str(path)


def test_bpe_has_at_least_the_bytes():
  with pytest.raises(ValueError, match="data.tokenizer_size: expected at least 257"):
    train_tokenizer("bpe", LINES, vocab_size=67)


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


@pytest.fixture
def gpt2(tmp_path):
  """A small vocabulary in GPT-2's two files, and the library's tokenizer of them."""
  reference = library.ByteLevelBPETokenizer()
  text = [*LINES, "\n\n  indented\n\n\nlines\t and 's 22 words\n"]
  reference.train_from_iterator(text, vocab_size=300, show_progress=False)
  reference.save_model(str(tmp_path), "small")
  reference.save_model(str(tmp_path))
  reference.save(str(tmp_path / "tokenizer.json"))
  return tmp_path, reference


@pytest.mark.parametrize("name", ["small-merges.txt", "tokenizer.json", ""])
def test_loaded_bpe_is_the_library_on_the_whole_text(gpt2, name):
  folder, reference = gpt2
  text = "a cat\nsat\n\non  the\n   mat\n\n\n\n the dog's 22\r\n\r\nx\t\n \ny\n\n"
  tokenizer = train_tokenizer("bpe", [], file=str(folder / name))
  assert tokenizer.encode(text).tolist() == reference.encode(text).ids
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.lossless and tokenizer.vocab_size == reference.get_vocab_size()


def test_bpe_files_that_lack_one_another(gpt2):
  folder, _ = gpt2
  (folder / "vocab.json").unlink()
  with pytest.raises(ValueError, match="data.tokenizer_file: .*got /.*/vocab.json"):
    train_tokenizer("bpe", [], file=str(folder))
  (folder / "small-vocab.json").write_text("{")
  model = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
  (folder / "tokenizer.json").write_text(model.to_str())
  for name in ("small-merges.txt", "vocabulary.txt", "tokenizer.json"):
    with pytest.raises(ValueError, match="data.tokenizer_file: expected a tokenizer.json"):
      train_tokenizer("bpe", [], file=str(folder / name))


def test_bpe_keeps_a_literal_mark():
  tokenizer = train_tokenizer("bpe", LINES, vocab_size=275)
  text = "end<|endoftext|>\n"
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert "<|endoftext|>" in json.loads(tokenizer.to_json())["tokenizer"]["model"]["vocab"]


def test_gpt2s_mark_between_documents_is_one_token(tmp_path):
  reference = library.ByteLevelBPETokenizer()
  reference.train_from_iterator(
    LINES, vocab_size=280, special_tokens=["<|endoftext|>"], show_progress=False
  )
  reference.save_model(str(tmp_path))
  tokenizer = train_tokenizer("bpe", [], file=str(tmp_path))
  mark = reference.token_to_id("<|endoftext|>")
  text = "one\n<|endoftext|>\ntwo"
  assert tokenizer.encode("<|endoftext|>").tolist() == [mark]
  for again in (tokenizer, tokenizer_from_json(tokenizer.to_json())):
    ids = again.encode(text).tolist()
    assert ids.count(mark) == 1 and again.decode(ids) == text
  assert tokenizer.vocab_size == reference.get_vocab_size()


# The rule of Llama 3, which is that of GPT-4, and that of GPT-4o, short.
_RULE = (
  r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
  r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RULE_4O = _RULE.replace(r"+[\r\n]*", r"+[\r\n/]*")
FAMILY_LINES = [
  "One.\nTwo (three).\n\nFour\n  five {\n}\n  x;\n/one/two.\n/\n\n\n 12 345\n1. a\n",
  "the cat's\n\n sat on\n\tthe mat\r\n on\r\n\r\n \n the \n mat\n",
] * 9


def _byte_level(rule=None, normalizer=None, **options):
  """Byte-level BPE whose words are cut by a regular expression, None: by nothing."""
  raw = library.Tokenizer(library.models.BPE())
  raw.pre_tokenizer = pre_tokenizers.ByteLevel(
    **{"add_prefix_space": False, "use_regex": False, **options}
  )
  if rule:
    raw.pre_tokenizer = pre_tokenizers.Sequence(
      [pre_tokenizers.Split(library.Regex(rule), "isolated"), raw.pre_tokenizer]
    )
  if normalizer:
    raw.normalizer = normalizer
  raw.decoder = decoders.ByteLevel()
  raw.train_from_iterator(
    FAMILY_LINES,
    library.trainers.BpeTrainer(
      vocab_size=330,
      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
      special_tokens=["<|mark|>"],
      show_progress=False,
    ),
  )
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
  return _train(name).to_str()


def _train(name):
  if name == "llama 3":
    return _byte_level(_RULE)
  if name == "gpt-4o":
    return _byte_level(_RULE_4O)
  if name == "qwen":
    return _byte_level(_RULE, normalizers.NFC())
  if name == "starcoder":
    raw = _byte_level(use_regex=True)
    raw.pre_tokenizer = pre_tokenizers.Sequence(
      [pre_tokenizers.Digits(individual_digits=True), raw.pre_tokenizer]
    )
    return raw
  if name == "space in front":
    return _byte_level(use_regex=True, add_prefix_space=True)
  if name == "no rule":
    return _byte_level()
  space = normalizers.Replace(" ", "\u2581")
  if name == "gemma":
    return _byte_fallback(space)
  return _byte_fallback(
    normalizers.Sequence([normalizers.Prepend("\u2581"), space]), decoders.Strip(" ", 1, 0)
  )


# Whether a text without a normalisation comes back whole.
FAMILIES = dict.fromkeys(("llama 3", "gpt-4o", "qwen", "starcoder"), True)
FAMILIES |= {"space in front": False, "no rule": True, "gemma": True, "llama 2": True}


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request, tmp_path_factory):
  """A family's name, the library's tokenizer, and the one that is loaded of its file."""
  raw = family(request.param)
  file = tmp_path_factory.mktemp("family") / "tokenizer.json"
  raw.save(str(file))
  return request.param, raw, train_tokenizer("bpe", [], file=str(file))


def _texts():
  yield from ("One.\nTwo", "one\ntwo", "\none\n", " \n two \n ", "\r\n", "a", "", "7\n/7)\n/")
  yield "\n<|mark|> \none<|mark|>\n\n"
  rng = np.random.default_rng(5)
  parts = ["\n", "\n", "\n\n", "\r\n", " ", "  ", "\t", ".", ")", "/", "7", "12", "'s", "One"]
  parts += ["two", " the", "\u00e9", "\u6f22", "};\n", "\u2003"]
  for _ in range(60):
    yield "".join(rng.choice(parts, 41))


def test_families_have_the_ids_of_the_library(of_family):
  name, raw, tokenizer = of_family
  for text in _texts():
    expected = raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text).tolist() == expected
    if FAMILIES[name]:
      assert tokenizer.decode(expected) == text
  again = tokenizer_from_json(tokenizer.to_json())
  assert again.encode(text).tolist() == expected
  # Qwen's normalises; the mark for a space comes back as one; a space is put in front.
  assert tokenizer.lossless == (name in ("llama 3", "gpt-4o", "starcoder", "no rule"))
  assert tokenizer.decode([tokenizer.start_id]) == "\n"


def test_families_are_cut_where_no_id_changes(of_family, monkeypatch):
  name, raw, tokenizer = of_family
  num_parts = 0
  for text in _texts():
    chunks = [text[begin : begin + 11] for begin in range(0, len(text), 11)]
    parts = list(tokenizer.parts(chunks))
    assert "".join(parts) == text
    found = [i for part in parts for i in tokenizer.encode(part).tolist()]
    assert found == raw.encode(text, add_special_tokens=False).ids
    num_parts += len(parts)
  whole = len(list(_texts())) - 1  # One is empty.
  assert num_parts == whole if name in ("no rule", "llama 2") else num_parts > 2 * whole
  monkeypatch.setattr(subwords, "MOST_WHOLE", 29)
  if name in ("no rule", "llama 2"):
    with pytest.raises(ValueError, match="^data.tokenizer_file: .* up to 29 characters"):
      list(tokenizer.parts(["one two\n"] * 4))
  assert "".join(tokenizer.parts(["one two\n"] * 3)) == "one two\n" * 3


def test_what_a_file_says_of_batches_is_not_for_texts(tmp_path):
  raw = family("llama 3")
  expected = raw.encode(FAMILY_LINES[0]).ids
  raw.enable_truncation(5)
  raw.enable_padding(length=500)
  raw.model.dropout = 0.5
  raw.save(str(tmp_path / "tokenizer.json"))
  tokenizer = train_tokenizer("bpe", [], file=str(tmp_path / "tokenizer.json"))
  assert tokenizer.encode(FAMILY_LINES[0]).tolist() == expected


def test_ids_with_gaps(tmp_path):
  content = json.loads(family("llama 3").to_str())
  content["model"]["vocab"]["zzz"] = 401
  (tmp_path / "tokenizer.json").write_text(json.dumps(content))
  tokenizer = train_tokenizer("bpe", [], file=str(tmp_path / "tokenizer.json"))
  assert tokenizer.vocab_size == 402 and tokenizer.decode([401, 400]) == "zzz"


# Changes to a small tokenizer.json, and what is said of them. A panic is no Exception.
WRONG = {
  "the id 2147483648": lambda content: content["model"]["vocab"].update(zzz=2**31),
  "the id 999999": lambda content: content["model"]["vocab"].update(zzz=999_999),
  "the id -1": lambda content: content["model"]["vocab"].update(zzz=-1),
  "the id 1.5": lambda content: content["model"]["vocab"].update(zzz=1.5),
  "the id 4294967296": lambda content: content["added_tokens"][0].update(id=2**32),
  "answer: .*charsmap": lambda content: content.update(
    normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
  ),
  "answer: .*parenthesis": lambda content: content["pre_tokenizer"].update(
    type="Split", pattern={"Regex": "(x+x+"}, behavior="Isolated", invert=False
  ),
  "not the JSON of a tokenizer": lambda content: content.update(model=[]),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("is_own", [False, True])
def test_a_small_file_that_asks_for_much_or_breaks_the_library(tmp_path, message, is_own):
  content = json.loads(family("no rule").to_str())
  WRONG[message](content)
  if is_own:
    content = {"format": 1, "kind": "bpe", "tokenizer": content}
    with pytest.raises(UserError, match=f"^tokenizer.json: expected .*{message}") as caught:
      tokenizer_from_json(json.dumps(content))
  else:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"^data.tokenizer_file: .*{file}.*{message}") as caught:
      train_tokenizer("bpe", [], file=str(file))
  assert "\n" not in str(caught.value)


def test_ids_of_other_files(gpt2, monkeypatch):
  folder, _ = gpt2
  vocabulary = json.loads((folder / "vocab.json").read_text())
  (folder / "vocab.json").write_text(json.dumps(vocabulary | {"zzz": 2**31}))
  with pytest.raises(UserError, match="^data.tokenizer_file: .*the id 2147483648"):
    train_tokenizer("bpe", [], file=str(folder))
  known = json.loads(train_tokenizer("wordpiece", LINES, vocab_size=29).to_json())
  known["tokenizer"]["model"]["vocab"]["cat"] = 77
  with pytest.raises(UserError, match="^tokenizer.json: .*ids with gaps"):
    tokenizer_from_json(json.dumps(known))
  monkeypatch.setattr(tokenizer_lib, "_MOST_BYTES", 1000)
  with pytest.raises(UserError, match="^data.tokenizer_file: expected at most 1,000 bytes, got"):
    train_tokenizer("bpe", [], file=str(folder / "tokenizer.json"))


def test_a_text_that_breaks_the_library_is_named():
  content = json.loads(family("no rule").to_str())
  rule = dict(type="Split", pattern={"Regex": "(x+x+)+y"}, behavior="Isolated", invert=False)
  content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [rule, content["pre_tokenizer"]]}
  content = {"format": 1, "kind": "bpe", "tokenizer": content}
  tokenizer = tokenizer_from_json(json.dumps(content))
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
