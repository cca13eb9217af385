"""A modern Transformer on children's books: a baseline for new mixers.

  python train.py --config=configs/modern_transformer.py --workdir=runs/modern
  python train.py --config=configs/modern_transformer.py:small --workdir=runs/small
  python train.py --config=configs/modern_transformer.py:tiny --workdir=runs/tiny

RMSNorm before each branch, rotary positions, SwiGLU, tied embeddings, no biases; AdamW that
decays only matrices, a warm-up and a cosine down to a tenth, clipping at 1. The papers'
mixers in this model: configs/modern_dispatcher.py and configs/modern_we.py. Choose any
other with --config.model.mixer=NAME.

  small   4 layers of width 128, a window of 128 and 2,000 updates of 16 rows, for a CPU
  tiny    a minute on a CPU

Downloads the texts of configs/extractors_childrens_books.py into data/, or reads
--config.data.path. The tokenizer is its byte-level BPE.

Sources: Zhang and Sennrich 2019, arXiv:1910.07467 (RMSNorm); Su et al. 2021,
arXiv:2104.09864 (rotary positions); Shazeer 2020, arXiv:2002.05202 (SwiGLU); Press and
Wolf 2017, arXiv:1608.05859 (tied embeddings); Touvron et al. 2023, arXiv:2302.13971 (most
of them together).

Parameters:      7.7M, small 1.4M; vocabulary 5,000
Hardware, hours: small a quarter of an hour on one core of an AMD EPYC
Test perplexity: small 58.6 (docs/results.md)
"""

import dpjax
from dpjax.errors import UserError


def get_config(variant: str = ""):
  if variant not in ("", "small", "tiny"):
    raise UserError(f"expected the variant small or tiny, or none, got {variant}")
  config = dpjax.config.default()
  model = config.model
  model.mixer = dpjax.config.mixer("attention", num_heads=4, use_bias=False, rotary_base=10_000.0)
  model.width = 256
  model.feed_forward_width = 704  # two thirds of 4 * 256, as SwiGLU has three matrices
  model.num_layers = 8
  model.max_length = 256
  model.norm_position = "pre"
  model.norm_type = "rms_norm"
  model.activation = "swiglu"
  model.positions = "none"
  model.tie_embeddings = True
  model.use_bias = False
  model.dropout = 0.1
  model.init_std = 0.02

  config.data.name = "childrens_books"
  config.data.tokenizer = dpjax.config.tokenizer("bpe", vocab_size=5000)

  train = config.train
  train.sampling = "random_windows"
  train.batch_size = 64
  train.num_steps = 10_000
  train.num_epochs = 0.0
  train.optimizer = dpjax.config.optimizer("adamw", b2=0.95, weight_decay=0.1)
  train.learning_rate = 1e-3
  train.weight_decay_mask = "matrices"
  train.schedule = dpjax.config.schedule("cosine", warmup_steps=500, min_ratio=0.1)
  train.grad_clip_norm = 1.0
  train.eval_every_steps = 1_000
  train.eval_every_epochs = 0.0
  config.eval.batch_size = 64

  config.sample.prompt = "Once upon a time there was a little princess who"
  config.sample.top_p = 0.6
  config.sample.length = 100
  if variant == "small":
    model.update(dict(num_layers=4, width=128, feed_forward_width=344, max_length=128, dropout=0.0))
    train.update(dict(batch_size=16, num_steps=2_000, eval_every_steps=500, learning_rate=4e-3))
    train.schedule.warmup_steps = 100
    variant = ""
  return dpjax.config.apply_variant(config, variant)
