"""Masked self-attention, the baseline, on One Billion Word (Dispatcher paper, Table 1).

  python train.py --config=configs/msa_lm1b.py --workdir=runs/msa_lm1b
  python train.py --config=configs/msa_lm1b.py:tiny --workdir=runs/tiny

The data and vocabulary, which is not the paper's, are those of configs/dispatcher_lm1b.py;
with the uncased vocabulary the model has 40.8M parameters.

Attention with dropout of its weights is computed in tiles (`dpjax.ops.causal_attention`).

Parameters:      39.2M (the paper: 41M)
Hardware, hours: one GPU; about 100,000 steps an epoch, up to 60 epochs; not yet timed
Test perplexity: the paper's 66.52; ours not yet measured
"""

import dpjax
from configs import dispatcher_lm1b


def get_config(variant: str = ""):
  config = dispatcher_lm1b.get_config(variant)
  config.model.mixer = dpjax.config.mixer("attention", dropout=0.2)
  return config
