"""Every file of configs/: it builds at full size, has the papers' settings, and a true header."""

import importlib
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import dpjax
from configs import dispatcher_finetuned as finetuned
from configs import extractors_childrens_books as extractors
from configs import hnet, modern_transformer, pooling_cc100, pooling_text8, pooling_wiki40b
from dpjax.config.registry import load_plugins
from dpjax.data import remote, sources
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
  "hnet": 256,
  "text8": 28,  # a to z, the space, and what is unknown
}
CORPORA = {
  "quickstart": sources.PYTHON_MANUAL,
  "ptb": "penn_treebank",
  "finetuned": "wikitext2",
  **dict.fromkeys(("books", "transformer", "dispatcher", "we", "hnet"), "childrens_books"),
  "wiki40b": "wiki40b_en",
  "cc100": "cc100_en",
}  # of the others the file's name says it
TABLE_1 = [
  f"{x}_{y}" for x in ("msa", "dispatcher") for y in ("ptb", "wikitext2", "wikitext103", "lm1b")
]
EXTRACTORS = ("she", "he", "we", "me", "he_extraction")
# Files whose headers count the parameters, and of which variants.
COUNTED = {
  **{name: [""] for name in (*TABLE_1, "dispatcher_openwebtext", "dispatcher_finetuned")},
  **{f"modern_{name}": ["", "small"] for name in ("transformer", "dispatcher", "we")},
  "hnet": ["", "mamba2,two,small"],
  "extractors_childrens_books": [*EXTRACTORS, "attention_32"],
  "pooling_text8": ["", "unigram", "gumbel,middle_4", "gumbel,middle_16"],
}


def load(name: str, variant: str = ""):
  get_config = importlib.import_module(f"configs.{name}").get_config
  return get_config(*([variant] if inspect.signature(get_config).parameters else []))


def header(name: str) -> str:
  return importlib.import_module(f"configs.{name}").__doc__


