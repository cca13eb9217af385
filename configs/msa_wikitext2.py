"""Masked self-attention, the baseline, on WikiText-2 (Dispatcher paper, Table 1).

  python train.py --config=configs/msa_wikitext2.py --workdir=runs/msa_wikitext2
  python train.py --config=configs/msa_wikitext2.py:tiny --workdir=runs/tiny

The data are those of configs/dispatcher_wikitext2.py.

Attention with dropout of its weights is computed in tiles (`dpjax.ops.causal_attention`).

Parameters:      30.0M (the paper: 30M)
Hardware, hours: one GPU; 243 steps an epoch, 60 epochs; not yet timed
Test perplexity: the paper's 55.05; ours not yet measured
"""

import dpjax
from configs import dispatcher_wikitext2


def get_config(variant: str = ""):
  config = dispatcher_wikitext2.get_config()
  config.model.mixer = dpjax.config.mixer("attention", dropout=0.2)
  return dpjax.config.apply_variant(config, variant)
