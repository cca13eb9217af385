"""The Dispatcher pretrained on OpenWebText, fine-tuned (Dispatcher paper, Sec. 3.4, Table 1).

  python train.py --config=configs/dispatcher_finetuned.py:ptb --workdir=runs/finetuned_ptb
  python train.py --config=configs/dispatcher_finetuned.py:ptb,tiny --workdir=runs/tiny

After the colon, separated by commas: the text, ptb, wikitext2, wikitext103 or lm1b
(default: wikitext2), and tiny.

Starts from the best parameters of the run in runs/dispatcher_openwebtext, which
configs/dispatcher_openwebtext.py makes; tiny starts from runs/tiny_openwebtext.
--config.train.init_from names another run. Sizes and vocabulary are that run's.

WikiText-2 (4.5 MB), WikiText-103 (190 MB, unpacked 540 MB), One Billion Word (1.8 GB,
unpacked 4.2 GB) and GPT-2's vocabulary (1.5 MB) are downloaded into data/; Penn Treebank
must be provided, see configs/dispatcher_ptb.py. Local files: --config.data.path, a
folder with {train,valid,test}.txt, and --config.data.tokenizer.file. The text is
tokenized unchanged, and line ends are tokens.

The paper does not say how long it trains: here up to 60 epochs, like the plain
Dispatcher, keeping the best by validation.

Parameters:      59.4M (the paper: 59M), vocabulary 50,257; 1,174,722 training tokens
                 of ptb, 2,448,382 of wikitext2
Hardware, hours: one GPU; 230 steps of 5 x 1,024 tokens an epoch of ptb, 479 of wikitext2;
                 not yet timed
Test perplexity: the paper's, of ptb 18.95, wikitext2 22.74, wikitext103 20.38, lm1b 36.76;
                 ours not yet measured
"""

from configs import dispatcher_openwebtext
from dpjax.errors import UserError

TEXTS = {
  "ptb": "penn_treebank",
  "wikitext2": "wikitext2",
  "wikitext103": "wikitext103",
  "lm1b": "lm1b",
}


def get_config(variant: str = ""):
  words = variant.split(",")
  text = next((word for word in words if word in TEXTS), "wikitext2")
  if set(words) - {text, "tiny", ""} or len(words) != len(set(words)):
    known = ", ".join((*TEXTS, "tiny"))
    raise UserError(f"expected a text and tiny, of {known}, got {variant}")

  config = dispatcher_openwebtext.get_config("tiny" if "tiny" in words else "")
  config.data.name = TEXTS[text]
  train = config.train
  if "tiny" in words:
    train.init_from = "runs/tiny_openwebtext"
    return config
  train.init_from = "runs/dispatcher_openwebtext"
  train.learning_rate = 1e-5
  train.num_epochs = 60.0
  train.eval_every_steps = 10_000
  if text in ("ptb", "wikitext2"):
    train.eval_every_steps, train.eval_every_epochs = 0, 1.0
  return config