def count_parameters(name: str, variant: str) -> int:
  """Of the valid configuration, built at full size."""
  config = load(name, variant)
  dpjax.config.check(config)
  config.model.vocab_size = VOCABULARIES.get(name.split("_")[-1], 5_000)
  if config.model.boundaries.name == "whitespace":
    config.model.boundaries.space_ids = (0,)
  model = build_model(config.model)
  # No shape depends on the length of a row.
  tokens = jax.ShapeDtypeStruct((2, min(32, config.model.max_length)), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
  return sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", NAMES)
def test_is_valid_and_its_header_has_commands_that_run(name):
  data, stem, text = load(name).data, name.split("_")[-1], header(name)
  assert data.name == CORPORA.get(stem, stem) and not data.path
  assert sources.find_source(data.name) and sources.find_source(load(name, "tiny").data.name)
  load_plugins()
  assert data.tokenizer.file in ("", *remote.VOCABULARIES)
  assert set(re.findall(r"configs/(\w+)\.py", text)) <= {*NAMES}
  words = re.findall(rf"--config=configs/{name}.py(?::(\S+))?", text)
  assert len(words) >= 2 or name == "quickstart"
  for word in words:
    dpjax.config.check(load(name, word))
  # Half of the largest are embeddings of 50,257 tokens.
  assert count_parameters(name, "tiny") < 3.5e6 and load(name, "tiny").train.num_steps == 50


OF_HNET = "two small two,small mamba2,small 1stage_L 2stage_L"


@pytest.mark.parametrize(
  "name, variants",
  [*COUNTED.items(), pytest.param("hnet", OF_HNET.split(), marks=pytest.mark.slow)],
)
def test_the_header_counts_the_parameters(name, variants):
  for variant in variants:
    assert f"{count_parameters(name, variant) / 1e6:.1f}M" in header(name), variant


def of_table_1(name: str) -> str:
  """The Dispatcher paper's Table 1."""
  mixer, text = name.split("_")
  is_complete = text in ("wikitext103", "lm1b")
  # WikiText-103's is that of train_plain_dispatcher_on_wikitext103.py of the authors' code;
  # it is lower-cased first, and has the complete vocabulary; so has lm1b.
  rate, eps = (0.0002, 1e-10) if name == "dispatcher_wikitext103" else (0.0001, 1e-8)
  of_mixer = "dispatcher num_levels=None level_dropout=0.2"
  return f"""
    model width=512 feed_forward_width=512 num_layers=6 max_length=512 norm_position=post
    model positions=sinusoidal activation=relu dropout=0.2 hidden_dropout=0.2 dtype=float32
    model.mixer num_heads=1 name={"attention dropout=0.2" if mixer == "msa" else of_mixer}
    model.boundaries name=none
    data.tokenizer name=wordpiece file=bert_base_cased lower_text={is_complete}
    data.tokenizer lower_pieces={not is_complete} restrict_vocabulary={not is_complete}
    train batch_size=20 window=0 num_steps=0 num_epochs=60.0 grad_clip_norm=0.5 learning_rate={rate}
    train.optimizer name=adam b1=0.9 b2=0.999 eps={eps}
    train.schedule name=constant warmup_steps=0
    eval window=0 stride=0 batch_size=10"""


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
  train """


def of_extractors(mixer: str, max_length=128, num_layers=18, num_steps=60_000) -> str:
  """Table 1 of the Extractors paper, or what its text says of Figs. 10 and 11."""
  name, _, rest = mixer.partition("_")
  of_mixer = f"name={name} implementation=None"
  if name == "attention":
    of_mixer = f"name={name} num_heads={rest} use_bias=False dropout=0.0 rotary_base=None"
  elif name != "me":
    of_mixer += f" adjustment={not rest} output_projection={not rest}"
  return f"""
    model width=128 feed_forward_width=512 norm_position=pre positions=learned activation=relu
    model dropout=0.1 hidden_dropout=0.0 init_std=0.01 dtype=float32
    model max_length={max_length} num_layers={num_layers}
    model.mixer has_feed_forward=True {of_mixer}
    data.tokenizer name=bpe vocab_size=5000
    train sampling=random_windows batch_size=64 window=0 num_steps={num_steps}
    train learning_rate=0.001 grad_clip_norm=0.0
    train.optimizer name=adamw b1=0.9 b2=0.999 eps=1e-08 weight_decay=0.01
    train.schedule name=constant warmup_steps=0
    sample top_p=0.6 temperature=1.0 top_k=0"""


FIGURES = {f"fig10_{length}": (length, 2, 30_000) for length in (8, 16, 32, 64)}
FIGURES |= {f"fig11_{layers}": (32, layers, 30_000) for layers in (1, 2, 4, 8)}
LABELS = {
  "none": "none",
  **{f"fixed{n}": f"fixed offset=None pooling=mean shortening_factor={n}" for n in (2, 3, 4)},
  "gumbel": "gumbel temperature=0.5 prior=0.2 sample=False space_ids=()",
  "entropy": "entropy left=2 double_sigmoid=False pooling=mean",
  "unigram": "unigram file= size=10000 double_sigmoid=False pooling=mean",
  "whitespace": "whitespace space_ids=() pooling=mean",
}


def of_pooling(label: str) -> str:
  """The pooling paper's Appendix B and its authors' files."""
  return f"""
    model width=512 feed_forward_width=2048 max_length=2048 norm_position=post positions=none
    model activation=gelu dropout=0.1 hidden_dropout=0.1 init_std=0.02 norm_init_std=0.02
    model num_layers={12 if label == "none" else 8}
    model.first num_layers=2 mixer=None
    model.last num_layers=2 mixer=None
    model.mixer name=relative_attention num_heads=8 dropout=0.1
    model.boundaries name={LABELS[label]}
    data name=text8
    data.tokenizer name=characters
    data split_fractions=(0.9,0.05,0.05)
    train sampling=shuffled_windows batch_size=8 window=0 num_steps=200000
    train learning_rate=0.00025 grad_clip_norm=0.25
    train.optimizer name=adam b1=0.9 b2=0.999 eps=1e-08
    train.schedule name=cosine warmup_steps=4000
    eval window=0 stride=512"""


TUNED = "num_epochs=60.0 learning_rate=1e-05 init_from=runs/dispatcher_openwebtext\n  data name="
BOOKS = "extractors_childrens_books"
PAPERS = {
  **{name: of_table_1(name) for name in TABLE_1},
  "dispatcher_openwebtext": LARGER_DISPATCHER + "num_epochs=1.0 init_from= learning_rate=6e-05",
  **{
    f"dispatcher_finetuned:{x}": f"{LARGER_DISPATCHER}{TUNED}{CORPORA.get(x, x)}"
    for x in ("ptb", "wikitext2", "wikitext103", "lm1b")
  },
  **{f"{BOOKS}:{x}": of_extractors(x) for x in (*EXTRACTORS, "attention_1", "attention_128")},
  **{f"{BOOKS}:{x},she": of_extractors("she", *FIGURES[x]) for x in FIGURES},
  **{f"pooling_text8:{label}": of_pooling(label) for label in LABELS},
}


@pytest.mark.parametrize("experiment", PAPERS)
def test_has_the_papers_settings(experiment):
  config = load(*experiment.split(":"))
  dpjax.config.check(config)
  # Each line: a section, and settings of it with their values as Python writes them.
  for line in PAPERS[experiment].strip().splitlines():
    section, *settings = line.split()
    values = dict(setting.split("=") for setting in settings)
    result = dpjax.config.get(config, section)
    assert {key: str(result[key]).replace(" ", "") for key in values} == values


def test_the_finetuned_dispatcher_goes_on_from_the_one_on_openwebtext():
  assert "--workdir=runs/dispatcher_openwebtext" in header("dispatcher_openwebtext")
  tiny = finetuned.get_config("tiny,ptb")
  assert tiny.model == load("dispatcher_openwebtext", "tiny").model
  assert tiny.data.name == "penn_treebank"


@pytest.mark.parametrize("name", ["transformer", "dispatcher", "we"])
def test_the_modern_frame_is_one_for_all_mixers(name):
  for variant in ("", "small", "tiny"):
    config = load(f"modern_{name}", variant)
    assert config.model.mixer.name == name.replace("transformer", "attention")
    config.model.mixer = load("modern_transformer", variant).model.mixer
    assert config == load("modern_transformer", variant)


def changes(variant: str, base: str) -> dict:
  """The settings in which a variant differs from another one."""
  new, old = pooling_text8.get_config(variant), pooling_text8.get_config(base)
  dpjax.config.check(new)
  new, old = dpjax.config.flatten(new), dpjax.config.flatten(old)
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
  assert changes("entropy,subsampling", "entropy") == {"model.boundaries.pooling": "last"}


def test_the_texts_of_pooling_have_the_papers_settings():
  sizes = dict(en=(10_000, 0.2), fi=(200, 0.37), he=(200, 0.2), vi=(10_000, 0.2))
  for language, (size, prior) in sizes.items():
    unigram = pooling_wiki40b.get_config(f"{language},unigram")
    gumbel = pooling_wiki40b.get_config(f"gumbel,{language}")
    assert unigram.data.name == gumbel.data.name == f"wiki40b_{language}"
    assert (unigram.model.boundaries.size, gumbel.model.boundaries.prior) == (size, prior)
  ours = pooling_cc100.get_config("unigram")
  assert ours.data.name == "cc100_en"
  ours.data.name = "text8"
  assert ours == pooling_text8.get_config("unigram")


# Words, and what they are answered with, of each module.
WRONG = [
  (modern_transformer, "the variant small or tiny, or none,", "smal|small,tiny"),
  (hnet, "1stage_L, .* or tiny, separated by commas,", "three|two,two|1stage_L,tiny"),
  (finetuned, "a text and tiny, of ptb, .*", "ptb,lm1b|wikitext|tiny,tiny"),
  (extractors, "a mixer, .* she, he,.*", "shee|she,he|tiny,tiny|fig10_8,fig11_2"),
  (
    pooling_text8,
    "boundaries, middle_N, subsampling and tiny, each at most once, of none, fixed2.*",
    "fixed5|fixed2,fixed3|unigram,unigram|unigram_300|fi,unigram",
  ),
  (pooling_text8, "no subsampling with none,", "subsampling,none"),
  (pooling_wiki40b, "a language, boundaries, .* en, fi, he, vi, none, .*", "sv,unigram|en,fi"),
]


@pytest.mark.parametrize("module, message, variants", WRONG)
def test_variants_that_there_are_not(module, message, variants):
  for variant in variants.split("|"):
    with pytest.raises(ValueError, match=f"^expected {message} got {variant}$"):
      module.get_config(variant)
