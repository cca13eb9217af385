"""Every file of configs/: it is valid, builds at full size, and its header is true."""

import functools
import importlib
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs import dispatcher_finetuned as finetuned
from configs import extractors_childrens_books as extractors
from configs import hnet, modern_transformer, pooling_cc100, pooling_text8, pooling_wiki40b
from dpjax import config as config_lib
from dpjax.config.registry import load_plugins
from dpjax.data import corpus, remote
from dpjax.models.build import build_model

CONFIGS = Path(__file__).parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")
# Entries of the vocabularies that the configured tokenizers make.
VOCABULARIES = {
  "ptb": 8_558,
  "wikitext2": 20_044,
  "wikitext103": 28_996,
  "lm1b": 28_996,
  "openwebtext": 50_257,
  "finetuned": 50_257,
  "books": 5_000,
  "hnet": 256,
  "text8": 28,  # a to z, the space, and what is unknown
}
CORPORA = {
  "quickstart": corpus.PYTHON_MANUAL,
  "ptb": "penn_treebank",
  "finetuned": "wikitext2",
  "books": "childrens_books",
  "transformer": "childrens_books",
  "dispatcher": "childrens_books",
  "we": "childrens_books",
  "hnet": "childrens_books",
  "wiki40b": "wiki40b_en",
  "cc100": "cc100_en",
}  # of the others the file's name says it
# Table 1 of the Dispatcher paper. The papers' numbers are those of reproduce/papers.py, and a
# test there finds them in the headers.
TABLE_1 = [
  f"{x}_{y}" for x in ("msa", "dispatcher") for y in ("ptb", "wikitext2", "wikitext103", "lm1b")
]


def load(name: str, variant: str = ""):
  get_config = importlib.import_module(f"configs.{name}").get_config
  return get_config(*([variant] if inspect.signature(get_config).parameters else []))


def header(name: str) -> str:
  return importlib.import_module(f"configs.{name}").__doc__


