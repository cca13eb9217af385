"""The settings of a run: one table with each one's default, meaning and range.

Of each duration, set one unit: steps or epochs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from dpjax.config import registry
from dpjax.config.registry import Registry, Setting


class Component(NamedTuple):
  """A section of a component's name and settings.

  Attributes:
    components: those that it may be.
    default: the name by default; None: the setting may be None.
    meaning: what it is for.
  """

  components: Registry
  default: str | None
  meaning: str


class Middle(NamedTuple):
  """A section that is None unless `middle` makes one."""

  schema: Mapping[str, Any]
  meaning: str
  default: None = None


S, FREE = Setting, partial(Setting, is_free=True)


def choice(names: str, meaning: str, is_free: bool = False) -> Setting:
  """A setting with a few values, the first by default."""
  choices = tuple(names.split())
  return Setting(choices[0], meaning, choices=choices, is_free=is_free)


_STACK = {
  "num_layers": S(2, "token-level blocks before or after the pooling; only with boundaries", 1),
  "mixer": Component(registry.mixers, None, "a mixer of their own; None: model.mixer"),
}
_POOLING: dict[str, Any] = {
  "boundaries": Component(registry.boundaries, "none", "where segments end"),
  "first": _STACK,
  "last": _STACK,
}
MIDDLE: dict[str, Any] = {
  "width": S(0, "D; 0: that of the stage around it", 0),
  "feed_forward_width": S(0, "0: that of the stage around it", 0),
  **_POOLING,
}
_ABOUT_MIDDLE = "a width of its own, or more pooling: `dpjax.config.middle`; with boundaries"
_POOLING["middle"] = MIDDLE["middle"] = Middle(MIDDLE, _ABOUT_MIDDLE)
MODEL: dict[str, Any] = {
  "mixer": Component(registry.mixers, "dispatcher", "takes the place of self-attention"),
  "vocab_size": S(0, "V, the entries of the vocabulary; 0: the tokenizer's", 0),
  "num_layers": S(6, "blocks; with token pooling, those on segments", 1),
  "width": S(512, "D, the features of a token's vector", 1),
  "feed_forward_width": S(512, "features within each feed-forward network", 1),
  "max_length": S(
    512, "the window: tokens in the context, at most; for Extractors also the number of taps l", 1
  ),
  "norm_position": choice("post pre", "norms after or before each branch"),
  "norm_type": choice("layer_norm rms_norm", "with or without mean and bias"),
  "norm_epsilon": S(1e-5, "added to the variance, or to the mean square", above=0),
  "stack_norms": S(False, "a norm after each stack, also before and after the middle"),
  "residual_dtype": choice("model float32", "in which a stack sums its branches; model: its dtype"),
  "middle_resize": choice(
    "matrices padding",
    "to a middle of another width: a matrix each way, or a learned vector "
    "that fills a wider one up and is cut off again",
  ),
  "use_bias": S(True, "of norms, feed-forward networks and logits; a mixer has its own"),
  "positions": choice("sinusoidal learned none", "of tokens; none also drops the scale sqrt(D)"),
  "tie_embeddings": S(False, "reuse the token embedding as the output layer"),
  "activation": choice(
    "relu gelu swiglu", "of feed-forward layers: gelu by erf, swiglu with a third matrix"
  ),
  "dropout": S(0.0, "rate, of embeddings and of each branch", 0, below=1),
  "hidden_dropout": S(0.0, "rate, within the feed-forward networks", 0, below=1),
  "init_std": S(0.0, "weights ~ N(0, init_std**2), and biases 0; 0: PyTorch's defaults", 0),
  "embedding_std": S(0.0, "embeddings ~ N(0, embedding_std**2); 0: as init_std says", 0),
  "scale_outputs": S(
    False,
    "divide the initial output matrix of each branch by the square root of the number of branches "
    "that a token passes, without those of inner stages",
  ),
  "norm_init_std": S(0.0, "gains of the norms ~ N(1, norm_init_std**2)", 0),
  "scan_layers": FREE(True, "compile one layer and loop, or compile each"),
  "remat": FREE(False, "recompute each layer in the gradient: less memory"),
  "dtype": choice("float32 bfloat16", "of the computation; parameters are float32"),
  **_POOLING,
}
_DATA = {
  "name": S("python_manual", "a corpus: `dpjax data list`, hf:OWNER/NAME at the Hub, or tfds:NAME"),
  "mixture": S(
    "",
    "several corpora: SOURCE=WEIGHT,SOURCE=WEIGHT, with names and paths; wins over data.path. Each "
    "has its share of the rows; with train.sampling = random_windows",
  ),
  "data_dir": FREE("data", "the folder of downloads, texts and tokens, shared by all runs"),
  "manual_dir": FREE("", 'the folder of files downloaded by hand; "": data_dir/manual'),
  "path": S(
    "",
    "a text file, .jsonl or .parquet, a pattern of several, a folder with train/valid/test.txt, of "
    "documents, or of tokens that were made elsewhere; wins over data.name",
  ),
  "isolate_documents": S(False, "no document sees another; False: one stream of all"),
  "text_field": S("text", "the text in a .jsonl or .parquet, with a document a line or row"),
  "separator": S("", "the line between two documents of a .txt"),
  "split_fractions": S((0.9, 0.05, 0.05), "of a single file: train, valid, test"),
  "tokenizer": Component(registry.tokenizers, "characters", "splits the text into tokens"),
}
_TRAIN = {
  "sampling": choice(
    "sequential random_windows shuffled_windows",
    "windows in order; at random offsets; or of rows that are rolled and shuffled each epoch",
  ),
  "batch_size": S(20, "rows of all devices together", 1),
  "window": S(0, "tokens a row; 0: model.max_length", 0),
  "init_from": S("", "the folder of a run whose best parameters initialize this one"),
  "grad_accum_steps": FREE(1, "parts of a batch, in turn, for less memory; divides batch_size", 1),
  "num_steps": S(0, "updates of the whole run; 0 with train.num_epochs", 0),
  "num_epochs": S(60.0, "passes over the train split; 0 with train.num_steps"),
  "optimizer": Component(registry.optimizers, "adam", "the update rule"),
  "learning_rate": S(1e-4, "the peak of the schedule", 0),
  "stage_multipliers": S(
    (),
    "factors of the learning rate of each stage, the outermost first, of a model with token "
    "pooling; auto: H-Net's rule, see `dpjax.config.stage_multipliers`",
    choices=("auto",),
  ),
  "schedule": Component(registry.schedules, "constant", "of the learning rate"),
  "grad_clip_norm": S(0.5, "the largest global norm of the gradient; 0: no clipping", 0),
  "weight_decay_mask": choice(
    "all matrices",
    "which parameters get weight decay; matrices excludes norms, biases and embedding tables",
  ),
  "ema_decay": S(0.0, "of averaged parameters that are scored and kept; 0: none", 0, below=1),
  "log_every_steps": FREE(20, "updates between reports of the loss", 1),
  "eval_every_steps": FREE(0, "updates between evaluations; 0 with train.eval_every_epochs"),
  "eval_every_epochs": FREE(1.0, "epochs between evaluations; 0 with train.eval_every_steps"),
  "patience": FREE(0, "evaluations without a new best that end the run; 0: never", 0),
  "checkpoint_every_steps": FREE(500, "updates between checkpoints", 1),
  "max_to_keep": FREE(2, "recent checkpoints to keep, in addition to the best", 1),
  "matmul_dtype": choice(
    "float32 bfloat16",
    "of the operands of matrix products; bfloat16 is mixed precision: sums, norms, softmax and "
    "what layers pass on stay in model.dtype",
  ),
  "param_sharding": choice(
    "replicated fsdp", "replicate parameters on all devices, or shard each over them", True
  ),
}
_EVAL = {
  "window": FREE(0, "tokens a row; 0: model.max_length", 0),
  "stride": FREE(0, "new tokens a window; 0: equal to the window, so windows do not overlap", 0),
  "batch_size": FREE(10, "rows", 1),
  "max_tokens": FREE(0, "of the validation split in training, in windows drawn once; 0: all", 0),
}
_SAMPLE = {
  "prompt": FREE("", 'a prompt that is continued and printed when training ends; "": none'),
  "length": FREE(300, "new tokens", 1),
  "temperature": FREE(1.0, "divides the logits; 0: the most likely token", 0),
  "top_k": FREE(0, "draw from the k most likely tokens; 0: from all", 0),
  "top_p": FREE(1.0, "draw from the most likely tokens of this probability", above=0, maximum=1),
  "overflow": choice(
    "slide continue error", "past the window: move it, continue where mixers can, or refuse", True
  ),
  "dtype": choice("model bfloat16", "of weights and computation; model: model.dtype", True),
}
SCHEMA: dict[str, Any] = {
  "seed": S(0, "of parameters, batches and dropout", 0, below=2**32),
  "plugins": FREE(
    (), "modules that --plugin imports; training records those that its components need"
  ),
  "model": MODEL,
  "data": _DATA,
  "train": _TRAIN,
  "eval": _EVAL,
  "sample": _SAMPLE,
}
# Settings that name files and folders, those of components too.
PATHS = """data.path data.data_dir data.manual_dir data.tokenizer.file train.init_from
  model.boundaries.file model.boundaries.run""".split()
# The length of a run may change on resume where the schedule does not depend on it.
LENGTH_KEYS = ("train.num_steps", "train.num_epochs")
# New names that are not the nearest of the old ones.
RENAMED = {
  "train.products": "train.matmul_dtype",
  "train.parameters": "train.param_sharding",
  "train.batches": "train.sampling",
  "train.keep_checkpoints": "train.max_to_keep",
  "model.norm": "model.norm_position",
  "model.norm_kind": "model.norm_type",
  "data.documents": "data.isolate_documents",
  "data.tokenizer_file": "data.tokenizer.file",
  "data.tokenizer_size": "data.tokenizer.vocab_size",
}
RENAMED |= {
  f"data.{x}": f"data.tokenizer.{x}" for x in ("lower_text", "lower_pieces", "restrict_vocabulary")
}
FREE_NAMES = ("implementation", "num_buckets")  # of components
