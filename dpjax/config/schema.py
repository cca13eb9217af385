"""All settings of a run: a class for each section, a field for each setting.

The field says the setting's default, meaning and range, and whether a run may resume with another
value (`is_free`). A configuration is a `ConfigDict` with these sections, made by
`dpjax.config.default`. Functions that read only one section take its class: `Data`, `Train`, `Eval`
or `Sample`, made by `Train(**config.train)`. `Config`, `Model`, `Middle` and `OuterLayers` only
declare settings, and have no instances.

Set each duration in one unit: steps or epochs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from dpjax.config import registry
from dpjax.config.registry import Registry
from dpjax.config.setting import ConfigDict, Setting

T = TypeVar("T")
P = ParamSpec("P")


class ComponentSetting(NamedTuple):
  """A setting that is a section with the name and settings of a component.

  Attributes:
    registry: the components to choose from.
    default: the name of the default component; None: the setting is None by default.
    meaning: its purpose.
  """

  registry: Registry
  default: str | None
  meaning: str

  @property
  def is_optional(self) -> bool:
    """Whether it is None by default."""
    return self.default is None


class Subsection(NamedTuple):
  """A setting that is a section of settings.

  Attributes:
    section: gives its class.
    meaning: its purpose.
    is_optional: whether it is None by default.
  """

  section: Callable[[], type]
  meaning: str = ""
  is_optional: bool = False


Declaration = Setting | ComponentSetting | Subsection


def _as_field(declare: Callable[P, Setting[T]]) -> Callable[P, T]:
  """A function that takes the attributes of a `Setting` and makes a field of its type."""

  def field(*args: P.args, **kwargs: P.kwargs) -> T:
    declaration = declare(*args, **kwargs)
    return dataclasses.field(default=declaration.default, metadata={"declared": declaration})

  return field


# A field with a simple value: `batch_size: int = setting(20, "rows per batch", minimum=1)`.
setting = _as_field(Setting)


def choice(names: str, meaning: str, *, is_free: bool = False) -> str:
  """A field with a fixed list of values; the first is the default."""
  choices = tuple(names.split())
  return setting(choices[0], meaning, choices=choices, is_free=is_free)


def component(components: Registry, default: str, meaning: str) -> ConfigDict:
  """A field with the section of a component."""
  make = functools.partial(components.section, default)
  declaration = ComponentSetting(components, default, meaning)
  return dataclasses.field(default_factory=make, metadata={"declared": declaration})


def optional_component(components: Registry, meaning: str) -> ConfigDict | None:
  """A field with the section of a component, or None, the default."""
  declaration = ComponentSetting(components, None, meaning)
  return dataclasses.field(default=None, metadata={"declared": declaration})


def subsection(section: type[T]) -> T:
  """A field with a section."""
  declaration = Subsection(lambda: section)
  return dataclasses.field(default_factory=section, metadata={"declared": declaration})


def inner_stage() -> "Middle | None":
  """A field with an inner stage, or None, the default."""
  meaning = "an inner stage with its own width or pooling, `dpjax.config.middle`"
  declaration = Subsection(lambda: Middle, meaning, is_optional=True)
  return dataclasses.field(default=None, metadata={"declared": declaration})


# For classes without instances, whose methods would only slow down the start of a command.
_declares = dataclasses.dataclass(init=False, repr=False, eq=False)


@_declares
class OuterLayers:
  """Blocks on tokens, before or after pooling."""

  num_layers: int = setting(
    2, "number of blocks on tokens, before or after pooling; needs boundaries", minimum=1
  )
  mixer: ConfigDict | None = optional_component(
    registry.mixers, "the mixer of these blocks; None: model.mixer"
  )


@_declares
class Middle:
  """An inner stage."""

  width: int = setting(0, "D; 0: as in the enclosing stage", minimum=0)
  feed_forward_width: int = setting(0, "0: as in the enclosing stage", minimum=0)
  boundaries: ConfigDict = component(registry.boundaries, "none", "where segments end")
  first: OuterLayers = subsection(OuterLayers)
  last: OuterLayers = subsection(OuterLayers)
  middle: "Middle | None" = inner_stage()


@_declares
class Model:
  """The model."""

  mixer: ConfigDict = component(
    registry.mixers, "dispatcher", "the token mixer, in place of self-attention"
  )
  vocab_size: int = setting(0, "V, the size of the vocabulary; 0: that of the tokenizer", minimum=0)
  num_layers: int = setting(
    6, "number of blocks; with token pooling, of those on segments", minimum=1
  )
  width: int = setting(512, "D, the number of features per token", minimum=1)
  feed_forward_width: int = setting(512, "hidden features of each feed-forward network", minimum=1)
  max_length: int = setting(
    512,
    "the window, the most tokens in a context; for Extractors also the number of taps l",
    minimum=1,
  )
  norm_position: str = choice("post pre", "whether norms come after or before each branch")
  norm_type: str = choice("layer_norm rms_norm", "LayerNorm, or RMSNorm, without mean and bias")
  norm_epsilon: float = setting(1e-5, "added to the variance or mean square in norms", above=0)
  stack_norms: bool = setting(
    False, "add a norm after each stack, including before and after the middle"
  )
  residual_dtype: str = choice("model float32", "dtype of the sum of branches; model: model.dtype")
  middle_resize: str = choice(
    "matrices padding",
    "how to reach a middle of another width: a matrix each way, or padding with a learned "
    "vector, which is cut off again",
  )
  use_bias: bool = setting(
    True, "biases in norms, feed-forward networks and logits; mixers have their own"
  )
  positions: str = choice(
    "sinusoidal learned none", "position embeddings; none also drops the scale sqrt(D)"
  )
  tie_embeddings: bool = setting(False, "reuse the token embedding as the output layer")
  activation: str = choice(
    "relu gelu swiglu", "in feed-forward networks; gelu uses erf, swiglu a third matrix"
  )
  dropout: float = setting(0.0, "dropout rate of embeddings and of each branch", minimum=0, below=1)
  hidden_dropout: float = setting(
    0.0, "dropout rate within the feed-forward networks", minimum=0, below=1
  )
  init_std: float = setting(
    0.0, "weights ~ N(0, init_std**2), and biases 0; 0: PyTorch's defaults", minimum=0
  )
  embedding_std: float = setting(
    0.0, "embeddings ~ N(0, embedding_std**2); 0: uses init_std", minimum=0
  )
  scale_outputs: bool = setting(
    False,
    "divide the initial output matrix of each branch by the square root of the number of branches "
    "that a token passes, excluding those of inner stages",
  )
  norm_init_std: float = setting(0.0, "gains of the norms ~ N(1, norm_init_std**2)", minimum=0)
  scan_layers: bool = setting(
    True, "compile one layer and loop over it, or compile each layer", is_free=True
  )
  remat: bool = setting(
    False, "recompute each layer in the backward pass to save memory", is_free=True
  )
  dtype: str = choice("float32 bfloat16", "dtype of the computation; parameters are float32")
  boundaries: ConfigDict = component(registry.boundaries, "none", "where segments end")
  first: OuterLayers = subsection(OuterLayers)
  last: OuterLayers = subsection(OuterLayers)
  middle: Middle | None = inner_stage()


@dataclasses.dataclass(frozen=True)
class Data:
  """The text and its tokens."""

  name: str = setting(
    "python_manual", "one of `dpjax data list`, hf:OWNER/NAME on the Hub, or tfds:NAME"
  )
  mixture: str = setting(
    "",
    "several corpora, SOURCE=WEIGHT,SOURCE=WEIGHT, by name or path; overrides a data.path without "
    "tokens. Each gets its share of the rows; requires train.sampling = random_windows",
  )
  data_dir: str = setting(
    "data",
    "the folder of downloads, texts and tokens, shared by all runs",
    is_free=True,
    is_path=True,
  )
  manual_dir: str = setting(
    "",
    'the folder of files downloaded by hand; "": data_dir/manual',
    is_free=True,
    is_path=True,
  )
  path: str = setting(
    "",
    "a text file, .jsonl or .parquet, a pattern that matches several, or a folder with "
    "train/valid/test.txt, documents, or tokens made elsewhere; overrides data.name",
    is_path=True,
  )
  isolate_documents: bool = setting(
    False, "keep documents from seeing each other; False: one stream"
  )
  text_field: str = setting(
    "text", "the text's field in .jsonl or .parquet; each line or row is a document"
  )
  separator: str = setting("", "the line that separates documents in a .txt")
  split_fractions: tuple[float, ...] = setting(
    (0.9, 0.05, 0.05), "shares of train, valid and test in a single file"
  )
  tokenizer: ConfigDict = component(
    registry.tokenizers, "characters", "splits the text into tokens"
  )


@dataclasses.dataclass(frozen=True)
class Train:
  """The updates, and what comes between them."""

  sampling: str = choice(
    "sequential random_windows shuffled_windows",
    "windows in order, at random offsets, or from rows that are rolled and shuffled each epoch",
  )
  batch_size: int = setting(20, "rows per batch, over all devices", minimum=1)
  window: int = setting(0, "tokens per row; 0: model.max_length", minimum=0)
  init_from: str = setting(
    "", "the folder of a run whose best parameters initialize this one", is_path=True
  )
  grad_accum_steps: int = setting(
    1,
    "parts per batch, run in turn to save memory; divides batch_size",
    minimum=1,
    is_free=True,
  )
  num_steps: int = setting(
    0, "updates in total; 0 if train.num_epochs is set", minimum=0, is_length=True
  )
  num_epochs: float = setting(
    60.0, "passes over the train split; 0 if train.num_steps is set", is_length=True
  )
  optimizer: ConfigDict = component(registry.optimizers, "adam", "the update rule")
  learning_rate: float = setting(1e-4, "the peak of the schedule", minimum=0)
  stage_multipliers: tuple[float, ...] | str = setting(
    (),
    "learning rate factors of the stages of a model with token pooling, outermost first; auto: "
    "H-Net's rule, see `dpjax.config.stage_multipliers`",
    choices=("auto",),
  )
  schedule: ConfigDict = component(registry.schedules, "constant", "the learning rate schedule")
  grad_clip_norm: float = setting(
    0.5, "the maximum global norm of the gradient; 0: no clipping", minimum=0
  )
  weight_decay_mask: str = choice(
    "all matrices",
    "which parameters get weight decay; matrices excludes norms, biases and embedding tables",
  )
  ema_decay: float = setting(
    0.0, "decay of averaged parameters, to score and keep; 0: none", minimum=0, below=1
  )
  log_every_steps: int = setting(20, "updates between reports of the loss", minimum=1, is_free=True)
  eval_every_steps: int = setting(
    0, "updates between evaluations; 0 if train.eval_every_epochs is set", is_free=True
  )
  eval_every_epochs: float = setting(
    1.0, "epochs between evaluations; 0 if train.eval_every_steps is set", is_free=True
  )
  patience: int = setting(
    0, "evaluations without improvement before training stops; 0: never", minimum=0, is_free=True
  )
  checkpoint_every_steps: int = setting(500, "updates between checkpoints", minimum=1, is_free=True)
  max_to_keep: int = setting(
    2, "recent checkpoints to keep, in addition to the best", minimum=1, is_free=True
  )
  matmul_dtype: str = choice(
    "float32 bfloat16",
    "dtype of the operands of matrix products; bfloat16 is mixed precision: sums, norms, softmax "
    "and the outputs of layers stay in model.dtype",
  )
  param_sharding: str = choice(
    "replicated fsdp",
    "replicate parameters on all devices, or shard each over them",
    is_free=True,
  )


@dataclasses.dataclass(frozen=True)
class Eval:
  """How whole texts are scored."""

  window: int = setting(0, "tokens per row; 0: model.max_length", minimum=0, is_free=True)
  stride: int = setting(
    0,
    "new tokens per window; 0: the window, so that windows do not overlap",
    minimum=0,
    is_free=True,
  )
  batch_size: int = setting(10, "rows per batch", minimum=1, is_free=True)
  max_tokens: int = setting(
    0,
    "validation tokens to score in training, in windows drawn once; 0: all",
    minimum=0,
    is_free=True,
  )


@dataclasses.dataclass(frozen=True)
class Sample:
  """How text is generated."""

  prompt: str = setting(
    "", 'a prompt to continue and print when training ends; "": none', is_free=True
  )
  length: int = setting(300, "number of new tokens", minimum=1, is_free=True)
  temperature: float = setting(
    1.0, "divides the logits; 0: the most likely token", minimum=0, is_free=True
  )
  top_k: int = setting(
    0, "draw from the k most likely tokens; 0: from all", minimum=0, is_free=True
  )
  top_p: float = setting(
    1.0,
    "draw from the likeliest tokens, up to this probability",
    above=0,
    maximum=1,
    is_free=True,
  )
  overflow: str = choice(
    "slide continue error",
    "past the window: slide it, continue where mixers can, or fail",
    is_free=True,
  )
  dtype: str = choice(
    "model bfloat16", "dtype of weights and computation; model: model.dtype", is_free=True
  )


@_declares
class Config:
  """A run."""

  seed: int = setting(0, "seed of parameters, batches and dropout", minimum=0, below=2**32)
  plugins: tuple[str, ...] = setting(
    (),
    "modules that --plugin imports; training records those that its components need",
    is_free=True,
  )
  model: Model = subsection(Model)
  data: Data = subsection(Data)
  train: Train = subsection(Train)
  eval: Eval = subsection(Eval)
  sample: Sample = subsection(Sample)


def declared(section: type) -> dict[str, Declaration]:
  """The settings of a section's class, by name."""
  return {field.name: field.metadata["declared"] for field in dataclasses.fields(section)}


def settings_of(section: type) -> dict[str, Setting]:
  """The settings of a section's class with simple values, by name."""
  return {name: node for name, node in declared(section).items() if isinstance(node, Setting)}


# The settings of a run's length.
LENGTHS = [f"train.{name}" for name, x in settings_of(Train).items() if x.is_length]