@functools.cache  # Two tests count some.
def count_parameters(name: str, variant: str, vocab_size: int) -> int:
  config = load(name, variant)
  model_config = config.model.copy_and_resolve_references()
  model_config.vocab_size = vocab_size
  if model_config.boundaries.name == "whitespace":
    model_config.boundaries.space_ids = (0,)
  model = build_model(model_config)
  # No shape depends on the length of a row.
  tokens = jax.ShapeDtypeStruct((2, min(32, model_config.max_length)), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("variant", ["", "tiny"])
@pytest.mark.parametrize("name", NAMES)
def test_is_valid_and_builds(name, variant):
  config = load(name, variant)
  config_lib.check(config)
  assert load(name, variant) == config and load(name, variant) is not config
  count = count_parameters(name, variant, VOCABULARIES.get(name.split("_")[-1], 5_000))
  if variant and name != "quickstart":
    # Half of the largest are embeddings of 50,257 tokens.
    assert count < 3.5e6 and config.train.num_steps == 50


@pytest.mark.parametrize("name", NAMES)
def test_its_corpus_is_known_and_its_header_has_commands_that_run(name):
  data = load(name).data
  stem = name.split("_")[-1]
  assert data.name == CORPORA.get(stem, stem) and not data.path
  assert corpus.find_source(data.name) and corpus.find_source(load(name, "tiny").data.name)
  load_plugins()
  assert data.tokenizer.file in ("", *remote.VOCABULARIES)
  text = header(name)
  assert set(re.findall(r"configs/(\w+)\.py", text)) <= {*NAMES}
  words = re.findall(rf"--config=configs/{name}.py(?::(\S+))?", text)
  assert len(words) >= 2 or name == "quickstart"
  for word in words:
    config_lib.check(load(name, word))


EXTRACTORS = {"she": "she", "he": "he", "we": "we", "me": "me", "he_extraction": "he"}
# Files whose headers count the parameters, and of which variants.
COUNTED = {
  **{name: [""] for name in (*TABLE_1, "dispatcher_openwebtext", "dispatcher_finetuned")},
  **{f"modern_{name}": ["", "small"] for name in ("transformer", "dispatcher", "we")},
  "hnet": [
    *("", "two", "small", "two,small", "mamba2,small", "mamba2,two,small"),
    *("1stage_L", "2stage_L"),
  ],
  "extractors_childrens_books": [*EXTRACTORS, "attention_32"],
  "pooling_text8": ["fixed4", "unigram", "gumbel,middle_4", "gumbel,middle_16"],
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_header_counts_the_parameters(name):
  size = VOCABULARIES.get(name.split("_")[-1], VOCABULARIES["books"])
  for variant in COUNTED[name]:
    assert f"{count_parameters(name, variant, size) / 1e6:.1f}M" in header(name), variant


def assert_has(config, expected: str) -> None:
  """Each line: a section, and settings of it with their values as Python writes them."""
  for line in expected.strip().splitlines():
    section, *settings = line.split()
    values = dict(setting.split("=") for setting in settings)
    result = config_lib.get(config, section)
    assert {key: str(result[key]).replace(" ", "") for key in values} == values


# What SPEC's table has of the Dispatcher on OpenWebText, and of the fine-tuned.
LARGER_DISPATCHER = """
  model width=480 feed_forward_width=480 num_layers=12 max_length=1024 norm_position=post
  model positions=sinusoidal activation=relu dropout=0.0 hidden_dropout=0.0 dtype=float32
  model.mixer name=dispatcher num_heads=1 level_dropout=0.0
  data.tokenizer name=bpe file=gpt2
  train sampling=sequential batch_size=5 window=0 num_steps=0 grad_clip_norm=0.5
  train.optimizer name=adam b1=0.9 b2=0.999 eps=1e-08
  train.schedule name=constant warmup_steps=0
  eval window=0 stride=0
"""


def test_the_dispatcher_on_openwebtext_has_the_papers_settings():
  more = "train num_epochs=1.0 init_from= learning_rate=6e-05"
  assert_has(load("dispatcher_openwebtext"), LARGER_DISPATCHER + more)


@pytest.mark.parametrize("text", ["ptb", "wikitext2", "wikitext103", "lm1b"])
def test_the_finetuned_dispatcher_has_the_papers_settings(text):
  config = finetuned.get_config(text)
  config_lib.check(config)
  position = re.search(r"openwebtext.py \\\n +--workdir=(\S+)", header("dispatcher_openwebtext"))[1]
  more = f"train num_epochs=60.0 learning_rate=1e-05 init_from={position}"
  assert_has(config, LARGER_DISPATCHER + more)
  assert config.data.name == CORPORA.get(text, text)
  # The tiny one goes on from the tiny one.
  tiny = finetuned.get_config(f"tiny,{text}")
  config_lib.check(tiny)
  origin = load("dispatcher_openwebtext", "tiny")
  assert tiny.model == origin.model != config.model
  assert tiny.data.name == config.data.name and tiny.train.num_steps == 50


# Table 1 of the Extractors paper, and what its text says of Figs. 10 and 11: the length, the
# layers and the steps.
FIGURES = {
  "": (128, 18, 60_000),
  **{f"fig10_{length}": (length, 2, 30_000) for length in (8, 16, 32, 64)},
  **{f"fig11_{layers}": (32, layers, 30_000) for layers in (1, 2, 4, 8)},
}
HEADS = {f"attention_{2**i}": 2**i for i in range(8)}


@pytest.mark.parametrize(
  ("mixer", "figure"),
  [
    *((mixer, "") for mixer in (*EXTRACTORS, *HEADS)),
    *((mixer, figure) for mixer in ("she", "attention_8") for figure in FIGURES if figure),
  ],
)
def test_every_extractor_and_head_has_the_papers_settings(mixer, figure):
  config = extractors.get_config(",".join(filter(None, (figure, mixer))))
  config_lib.check(config)
  max_length, num_layers, num_steps = FIGURES[figure]
  has_parts = mixer != "he_extraction"
  if mixer in HEADS:
    of_mixer = dict(name="attention", num_heads=HEADS[mixer], use_bias=False)
    of_mixer |= dict(dropout=0.0, rotary_base=None, rotary_features=None)
  else:
    of_mixer = dict(name=EXTRACTORS[mixer], implementation=None)
  if mixer in ("she", "he", "we", "he_extraction"):
    of_mixer |= dict(adjustment=has_parts, output_projection=has_parts)
  assert_has(
    config,
    f"""model width=128 feed_forward_width=512 norm_position=pre positions=learned activation=relu
    model dropout=0.1 hidden_dropout=0.0 init_std=0.01 dtype=float32
    model max_length={max_length} num_layers={num_layers}
    data.tokenizer name=bpe vocab_size=5000
    train sampling=random_windows batch_size=64 window=0 num_steps={num_steps}
    train learning_rate=0.001 grad_clip_norm=0.0
    train.optimizer name=adamw b1=0.9 b2=0.999 eps=1e-08 weight_decay=0.01
    train.schedule name=constant warmup_steps=0
    sample top_p=0.6 temperature=1.0 top_k=0""",
  )
  assert config.model.mixer.to_dict() == of_mixer | dict(has_feed_forward=True)
  tiny = extractors.get_config(f"tiny,{mixer},{figure}".rstrip(","))
  config_lib.check(tiny)
  assert tiny.train.num_steps == 50 and tiny.model.mixer.name == config.model.mixer.name


MODERN = {"transformer": "attention", "dispatcher": "dispatcher", "we": "we"}


@pytest.mark.parametrize("name, mixer", MODERN.items())
def test_the_modern_frame_is_one_for_all_mixers(name, mixer):
  for variant, layers, length in (("", 8, 256), ("small", 4, 128), ("tiny", 2, 64)):
    config = load(f"modern_{name}", variant)
    config_lib.check(config)
    assert_has(
      config,
      f"""model norm_position=pre norm_type=rms_norm activation=swiglu positions=none use_bias=False
      model tie_embeddings=True num_layers={layers} max_length={length}
      model.mixer name={mixer}""",
    )
    config.model.mixer = load("modern_transformer", variant).model.mixer
    assert config == load("modern_transformer", variant)


@pytest.mark.parametrize("name", TABLE_1)
def test_has_the_papers_settings(name):
  config = load(name)
  mixer, data = name.split("_")
  is_whole = data in ("wikitext103", "lm1b")
  # WikiText-103's is that of train_plain_dispatcher_on_wikitext103.py of the authors' code;
  # it is lower-cased first, and has the whole vocabulary; so has lm1b.
  rate, eps = (0.0002, 1e-10) if name == "dispatcher_wikitext103" else (0.0001, 1e-8)
  of_mixer = "dispatcher num_levels=None level_dropout=0.2"
  assert_has(
    config,
    f"""model width=512 feed_forward_width=512 num_layers=6 max_length=512 norm_position=post
    model positions=sinusoidal activation=relu dropout=0.2 hidden_dropout=0.2 dtype=float32
    model.mixer num_heads=1 name={"attention dropout=0.2" if mixer == "msa" else of_mixer}
    model.boundaries name=none
    data.tokenizer name=wordpiece file=bert_base_cased lower_text={is_whole}
    data.tokenizer lower_pieces={not is_whole} restrict_vocabulary={not is_whole}
    train batch_size=20 window=0 num_steps=0 num_epochs=60.0 grad_clip_norm=0.5 learning_rate={rate}
    train.optimizer name=adam b1=0.9 b2=0.999 eps={eps}
    train.schedule name=constant warmup_steps=0
    eval window=0 stride=0 batch_size=10""",
  )


FIXED = dict(name="fixed", offset=None, pooling="mean")
LABELS = {
  "none": dict(name="none"),
  **{f"fixed{n}": FIXED | dict(shortening_factor=n) for n in (2, 3, 4)},
  "gumbel": dict(name="gumbel", temperature=0.5, prior=0.2, sample=False, space_ids=()),
  "entropy": dict(name="entropy", left=2, double_sigmoid=False, pooling="mean"),
  "unigram": dict(name="unigram", file="", size=10_000, double_sigmoid=False, pooling="mean"),
  "whitespace": dict(name="whitespace", space_ids=(), pooling="mean"),
}


@pytest.mark.parametrize("label", LABELS)
def test_pooling_has_the_papers_settings(label):
  config = pooling_text8.get_config(label)
  config_lib.check(config)
  assert_has(
    config,
    f"""model width=512 feed_forward_width=2048 max_length=2048 norm_position=post positions=none
    model activation=gelu dropout=0.1 hidden_dropout=0.1 init_std=0.02 norm_init_std=0.02
    model num_layers={12 if label == "none" else 8}
    model.mixer name=relative_attention num_heads=8 dropout=0.1
    data name=text8
    data.tokenizer name=characters
    data split_fractions=(0.9,0.05,0.05)
    train sampling=shuffled_windows batch_size=8 window=0 num_steps=200000
    train learning_rate=0.00025 grad_clip_norm=0.25
    train.optimizer name=adam b1=0.9 b2=0.999 eps=1e-08
    train.schedule name=cosine warmup_steps=4000
    eval window=0 stride=512""",
  )
  for stack in (config.model.first, config.model.last):
    assert stack.to_dict() == dict(num_layers=2, mixer=None)
  boundaries = config.model.boundaries.to_dict()
  assert boundaries.pop("num_buckets", 5) == 5 and not boundaries.pop("target_schedule", ())
  assert boundaries == LABELS[label]
  config_lib.check(pooling_text8.get_config(f"tiny,{label}"))


def changes(variant: str, base: str) -> dict:
  """The settings in which a variant differs from another one."""
  new, old = pooling_text8.get_config(variant), pooling_text8.get_config(base)
  config_lib.check(new)
  new, old = config_lib.flatten(new), config_lib.flatten(old)
  return {key: value for key, value in new.items() if value != old[key]}


def test_each_word_of_pooling_changes_its_settings_alone():
  for size in (200, 500, 1000, 3000, 5000):
    assert changes(f"unigram_{size}", "unigram") == {"model.boundaries.size": size}
  assert changes("unigram_10000", "unigram") == {} == changes("gumbel_0.20", "gumbel")
  for prior in ("0.25", "0.30", "0.37", "0.45"):
    assert changes(f"gumbel_{prior}", "gumbel") == {"model.boundaries.prior": float(prior)}
  for layers in (4, 6, 10, 12, 14, 16):
    assert changes(f"middle_{layers},entropy", "entropy") == {"model.num_layers": layers}
    assert changes(f"none,middle_{layers}", "none") == {"model.num_layers": layers + 4}
  assert changes("middle_8", "whitespace") == {} == changes("", "whitespace")
  for label in ("fixed2", "entropy", "whitespace"):
    assert changes(f"{label},subsampling", label) == {"model.boundaries.pooling": "last"}


def test_the_texts_of_pooling_have_the_papers_settings():
  sizes = dict(en=(10_000, 0.2), fi=(200, 0.37), he=(200, 0.2), vi=(10_000, 0.2))
  for language, (size, prior) in sizes.items():
    unigram = pooling_wiki40b.get_config(f"{language},unigram")
    gumbel = pooling_wiki40b.get_config(f"gumbel,{language}")
    for config in (unigram, gumbel):
      config_lib.check(config)
      assert config.data.name == f"wiki40b_{language}"
    assert (unigram.model.boundaries.size, gumbel.model.boundaries.prior) == (size, prior)
  assert pooling_wiki40b.get_config("unigram_500,fi").model.boundaries.size == 500
  assert pooling_wiki40b.get_config("fi,gumbel_0.20").model.boundaries.prior == 0.2
  for label in LABELS:
    ours, text8 = pooling_cc100.get_config(label), pooling_text8.get_config(label)
    assert ours.data.name == "cc100_en"
    ours.data.name = "text8"
    assert ours == text8


# Words, and what they are answered with, of each module.
WRONG = [
  (modern_transformer, "the variant small or tiny, or none,", "smal|small,tiny"),
  (hnet, "1stage_L, .* or tiny, separated by commas,", "three|two,two|1stage_L,tiny|small;tiny"),
  (finetuned, "a text and tiny, of ptb, .*", "ptb,lm1b|wikitext|tiny,tiny|ptb tiny"),
  (extractors, "a mixer, .* she, he,.*", "shee|she,he|she,fig10_7|tiny,tiny|fig10_8,fig11_2"),
  (
    pooling_text8,
    "boundaries, middle_N, subsampling and tiny, each at most once, of none, fixed2.*",
    "fixed5|fixed2,fixed3|unigram,unigram|unigram_300|gumbel_0.2|middle_5|fi,unigram",
  ),
  (pooling_text8, "no subsampling with gumbel,", "gumbel,subsampling"),
  (pooling_text8, "no subsampling with none,", "subsampling,none"),
  (pooling_wiki40b, "a language, boundaries, .* en, fi, he, vi, none, .*", "sv,unigram|en,fi"),
]


@pytest.mark.parametrize("module, message, variants", WRONG)
def test_variants_that_there_are_not(module, message, variants):
  for variant in variants.split("|"):
    with pytest.raises(ValueError, match=f"^expected {message} got {variant}$"):
      module.get_config(variant)
