"""The papers' experiments as they are, or scaled down.

paper  as in configs/
cpu    a small model and few steps on the same text: minutes on a processor. Validation and test
       are the first 60,000 characters
tiny   a few steps on Python's own manual: seconds, to check that everything works

What a figure varies is unchanged: windows, layers, heads, boundaries. Numbers of the two
reduced scales must not be compared with a paper's.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dpjax
from dpjax.config import ConfigDict
from dpjax.data import sources
from dpjax.data.text_file import write_texts
from dpjax.errors import UserError
from dpjax_papers import corpora as _corpora  # noqa: F401  (registers the papers' corpora)

SCALES = ("tiny", "cpu", "paper")
# Settings of paths and output, which change no numbers.
_FREE = ("seed", "data.path", "data.data_dir", "data.manual_dir", "sample.")
_FREE += ("train.init_from", "train.log_every_steps")


def _steps(num_steps: int, eval_every: int) -> dict[str, Any]:
  return dict(num_steps=num_steps, eval_every_steps=eval_every)


_ONE_EACH = dict(first=dict(num_layers=1), last=dict(num_layers=1))
# By scale and by prefix of a configuration's file; msa is like dispatcher.
_CHANGES: dict[str, dict[str, Any]] = {
  "cpu": {
    "all": {},
    "dispatcher": dict(
      model=dict(num_layers=2, width=128, feed_forward_width=128, max_length=128),
      train=dict(batch_size=10, learning_rate=1e-3, schedule=dict(warmup_steps=50))
      | _steps(1_000, 250),
    ),
    "extractors": dict(
      model=dict(num_layers=2, max_length=64), train=dict(batch_size=16) | _steps(800, 400)
    ),
    "pooling": dict(
      model=dict(num_layers=3, width=64, feed_forward_width=256, max_length=128)
      | dict(mixer=dict(num_heads=4), boundaries=dict(num_buckets=1))
      | _ONE_EACH,
      train=dict(learning_rate=1e-3, schedule=dict(warmup_steps=20)) | _steps(200, 200),
      eval=dict(stride=128),
    ),
  },
  "tiny": {
    "all": dict(
      data=dict(name=sources.PYTHON_MANUAL, tokenizer=dict(file="", vocab_size=300)),
      train=dict(batch_size=8, checkpoint_every_steps=4) | _steps(4, 2),
    ),
    "dispatcher": dict(model=dict(num_layers=2, width=12, feed_forward_width=20, max_length=17)),
    # 128 is the smallest width with 128 heads.
    "extractors": dict(model=dict(num_layers=2, feed_forward_width=20, max_length=17)),
    "pooling": dict(
      model=dict(num_layers=2, width=12, feed_forward_width=20, max_length=34)
      | dict(mixer=dict(num_heads=3), boundaries=dict(num_buckets=1, size=150))
      | _ONE_EACH,
      train=dict(schedule=dict(warmup_steps=1)),
      eval=dict(stride=17),
    ),
  },
}
# Without a sample; durations are in steps, not epochs.
_UNSET = {"sample.prompt": "", "train.num_epochs": 0.0, "train.eval_every_epochs": 0.0}
# Many runs each: what these figures vary, and how many steps a run of "cpu" then has.
_FIGURES = {
  "fig10_": (("model.num_layers", "model.max_length"), 400),
  "fig11_": (("model.num_layers", "model.max_length"), 400),
  "middle_": (("model.num_layers", "model.first.num_layers", "model.last.num_layers"), 60),
}


def load(name: str) -> ConfigDict:
  """The configuration "FILE:VARIANT" of the repository."""
  file, _, variant = name.partition(":")
  module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
  return module.get_config(*[variant] * bool(variant))


def configure(name: str, scale: str) -> ConfigDict:
  """The configuration "FILE:VARIANT" at a scale of `SCALES`."""
  config = load(name)
  if scale == "paper":
    return config
  family = Path(name.partition(":")[0]).stem.partition("_")[0].replace("msa", "dispatcher")
  changes = dict(_UNSET)
  for part in ("all", family):
    changes |= dpjax.config.flatten(_CHANGES[scale][part])
  for word, (varied, num_steps) in _FIGURES.items():
    if f",{word}" in name:
      changes = {key: value for key, value in changes.items() if key not in varied}
      if scale == "cpu":
        changes |= dpjax.config.flatten({"train": _steps(num_steps, num_steps)})
  if scale == "cpu":
    if config.train.init_from:
      changes["train.learning_rate"] /= 6  # the ratio of the paper's two rates
  is_vanilla = not dpjax.config.is_pooled(config.model)
  if family == "pooling" and is_vanilla and "model.num_layers" in changes:
    for side in ("first", "last"):
      changes["model.num_layers"] += changes.pop(f"model.{side}.num_layers")
  config.unlock()
  for key, value in changes.items():
    parent, _, setting = key.rpartition(".")
    section = dpjax.config.get(config, parent)
    # Not all boundaries and tokenizers have it.
    if parent not in ("model.boundaries", "data.tokenizer") or setting in section:
      section[setting] = value
  return config


def changes(name: str, scale: str) -> dict[str, list]:
  """The settings in which a scale differs from the paper: {"model.width": [512, 128]}.

  Paths, seeds and samples, which change no numbers, are left out. None: not a setting there.
  """
  there, here = settings(load(name)), settings(configure(name, scale))
  return {key: [there[key], here.get(key)] for key in there if there[key] != here.get(key)}


def settings(config: ConfigDict) -> dict[str, Any]:
  """The settings that change numbers, as JSON values: {"model.width": 512}."""
  found = {x: y for x, y in dpjax.config.flatten(config).items() if not x.startswith(_FREE)}
  return json.loads(json.dumps(found))


# The characters of train, valid and test that a scale takes from their beginnings; 0: all.
MAX_CHARACTERS = {"cpu": (0, 60_000, 60_000), "tiny": (60_000, 3_000, 3_000)}


def cut(config: ConfigDict, scale: str) -> None:
  """Sets `data.path` to the first characters of the text, as many as the scale uses."""
  data = config.data
  if scale not in MAX_CHARACTERS or data.path and Path(data.path, "train.bin").exists():
    return
  corpus = sources.load_corpus(
    data.path, name=data.name, data_dir=data.data_dir, manual_dir=data.manual_dir
  )
  sizes = dict(zip(corpus.splits, MAX_CHARACTERS[scale], strict=True))

  def read() -> Iterator[tuple[str, str]]:
    for split, text in corpus.splits.items():
      left = sizes[split] or len(text)
      for part in text:
        yield split, part[:left]
        left -= len(part[:left])
        if not left:
          break

  folder = Path(data.data_dir, "texts", f"{corpus.name}_{scale}")
  write_texts(folder, {"of": corpus.about, "sizes": sizes}, read)
  data.path = str(folder.resolve())


def find_text(config: ConfigDict, folder: str | Path | None) -> tuple[str, Path | None]:
  """The name of an experiment's text, and its path in a folder of texts.

  It is NAME: a folder with {train,valid,test}.txt, or a file with the ending .txt. Names of
  stand-ins and parts of the text add a suffix: text8_prefix.txt, wiki40b_fi_books.txt. The folder
  may contain tokens instead of text, in a subfolder named by `tokens_name`. Without a folder the
  text is downloaded, and there is no path.

  Raises:
    ValueError: the folder has no such text, or more than one.
  """
  wanted, names = config.data.name, {*sources.SOURCES}
  if folder is None:
    return wanted, None
  if wanted == sources.PYTHON_MANUAL and not Path(folder, wanted).exists():
    return wanted, None
  found = {}
  for path in sorted(Path(folder).glob("*")):
    stem = path.name.removesuffix(".txt")
    is_text = path.is_dir() or path.suffix == ".txt"
    if is_text and f"{stem}_".startswith(f"{wanted}_") and stem not in names - {wanted}:
      found[path] = stem
  exact = {path: stem for path, stem in found.items() if stem == wanted}
  if len(exact or found) != 1:
    got = ", ".join(path.name for path in exact or found) or "none"
    raise UserError(f"data: expected a folder {wanted} or {wanted}.txt in {folder}, got {got}")
  ((path, stem),) = (exact or found).items()
  tokens = path / tokens_name(config)
  return stem, tokens if tokens.exists() else path


def tokens_name(config: ConfigDict) -> str:
  """The name of a folder of tokens: bpe, or characters_unigram_200 with boundaries of the text."""
  kind = config.model.boundaries
  return config.data.tokenizer.name + f"_unigram_{kind.get('size')}" * (kind.name == "unigram")
