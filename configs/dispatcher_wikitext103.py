"""The plain Dispatcher on WikiText-103 (Dispatcher paper, Sec. 3.3, Table 1).

  python train.py --config=configs/dispatcher_wikitext103.py --workdir=runs/wikitext103
  python train.py --config=configs/dispatcher_wikitext103.py:tiny --workdir=runs/tiny

Downloads WikiText-103 (190 MB, unpacked 540 MB; the tokenised form) and the vocabulary of
bert-base-cased (0.2 MB) into data/. Local files: --config.data.path, a folder with
{train,valid,test}.txt, and --config.data.tokenizer.file. The text is lower-cased and all
28,996 pieces are kept. Learning rate and epsilon are those of the authors' code, which
uses other values for other texts.

Parameters:      36.1M (the paper: 36M)
Hardware, hours: one GPU, up to 60 epochs; not yet timed
Test perplexity: the paper's 24.39; ours not yet measured
"""

import dpjax
from configs import dispatcher_wikitext2


def get_config(variant: str = ""):
  config = dispatcher_wikitext2.get_config()
  config.data.name = "wikitext103"
  config.data.tokenizer = dpjax.config.tokenizer(
    "wordpiece", file="bert_base_cased", lower_text=True
  )
  config.train.learning_rate = 2e-4
  config.train.optimizer.eps = 1e-10
  return dpjax.config.apply_variant(config, variant)
