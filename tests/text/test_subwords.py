import io
import json

import pytest
import sentencepiece
import tokenizers as library

from dpjax.text.tokens import tokenizer_from_json, train_tokenizer

LINES = ["the cat sat on the mat\n", "the dog sat on the log\n"] * 7


@pytest.mark.parametrize("kind", ["sentencepiece_unigram", "sentencepiece_bpe"])
def test_size_the_text_does_not_admit(kind):
  with pytest.raises(ValueError, match=r"^data.tokenizer_size: expected at most \d+ "):
    train_tokenizer(kind, LINES, vocab_size=5000)
  with pytest.raises(ValueError, match=r"^data.tokenizer_size: expected at least \d+ "):
    train_tokenizer(kind, LINES, vocab_size=67)


def test_bpe_has_at_least_the_bytes():
  with pytest.raises(ValueError, match="data.tokenizer_size: expected at least 257"):
    train_tokenizer("bpe", LINES, vocab_size=67)


@pytest.mark.parametrize("kind", ["sentencepiece_unigram", "sentencepiece_bpe"])
def test_text_without_characters(kind):
  with pytest.raises(ValueError, match="^data.tokenizer: expected a text"):
    train_tokenizer(kind, ["\n", "\n\n"], vocab_size=300)


@pytest.mark.parametrize("kind", ["sentencepiece_unigram", "sentencepiece_bpe"])
def test_one_long_line_is_learned_from(kind):
  # SentencePiece itself drops lines above its limit.
  text = 1000 * "the cat sat on the mat and the dog on the log "
  tokenizer = train_tokenizer(kind, [text], vocab_size=275)
  ids = tokenizer.encode(text)
  assert len(ids) < len(text)
  assert tokenizer.decode(ids) == text


@pytest.fixture
def foreign_model(tmp_path):
  """A model with SentencePiece's own settings: no line end, and white space is lost."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(LINES), model_writer=model, vocab_size=17, minloglevel=2)
  file = tmp_path / "foreign.model"
  file.write_bytes(model.getvalue())
  return file


def test_loaded_sentencepiece_ends_lines_with_its_end_of_sentence(foreign_model):
  processor = sentencepiece.SentencePieceProcessor(model_file=str(foreign_model))
  tokenizer = train_tokenizer("sentencepiece_unigram", [], file=str(foreign_model))
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
  with pytest.raises(ValueError, match="data.tokenizer_file: expected a tokenizer.json"):
    train_tokenizer("bpe", [], file=str(folder / "small-merges.txt"))
  with pytest.raises(ValueError, match="data.tokenizer_file: expected a tokenizer.json"):
    train_tokenizer("bpe", [], file=str(folder / "vocabulary.txt"))


def test_bpe_refuses_another_model(tmp_path):
  model = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
  (tmp_path / "tokenizer.json").write_text(model.to_str())
  with pytest.raises(ValueError, match="data.tokenizer_file: expected a tokenizer.json"):
    train_tokenizer("bpe", [], file=str(tmp_path / "tokenizer.json"))


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
