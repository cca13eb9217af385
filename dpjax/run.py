"""A trained model with all that belongs to it: made by `train`, read by `load`.

`dpjax.workdir` says which files its folder has.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from dpjax import config as config_lib
from dpjax import exported, generation, ops, registry
from dpjax import workdir as workdir_lib
from dpjax.config import ConfigDict
from dpjax.data import batches, prepared
from dpjax.errors import UserError
from dpjax.interop.torch_checkpoints import from_torch
from dpjax.models.build import build_boundaries, build_model, check_memory
from dpjax.models.language_model import LanguageModel, with_frozen
from dpjax.text.tokens import Tokenizer
from dpjax.training import (
  checkpoints,
  evaluation,
  loop,
  losses,
  metrics,
  sharding,
)
from dpjax.training import optimizer as optimizers
from dpjax.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class Run:
  """A trained model with all that is needed to use it.

  Attributes:
    config: its settings; `config.model.vocab_size` is filled in.
    model: `model.apply({"params": params}, tokens).logits`, [B, T] -> [B, T, V].
    params: its parameters.
    tokenizer: `encode` and `decode`.
    step: updates made.
    data: the prepared corpus, or None where there is only a model.
    workdir: the run's folder, or None.
  """

  config: ConfigDict
  model: nn.Module
  params: dict
  tokenizer: Tokenizer
  step: int
  data: prepared.Prepared | None = None
  workdir: Path | None = None

  def __repr__(self) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
    return (
      f"Run({self.name}, {size:,} parameters, {self.tokenizer.kind} of "
      f"{self.tokenizer.vocab_size:,} entries, step {self.step}, {self.workdir})"
    )

  @property
  def name(self) -> str:
    """The mixer's, or that of the class of a model made in Python."""
    is_own = not isinstance(self.model, LanguageModel)
    return type(self.model).__name__ if is_own else self.config.model.mixer.name

  def score(self, text: str, *, window: int = 0, stride: int = 0) -> dict[str, float]:
    """Scores a text, its first token included.

    Args:
      text: not empty.
      window: tokens the model sees at once; 0 is the configuration's.
      stride: tokens it scores of them, the others being context; 0 is likewise.

    Returns:
      "nats_per_token", "perplexity", "perplexity_per_word" and, unless the tokens have lost
      some of the text, "bits_per_character" and "bits_per_byte"
      (`dpjax.training.metrics.text_scores`); with token pooling also
      those of `dpjax.training.metrics.boundary_scores`.

    Raises:
      ValueError: the text is empty, or the window is longer than the model's.
    """
    tokens = self.tokenizer.encode(text)
    if not len(tokens):
      raise UserError(f"text: expected at least one token, got none in {text!r}")
    counts = {"tokens": len(tokens), **prepared.count_text([text])}
    boundaries = None
    if self.data is not None and self.data.unigram is not None:
      boundaries = self.data.segment(text)
    return self._score(self.params, tokens, counts, window, stride, boundaries=boundaries)

  def score_split(
    self, split: str = "test", *, window: int = 0, stride: int = 0, progress: bool = False
  ) -> dict[str, float]:
    """Scores a split of the run's corpus, each of its tokens once.

    Args:
      split: "train", "valid" or "test".
      window: as in `score`.
      stride: as in `score`.
      progress: show a bar.

    Returns:
      As `score`.

    Raises:
      ValueError: there is no such split, its tokens have changed since they were
        prepared, or the window is longer than the model's.
    """
    if self.data is None or split not in [*self.data.splits]:
      known = ", ".join(self.data.splits) if self.data else "none"
      raise UserError(f"split: expected one of {known}, got {split}")
    if self.workdir is not None and not self.data.has_tokens:
      data = workdir_lib.find_tokens(self.config, self.workdir / "data")
      run = dataclasses.replace(self, data=data, workdir=None)
      return run.score_split(split, window=window, stride=stride, progress=progress)
    self.data.check(split)
    return self._score_split(self.params, split, window, stride, progress)

  def write_scores(
    self, split: str, scores: Mapping[str, float], *, window: int = 0, stride: int = 0
  ) -> None:
    """Writes what `score_split` gave into the run's folder, as JSON."""
    if self.workdir is None or self.data is None or jax.process_index() != 0:
      return
    used = window, stride = self._window_and_stride(window, stride)
    name = f"scores_{split}_{self.step}"
    if used != self._window_and_stride(0, 0):
      name += f"_window{window}_stride{stride}"
    content = {
      "split": split,
      "step": self.step,
      "window": window,
      "stride": stride,
      "scores": metrics.for_json(scores),
      "counts": dict(self.data.counts[split]),
    }
    workdir_lib.write_json(self.workdir / f"{name}.json", content)

  def generate(self, prompt: str | Sequence[str], **settings) -> list[str] | list[list[str]]:
    """Continues a prompt, or several at once.

    Args:
      prompt: a text, or texts of any lengths; "" starts a text.
      **settings: length, temperature, top_k, top_p, seed, num_samples, stop and
        beyond_window of `dpjax.generation.Generator.stream`; by default as in the run's
        configuration, `config.sample`.

    Returns:
      The continuations, without the prompt, one for each sample; of several prompts, a
      list of them for each.

    Raises:
      ValueError: as there.
    """
    prompts = _as_texts(prompt)
    rows = zip(*self.stream(prompts, **settings), strict=True)
    texts = ["".join(piece.text for piece in row) for row in rows]
    if isinstance(prompt, str):
      return texts
    count = len(texts) // len(prompts)
    return [texts[i * count : (i + 1) * count] for i in range(len(prompts))]

  def stream(self, prompt: str | Sequence[str], **settings) -> Iterator[list[generation.Piece]]:
    """Continues a prompt, or several at once, and gives out the text as it comes.

    Args:
      prompt: as in `generate`.
      **settings: likewise.

    Returns:
      As `dpjax.generation.Generator.stream`, to which this goes.

    Raises:
      ValueError: as there.
    """
    prompts = _as_texts(prompt)
    return self._generator.stream(self.params, prompts, **settings)

  def save(self, folder: str | Path, *, dtype: str = "float32") -> None:
    """Writes what is needed to load the run elsewhere: `dpjax.exported.save`."""
    exported.save(self, folder, dtype)

  @cached_property
  def _generator(self) -> generation.Generator:
    model: Any = self.model
    return generation.Generator(self.config, model, self.tokenizer)

  @cached_property
  def _mesh(self):
    return sharding.make_mesh()

  @cached_property
  def _eval_step(self):
    return step_lib.jit_eval_step(self.model, self._mesh, _objective(self.config))

  def _window_and_stride(self, window: int, stride: int) -> tuple[int, int]:
    settings, longest = self.config.eval, self.config.model.max_length
    window = window or settings.window or longest
    if not 1 <= window <= longest:
      raise UserError(f"eval.window: expected 1 to model.max_length = {longest}, got {window}")
    return window, stride or min(settings.stride, window) or window

  def _score_split(self, params, split: str, window=0, stride=0, progress=False):
    data = self.data
    if data is None:
      raise UserError("split: expected a run with data, got one without")
    boundaries = None if data.boundaries is None else data.boundaries[split]
    tokens, counts = data.splits[split], data.counts[split]
    return self._score(params, tokens, counts, window, stride, progress, boundaries)

  def _score(self, params, tokens, counts, window=0, stride=0, progress=False, boundaries=None):
    if not self.tokenizer.keeps_text(tokens):
      counts = {unit: counts[unit] for unit in ("tokens", "words")}
    # Whole rows for every device; rows without text count nothing.
    num_rows = -(-self.config.eval.batch_size // self._mesh.size) * self._mesh.size
    window, stride = self._window_and_stride(window, stride)
    start_id = self.tokenizer.start_id
    rows = batches.EvaluationWindows(
      tokens,
      window,
      stride,
      num_rows,
      start_id,
      boundaries=boundaries,
      start_boundary=int(start_id in self.tokenizer.space_ids),
      pad_id=generation.pad_id(self.config),
    )
    return evaluation.evaluate(
      self._eval_step,
      params,
      rows,
      counts,
      self._mesh,
      progress=progress,
      capacity=_capacity(self.config),
    )


def prepare(config: ConfigDict, workdir: str | Path) -> prepared.Prepared:
  """Makes the tokens that a run needs, as `train` does first.

  Args:
    config: of `dpjax.config`.
    workdir: the run's folder; made where there is none.

  Returns:
    The tokens.

  Raises:
    ValueError: `setting: expected ..., got ...`.
  """
  config_lib.check(config)
  with workdir_lib.hold(Path(workdir)):
    data = _prepare(config, Path(workdir))
    workdir_lib.claim(Path(workdir), config)
  return data


def train(
  config: ConfigDict,
  workdir: str | Path,
  *,
  model: nn.Module | Callable[[ConfigDict], nn.Module] | None = None,
  optimizer: optax.GradientTransformation | None = None,
  callbacks: Sequence[loop.Callback] = (),
  should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Run, dict[str, float]]:
  """Trains what a configuration describes, or goes on where the folder's run stopped.

    dpjax.train(config, "runs/mine", model=lambda settings: Mine(settings.vocab_size))
    dpjax.load("runs/mine", model=lambda settings: Mine(settings.vocab_size))

  Args:
    config: of `dpjax.config`.
    workdir: the run's folder; made where there is none.
    model: in the place of the one that `config.model` describes: a module, or a function
      of `config.model`, with its `vocab_size`, that gives one. Its
      `apply({"params": params}, tokens, deterministic=..., rngs=...)` returns something
      with `logits`, [B, T, V]. To go on, or to load the run, takes the same one again.
    optimizer: in the place of the one that `config.train` describes, with its schedule and
      clipping.
    callbacks: told of each report; one that returns True ends the training.
    should_stop: asked after every update, beside signals.

  Returns:
    The run with the parameters that were best by validation, and their test scores.

  Raises:
    ValueError: `setting: expected ..., got ...`.
    dpjax.training.loop.NonFiniteError: the training diverged.
    dpjax.errors.Interrupted: a signal or `should_stop` did; it has saved.
  """
  config_lib.check(config)
  with workdir_lib.hold(Path(workdir)):
    return _train(config, Path(workdir), model, optimizer, callbacks, should_stop)


def _train(
  config, workdir: Path, model, optimizer, callbacks, should_stop
) -> tuple[Run, dict[str, float]]:
  data = _prepare(config, workdir)
  given, config = config, _with_vocabulary(config, data.tokenizer)
  frozen = _frozen_run(config, workdir, data.tokenizer)
  reader: Any = frozen.model if frozen else _saved_frozen(config, workdir)
  settings, built = config.train, _model(config, model, reader)
  train_batches = _train_batches(config, data)
  durations = _durations(settings, train_batches.steps_per_epoch)
  trainer = loop.Trainer(
    built,
    optimizers.build_optimizer(settings, durations.num_steps)
    if optimizer is None
    else optimizers.without_frozen(optimizer),
    _objective(config),
    settings.accumulate_steps,
    settings.parameters,
    _capacity(config),
    config.seed,
  )
  run = Run(config, built, {}, data.tokenizer, 0, data, workdir)
  sharding.check_rows(settings.batch_size, settings.accumulate_steps)
  generation.check_prompt(
    config, data.tokenizer, config.sample.prompt, "sample.prompt", config.sample
  )
  shapes = jax.eval_shape(
    lambda: built.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), deterministic=True)
  )
  check_memory(shapes, jax.device_count() if settings.parameters == "sharded" else 1)
  workdir_lib.claim(workdir, given, frozen and frozen.config.model)
  if jax.process_index() == 0:
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    print(
      f"{run.name}, {size:,} parameters; {data.name}, "
      f"{data.counts['train']['tokens']:,} training tokens, vocabulary of "
      f"{config.model.vocab_size:,}; {durations.num_steps:,} steps on "
      f"{jax.device_count()} {jax.devices()[0].platform} device(s)"
    )
  loop.fit(
    trainer,
    train_batches,
    lambda params: run._score_split(params, "valid"),
    durations,
    workdir=workdir,
    keep_checkpoints=settings.keep_checkpoints,
    initial=_initial(config, shapes["params"], data, frozen, model),
    meta={
      "config": config.to_dict(),
      "validation": dict(zip(("window", "stride"), run._window_and_stride(0, 0), strict=True)),
    },
    origin=_origin(data),
    callbacks=callbacks,
    should_stop=should_stop,
  )
  best = load(workdir, model=model)
  # What validation was compiled for: the same model, with other parameters.
  best.__dict__["_eval_step"] = run._eval_step
  scores = best.score_split("test", progress=True)
  best.write_scores("test", scores)
  return best, scores


