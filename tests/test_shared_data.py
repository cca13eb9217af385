"""Tokens: made once in data_dir for all runs, found again, made again where they are gone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import linen as nn

import dpjax
from dpjax import files
from dpjax.data import encoding, token_files
from dpjax.errors import UserError
from dpjax.runs import prepare, processes, run_files
from dpjax.text.tokenizer import train_tokenizer
from dpjax.text.unigram import train_unigram
from tests import helpers


@pytest.fixture
def text(tmp_path):
  return helpers.write_text(tmp_path / "text.txt")


@pytest.fixture
def config(text):
  return helpers.small_config(text)


def tokens_of(config):
  return sorted(Path(config.data.data_dir, "tokens").glob("*/data.json"))


def test_runs_share_the_tokens(config, text, tmp_path, monkeypatch):
  first = prepare.prepare_tokens(config, tmp_path / "a" / "data")
  parts = (first.tokenizer.decode(tokens) for tokens in first.splits.values())
  assert "".join(parts) == text.read_text() and first.name == "text"
  (made,) = tokens_of(config)
  assert made.parent.name.startswith("text_characters_")
  names = sorted(path.name for path in (tmp_path / "a" / "data").iterdir())
  assert names == ["data.json", "tokenizer.json"] and first.folder == made.parent
  monkeypatch.setattr(encoding, "encode_text", lambda *_, **__: 1 / 0)
  second = prepare.prepare_tokens(config, tmp_path / "b" / "data")
  np.testing.assert_array_equal(second.splits["train"], first.splits["train"])
  prepare.prepare_tokens(config, tmp_path / "a" / "data", fresh=True)
  helpers.write_text(text, seed=5)
  with pytest.raises(ZeroDivisionError):
    prepare.prepare_tokens(config, tmp_path / "c" / "data")


def test_settings_that_change_the_tokens_have_their_own(config, tmp_path):
  def prepare_in(name):
    return prepare.prepare_tokens(config, tmp_path / name / "data"), len(tokens_of(config))

  assert prepare_in("a")[1] == 1
  config.model.boundaries = dpjax.config.boundaries("entropy", left=3)
  config.data.manual_dir, config.train.learning_rate = str(tmp_path), 3.0
  assert prepare_in("b")[1] == 1
  config.model.boundaries = dpjax.config.boundaries("unigram", size=31)
  data, number = prepare_in("c")
  assert data.boundaries is not None and number == 2
  config.model.boundaries = dpjax.config.boundaries("none")
  config.data.tokenizer = "bytes"
  data, number = prepare_in("d")
  assert data.boundaries is None and number == 3


def find_again(config, folder):
  return prepare.find_tokens(config, prepare.read_tokens(config, folder))


@pytest.mark.parametrize("again", [prepare.prepare_tokens, find_again])
def test_tokens_that_are_gone_are_made_again(config, text, tmp_path, again):
  folder = tmp_path / "a" / "data"
  first = prepare.prepare_tokens(config, folder).splits["train"].tolist()
  (made,) = tokens_of(config)
  shutil.rmtree(made.parent)
  with pytest.raises(UserError, match="train.bin: .* no such file; `dpjax train --workdir=RUN "):
    token_files.open_tokens(folder).check()
  data = again(config, folder)
  assert data.splits["train"].tolist() == first and data.folder == made.parent
  # Not from another text, with which the run did not begin.
  shutil.rmtree(made.parent)
  helpers.write_text(text, seed=5)
  message = f"^{made.parent}: expected its settings to give the run's text, .*, got different ones"
  with pytest.raises(UserError, match=message):
    again(config, folder)


def test_another_process_makes_the_tokens_of_a_run_from_the_same_text(
  config, text, tmp_path, monkeypatch
):
  made = prepare.prepare_tokens(config, tmp_path / "data").folder
  shutil.rmtree(made)
  helpers.write_text(text, seed=5)
  # As if it were the second one, which sees another text than the first.
  monkeypatch.setattr(processes, "on_first_process", lambda work: None)
  message = f"^{made}: expected its settings to give the run's text, .*, got different ones"
  with pytest.raises(UserError, match=message):
    find_again(config, tmp_path / "data")


def test_tokens_that_one_process_lacks_are_made_again_by_all(config, tmp_path, monkeypatch):
  data = prepare.prepare_tokens(config, tmp_path / "data")
  asked = []
  monkeypatch.setattr(processes, "have_same", lambda value: asked.append(value))
  monkeypatch.setattr(prepare, "_make_again", lambda *_: "made again")
  # As if another process lacked them.
  assert prepare.find_tokens(config, data) == "made again" and asked == ["True"]


@pytest.mark.parametrize("start", [prepare.open_data, prepare.find_or_make_tokens])
def test_what_keeps_one_process_from_starting_is_told_to_all(config, tmp_path, monkeypatch, start):
  told = []

  def on_every_process(work):
    try:
      return work()
    except UserError as error:
      told.append(error)
      raise

  monkeypatch.setattr(processes, "on_every_process", on_every_process)
  config.train.init_from = str(tmp_path)
  message = "^train.init_from: expected the folder of a run"
  with pytest.raises(UserError, match=message) as raised:
    start(config, tmp_path / "run")
  assert told == [raised.value]


def test_one_process_looks_for_its_tokens_once(config, tmp_path, monkeypatch):
  calls = []
  make = prepare._make_tokens
  monkeypatch.setattr(prepare, "_make_tokens", lambda *x: calls.append(x) or make(*x))
  prepare.find_or_make_tokens(config, tmp_path / "run").check()
  assert len(calls) == 1


def test_the_data_of_a_run_come_back_after_a_kill(config, tmp_path, monkeypatch):
  folder = tmp_path / "run" / "data"
  prepare.prepare_tokens(config, folder)
  folder.rename(tmp_path / "run" / "data.replaced")
  monkeypatch.setattr(prepare, "_make_tokens", lambda *_: 1 / 0)
  prepare.prepare_tokens(config, folder).check()


def test_tokens_are_found_where_run_or_data_have_moved(config, tmp_path):
  (tmp_path / "old").mkdir()
  config.data.data_dir = str(tmp_path / "old" / "data")
  prepare.prepare_tokens(config, tmp_path / "old" / "run" / "data")
  # Both together, and the run alone.
  (tmp_path / "old").rename(tmp_path / "new")
  data = token_files.open_tokens(tmp_path / "new" / "run" / "data")
  data.check()
  assert data.folder.parent == tmp_path / "new" / "data" / "tokens"
  (tmp_path / "new" / "run").rename(tmp_path / "run")
  assert not token_files.open_tokens(tmp_path / "run" / "data").has_tokens
  token_files.open_tokens(tmp_path / "run" / "data", tmp_path / "new" / "data").check()


def test_changed_tokens_are_found_before_they_are_used(config, tmp_path):
  """When a run is begun or taken up, and a split is scored; not when it is opened."""
  folder = tmp_path / "run" / "data"
  data = prepare.prepare_tokens(config, folder)
  path = data.folder / "train.bin"
  changed = np.fromfile(path, np.uint16)
  changed[[11, 13]] = changed[[13, 11]]
  assert (changed != data.splits["train"]).sum() == 2
  changed.tofile(path)
  message = f"^{path}: .* a file that was changed; .* remove {data.folder}: "
  with pytest.raises(UserError, match=message):
    prepare.prepare_tokens(config, folder)
  run = dpjax.runs.Run(config, nn.Dense(3), {}, data.tokenizer, 0, token_files.open_tokens(folder))
  # `calibrate` and `look` read by the second.
  for read in (run.score_split, run.tokens, lambda split: run.data.splits[split]):
    with pytest.raises(UserError, match=message):
      read("train")
  shutil.rmtree(data.folder)
  prepare.prepare_tokens(config, folder).check()


def test_tokens_are_read_whole_once(config, tmp_path, monkeypatch):
  folder = tmp_path / "run" / "data"
  prepare.prepare_tokens(config, folder)
  read, real = [], files.checksum
  monkeypatch.setattr(files, "checksum", lambda path: read.append(path.name) or real(path))
  begun = prepare.prepare_tokens(config, folder)
  opened = token_files.open_tokens(folder)
  for data in (begun, opened):
    for split in (*data.splits, *data.splits):
      assert len(data.splits[split])
    assert sorted(read) == ["test.bin", "train.bin", "valid.bin"]
    read.clear()


def test_another_vocabulary_has_its_own(config, text, tmp_path):
  config.data.tokenizer = "bpe"
  for size in (270, 280):
    folder = tmp_path / f"vocabulary{size}"
    folder.mkdir()
    tokenizer = train_tokenizer("bpe", [text.read_text()], vocab_size=size)
    tokenizer._raw.model.save(str(folder))
    config.data.tokenizer.file = str(folder)
    data = prepare.prepare_tokens(config, tmp_path / str(size) / "data")
    assert data.tokenizer.vocab_size == size
  # What a vocabulary of one's own would have is of no account.
  config.data.tokenizer.vocab_size = 999
  prepare.prepare_tokens(config, tmp_path / "again" / "data")
  assert len(tokens_of(config)) == 2


def test_a_tokenizer_file_is_that_of_a_run(config, tmp_path):
  """By its folder or its file; the kind is its own, unless another one is asked for."""
  config.data.tokenizer = dpjax.config.tokenizer("bpe", vocab_size=271)
  expected = prepare.prepare_tokens(config, tmp_path / "run" / "data").tokenizer.to_json()
  config.data.path = str(helpers.write_text(tmp_path / "new.txt", 50, seed=7))
  for i, location in enumerate(("run", "run/data/tokenizer.json")):
    for variant in ("bpe", "characters"):  # the default
      config.data.tokenizer = dpjax.config.tokenizer(variant, file=str(tmp_path / location))
      data = prepare.prepare_tokens(config, tmp_path / f"{variant}{i}" / "data")
      assert data.tokenizer.to_json() == expected and data.folder.name.startswith("new_bpe_")
  assert len(tokens_of(config)) == 2
  content = json.loads(expected)
  content["tokenizer"]["model"] |= {"vocab": {"a": 0, "b": 1}, "merges": []}
  content["tokenizer"]["added_tokens"] = []
  (tmp_path / "run/data/tokenizer.json").write_text(json.dumps(content))
  with pytest.raises(UserError, match="^data.tokenizer.file: expected .* or an unknown token"):
    prepare.prepare_tokens(config, tmp_path / "wrong" / "data")
  (tmp_path / "run/data/tokenizer.json").write_text('{"format": 1, "name": "bpe"}')
  for name, file, message in (
    ("wordpiece", "run", "expected a tokenizer.json, got .*damaged"),
    ("characters", "none", "expected none, or a run"),
  ):
    config.data.tokenizer = dpjax.config.tokenizer(name, file=str(tmp_path / file))
    with pytest.raises(UserError, match=f"^data.tokenizer.file: {message}"):
      prepare.prepare_tokens(config, tmp_path / "wrong" / "data")


def test_tokens_alone(config, tmp_path):
  dpjax.runs.tokenize_only(config, tmp_path / "run").check()
  assert run_files.resumes(tmp_path / "run", config)  # a run to go on with
  # Or to begin anew, as nothing has been learned.
  config.train.learning_rate = 3.0
  assert not run_files.resumes(tmp_path / "run", config)


@pytest.mark.parametrize("variant", ["none", "unigram"])
def test_a_run_takes_tokens_made_elsewhere(text, tmp_path, variant):
  config = helpers.pooled_config(text, variant)
  made = prepare.prepare_tokens(config, tmp_path / "a" / "data")
  ready = shutil.copytree(made.folder, tmp_path / "ready")
  shutil.rmtree(config.data.data_dir)
  text.unlink()
  config.data.path = str(ready)
  data = prepare.prepare_tokens(config, tmp_path / "b" / "data")
  assert data.counts == made.counts and data.folder == ready
  assert (data.boundaries is None) == (variant == "none")
  assert find_again(config, tmp_path / "b" / "data").checksums == made.checksums
  other = "unigram" if variant == "none" else "none"
  for section, name, value in (
    ("data", "tokenizer", "bytes"),
    ("data", "isolate_documents", True),
    ("data", "mixture", "a.txt=1,b.txt=2"),
    ("model", "boundaries", other),
  ):
    wrong, key = config.copy_and_resolve_references(), f"{section}.{name}"
    wrong[section][name] = value
    with pytest.raises(UserError, match=f"^{key}: expected .*, as in the tokens of {ready}, got "):
      prepare.prepare_tokens(wrong, tmp_path / "c" / "data")
  np.memmap(ready / "train.bin", mode="r+")[3] ^= 1
  with pytest.raises(UserError, match="train.bin: expected the tokens as they were made"):
    prepare.prepare_tokens(config, tmp_path / "d" / "data")


def test_tokens_made_elsewhere_keep_the_order_of_their_sources(config, text, tmp_path):
  helpers.write_text(tmp_path / "other.txt", seed=5)
  config.train.sampling = "random_windows"
  config.data.path = ""
  config.data.mixture = f"{text}=3,{tmp_path}/other.txt=1"
  made = prepare.prepare_tokens(config, tmp_path / "a" / "data")
  config.data.path = str(shutil.copytree(made.folder, tmp_path / "ready"))
  for i, mixture in enumerate(("text=1,b/other.txt.gz=9", "c/text.txt=2,d/*=1")):
    config.data.mixture = mixture
    assert prepare.prepare_tokens(config, tmp_path / str(i) / "data").counts == made.counts
  for names in (["other.txt", "text.txt"], ["text.txt"], ["text.txt", "python_manual"]):
    config.data.mixture = ",".join(f"{name}=1" for name in names)
    message = (
      f"^data.mixture: expected the sources text, other, in this order, as in the tokens of "
      f"{tmp_path}/ready, got {', '.join(names)}$"
    )
    with pytest.raises(UserError, match=message):
      prepare.prepare_tokens(config, tmp_path / "wrong" / "data")


def test_another_unigram_model_makes_no_tokens_of_a_run(text, tmp_path):
  config = helpers.pooled_config(text, "unigram")
  file = tmp_path / "unigram.model"
  file.write_bytes(train_unigram([text.read_text()], 23))
  config.model.boundaries.file = str(file)
  folder = tmp_path / "run" / "data"
  shutil.rmtree(prepare.prepare_tokens(config, folder).folder)
  file.write_bytes(train_unigram([text.read_text()], 31))
  with pytest.raises(UserError, match="text, vocabulary and Unigram model, got different ones"):
    find_again(config, folder)


def test_the_runs_own_folder_is_not_the_shared_one(config, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for data_dir in ("data", "data/more"):
    config.data.data_dir = data_dir
    with pytest.raises(UserError, match="^data.data_dir: expected a folder outside of"):
      dpjax.runs.tokenize_only(config, ".")
  assert not (tmp_path / "data").exists()
