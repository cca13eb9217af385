"""The plain Dispatcher on Penn Treebank (Dispatcher paper, Sec. 3.3, Table 1).

  python train.py --config=configs/dispatcher_ptb.py --workdir=runs/dispatcher_ptb
  python train.py --config=configs/dispatcher_ptb.py:tiny --workdir=runs/tiny

Penn Treebank is not downloaded, since its licence forbids it: put Mikolov's archive into
data/manual/simple-examples.tgz, or its three texts into
data/manual/penn_treebank/{train,valid,test}.txt. The vocabulary of bert-base-cased (0.2 MB)
is downloaded into data/. Local files: --config.data.path, a folder with these three texts,
and --config.data.tokenizer.file.

Parameters:      15.1M (the paper says 17M); 1,220,032 training tokens, vocabulary 8,558
Hardware, hours: one GPU (H200: 2.1 minutes); 120 steps of 20 x 512 tokens an epoch, 60 epochs;
                 9 minutes an epoch on two CPU cores (Zen 4), 5 with bfloat16 products
Test perplexity: the paper's 35.40; ours 35.31
"""

import dpjax
from configs import dispatcher_wikitext2


def get_config(variant: str = ""):
  config = dispatcher_wikitext2.get_config()
  config.data.name = "penn_treebank"
  return dpjax.config.apply_variant(config, variant)