def load(
  workdir: str | Path,
  step: int | None = None,
  *,
  model: nn.Module | Callable[[ConfigDict], nn.Module] | None = None,
) -> Run:
  """Reads a run from its folder.

  Args:
    workdir: of `train`, or of `Run.save`.
    step: of the checkpoint; None is the best by validation.
    model: that was given to `train`, if one was.

  Returns:
    The run, its parameters replicated or sharded as in training. A checkpoint that is
    damaged is named in a warning, and the one before it is read, unless `step` asks for
    it.

  Raises:
    ValueError: there is no run, no such step, or no checkpoint that is whole.
    OSError: a file cannot be read.
  """
  workdir = Path(workdir)
  config = workdir_lib.read_config(workdir)
  data = prepared.open_prepared(workdir / "data", config.data.data_dir)
  config = _with_vocabulary(config, data.tokenizer)
  built = _model(config, model, _saved_frozen(config, workdir))
  # Of a checkpoint, the parameters alone are read.
  abstract = step_lib.abstract_state(
    built, optax.identity(), config.seed, sharding.make_mesh(), config.train.parameters
  )
  if (workdir / exported.FILE).exists():
    params, at = exported.restore(workdir, abstract.params, step)
  else:
    with checkpoints.Checkpoints(workdir / "checkpoints") as saved:
      origin = {"tokenizer": data.tokenizer.to_json()}
      at, params, _ = saved.restore_step(abstract.params, step, origin)
  return Run(config, built, params, data.tokenizer, at, data, workdir)


