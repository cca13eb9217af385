"""Downloads, complete under their names, checked, or refused; TensorFlow Datasets."""

import hashlib
import re

import numpy as np
import pytest
import tensorflow_datasets as tfds

from dpjax.data import readers
from dpjax.data.remote import File, Files
from dpjax.data.text_file import SPLITS
from dpjax.errors import UserError
from tests import helpers

CONTENT = np.random.default_rng(1).bytes(7919)
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"
HUB = "hf://datasets/some/one/a/t.zip"


@pytest.fixture
def served(site):
  site.plain["/a b/t.zip"] = CONTENT
  site.publish("datasets/some/one", {"a/t.zip": CONTENT})
  return site


@pytest.fixture
def files(tmp_path):
  return Files(tmp_path / "data")


def get(site, files, **settings):
  return files.get(File(**({"url": f"{site.url}/a%20b/t.zip?x=y"} | settings)))


def names(files):
  return sorted(path.name for path in files.folder.iterdir())


@pytest.mark.parametrize("settings", [{"checksum": SHA256}, {"checksum": MD5}, {"url": HUB}])
def test_a_file_is_downloaded_once_and_again_where_it_has_changed(served, files, settings):
  for _ in range(2):
    path = get(served, files, **settings)
    assert path == files.folder / "t.zip" and path.read_bytes() == CONTENT
    assert names(files) == ["t.zip"]
  assert served.names().count("t.zip") == 1
  path.write_bytes(CONTENT[:-1])
  content = get(served, files, **settings).read_bytes()
  assert content == (CONTENT if "checksum" in settings else CONTENT[:-1])


@pytest.mark.parametrize(
  "settings, message",
  [
    ({"checksum": "sha256:" + "0" * 64}, f"expected sha256:00* but got {SHA256[7:]}"),
    ({"url": "hf://datasets/some/one/a/none"}, "one/a/none: expected the file, got 404"),
    ({"url": "ftp://host/a"}, "ftp://host/a: expected the file, got No connection adapters"),
    ({"url": "http://127.0.0.1:1/t.zip"}, "expected the file, got .*refused"),
  ],
)
def test_refusals(served, files, settings, message):
  with pytest.raises(UserError, match=f"{message}.*; download it yourself and put it as") as error:
    get(served, files, **settings)
  assert "\n" not in str(error.value) and names(files) == []


@pytest.mark.parametrize("url", [{}, {"url": HUB}])
def test_a_transfer_that_breaks_leaves_no_file(served, files, url):
  served.break_after = 1000
  with pytest.raises(UserError, match="expected the file, got "):
    get(served, files, **url)
  assert names(files) == []
  served.break_after = None
  assert get(served, files, **url).read_bytes() == CONTENT


def test_a_server_that_is_busy_is_asked_again(served, files):
  served.refusals = [503, 500]
  assert get(served, files).read_bytes() == CONTENT
  served.refusals = [503] * 3
  with pytest.raises(UserError, match="expected the file, got 503"):
    get(served, files, name="other")


@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_head_of_a_file(served, files, has_ranges):
  served.has_ranges = has_ranges
  assert get(served, files, head_bytes=1000).read_bytes() == CONTENT[:1000]
  assert served.sent == (1000 if has_ranges else len(CONTENT))
  assert get(served, files, name="all", head_bytes=10**6).read_bytes() == CONTENT


def test_a_manual_file_goes_first(served, files):
  path = files.manual_dir / "t.zip"
  path.parent.mkdir(parents=True)
  path.write_bytes(CONTENT)
  for settings in ({}, {"checksum": SHA256}, {"head_bytes": 100}):
    assert get(served, files, **settings) == path
  path.write_bytes(b"other")
  with pytest.raises(UserError, match=f"{path}: expected sha256.* or remove it"):
    get(served, files, checksum=SHA256)
  assert served.asked == []


def test_a_full_disk_is_the_folders_error(served, files):
  files.folder.parent.mkdir()
  files.folder.write_bytes(b"")  # no folder
  with pytest.raises(OSError, match=str(files.folder)):
    get(served, files)


class SmallTextForTests(tfds.core.GeneratorBasedBuilder):
  """A corpus of TensorFlow Datasets, which registers itself."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in ("whole", "train", "image")]

  def _info(self):
    name = "label" if self.builder_config.name == "image" else "text"
    features = tfds.features.FeaturesDict({name: tfds.features.Text()})
    return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

  def _split_generators(self, dl_manager):
    is_whole = self.builder_config.name == "whole"
    splits = ["train", "validation", "test", "unsupervised"] if is_whole else ["train"]
    return {split: self._generate_examples(split) for split in splits}

  def _generate_examples(self, split):
    (name,) = self.info.features
    for i in range(1100 if split == "train" else 3):
      yield i, {name: f"{split} {i} ä" + "\n" * (i % 2)}


def lines(split, numbers):
  return "".join(f"{split} {i} ä\n" for i in numbers)


def test_tensorflow_datasets(tmp_path):
  pytest.importorskip("array_record")
  corpus = helpers.load_corpus("tfds:small_text_for_tests/whole", data_dir=tmp_path / "data")
  assert {split: "".join(parts) for split, parts in corpus.splits.items()} == {
    "train": lines("train", range(1100)),
    "valid": lines("validation", range(3)),
    "test": lines("test", range(3)),
  }
  corpus = helpers.load_corpus("tfds:small_text_for_tests/train", data_dir=tmp_path / "data")
  parts = ["".join(corpus.splits[split]) for split in SPLITS]
  assert "".join(parts) == lines("train", range(1100)) and all(parts)


@pytest.mark.parametrize(
  "name, message",
  [("small_text_for_tests/image", "(KeyError: 'text')"), ("none_of_these", "none_of")],
)
def test_what_tensorflow_datasets_cannot_make(tmp_path, name, message):
  with pytest.raises(UserError, match=f"^data.name: .*{re.escape(message)}.*$") as error:
    helpers.load_corpus(f"tfds:{name}", data_dir=tmp_path)
  assert "\n" not in str(error.value)


def test_a_missing_library_is_named_with_the_command_to_install_it():
  message = "a_b.c: expected the package a-b .pip install a-b., got: No module named 'a_b'"
  with pytest.raises(UserError, match=f"^{message}$"):
    readers.optional("a_b.c", "a-b")
