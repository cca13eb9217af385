"""Trained models with their settings and vocabulary."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import files, ops
from dpjax.config import schema, sections
from dpjax.config.setting import ConfigDict
from dpjax.data.encoding import count_text
from dpjax.data.token_files import Split, Tokens
from dpjax.errors import UserError
from dpjax.generation import generator
from dpjax.interop import hnet
from dpjax.layers.common import Params
from dpjax.models import build
from dpjax.models.language_model import LanguageModel
from dpjax.runs import export, prepare, run_files
from dpjax.text.characters import BytesWithEnds
from dpjax.text.tokenizer import Tokenizer
from dpjax.training import checkpoints, evaluation, losses, metrics
from dpjax.training.trainer import abstract_params, find_non_finite

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Run:
  """A trained model with everything needed to use it.

  Attributes:
    config: the settings, including those that follow from the tokenizer.
    model: `model.apply({"params": params}, tokens).logits`, [B, T] -> [B, T, V]; one made in
      Python may have another class.
    params: the parameters.
    tokenizer: has `encode` and `decode`.
    step: the number of updates made.
    data: the prepared corpus, or None.
    workdir: the run's folder, or None.
  """

  config: ConfigDict
  model: LanguageModel
  params: Params
  tokenizer: Tokenizer
  step: int
  data: Tokens | None = None
  workdir: Path | None = None

  def __getstate__(self) -> dict[str, Any]:
    """The fields, to pickle or to copy; what is compiled is left out."""
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  def __repr__(self) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
    return (
      f"Run({self.name}, {size:,} parameters, {self.tokenizer.name} of "
      f"{self.tokenizer.vocab_size:,} entries, step {self.step}, {self.workdir})"
    )

  @property
  def name(self) -> str:
    """The mixers and boundaries of the model, or the class of one made in Python."""
    if isinstance(self.model, LanguageModel):
      return sections.describe_model(self.config.model)
    return type(self.model).__name__

  @property
  def window(self) -> int:
    """The most tokens that the model sees at once, `config.model.max_length`."""
    return self.config.model.max_length

  @overload
  def score(
    self, text: str, *, window: int = 0, stride: int = 0, progress: bool = False
  ) -> dict[str, float]: ...

  @overload
  def score(
    self, text: Sequence[str], *, window: int = 0, stride: int = 0, progress: bool = False
  ) -> list[dict[str, float]]: ...

  def score(
    self, text: str | Sequence[str], *, window: int = 0, stride: int = 0, progress: bool = False
  ) -> dict[str, float] | list[dict[str, float]]:
    """Scores a text, including its first token, or several, each by itself.

    Args:
      text: a text, or several.
      window: tokens that the model sees at once; 0: `config.eval.window`.
      stride: how many of these are scored, with the others as context; 0: `config.eval.stride`.
      progress: whether to show a progress bar.

    Returns:
      See `dpjax.training.metrics.text_scores`, and with token pooling `boundary_scores`; for
      several texts, a list. If tokens lose some of a text, its bits are nan, with a warning.

    Raises:
      ValueError: a text is empty, or the window is longer than the model's.
    """
    if not isinstance(text, Sequence) or isinstance(text, bytes):
      raise UserError(f"text: expected a text, or several, got {text!r:.60}")
    score = partial(self._score_text, window=window, stride=stride, progress=progress)
    return score(text) if isinstance(text, str) else [score(each) for each in text]

  def _score_text(self, text: str, *, window: int, stride: int, progress: bool) -> dict[str, float]:
    tokens = self.tokenizer.encode(text)
    if not len(tokens):
      raise UserError(f"text: expected at least one token, got none in {text!r}")
    counts = count_text([text], len(tokens))
    boundaries = None
    if self.data is not None and self.data.boundaries is not None:
      boundaries = self.data.segment(text)
    split = Split(tokens, counts, boundaries)
    scores = self.scorer.score(self.params, split, window=window, stride=stride, progress=progress)
    if not self.tokenizer.keeps_text(tokens):
      name = self.tokenizer.name
      lost = self.tokenizer.describe_unknown({"it": tokens}) or f"{name} loses parts of texts"
      _log.warning("Bits per character of a text are nan: %s", lost)
      scores |= dict.fromkeys(("bits_per_character", "bits_per_byte"), math.nan)
    return scores

  def score_split(
    self,
    split: str = "test",
    *,
    window: int = 0,
    stride: int = 0,
    isolate_documents: bool | None = None,
    progress: bool = False,
    folder: str | Path | None = None,
  ) -> dict[str, float]:
    """Scores a split of the run's corpus, every token once. All processes must call it.

    Args:
      split: "train", "valid" or "test".
      window: see `score`.
      stride: see `score`.
      isolate_documents: whether to score each document by itself, after a start token; None:
        `config.data.isolate_documents`.
      progress: whether to show a progress bar.
      folder: where to also write the scores, as JSON; None: nowhere.

    Raises:
      ValueError: the split does not exist, its tokens have changed, or as for `score`.
    """
    default = self.config.data.isolate_documents
    isolate = default if isolate_documents is None else isolate_documents
    if folder is not None:
      files.check_local("folder", folder)
    data = self._data_with(split, isolate)
    is_first = jax.process_index() == 0
    if folder is not None and is_first:
      files.check_writable(Path(folder))  # before hours of scoring
    text = data.split(split, with_documents=isolate)
    scores = self.scorer.score(self.params, text, window=window, stride=stride, progress=progress)
    if folder is not None and is_first:
      window, stride = self.scorer.sizes(window, stride)
      name = f"scores_{split}_{self.step}"
      if (window, stride) != self.scorer.sizes():
        name += f"_window{window}_stride{stride}"
      if isolate != default:
        name += "_isolated" if isolate else "_joined"
      content = {"split": split, "step": self.step, "window": window, "stride": stride}
      content |= {"scores": metrics.for_json(scores), "isolate_documents": isolate}
      content["counts"] = dict(data.counts[split])
      try:
        files.write_json(Path(folder, f"{name}.json"), content)
      except OSError:
        print(table(scores), flush=True)  # Scoring may have taken hours.
        raise
    return scores

  def tokens(self, split: str = "test") -> np.ndarray:
    """The tokens of a split of the run's corpus, [N]; recreates missing files.

    All processes must call it.

    Raises:
      ValueError: the split does not exist, or its tokens have changed.
    """
    return self._data_with(split, isolate=False).splits[split]

  def _data_with(self, split: str, isolate: bool) -> Tokens:
    if self.data is None or split not in self.data.splits:
      names = ", ".join(self.data.splits) if self.data else "none"
      raise UserError(f"split: expected one of {names}, got {split}")
    if isolate and self.data.documents is None:
      return prepare.with_documents(self.config, self.data)
    return prepare.find_tokens(self.config, self.data)

  @overload
  def generate(self, prompt: str, **settings: Unpack[generator.Sampling]) -> list[str]: ...

  @overload
  def generate(
    self, prompt: Sequence[str], **settings: Unpack[generator.Sampling]
  ) -> list[list[str]]: ...

  def generate(
    self, prompt: str | Sequence[str], **settings: Unpack[generator.Sampling]
  ) -> list[str] | list[list[str]]:
    """Continues a prompt, or several at once.

    Args:
      prompt: a text, or several; "" starts a text.
      **settings: see `dpjax.generation.Generator.stream`, also for the errors; by default
        `config.sample`.

    Returns:
      The continuations, one for each sample; for several prompts, a list for each.
    """
    rows = zip(*self.stream(prompt, **settings), strict=True)
    texts = ["".join(piece.text for piece in row) for row in rows]
    if isinstance(prompt, str):
      return texts
    count = len(texts) // len(prompt)
    return [texts[i * count : (i + 1) * count] for i in range(len(prompt))]

  def stream(
    self, prompt: str | Sequence[str], **settings: Unpack[generator.Sampling]
  ) -> Iterator[list[generator.Piece]]:
    """Like `generate`, but yields text as it arrives; see `dpjax.generation.Generator.stream`."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
      raise UserError(f"prompt: expected a text, or several, got {prompt!r:.60}")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    return self._generator.stream(self.params, prompts, **settings)

  def dispatch_matrices(self, text: str) -> list[np.ndarray]:
    """`dpjax.ops.dispatch_matrix` [H, T, T] of each layer, for a text of 1 to `window` tokens.

      matrices[layer][h, t, s]: the weight of the value at position s for position t

    Raises:
      ValueError: the text is empty or too long, or the model has other mixers or pools tokens.
    """
    tokens = self.tokenizer.encode(text)
    if not 1 <= len(tokens) <= self.window:
      raise UserError(f"text: expected 1 to {self.window} tokens, got {len(tokens)}")
    if not isinstance(self.model, LanguageModel) or self.model.core.stages:
      raise UserError("run: expected a model of Dispatchers without token pooling, got another")
    seen: Any
    _, seen = self.model.apply(
      {"params": self.params},
      jnp.asarray(tokens)[None],
      capture_intermediates=lambda module, _: module.name == "embedding",
      mutable=["intermediates"],
    )
    (x_btd,) = seen["intermediates"]["embedding"]["__call__"]
    layers, params = self.model.core.layers.unstack(self.params["layers"])
    matrices = []
    for i, block in enumerate(layers.blocks):
      layer = {"params": params[f"blocks_{i}"]}
      x_btd, seen = block.apply(layer, x_btd, mutable=["intermediates"])
      if "intermediates" not in seen:
        got = " and ".join(dict.fromkeys(type(mixer).__name__ for mixer in layers.mixers))
        raise UserError(f"run: expected a model of Dispatchers, got one of {got}")
      (g_bthk,) = seen["intermediates"]["mixer"]["level_gates"]
      matrices.append(np.asarray(ops.dispatch_matrix(g_bthk)[0]))
    return matrices

  def save(
    self,
    folder: str | Path,
    *,
    dtype: str = "",
    license: str = "",
    private: bool = False,
  ) -> None:
    """Writes a small folder to load elsewhere, or a model on the Hugging Face Hub.

    Args:
      folder: a new or empty folder, or "hf://OWNER/NAME" or "hf://OWNER/NAME@BRANCH".
      dtype: the saved dtype: "float32" keeps every bit, "bfloat16" halves the size; "": bfloat16
        if that keeps every bit, as for an export in bfloat16, or else float32.
      license: the Hub's name for the model's licence in the model card, such as "cc-by-4.0".
      private: whether a model on the Hub is private.

    Raises:
      ValueError: see `dpjax.runs.export.save`.
    """
    export.save(self, folder, dtype, license=license, private=private)

  @cached_property
  def _generator(self) -> generator.Generator:
    return generator.Generator(self.config.model, self.config.sample, self.model, self.tokenizer)

  @cached_property
  def scorer(self) -> evaluation.Scorer:
    """Scores texts with the model, by `config.eval`; compiled once for all parameters."""
    return evaluation.Scorer(
      self.model,
      losses.Objective(build.build_boundaries(self.config.model)),
      self.tokenizer,
      schema.Eval(**self.config.eval),
      max_length=self.config.model.max_length,
      pad_id=build.pad_id(self.config.model),
    )

  def validate(self, params: Params) -> dict[str, float]:
    """Scores parameters on the validation split as training does, with `config.eval.max_tokens`."""
    if self.data is None:
      raise UserError("run: expected one with a corpus, got one without")
    text = self.data.split("valid", with_documents=self.config.data.isolate_documents)
    return self.scorer.score(params, text, max_tokens=self.config.eval.max_tokens)

  def at_step(self, step: int | None = None) -> "Run":
    """The run with the parameters of another checkpoint; scoring is not compiled again.

    Args:
      step: see `load`, also for the errors.
    """
    if self.workdir is None:
      raise UserError("run: expected one with a folder, got one without")
    abstract = abstract_params(self.model, self.config.train.param_sharding)
    if run_files.is_exported(self.workdir):
      params, saved_step = export.restore(self.workdir, abstract, step)
    else:
      with checkpoints.Checkpoints(self.workdir / "checkpoints") as saved:
        origin = {"tokenizer": self.tokenizer.to_json()}
        field = "average" if self.config.train.ema_decay else "params"
        saved_step, params = saved.restore_step(abstract, step, origin, field)
    _check_finite(params, self.workdir)
    run = dataclasses.replace(self, params=params, step=saved_step)
    if "scorer" in vars(self):
      run.scorer = self.scorer
    return run