def generate(
  run: Run | str | Path, prompt: str | Sequence[str], **settings
) -> list[str] | list[list[str]]:
  """Continues a prompt, or several: `Run.generate` of a run, or of a run's folder.

    dpjax.generate("runs/quickstart", "The statement", length=200, top_p=0.6)

  Args:
    run: of `load`, or its folder.
    prompt: a text, or texts of any lengths; "" starts a text.
    **settings: as `Run.generate` takes them.

  Returns:
    As `Run.generate`.

  Raises:
    ValueError: as there, or there is no such run.
  """
  run = run if isinstance(run, Run) else load(run)
  return run.generate(prompt, **settings)


def load_torch(file: str | Path, config: ConfigDict, folder: str | Path) -> Run:
  """Reads a checkpoint of the Dispatcher's authors, with a configuration's data.

  Their files hold no vocabulary: `config.data` has to make the one they trained with,
  as configs/dispatcher_wikitext2.py does. That of the pooling paper's authors numbers
  characters by how often a text has them, which nothing here does: their files are for
  `dpjax.interop.from_torch`, with tokens numbered as theirs.

  Args:
    file: as their scripts save it.
    config: names mixer, heads, longest input, data and tokenizer.
    folder: where the tokens are prepared, unless they are there.

  Returns:
    The run, without a folder.

  Raises:
    ValueError: PyTorch is missing, or the file is not of this configuration.
  """
  try:
    import torch  # pyright: ignore[reportMissingImports]  (optional)
  except ImportError as error:
    raise UserError(
      "torch_checkpoint: expected PyTorch to read it with, got none; pip install torch"
    ) from error
  try:
    content = torch.load(file, map_location="cpu", weights_only=True)
  except (MemoryError, OSError):
    raise
  # A damaged file shows as any of several types.
  except Exception as error:
    raise UserError(
      f"torch_checkpoint: expected a file of the authors' code, got {file} ({error})"
    ) from error
  config_lib.check(config)
  settings = config.model
  if settings.mixer.name == "relative_attention":
    raise UserError(
      "model.mixer: expected one of the Dispatcher's authors for a torch_checkpoint, got "
      "relative_attention; dpjax.interop.from_torch reads it, but its numbers of the "
      "characters are in no file"
    )
  model_config, params = from_torch(
    content,
    num_heads=settings.mixer.get("num_heads"),
    variant="multihead" if settings.mixer.name == "dispatcher_multihead" else "paper",
    max_length=settings.max_length,
  )
  if model_config.mixer.name != settings.mixer.name:
    raise UserError(
      f"model.mixer: expected the file's {model_config.mixer.name}, got {settings.mixer.name}"
    )
  data = workdir_lib.prepare_data(config, Path(folder) / "data")
  for key in ("dtype", "remat", "scan_layers"):
    model_config[key] = settings[key]
  if "implementation" in model_config.mixer:
    model_config.mixer.implementation = settings.mixer.implementation
  config = config.copy_and_resolve_references()
  config.model = model_config
  config = _with_vocabulary(config, data.tokenizer)
  return Run(config, build_model(model_config), params, data.tokenizer, 0, data)


