"""Extractors and attention on children's books (Extractors paper, Sec. 6, Table 1).

  python train.py --config=configs/extractors_childrens_books.py:she --workdir=runs/she
  python train.py --config=configs/extractors_childrens_books.py:he,tiny --workdir=runs/tiny
  dpjax plots runs/she runs/he runs/attention_32 --figure=curves

After the colon, separated by commas:

  she he we me he_extraction attention_1 attention_2 attention_4 ... attention_128
             the mixer, by default she; he_extraction is only HE's extraction,
             attention_N has N heads
  fig10_L    Fig. 10: a window of L = 8, 16, 32 or 64, with 2 layers, 30,000 batches
  fig11_M    Fig. 11: M = 1, 2, 4 or 8 layers, with a window of 32, 30,000 batches
  tiny       a minute on a CPU

Without fig10 or fig11, the run is that of Table 1: a window of 128, 18 layers, 60,000
batches. The values of L and M are ours where the paper's figures do not give them.

Downloads the texts from Project Gutenberg's mirror (35 MB) into data/, or reads
--config.data.path, a folder with {train,valid,test}.txt. The paper uses 100 books that it
does not name, 8.4M tokens; we use 100 for training and 6 for validation and test, joined by
the line <|endofbook|>. The numbers below were counted in copies without page marks,
transcribers' notes and the like, given as data.path. The tokenizer is a byte-level BPE.

All models with the same seed get the same batches in the same order, as in the paper. It
compares the median training cost of each 2,000 batches: `dpjax plots --figure=curves`.

Parameters:      she 42.0M, he 4.9M, we 4.6M, me 3.7M, he_extraction 4.3M, attention 4.9M;
                 9,573,959 training tokens, vocabulary 5,000
Hardware, hours: the paper's GeForce RTX 4050, times not stated; ours on one CPU core, with
                 fig11_2: 0.3 s a batch, 2.5 hours for all 30,000; a GPU not yet timed
Training cost:   the paper's order SHE < HE < attention_32 ~ WE < attention_1 ~ ME; ours
                 after 4,000 batches of fig11_2: results/extractors_4000_batches.json; two rows to
                 4,500: results/extractors_fig11_two_rows.json
"""

import dpjax
from dpjax.errors import UserError

MIXERS = ("she", "he", "we", "me", "he_extraction", *(f"attention_{2**i}" for i in range(8)))
LENGTHS = (8, 16, 32, 64)
LAYERS = (1, 2, 4, 8)
FIGURES = (*(f"fig10_{length}" for length in LENGTHS), *(f"fig11_{layers}" for layers in LAYERS))


def get_config(variant: str = "she"):
  words = variant.split(",")
  mixer = next((word for word in words if word in MIXERS), "she")
  figure = next((word for word in words if word in FIGURES), "")
  rest = [word for word in words if word not in (mixer, figure, "tiny", "")]
  if rest or len(words) != len(set(words)):
    known = ", ".join((*MIXERS, *FIGURES, "tiny"))
    raise UserError(f"expected a mixer, a figure and tiny, of {known}, got {variant}")

  config = dpjax.config.default()
  model = config.model
  if mixer.startswith("attention"):
    heads = int(mixer.split("_")[1])
    model.mixer = dpjax.config.mixer("attention", num_heads=heads, use_bias=False)
  elif mixer == "he_extraction":
    model.mixer = dpjax.config.mixer("he", adjustment=False, output_projection=False)
  else:
    model.mixer = dpjax.config.mixer(mixer)
  model.width = 128
  model.feed_forward_width = 512
  model.num_layers = 18
  model.max_length = 128
  model.norm_position = "pre"
  model.positions = "learned"
  model.dropout = 0.1
  model.init_std = 0.01

  config.data.name = "childrens_books"
  config.data.tokenizer = dpjax.config.tokenizer("bpe", vocab_size=5000)

  train = config.train
  train.sampling = "random_windows"
  train.batch_size = 64
  train.num_steps = 60_000
  train.num_epochs = 0.0
  # PyTorch's default weight decay: the paper does not state it.
  train.optimizer = dpjax.config.optimizer("adamw", weight_decay=0.01)
  train.learning_rate = 1e-3
  train.grad_clip_norm = 0.0
  train.eval_every_steps = 5_000
  train.eval_every_epochs = 0.0
  train.checkpoint_every_steps = 2_000
  config.eval.batch_size = 64

  config.sample.prompt = "Once upon a time there was a little princess who"
  config.sample.top_p = 0.6
  config.sample.length = 100

  if figure:
    name, size = figure.split("_")
    model.num_layers = int(size) if name == "fig11" else 2
    model.max_length = int(size) if name == "fig10" else 32
    train.num_steps = 30_000
  if model.max_length < 16:
    config.sample.prompt = "Once upon a time"  # fits in the window
  if "tiny" in words:
    layers, length = model.num_layers, model.max_length
    dpjax.config.apply_variant(config, "tiny")
    if mixer.startswith("attention"):
      model.mixer.num_heads = min(model.mixer.num_heads, model.width)
    model.num_layers, model.max_length = min(layers, 3), min(length, 32)
  return config
