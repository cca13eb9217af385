"""The settings of a run: a table of their defaults, meanings and ranges.

Set each duration in one unit: steps or epochs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from dpjax.config import registry
from dpjax.config.registry import Registry, Setting


class Component(NamedTuple):
  """A section with the name and settings of a component.

  Attributes:
    components: the registry to choose from.
    default: the default name; None if the setting may be None.
    meaning: its purpose.
  """

  components: Registry
  default: str | None
  meaning: str


class Middle(NamedTuple):
  """A section that is None unless it is made by `middle`."""

  schema: Mapping[str, Any]
  meaning: str
  default: None = None


S, FREE = Setting, partial(Setting, is_free=True)


def choice(names: str, meaning: str, is_free: bool = False) -> Setting:
  """A setting with a fixed list of values; the first is the default."""
  choices = tuple(names.split())
  return Setting(choices[0], meaning, choices=choices, is_free=is_free)


_STACK = {
  "num_layers": S(2, "number of blocks on tokens, before or after pooling; needs boundaries", 1),
  "mixer": Component(registry.mixers, None, "the mixer of these blocks; None: model.mixer"),
}
_POOLING: dict[str, Any] = {
  "boundaries": Component(registry.boundaries, "none", "where segments end"),
  "first": _STACK,
  "last": _STACK,
}
MIDDLE: dict[str, Any] = {
  "width": S(0, "D; 0: as in the enclosing stage", 0),
  "feed_forward_width": S(0, "0: as in the enclosing stage", 0),
  **_POOLING,
}
_ABOUT_MIDDLE = "an inner stage with its own width or pooling, `dpjax.config.middle`"
_POOLING["middle"] = MIDDLE["middle"] = Middle(MIDDLE, _ABOUT_MIDDLE)
MODEL: dict[str, Any] = {
  "mixer": Component(registry.mixers, "dispatcher", "the token mixer, in place of self-attention"),
  "vocab_size": S(0, "V, the size of the vocabulary; 0: that of the tokenizer", 0),
  "num_layers": S(6, "number of blocks; with token pooling, of those on segments", 1),
  "width": S(512, "D, the number of features per token", 1),
  "feed_forward_width": S(512, "hidden features of each feed-forward network", 1),
  "max_length": S(
    512, "the window, the most tokens in a context; for Extractors also the number of taps l", 1
  ),
  "norm_position": choice("post pre", "whether norms come after or before each branch"),
  "norm_type": choice("layer_norm rms_norm", "LayerNorm, or RMSNorm, without mean and bias"),
  "norm_epsilon": S(1e-5, "added to the variance or mean square in norms", above=0),
  "stack_norms": S(False, "add a norm after each stack, including before and after the middle"),
  "residual_dtype": choice("model float32", "dtype of the sum of branches; model: model.dtype"),
  "middle_resize": choice(
    "matrices padding",
    "how to reach a middle of another width: a matrix each way, or padding with a learned "
    "vector, which is cut off again",
  ),
  "use_bias": S(True, "biases in norms, feed-forward networks and logits; mixers have their own"),
  "positions": choice(
    "sinusoidal learned none", "position embeddings; none also drops the scale sqrt(D)"
  ),
  "tie_embeddings": S(False, "reuse the token embedding as the output layer"),
  "activation": choice(
    "relu gelu swiglu", "in feed-forward networks; gelu uses erf, swiglu a third matrix"
  ),
  "dropout": S(0.0, "dropout rate of embeddings and of each branch", 0, below=1),
  "hidden_dropout": S(0.0, "dropout rate within the feed-forward networks", 0, below=1),
  "init_std": S(0.0, "weights ~ N(0, init_std**2), and biases 0; 0: PyTorch's defaults", 0),
  "embedding_std": S(0.0, "embeddings ~ N(0, embedding_std**2); 0: uses init_std", 0),
  "scale_outputs": S(
    False,
    "divide the initial output matrix of each branch by the square root of the number of branches "
    "that a token passes, excluding those of inner stages",
  ),
  "norm_init_std": S(0.0, "gains of the norms ~ N(1, norm_init_std**2)", 0),
  "scan_layers": FREE(True, "compile one layer and loop over it, or compile each layer"),
  "remat": FREE(False, "recompute each layer in the backward pass to save memory"),
  "dtype": choice("float32 bfloat16", "dtype of the computation; parameters are float32"),
  **_POOLING,
}
_DATA = {
  "name": S("python_manual", "one of `dpjax data list`, hf:OWNER/NAME on the Hub, or tfds:NAME"),
  "mixture": S(
    "",
    "several corpora, SOURCE=WEIGHT,SOURCE=WEIGHT, by name or path; overrides data.path. Each "
    "gets its share of the rows; requires train.sampling = random_windows",
  ),
  "data_dir": FREE("data", "the folder of downloads, texts and tokens, shared by all runs"),
  "manual_dir": FREE("", 'the folder of files downloaded by hand; "": data_dir/manual'),
  "path": S(
    "",
    "a text file, .jsonl or .parquet, a pattern that matches several, or a folder with "
    "train/valid/test.txt, documents, or tokens made elsewhere; overrides data.name",
  ),
  "isolate_documents": S(False, "keep documents from seeing each other; False: one stream"),
  "text_field": S("text", "the text's field in .jsonl or .parquet; each line or row is a document"),
  "separator": S("", "the line that separates documents in a .txt"),
  "split_fractions": S((0.9, 0.05, 0.05), "shares of train, valid and test in a single file"),
  "tokenizer": Component(registry.tokenizers, "characters", "splits the text into tokens"),
}
_TRAIN = {
  "sampling": choice(
    "sequential random_windows shuffled_windows",
    "windows in order, at random offsets, or from rows that are rolled and shuffled each epoch",
  ),
  "batch_size": S(20, "rows per batch, over all devices", 1),
  "window": S(0, "tokens per row; 0: model.max_length", 0),
  "init_from": S("", "the folder of a run whose best parameters initialize this one"),
  "grad_accum_steps": FREE(1, "parts per batch, run in turn to save memory; divides batch_size", 1),
  "num_steps": S(0, "updates in total; 0 if train.num_epochs is set", 0),
  "num_epochs": S(60.0, "passes over the train split; 0 if train.num_steps is set"),
  "optimizer": Component(registry.optimizers, "adam", "the update rule"),
  "learning_rate": S(1e-4, "the peak of the schedule", 0),
  "stage_multipliers": S(
    (),
    "learning rate factors of the stages of a model with token pooling, outermost first; auto: "
    "H-Net's rule, see `dpjax.config.stage_multipliers`",
    choices=("auto",),
  ),
  "schedule": Component(registry.schedules, "constant", "the learning rate schedule"),
  "grad_clip_norm": S(0.5, "the maximum global norm of the gradient; 0: no clipping", 0),
  "weight_decay_mask": choice(
    "all matrices",
    "which parameters get weight decay; matrices excludes norms, biases and embedding tables",
  ),
  "ema_decay": S(0.0, "decay of averaged parameters, to score and keep; 0: none", 0, below=1),
  "log_every_steps": FREE(20, "updates between reports of the loss", 1),
  "eval_every_steps": FREE(0, "updates between evaluations; 0 if train.eval_every_epochs is set"),
  "eval_every_epochs": FREE(1.0, "epochs between evaluations; 0 if train.eval_every_steps is set"),
  "patience": FREE(0, "evaluations without improvement before training stops; 0: never", 0),
  "checkpoint_every_steps": FREE(500, "updates between checkpoints", 1),
  "max_to_keep": FREE(2, "recent checkpoints to keep, in addition to the best", 1),
  "matmul_dtype": choice(
    "float32 bfloat16",
    "dtype of the operands of matrix products; bfloat16 is mixed precision: sums, norms, softmax "
    "and the outputs of layers stay in model.dtype",
  ),
  "param_sharding": choice(
    "replicated fsdp", "replicate parameters on all devices, or shard each over them", True
  ),
}
_EVAL = {
  "window": FREE(0, "tokens per row; 0: model.max_length", 0),
  "stride": FREE(0, "new tokens per window; 0: the window, so that windows do not overlap", 0),
  "batch_size": FREE(10, "rows per batch", 1),
  "max_tokens": FREE(0, "validation tokens to score in training, in windows drawn once; 0: all", 0),
}
_SAMPLE = {
  "prompt": FREE("", 'a prompt to continue and print when training ends; "": none'),
  "length": FREE(300, "number of new tokens", 1),
  "temperature": FREE(1.0, "divides the logits; 0: the most likely token", 0),
  "top_k": FREE(0, "draw from the k most likely tokens; 0: from all", 0),
  "top_p": FREE(1.0, "draw from the likeliest tokens, up to this probability", above=0, maximum=1),
  "overflow": choice(
    "slide continue error", "past the window: slide it, continue where mixers can, or fail", True
  ),
  "dtype": choice("model bfloat16", "dtype of weights and computation; model: model.dtype", True),
}
SCHEMA: dict[str, Any] = {
  "seed": S(0, "seed of parameters, batches and dropout", 0, below=2**32),
  "plugins": FREE(
    (), "modules that --plugin imports; training records those that its components need"
  ),
  "model": MODEL,
  "data": _DATA,
  "train": _TRAIN,
  "eval": _EVAL,
  "sample": _SAMPLE,
}
# Settings that name files or folders, including those of components.
PATHS = """data.path data.data_dir data.manual_dir data.tokenizer.file train.init_from
  model.boundaries.file model.boundaries.run""".split()
# The length of a run may change on resume if the schedule does not depend on it.
LENGTH_KEYS = ("train.num_steps", "train.num_epochs")
# Renamed settings whose new name is not the nearest match.
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
FREE_NAMES = ("implementation", "num_buckets")  # settings of components