def table(scores: Mapping[str, float]) -> str:
  """Scores for people, a line each."""
  lines = [f"  {name.replace('_', ' '):22s}{value:12.6g}" for name, value in scores.items()]
  if "bits_per_character" not in scores:
    lines.append("  (no bits per character: the tokens do not hold the whole text)")
  return "\n".join(lines)


def _with_vocabulary(config: ConfigDict, tokenizer: Tokenizer) -> ConfigDict:
  size = config.model.vocab_size
  if size not in (0, tokenizer.vocab_size):
    raise UserError(
      f"model.vocab_size: expected 0 or the tokenizer's {tokenizer.vocab_size}, got {size}"
    )
  config = config.copy_and_resolve_references()
  config.model.vocab_size = tokenizer.vocab_size
  for kind in build_boundaries(config.model)[:1]:
    config.model.boundaries.update(kind.settings_for(tokenizer))
  config_lib.check_model(config.model)
  return config


def _model(config: ConfigDict, model, frozen: LanguageModel | None) -> nn.Module:
  """The model of a configuration, or the one that is given in its place."""
  if model is None:
    return build_model(config.model, frozen)
  built = model if isinstance(model, nn.Module) else model(config.model)
  if not isinstance(built, nn.Module):
    raise UserError(
      "model: expected a flax.linen.Module, or a function of config.model "
      f"that gives one, got {built!r}"
    )
  pools = isinstance(built, LanguageModel) and built.make_hourglass is not None
  if pools != config_lib.is_pooled(config.model):
    raise UserError(
      f"model.boundaries: expected {'those of the' if pools else 'none for a'} model that "
      f"is given, which pools {'tokens' if pools else 'none'}, got "
      f"{config.model.boundaries.name}"
    )
  return built


