"""Masked self-attention, the baseline, on WikiText-103 (Dispatcher paper, Table 1).

  python train.py --config=configs/msa_wikitext103.py --workdir=runs/msa_wikitext103
  python train.py --config=configs/msa_wikitext103.py:tiny --workdir=runs/tiny

The data are those of configs/dispatcher_wikitext103.py; learning rate and epsilon are those
of the authors' code for this model.

Attention with dropout of its weights is computed in tiles (`dpjax.ops.causal_attention`).

Parameters:      39.2M (the paper: 39M)
Hardware, hours: one GPU, up to 60 epochs; not yet timed
Test perplexity: the paper's 22.56; ours not yet measured
"""

import dpjax
from configs import dispatcher_wikitext103


def get_config(variant: str = ""):
  config = dispatcher_wikitext103.get_config()
  config.model.mixer = dpjax.config.mixer("attention", dropout=0.2)
  config.train.learning_rate = 1e-4
  config.train.optimizer.eps = 1e-8
  return dpjax.config.apply_variant(config, variant)
