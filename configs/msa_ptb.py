"""Masked self-attention, the baseline, on Penn Treebank (Dispatcher paper, Table 1).

  python train.py --config=configs/msa_ptb.py --workdir=runs/msa_ptb
  python train.py --config=configs/msa_ptb.py:tiny --workdir=runs/tiny

The data are those of configs/dispatcher_ptb.py.

Attention with dropout of its weights is computed in tiles (`dpjax.ops.causal_attention`).

Parameters:      18.2M (the paper: 18M)
Hardware, hours: one GPU (H200: 2 minutes); 120 steps an epoch, 60 epochs; 13.6 minutes
                 an epoch on two CPU cores
Test perplexity: the paper's 40.58; ours 40.67
"""

import dpjax
from configs import dispatcher_ptb


def get_config(variant: str = ""):
  config = dispatcher_ptb.get_config()
  config.model.mixer = dpjax.config.mixer("attention", dropout=0.2)
  return dpjax.config.apply_variant(config, variant)
