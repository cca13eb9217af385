"""Every file of configs/: it is valid, builds at full size, and its header is true."""

import importlib
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import extractors_childrens_books as extractors
from dpjax import config as config_lib
from dpjax.models.build import build_model

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")
# Entries of the vocabularies that the configured tokenizers make.
VOCABULARIES = {"ptb": 8_558, "wikitext2": 20_044, "wikitext103": 28_996, "books": 5_000}
# Table 1 of the Dispatcher paper.
PERPLEXITIES = {
  "msa_ptb": 40.58,
  "msa_wikitext2": 55.05,
  "msa_wikitext103": 22.56,
  "dispatcher_ptb": 35.40,
  "dispatcher_wikitext2": 50.23,
  "dispatcher_wikitext103": 24.39,
}


def load(name: str, variant: str = ""):
  get_config = importlib.import_module(f"configs.{name}").get_config
  return get_config(*([variant] if inspect.signature(get_config).parameters else []))


def header(name: str) -> str:
  return importlib.import_module(f"configs.{name}").__doc__


def count_parameters(config, vocab_size: int) -> int:
  model_config = config.model.copy_and_resolve_references()
  model_config.vocab_size = vocab_size
  model = build_model(model_config)
  tokens = jax.ShapeDtypeStruct((2, model_config.max_length), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("variant", ["", "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_is_valid_and_builds(name, variant):
  config = load(name, variant)
  config_lib.check(config)
  assert load(name, variant) == config and load(name, variant) is not config
  count = count_parameters(config, VOCABULARIES.get(name.split("_")[-1], 101))
  if variant and name != "quickstart":
    assert count < 3e6 and config.train.num_steps == 50


@pytest.mark.parametrize("name", PERPLEXITIES)
def test_header_is_true(name):
  text = header(name)
  assert re.search(rf"^  python train.py --config=configs/{name}.py ", text, re.MULTILINE)
  assert f"--config=configs/{name}.py:tiny " in text
  assert re.search(r"^Hardware, hours: \S", text, re.MULTILINE)
  paper = re.search(r"^Test perplexity: the paper's ([\d.]+);", text, re.MULTILINE)
  assert float(paper[1]) == PERPLEXITIES[name]
  data = name.split("_")[-1]
  stated = re.search(r"^Parameters: +([\d.]+)M", text, re.MULTILINE)
  count = count_parameters(load(name), VOCABULARIES[data])
  assert stated[1] == f"{count / 1e6:.1f}"
  for size in re.findall(r"vocabulary ([\d,]+)|all ([\d,]+) pieces", text):
    assert int("".join(size).replace(",", "")) == VOCABULARIES[data]
  for file in re.findall(r"configs/(\w+)\.py", text):
    assert file in NAMES


@pytest.mark.parametrize("name", ["dispatcher_ptb", "dispatcher_wikitext2"])
def test_header_counts_the_steps_of_an_epoch(name):
  number = r"([\d,]+)"
  tokens = re.search(rf"{number} training tokens", header(name))[1].replace(",", "")
  steps = re.search(rf"{number} steps of 20 x 512 tokens an epoch", header(name))[1]
  # Rows of N // 20 tokens, the first of which is no target.
  assert -(-(int(tokens) // 20 - 1) // 512) == int(steps)
  assert f"{steps} steps an epoch" in header(name.replace("dispatcher", "msa"))


# Table 1 of the Extractors paper, and what its text says of Figs. 10 and 11.
TABLE_1 = dict(max_length=128, num_layers=18, num_steps=60_000)
FIGURES = {
  "": TABLE_1,
  **{f"fig10_{length}": dict(max_length=length, num_layers=2, num_steps=30_000)
     for length in (8, 16, 32, 64)},
  **{f"fig11_{layers}": dict(max_length=32, num_layers=layers, num_steps=30_000)
     for layers in (1, 2, 4, 8)},
}
HEADS = {f"attention_{2**i}": 2**i for i in range(8)}
EXTRACTORS = {"she": "she", "he": "he", "we": "we", "me": "me", "he_extraction": "he"}


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("mixer", [*EXTRACTORS, *HEADS])
def test_every_extractor_and_head_has_the_papers_settings(mixer, figure):
  config = extractors.get_config(",".join(filter(None, (figure, mixer))))
  config_lib.check(config)
  sizes = FIGURES[figure]
  has_parts = mixer != "he_extraction"
  expected = {
    "model": dict(
      mixer=EXTRACTORS.get(mixer, "attention"), num_heads=HEADS.get(mixer, 1),
      attention_bias=mixer not in HEADS, adjustment=has_parts,
      output_projection=has_parts, width=128, feed_forward_width=512, norm="pre",
      positions="learned", activation="relu", dropout=0.1, hidden_dropout=0.0,
      mixer_dropout=0.0, init_std=0.01, dtype="float32",
      max_length=sizes["max_length"], num_layers=sizes["num_layers"],
    ),
    "data": dict(tokenizer="bpe", tokenizer_size=5000),
    "train": dict(
      batches="random_windows", batch_size=64, window=0, num_steps=sizes["num_steps"],
      optimizer="adamw", learning_rate=1e-3, b1=0.9, b2=0.999, eps=1e-8,
      weight_decay=0.01, clip_norm=0.0, schedule="constant", warmup_steps=0,
      median_every_steps=2000,
    ),
    "sample": dict(top_p=0.6, temperature=1.0, top_k=0),
  }
  for section, settings in expected.items():
    assert {key: config[section][key] for key in settings} == settings
  princess = "Once upon a time there was a little princess who"
  assert princess.startswith(config.sample.prompt)
  # The whole prompt has some ten tokens.
  assert (config.sample.prompt == princess) == (config.model.max_length > 8)
  tiny = extractors.get_config(f"tiny,{mixer},{figure}".rstrip(","))
  config_lib.check(tiny)
  assert tiny.train.num_steps == 50 and tiny.model.width == 32
  assert tiny.model.mixer == config.model.mixer and tiny.train.median_every_steps <= 50
  assert tiny.data == config.data and tiny.train.batches == config.train.batches


def test_the_header_of_the_extractors_is_true():
  text = header("extractors_childrens_books")
  stated = {
    mixer: float(size)
    for mixer, size in re.findall(r"(\w+) ([\d.]+)M[,;]", text)
  }
  assert stated.keys() == {*EXTRACTORS, "attention"}
  for mixer, size in stated.items():
    config = extractors.get_config({"attention": "attention_32"}.get(mixer, mixer))
    assert f"{count_parameters(config, 5000) / 1e6:.1f}" == f"{size:.1f}"
  for word in re.findall(r"--config=configs/extractors_childrens_books.py:(\S+)", text):
    config_lib.check(extractors.get_config(word))


@pytest.mark.parametrize(
  "variant", ["shee", "she,he", "she,fig10_7", "tiny,tiny", "fig10_8,fig11_2", "she tiny"]
)
def test_variants_of_the_extractors_that_there_are_not(variant):
  with pytest.raises(ValueError, match=f"expected a mixer, .* she, he,.* got {variant}"):
    extractors.get_config(variant)


@pytest.mark.parametrize("name", PERPLEXITIES)
def test_has_the_papers_settings(name):
  config = load(name)
  mixer, data = name.split("_")
  expected = {
    "model": dict(
      mixer={"msa": "attention"}.get(mixer, mixer), width=512, feed_forward_width=512,
      num_layers=6, num_heads=1, max_length=512, norm="post", positions="sinusoidal",
      activation="relu", dropout=0.2, hidden_dropout=0.2, mixer_dropout=0.2,
      dtype="float32",
    ),
    "data": dict(
      path=f"data/{data}", tokenizer="wordpiece",
      tokenizer_file="data/tokenizers/bert_base_cased_vocab.txt",
      # WikiText-103 is lower-cased first, and has the whole vocabulary.
      lower_text=data == "wikitext103", lower_pieces=data != "wikitext103",
      restrict_vocabulary=data != "wikitext103",
    ),
    "train": dict(
      batch_size=20, window=0, num_steps=0, num_epochs=60.0, optimizer="adam", b1=0.9,
      b2=0.999, clip_norm=0.5, schedule="constant", warmup_steps=0,
      # The paper's, but for train_plain_dispatcher_on_wikitext103.py of the authors' code.
      learning_rate=2e-4 if name == "dispatcher_wikitext103" else 1e-4,
      eps=1e-10 if name == "dispatcher_wikitext103" else 1e-8,
    ),
    "eval": dict(window=0, stride=0, batch_size=10),
  }
  for section, settings in expected.items():
    assert {key: config[section][key] for key in settings} == settings
