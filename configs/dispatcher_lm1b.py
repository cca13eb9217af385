"""The plain Dispatcher on One Billion Word, "1BW" (Dispatcher paper, Sec. 3.3, Table 1).

  python train.py --config=configs/dispatcher_lm1b.py --workdir=runs/dispatcher_lm1b
  python train.py --config=configs/dispatcher_lm1b.py:tiny --workdir=runs/tiny

Downloads the benchmark (1.8 GB, unpacked 4.2 GB) and the vocabulary of bert-base-cased
(0.2 MB) into data/. Local files: --config.data.path, a folder with {train,valid,test}.txt,
and --config.data.tokenizer.file. The tiny variant uses a small part of the text, but
downloads all of it, unless data.path is set. Test is the held-out shard 0, as in the
literature, and validation the next one.

The vocabulary is not the paper's. Its text names only bert-base-cased, while its 38M
and 41M parameters fit bert-base-uncased, 30,522 pieces. As for WikiText-103, the text is
lower-cased here and all 28,996 pieces of bert-base-cased are kept, a vocabulary that is
downloaded automatically. For the paper's sizes (37.6M, and 40.8M for configs/msa_lm1b.py)
use the uncased vocabulary, vocab.txt of BERT-Base, Uncased (github.com/google-research/bert):
--config.data.tokenizer.file=vocab.txt. (It has no accented letters; words with
them are unknown.) Perplexities of two vocabularies cannot be compared token by token.

Parameters:      36.1M (the paper: 38M); about a billion training tokens, an estimate
Hardware, hours: one GPU; about 100,000 steps of 20 x 512 tokens an epoch, up to 60 epochs
                 (--config.train.num_epochs=1 is the beginning of the same run); not yet
                 timed
Test perplexity: the paper's 53.32; ours not yet measured
"""

import dpjax
from configs import dispatcher_wikitext2


def get_config(variant: str = ""):
  config = dispatcher_wikitext2.get_config()
  config.data.name = "lm1b"
  config.data.tokenizer = dpjax.config.tokenizer(
    "wordpiece", file="bert_base_cased", lower_text=True
  )
  config.train.log_every_steps = 100
  config.train.eval_every_steps = 10_000
  config.train.eval_every_epochs = 0.0
  config.train.checkpoint_every_steps = 2_000
  if variant == "tiny":
    config.data.name = "lm1b_tiny"
  return dpjax.config.apply_variant(config, variant)
