"""Mixtures: shares of the rows, windows of one source, and tokens of several."""

import json
import math

import numpy as np
import pytest

from dpjax.data.batches import TokenStream
from dpjax.data.encoding import tokenize
from dpjax.data.mixture import MixedWindows, parse
from dpjax.errors import UserError
from tests import helpers

SIZES = (137, 61, 29)
STREAM = np.arange(sum(SIZES))
ENDS = np.cumsum(SIZES)


def make(shares=(0.6, 0.3, 0.1), window=5, seed=3):
  return MixedWindows(TokenStream(STREAM), 8, window, seed, sizes=SIZES, shares=shares)


@pytest.mark.parametrize("shares, seed", [((0.334, 0.333, 0.333), 0), ((0.05, 0.94, 0.01), 3)])
def test_of_any_rows_each_source_has_its_share(shares, seed):
  batches = make(shares, seed=seed)
  sources = batches.sources(np.arange(40_000))
  counts = np.cumsum(sources[:, None] == np.arange(3), axis=0)
  expected = np.arange(1, 40_001)[:, None] * np.array(shares)
  assert abs(counts - expected).max() < 8
  for begin in (0, 77, 12_345):
    share = (counts[begin + 9_999] - counts[begin]) / 10_000
    np.testing.assert_allclose(share, shares, rtol=0, atol=0.001)
  assert (make(shares, seed=seed + 1).sources(np.arange(40)) != sources[:40]).any()


def test_the_rows_of_a_source_are_counted():
  batches = make()
  numbers = np.arange(5_003)
  sources = batches.sources(numbers)
  before = batches._count_before(numbers, sources)
  for source in range(3):
    np.testing.assert_array_equal(before[sources == source], np.arange((sources == source).sum()))
  # Also beyond the numbers that the bits hold.
  later = numbers + 3 * 2**32
  np.testing.assert_array_equal(batches.sources(later), sources)
  for source, added in enumerate((0.6, 0.3, 0.1)):
    more = (batches._count_before(later, sources) - before)[sources == source]
    assert (more == more[0]).all() and more[0] == pytest.approx(added * 3 * 2**32, abs=3)