def load(
  workdir: str | Path,
  step: int | None = None,
  *,
  model: build.CustomModel = None,
  dtype: str = "float32",
) -> Run:
  """Reads a run from its folder, its parameters replicated or sharded as in training.

  Args:
    workdir: a folder that `train` or `Run.save` wrote, or a model on the Hugging Face Hub,
      "hf://OWNER/NAME" or "hf://OWNER/NAME@REVISION". Code in the folder is not run. Also an
      H-Net released by its authors: the folder, or the path, of one `.pt` or `.safetensors` with
      its JSON.
    step: the step of the checkpoint; None: the best by validation or, with a warning, the one
      before if that is damaged.
    model: the `model` given to `train`, if any.
    dtype: for an H-Net released by its authors: "bfloat16" computes in it, and halves the memory.

  Raises:
    ValueError: the run or step does not exist, or no checkpoint is intact and finite.
    OSError: a file cannot be read.
  """
  workdir = run_files.find(workdir)
  if (released := hnet.find(workdir)) is not None:
    if step is not None or model is not None:
      raise UserError("step, model: expected None for an H-Net of its authors, got another")
    return _load_released(workdir, *released, dtype)
  if dtype != "float32":
    raise UserError(f"dtype: expected float32 for a run, which has a model.dtype, got {dtype}")
  settings = run_files.read_config(workdir)
  data = prepare.read_tokens(settings, workdir / "data")
  config = build.with_vocabulary(settings, data.tokenizer)
  run_files.check_saved(workdir, settings, config)
  built = build.make_model(config, model, saved_frozen(config, workdir))
  run = Run(config, built, params={}, tokenizer=data.tokenizer, step=0, data=data, workdir=workdir)
  return run.at_step(step)


def _load_released(folder: Path, arrays: Path, config_file: Path, dtype: str) -> Run:
  """An H-Net released by its authors."""
  config = sections.default()
  config.model, params = hnet.read(arrays, config_file, dtype=dtype)
  _check_finite(params, folder)
  config.data.tokenizer = BytesWithEnds.name
  config.eval.batch_size = 1
  return Run(config, build.assemble(config.model), params, BytesWithEnds(), 0)


def _check_finite(params: Params, workdir: Path) -> None:
  if (name := find_non_finite(params)) is not None:
    raise UserError(f"{workdir}: expected finite parameters, got nan or infinity in {name}")


def saved_frozen(config: ConfigDict, workdir: Path) -> LanguageModel | None:
  """The frozen model of a saved run's boundaries, if any."""
  settings = run_files.read_frozen(config, workdir)
  return None if settings is None else build.assemble(settings)


def table(scores: Mapping[str, float]) -> str:
  """Scores as a table, one on each line."""
  lines = [f"  {name.replace('_', ' '):22s}{value:12.6g}" for name, value in scores.items()]
  if math.isnan(scores.get("bits_per_character", math.nan)):
    lines.append("  (no bits per character: the tokens do not hold the whole text)")
  return "\n".join(lines)