def _durations(settings: ConfigDict, steps_per_epoch: int) -> loop.Durations:
  """The durations of `config.train`, in updates."""
  num_steps, eval_every_steps = (
    config_lib.steps_in(settings, name, steps_per_epoch=steps_per_epoch)
    for name in ("num", "eval_every")
  )
  return loop.Durations(
    num_steps,
    eval_every_steps,
    settings.log_every_steps,
    settings.median_every_steps,
    settings.checkpoint_every_steps,
  )


def _objective(config: ConfigDict) -> losses.Objective:
  return losses.Objective(build_boundaries(config.model))


def _capacity(config: ConfigDict) -> Callable[[Mapping[str, np.ndarray]], int | None]:
  """Batch -> how long its rows become where tokens alone tell it; None: the device says."""
  kinds = build_boundaries(config.model)
  # Several processes would have to agree on it.
  if not kinds or jax.process_count() > 1:
    return lambda batch: None
  boundaries = kinds[0]

  def from_tokens(batch: Mapping[str, np.ndarray]) -> int | None:
    tokens = batch["tokens"]
    counts = boundaries.count_in(tokens)
    if counts is None:
      return None
    sizes = ops.capacities(tokens.shape[1] + 1, boundaries.lengths_compiled)
    return next(size for size in sizes if size > counts.max())

  return from_tokens


def _prepare(config: ConfigDict, workdir: Path) -> prepared.Prepared:
  """The tokens of a run, made unless it goes on; before that, what can be refused."""
  goes_on = workdir_lib.check(workdir, config)
  others = {"train.initial_run": config.train.initial_run}
  if _needs_run(config):
    others["model.boundaries.run"] = config.model.boundaries.run
  for key, folder in others.items():
    if folder and not goes_on and not workdir_lib.is_run(Path(folder)):
      raise UserError(f"{key}: expected the folder of a run, got {folder}")
  return workdir_lib.prepare_data(config, workdir / "data", anew=not goes_on)


