r"""Dynamic token pooling on text8 (pooling paper, Tables 1 and 2, Figs. 3 and 4).

  python train.py --config=configs/pooling_text8.py:unigram --workdir=runs/unigram
  python train.py --config=configs/pooling_text8.py:gumbel,tiny --workdir=runs/tiny
  for seed in 0 1 2; do
    python train.py --config=configs/pooling_text8.py:whitespace --config.seed=$seed \
      --workdir=runs/whitespace/seed_$seed
  done

After the colon, separated by commas:

  none fixed2 fixed3 fixed4 whitespace unigram entropy gumbel
               where segments end, by default whitespace; none is the Transformer
               without pooling, with as many layers
  subsampling  Table 2: the last token represents a segment, not the mean (not with none or
               gumbel)
  unigram_V    Fig. 3: a vocabulary of V = 200, 500, 1000, 3000, 5000 or 10000 pieces
  gumbel_A     Fig. 3: a prior of A = 0.20, 0.25, 0.30, 0.37 or 0.45 boundaries per token
  middle_N     Fig. 4: N = 4, 6, 8, 10, 12, 14 or 16 layers on segments, and so 8 to 20 in
               all; the paper's text has the first and last, the others are ours
  tiny         a minute or two on a CPU, with a small part of the text

Without middle_N there are 2 layers on characters, 8 on segments, 2 on characters.

Downloads text8 (31 MB, unpacked 100 MB) into data/, or reads
--config.data.path: 90,000,000 of its 100,000,000 characters are for training, 5,000,000
each for validation and test. The Unigram model is trained on the train split, unless
--config.model.boundaries.file names one. Steps, rates and dropout are those of the paper's
Appendix B and of the authors' files; they train in float16, this in float32, or with
--config.model.dtype=bfloat16.

Parameters:      41.0M, with a predictor (unigram, entropy, gumbel) 42.1M (the paper: ~41M
                 and ~1M more); middle_4 and middle_16 with one 28.4M and 69.4M
Hardware, hours: the paper's two GeForce RTX 3080, 12 to 30 hours; ours not yet timed.
                 8 x 2,048 characters a step, 5,494 steps an epoch, 200,000 steps
Bits per character and shortening factor of the test split, from the paper (*: better than
none and fixed, p < 0.05 in a paired t-test over 3 seeds):

  none        1.143   1.0
  fixed2      1.149   2.0    with subsampling 1.180
  fixed3      1.155   3.0
  fixed4      1.166   4.0
  gumbel      1.136*  4.6
  entropy     1.138*  4.1    with subsampling 1.151
  unigram     1.134*  5.0
  whitespace  1.133*  5.7    with subsampling 1.144

Ours, on a small part of text8 and so not comparable with the paper's:
results/pooling_text8_prefix.json, and with SpaceByte and H-Net's routing
results/boundaries_text8_prefix.json. A run reports them as bits_per_character,
shortening_factor (characters over boundaries) and shortening_factor_padded (the window over
the segments of a batch's longest row, which is probably what the paper means).
"""

from collections.abc import Mapping
from typing import NamedTuple

import dpjax
from dpjax.errors import UserError

FIXED = {f"fixed{factor}": factor for factor in (2, 3, 4)}
UNIGRAM = {f"unigram_{size}": size for size in (200, 500, 1000, 3000, 5000, 10_000)}
GUMBEL = {f"gumbel_{prior:.2f}": prior for prior in (0.20, 0.25, 0.30, 0.37, 0.45)}
VARIANTS = ("none", *FIXED, "whitespace", "unigram", "entropy", "gumbel", *UNIGRAM, *GUMBEL)
MIDDLE = {f"middle_{layers}": layers for layers in range(4, 17, 2)}


class Text(NamedTuple):
  """A text's name, what the paper chose for it, and how a sample begins."""

  name: str
  unigram_size: int = 10_000
  prior: float = 0.2
  prompt: str = "the history of"


def get_config(variant: str = ""):
  return configure(variant, {"": Text("text8")})


def configure(variant: str, texts: Mapping[str, Text]):
  """The configuration of a variant, for the text that it names, or else the first."""
  words = variant.split(",")

  def named(known, default):
    return next((word for word in words if word in known), default)

  name, middle = named(VARIANTS, "whitespace"), named(MIDDLE, "middle_8")
  text = named(texts, next(iter(texts)))
  known = [*texts, *VARIANTS, *MIDDLE, "subsampling", "tiny"]
  rest = set(words) - {name, middle, text, "subsampling", "tiny", ""}
  if rest or len(words) != len(set(words)):
    languages = "a language, " if len(texts) > 1 else ""
    raise UserError(
      f"expected {languages}boundaries, middle_N, subsampling and tiny, each at most once, "
      f"of {', '.join(filter(None, known))}, got {variant}"
    )

  config = dpjax.config.default()
  model = config.model
  model.mixer = dpjax.config.mixer("relative_attention", num_heads=8, dropout=0.1)
  kind = "fixed" if name in FIXED else name.partition("_")[0]
  model.boundaries = dpjax.config.boundaries(
    kind,
    **{
      "fixed": dict(shortening_factor=FIXED.get(name)),
      "unigram": dict(size=UNIGRAM.get(name, texts[text].unigram_size)),
      "entropy": dict(left=2),
      "gumbel": dict(temperature=0.5, prior=GUMBEL.get(name, texts[text].prior)),
    }.get(kind, {}),
  )
  model.num_layers = MIDDLE[middle]
  model.first.num_layers = model.last.num_layers = 2
  model.width = 512
  model.feed_forward_width = 2048
  model.max_length = 2048
  model.norm_position = "post"
  model.positions = "none"
  model.activation = "gelu"
  model.dropout = model.hidden_dropout = 0.1
  model.init_std = model.norm_init_std = 0.02

  config.data.name = texts[text].name
  config.data.tokenizer = "characters"

  train = config.train
  train.sampling = "shuffled_windows"
  train.batch_size = 8
  train.num_steps = 200_000
  train.num_epochs = 0.0
  train.learning_rate = 2.5e-4
  train.grad_clip_norm = 0.25
  train.schedule = dpjax.config.schedule("cosine", warmup_steps=4_000)
  train.log_every_steps = 100
  train.eval_every_steps = 10_000
  train.eval_every_epochs = 0.0
  train.checkpoint_every_steps = 1_000
  config.eval.stride = 512
  config.eval.batch_size = 8
  config.sample.prompt = texts[text].prompt

  if kind == "none":
    model.num_layers += model.first.num_layers + model.last.num_layers
  if "subsampling" in words:
    if "pooling" not in model.boundaries:
      raise UserError(f"expected no subsampling with {name}, got {variant}")
    model.boundaries.pooling = "last"
  if "tiny" in words:
    _make_tiny(config)
  return config


def _make_tiny(config) -> None:
  dpjax.config.apply_variant(config, "tiny")
  model = config.model
  config.data.name += "_tiny"
  config.eval.stride = model.max_length // 4
  if dpjax.config.is_pooled(model):
    model.first.num_layers = model.last.num_layers = 1
  if "num_buckets" in model.boundaries:
    model.boundaries.num_buckets = 3
  if model.boundaries.name == "unigram":
    model.boundaries.size = 200  # even Vietnamese has fewer characters
