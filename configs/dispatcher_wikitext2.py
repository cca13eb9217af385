"""The plain Dispatcher on WikiText-2 (Dispatcher paper, Sec. 3.3, Table 1).

  python train.py --config=configs/dispatcher_wikitext2.py --workdir=runs/wikitext2
  python train.py --config=configs/dispatcher_wikitext2.py:tiny --workdir=runs/tiny

Downloads WikiText-2 (4.5 MB; the tokenised form, with <unk> and @-@) and the vocabulary of
bert-base-cased (0.2 MB) into data/. Local files: --config.data.path, a folder with
{train,valid,test}.txt, and --config.data.tokenizer.file.

Parameters:      26.9M (the paper: 27M); 2,484,966 training tokens, vocabulary 20,044
Hardware, hours: one GPU; 243 steps of 20 x 512 tokens an epoch, 60 epochs; not yet timed
Test perplexity: the paper's 50.23; ours not yet measured
"""

import dpjax


def get_config(variant: str = ""):
  config = dpjax.config.default()
  # The authors' single dropout rate also skips levels.
  config.model.mixer = dpjax.config.mixer("dispatcher", level_dropout=0.2)
  config.model.dropout = 0.2
  config.model.hidden_dropout = 0.2
  config.data.name = "wikitext2"
  config.data.tokenizer = dpjax.config.tokenizer(
    "wordpiece", file="bert_base_cased", lower_pieces=True, restrict_vocabulary=True
  )
  config.sample.prompt = "the "
  config.sample.top_k = 40
  return dpjax.config.apply_variant(config, variant)