def test_rows_are_windows_of_one_source_each_of_which_comes_once_a_round():
  batches = make()
  rows = np.concatenate([batches.batch(step)["tokens"] for step in range(60)])
  sources = np.searchsorted(ENDS, rows, "right")
  assert (sources == sources[:, :1]).all()
  np.testing.assert_array_equal(sources[:, 0], batches.sources(np.arange(480)))
  for source, size in enumerate(SIZES):
    begins = rows[sources[:, 0] == source][:, 0]
    for order in np.split(begins, range(size - 5, len(begins), size - 5)):
      assert len({*order}) == len(order)
    np.testing.assert_array_equal(np.diff(rows, axis=1), 1)
  # An epoch has as many targets as the sources.
  assert batches.steps_per_epoch == -(-sum(math.ceil((size - 1) / 5) for size in SIZES) // 8)


def test_a_source_that_is_too_short():
  with pytest.raises(UserError, match="^train.window: expected at most 28 .* has 29 .*, got 29"):
    make(window=29)
  assert make(window=28).steps_per_epoch


def test_weights():
  assert parse("a/b.txt=3, hf:x/y@v=1=1") == {"a/b.txt": 0.75, "hf:x/y@v=1": 0.25}
  assert parse("one=2") == {"one": 1} and parse("") == {}
  for weight in ("1e308", "1e-300", "5e-324"):
    assert parse(f"a={weight},b={weight}") == {"a": 0.5, "b": 0.5}
  shares = [*parse("a=2,b=1e9,c=2").values()]
  assert (np.diff(make(shares)._edges) >= 4).all()


@pytest.mark.parametrize("mixture", ["a", "=3", "a=0", "a=nan", "a=1,b=x", "a=1,a=2"])
def test_weights_of_another_form(mixture):
  with pytest.raises(UserError, match="^data.mixture: expected SOURCE=WEIGHT,SOU.* got "):
    parse(mixture)


@pytest.mark.parametrize("mixture", ["a=1e-300,b=1", "a=1,b=1e10", "a=1e308,b=1e-300"])
def test_a_source_without_rows_is_refused(mixture):
  with pytest.raises(UserError, match="^data.mixture: expected weights of at least 1e-9 of"):
    parse(mixture)


@pytest.fixture
def sources(tmp_path, monkeypatch):
  """Two files in the current folder."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "one.txt").write_text("one two three\n" * 53)
  texts = [f"four {i} five" for i in range(47)]
  (tmp_path / "two.jsonl").write_text("\n".join(json.dumps({"text": x}) for x in texts))


@pytest.mark.usefixtures("sources")
def test_tokens_of_sources_follow_each_other(tmp_path):
  corpus = helpers.load_corpus(mixture="one.txt=2,two.jsonl=1", data_dir=tmp_path / "data")
  tokens = tokenize(corpus, tmp_path / "tokens", "bpe", vocab_size=300)
  alone = [helpers.load_corpus(path=path) for path in ("one.txt", "two.jsonl")]
  for split, ids in tokens.splits.items():
    sizes = tokens.counts[split]["sources"]
    for x, part in zip(alone, np.split(ids, np.cumsum(sizes)[:-1]), strict=True):
      text = "".join(x.splits[split])
      assert tokens.tokenizer.decode(part) == text
      np.testing.assert_array_equal(part, tokens.tokenizer.encode(text))
  assert tokens.documents is None and corpus.name == "one+two"
  # Weights do not change the tokens.
  again = helpers.load_corpus("none", "none.txt", mixture="one.txt=9,two.jsonl=1")
  assert again.about == corpus.about


@pytest.mark.usefixtures("sources")
def test_documents_of_sources(tmp_path):
  (tmp_path / "three.jsonl").write_text('{"text": "six"}\n{"text": "seven"}\n{"text": "eight"}\n')
  arguments = dict(data_dir="data", isolate_documents=True, split_fractions=(0.4, 0.3, 0.3))
  corpus = helpers.load_corpus(mixture="two.jsonl=1,three.jsonl=2", **arguments)
  tokens = tokenize(corpus, tmp_path / "tokens", "bytes")
  begins, ids = tokens.documents["train"], tokens.splits["train"]
  documents = [tokens.tokenizer.decode(x) for x in np.split(ids, begins[1:])]
  assert documents[0] == "four 0 five\n" and documents[-1] == "six\n"
  assert len(documents) == tokens.counts["train"]["documents"]
  with pytest.raises(UserError, match="^data.mixture: .*data.isolate_documents: .* False for one"):
    helpers.load_corpus(mixture="two.jsonl=1,one.txt=2", **arguments)


@pytest.mark.usefixtures("sources")
def test_a_setting_is_for_the_sources_that_have_a_use_for_it(tmp_path):
  (tmp_path / "three.jsonl").write_text('{"body": "six"}\n' * 20)
  (tmp_path / "four.txt").write_text("one\n--\ntwo\n--\n" * 50)
  arguments = dict(data_dir="data", text_field="body")
  corpus = helpers.load_corpus(mixture="one.txt=1,three.jsonl=1", **arguments)
  assert "".join(corpus.splits["test"]).endswith("two three\nsix\n")
  # Both settings, and each source has a use for one.
  corpus = helpers.load_corpus(
    mixture="four.txt=1,three.jsonl=1", separator="--", isolate_documents=True, **arguments
  )
  four, three = ([*x] for x in corpus.splits["train"].texts)
  assert four[:2] == ["one\n--\n", "two\n--\n"] and {*three} == {"six\n"}
  for sources, name, setting in (
    ("one.txt=1,four.txt=1", "text_field", arguments),
    ("two.jsonl=1", "separator", {"separator": "--"}),
  ):
    with pytest.raises(UserError, match=f"^data.{name}: expected .* unless data.path is of"):
      helpers.load_corpus(mixture=sources, **setting)


@pytest.mark.usefixtures("sources")
def test_a_source_that_cannot_be_opened():
  with pytest.raises(UserError, match="^data.mixture: .* nothing.txt .data.path: .*nothing"):
    helpers.load_corpus(mixture="nothing.txt=1,one.txt=2")
