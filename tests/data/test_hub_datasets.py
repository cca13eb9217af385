"""Datasets of a stand-in for the Hugging Face Hub, by their names."""

import bz2
import gzip
import json

import pytest

from dpjax.data.remote import choose_files, parse_hub
from dpjax.errors import UserError
from tests import helpers
from tests.helpers import parquet

STORIES = [f"Story {i} of a \u00e9 hen.\nIts end {'x' * (i % 7)}" for i in range(61)]
OTHERS = ["One.", "", "Two \u2028 three.\n", "Four."]


def lines(texts, column="text"):
  return "\n".join(json.dumps({"n": 1, column: text}) for text in texts).encode()


@pytest.fixture
def load(tmp_path):
  """The documents of each split."""

  def load(name, **settings):
    corpus = helpers.load_corpus(name, data_dir=tmp_path / "data", **settings)
    assert corpus.name.startswith("hf_me_tales")
    assert all(text.has_documents for text in corpus.splits.values())
    return {split: [*text] for split, text in corpus.splits.items()}

  return load


def ended(texts):
  return [text if text.endswith("\n") else f"{text}\n" for text in texts if text]


def test_parquet_with_three_splits_is_read_once(site, load):
  files = {
    "README.md": b"",
    "data/train-00000-of-00002-0ab.parquet": parquet(STORIES[:40]),
    "data/train-00001-of-00002-0cd.parquet": parquet([*STORIES[40:], None]),
    "data/validation-00000-of-00001.parquet": parquet(OTHERS),
    "data/test-00000-of-00001.parquet": parquet(OTHERS[::-1]),
    "train.jsonl": lines(STORIES),  # the same in another form
  }
  site.publish("datasets/me/tales", files)
  expected = {"train": ended(STORIES), "valid": ended(OTHERS), "test": ended(OTHERS[::-1])}
  assert load("hf:me/tales") == expected
  site.clear()
  for isolate in (False, True):  # Both are of the text in data_dir.
    assert load("hf:me/tales", isolate_documents=isolate) == expected
  assert site.asked == []


def test_a_missing_split_is_cut_from_the_end(site, load):
  site.publish("datasets/me/tales", {"train.jsonl.gz": gzip.compress(lines(STORIES, "content"))})
  splits = load("hf:me/tales", split_fractions=(0.6, 0.2, 0.2))
  assert [*splits["train"], *splits["valid"], *splits["test"]] == ended(STORIES)
  assert [len(x) for x in splits.values()] == pytest.approx([37, 12, 12], abs=2)
  site.publish("datasets/me/tales", {"dev.jsonl": lines(OTHERS)})
  splits = load("hf:me/tales@main", split_fractions=(0.6, 0.2, 0.2))
  assert [*splits["train"], *splits["test"]] == ended(STORIES) and splits["valid"] == ended(OTHERS)


def test_the_card_names_configurations(site, load):
  files = {
    "a/part-0.parquet": parquet(STORIES),
    "a/part-1.parquet": parquet(OTHERS),
    "b/x.json.bz2": bz2.compress(lines(STORIES[::-1], "story")),
  }
  one = [{"split": "train", "path": "a/part-0*"}, {"split": "validation", "path": ["a/part-1*"]}]
  configs = [
    {"config_name": "a", "data_files": one, "default": True},
    {"config_name": "b", "data_files": "b/*"},
  ]
  site.publish("datasets/me/tales", files, card={"configs": configs})
  commit = site.files("datasets/me/tales")[1]
  site.publish("datasets/me/tales", dict.fromkeys(files, b"spoiled"))
  splits = load(f"hf:me/tales@{commit}")
  assert (
    splits["valid"] == ended(OTHERS) and splits["test"] == ended(STORIES)[-len(splits["test"]) :]
  )
  splits = load(f"hf:me/tales@{commit}:b//story")
  assert sum(splits.values(), []) == ended(STORIES[::-1])
  splits = load(f"hf:me/tales@{commit}:a/validation", split_fractions=(0.4, 0.3, 0.3))
  assert sum(splits.values(), []) == ended(OTHERS)


CONFIGS = [{"config_name": "x", "data_files": "p*"}, {"config_name": "y", "data_files": ["q*"]}]
# The files, the configuration and the split that are asked for, and the split of each file.
CHOICES = helpers.cases("""
  train/0.parquet dev/0.parquet                     | -  | -         | train valid
  en/c4-train.0.json.gz en/c4-validation.0.json.gz  | en | -         | train valid
  v1/training.jsonl v1/eval.jsonl                   | -  | -         | train test
  # No words for splits, no data, and what describes the data.
  a.parquet b.parquet                               | -  | -         | train train
  a.parquet dataset_infos.json notes.txt            | -  | -         | train - -
  train.json info.json                              | -  | -         | train -
  # A split of its own, configurations of the card, and the file's name before its folder's.
  train_sft-0.parquet train_gen-0.parquet           | -  | train_sft | train -
  p1.jsonl p2.jsonl q.jsonl                         | x  | -         | train train -
  latest/test.jsonl test/train.jsonl                | -  | -         | - train
""")


@pytest.mark.parametrize("names, config, split, expected", CHOICES)
def test_files_are_chosen_by_their_names(names, config, split, expected):
  files, configs = names.split(), CONFIGS if config == "x" else ()
  result = choose_files("hf:me/tales", files, configs, config.strip("-"), split.strip("-"))
  by_file = {file: split for split, files in result.items() for file in files}
  assert [by_file.get(file, "-") for file in files] == expected.split()


def test_names():
  whole = ("me/tales", "v1", "en", "train", "story")
  assert parse_hub("hf:me/tales@v1:en/train/story") == whole
  assert parse_hub("hf:me/tales:/train") == ("me/tales", None, "", "train", "")
  assert parse_hub("hf:me/ta.les_2") == ("me/ta.les_2", None, "", "", "")


REFUSALS = helpers.cases("""
  hf:tales                | expected hf:OWNER/NAME.@REVISION..:CONFIG/SPLIT/COLUMN., got hf:tales
  hf:me/tales:a/b/c/d     | expected hf:OWNER/NAME
  hf:me/none              | expected a dataset hf:me/none that can be read, got 401 Client Error
  hf:me/tales@v9          | got 404 Client Error. Revision Not Found
  hf:me/tales             | expected a configuration .hf:OWNER/NAME:CONFIG., one of de, en, got hf:
  hf:me/tales:de          | expected a split .* one of test, got hf:me/tales:de
  hf:me/tales:en          | a Parquet file with a column of strings named text or content .*, got
  hf:me/tales:en//id      | a Parquet file with a column of strings named id .*, got id of the type
  hf:me/tales:de/test     | a JSON object with a string 'text' or 'content' .*, got another line 1
  hf:me/notes             | expected a dataset of Parquet files or JSON lines, got hf:me/notes
""")


@pytest.mark.parametrize("name, message", REFUSALS)
def test_refusals(site, tmp_path, name, message):
  files = {"en/train.parquet": parquet(STORIES, "story"), "de/test.jsonl": b"[1]\n", "b": b""}
  site.publish("datasets/me/tales", files)
  site.publish("datasets/me/notes", {"notes.txt": b"a"})
  with pytest.raises(UserError, match=f"^(data.name: |/).*{message}") as error:
    helpers.load_corpus(name, data_dir=tmp_path / "data")
  assert "\n" not in str(error.value)
  assert not [*tmp_path.glob("data/texts/*/data.json")]