def _initial(
  config: ConfigDict, shapes, data: prepared.Prepared, frozen: Run | None, model
) -> Callable[[dict], dict] | None:
  """What reads the parameters to begin with, where they are not those that are drawn."""
  if frozen is None and not config.train.initial_run:
    return None

  def read(drawn: dict) -> dict:
    params = drawn
    if config.train.initial_run:
      params = _initial_params(config, shapes, data, model)
    return params if frozen is None else with_frozen(params, frozen.params)

  return read


def _initial_params(config: ConfigDict, shapes, data: prepared.Prepared, model) -> dict:
  """The parameters of another run, if they fit this one."""
  folder = config.train.initial_run
  other = _load_other(folder, "train.initial_run", data.tokenizer, model)
  expected, found = (
    {
      jax.tree_util.keystr(path): tuple(leaf.shape)
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    for params in (shapes, other.params)
  )
  wrong = [key for key in sorted(expected | found) if expected.get(key) != found.get(key)]
  if wrong:
    raise UserError(
      f"train.initial_run: expected parameters of this model, {wrong[0]} of the shape "
      f"{expected.get(wrong[0])}, got {found.get(wrong[0])} in {other.workdir}"
    )
  return other.params


def _load_other(folder: str, key: str, tokenizer: Tokenizer, model=None) -> Run:
  """The run that a setting names, if it has this one's vocabulary."""
  try:
    other = load(folder, model=model)
  except UserError as error:
    raise UserError(f"{key}: expected a run that can be read, got {folder} ({error})") from error
  if other.tokenizer.to_json() != tokenizer.to_json():
    raise UserError(
      f"{key}: expected a run with the vocabulary of this one, got {folder} "
      f"with another ({other.tokenizer.kind}, {other.tokenizer.vocab_size:,} entries)"
    )
  return other


def _needs_run(config: ConfigDict) -> bool:
  return registry.boundaries.component(config.model.boundaries.name).needs_run


def _frozen_run(config: ConfigDict, workdir: Path, tokenizer: Tokenizer) -> Run | None:
  """The run whose model the boundaries read with; None: none, or the folder has it."""
  if not _needs_run(config) or workdir_lib.has_saved(workdir):
    return None
  key = "model.boundaries.run"
  other = _load_other(config.model.boundaries.run, key, tokenizer)
  check_frozen(other, key)
  return other


def _saved_frozen(config: ConfigDict, workdir: Path) -> LanguageModel | None:
  """The model that the boundaries of a saved run read with, where they do."""
  return build_model(workdir_lib.read_frozen(workdir)) if _needs_run(config) else None


def check_frozen(run: Run, key: str = "run") -> None:
  """Refuses a run whose model the boundaries of another cannot read with.

  Args:
    run: of `load`.
    key: of the setting that names it.

  Raises:
    ValueError: its boundaries are drawn, or read with a model themselves.
  """
  kinds = build_boundaries(run.config.model)
  if any(kind.needs_run or kind.draws_in_evaluation for kind in kinds):
    raise UserError(
      f"{key}: expected a run whose boundaries are neither drawn in evaluation nor of "
      f"another run, got {run.config.model.boundaries.name} in {run.workdir}"
    )


def _origin(data: prepared.Prepared) -> dict[str, str]:
  """What has to stay the same while a run goes on, and is in no setting."""
  origin = {
    "tokenizer": data.tokenizer.to_json(),
    "training text": data.counts["train"]["sha256"],
  }
  if data.unigram is not None:
    origin["unigram model"] = hashlib.sha256(data.unigram.model).hexdigest()
  return origin


def _as_texts(prompt: str | Sequence[str]) -> list[str]:
  if isinstance(prompt, str):
    return [prompt]
  if not isinstance(prompt, Sequence):
    raise UserError(f"prompt: expected a text, or several, got {prompt!r}")
  return list(prompt)


def _train_batches(config: ConfigDict, data: prepared.Prepared):
  settings, tokens = config.train, data.splits["train"]
  boundaries = None if data.boundaries is None else data.boundaries["train"]
  size = settings.batch_size, settings.window or config.model.max_length
  if settings.batches == "random_windows":
    return batches.RandomWindows(tokens, *size, config.seed, boundaries=boundaries)
  options: dict[str, Any] = dict(boundaries=boundaries, pad_id=generation.pad_id(config))
  if settings.batches == "shuffled_windows":
    return batches.ShuffledWindows(tokens, *size, config.seed, **options)
  return batches.ContiguousRows(tokens, *size, **options)
