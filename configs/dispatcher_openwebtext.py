r"""A larger Dispatcher on OpenWebText, to be fine-tuned (Dispatcher paper, Sec. 3.4).

  python train.py --config=configs/dispatcher_openwebtext.py \
    --workdir=runs/dispatcher_openwebtext
  python train.py --config=configs/dispatcher_openwebtext.py:tiny \
    --workdir=runs/tiny_openwebtext

configs/dispatcher_finetuned.py starts from the runs in these two folders.

Downloads OpenWebText (24 GB, 40 GB of text) and GPT-2's vocabulary (1.5 MB) into data/,
which needs up to 85 GB, including tokens. Local files: --config.data.path, a text file or a
folder with {train,valid,test}.txt, and --config.data.tokenizer.file. The tiny variant uses
a small part of the text, but downloads all of it, unless data.path is set. Validation and
test are a thousandth of the pages each; the paper does not name splits. Batches of 5
windows, as in the paper, are for one device.

Parameters:      59.4M (the paper: 59M), vocabulary 50,257; about 9 billion training tokens,
                 an estimate
Hardware, hours: one GPU; about 1.8 million steps of 5 x 1,024 tokens, which is one
                 epoch; not yet timed. Checkpoints every 2,000 steps, scores every 20,000
Test perplexity: the paper does not report it for this text
"""

import dpjax


def get_config(variant: str = ""):
  config = dpjax.config.default()
  config.model.mixer = dpjax.config.mixer("dispatcher")
  config.model.num_layers = 12
  config.model.width = 480
  config.model.feed_forward_width = 480
  config.model.max_length = 1024
  config.data.name = "openwebtext"
  config.data.tokenizer = dpjax.config.tokenizer("bpe", file="gpt2")
  train = config.train
  train.batch_size = 5
  train.learning_rate = 6e-5
  train.num_epochs = 1.0
  train.log_every_steps = 100
  train.eval_every_steps = 20_000
  train.eval_every_epochs = 0.0
  train.checkpoint_every_steps = 2_000
  config.sample.prompt = "The"
  config.sample.top_k = 40
  if variant == "tiny":
    config.data.name = "openwebtext_tiny"
  return dpjax.config.apply_variant(config, variant)
