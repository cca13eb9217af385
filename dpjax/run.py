"""A trained model with all that belongs to it: made by `train`, read by `load`.

`dpjax.workdir` says which files its folder has.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax import config as config_lib
from dpjax import ops
from dpjax import workdir as workdir_lib
from dpjax.config import ConfigDict
from dpjax.data import batches, prepared
from dpjax.decoding.generate import generate, generate_cached
from dpjax.interop.torch_checkpoints import from_torch
from dpjax.models.build import build_model
from dpjax.text.tokens import Tokenizer
from dpjax.training import (
  checkpoints,
  evaluation,
  loop,
  losses,
  metrics,
  optimizer,
  sharding,
)
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

  def score(self, text: str, *, window: int = 0, stride: int = 0) -> dict[str, float]:
    """Scores a text, its first token included.

    Args:
      text: not empty.
      window: tokens the model sees at once; 0 is the configuration's.
      stride: tokens it scores of them, the others being context; 0 is likewise.

    Returns:
      "nats_per_token", "perplexity", "perplexity_per_word", "bits_per_character" and
      "bits_per_byte" (`dpjax.training.metrics.text_scores`); with token pooling also
      those of `dpjax.training.metrics.boundary_scores`.

    Raises:
      ValueError: the text is empty, or the window is longer than the model's.
    """
    tokens = self.tokenizer.encode(text)
    if not len(tokens):
      raise ValueError(f"text: expected at least one token, got none in {text!r}")
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
      ValueError: there is no such split, or the window is longer than the model's.
    """
    if self.data is None or split not in self.data.splits:
      known = ", ".join(self.data.splits) if self.data else "none"
      raise ValueError(f"split: expected one of {known}, got {split}")
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

  def generate(
    self,
    prompt: str,
    *,
    length: int = 300,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    num_samples: int = 1,
  ) -> list[str]:
    """Continues a prompt.

    Args:
      prompt: at most as long as the model's window; "" starts a text.
      length: new tokens a sample.
      temperature: at least 0; 0 always takes the most likely token.
      top_k: draw from the k most likely tokens; 0 is all.
      top_p: draw from the most likely tokens that reach this probability, in (0, 1].
      seed: sample i of a seed is the same whatever `num_samples` is.
      num_samples: continuations.

    Returns:
      The continuations, without the prompt.

    Raises:
      ValueError: a setting is out of its range, or the prompt is too long.
    """
    config_lib.check_sampling(
      dict(length=length, temperature=temperature, top_k=top_k, top_p=top_p)
    )
    config_lib.check_seed(seed)
    if not isinstance(num_samples, int) or num_samples < 1:
      raise ValueError(f"num_samples: expected an integer of at least 1, got {num_samples}")
    _check_prompt(self.config, self.tokenizer, prompt, "prompt")
    ids = self.tokenizer.encode(prompt)
    if not len(ids):
      ids = [self.tokenizer.start_id]
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(
      jnp.arange(num_samples)
    )
    longest = self.config.model.max_length
    # A cache holds no more than the window, and pooled models have none yet.
    has_room = len(ids) + length - 1 <= longest
    is_cached = has_room and self.config.model.boundaries == "none"
    num_ids = len(ids)
    if is_cached:
      # Few lengths of prompts, so that few programs are compiled.
      ids = np.pad(ids, (0, min(_round_up(num_ids), longest) - num_ids))
    new = (self._generate_cached if is_cached else self._generate)(
      self.params,
      np.tile(np.asarray(ids, np.int32), (num_samples, 1)),
      *([np.full(num_samples, num_ids, np.int32)] if is_cached else []),
      keys,
      jnp.float32(temperature),
      jnp.float32(top_p),
      length=length,
      top_k=top_k,
    )
    return [self.tokenizer.decode(row) for row in np.asarray(new)]

  @cached_property
  def _generate_cached(self):
    def run(params, prompt, lengths, keys, temperature, top_p, *, length, top_k):
      def step(tokens, cache, lengths):
        output: Any = self.model.apply(
          {"params": params}, tokens, cache=cache, lengths=lengths
        )
        return output.logits, output.cache

      return generate_cached(
        step,
        self.model.init_cache(len(prompt)),
        prompt,
        lengths,
        keys,
        length=length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
      )

    return jax.jit(run, static_argnames=("length", "top_k"))

  @cached_property
  def _generate(self):
    def run(params, prompt, keys, temperature, top_p, *, length, top_k):
      drawn = {}
      if self.config.model.sample_boundaries:
        # The same for a place at every step, so that the past keeps its segments. Token 0
        # is given, so that no token is drawn from this key.
        drawn["boundary_noise"] = jax.vmap(
          lambda key: jax.random.uniform(
            jax.random.fold_in(key, 0), (self.config.model.max_length,), minval=2.0**-24
          )
        )(keys)

      def next_logits(tokens: jax.Array) -> jax.Array:
        noise = {name: noise_bt[:, : tokens.shape[1]] for name, noise_bt in drawn.items()}
        output: Any = self.model.apply({"params": params}, tokens, **noise)
        return output.logits

      return generate(
        next_logits,
        prompt,
        keys,
        length=length,
        window=self.config.model.max_length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        pad_id=_pad_id(self.config),
      )

    return jax.jit(run, static_argnames=("length", "top_k"))

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
      raise ValueError(
        f"eval.window: expected 1 to model.max_length = {longest}, got {window}"
      )
    return window, stride or min(settings.stride, window) or window

  def _score_split(self, params, split: str, window=0, stride=0, progress=False):
    data = self.data
    if data is None:
      raise ValueError("split: expected a run with data, got one without")
    boundaries = None if data.boundaries is None else data.boundaries[split]
    tokens, counts = data.splits[split], data.counts[split]
    return self._score(params, tokens, counts, window, stride, progress, boundaries)

  def _score(
    self, params, tokens, counts, window=0, stride=0, progress=False, boundaries=None
  ):
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
      pad_id=_pad_id(self.config),
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
  data = _prepare(config, Path(workdir))
  workdir_lib.claim(Path(workdir), config)
  return data


def train(config: ConfigDict, workdir: str | Path) -> tuple[Run, dict[str, float]]:
  """Trains what a configuration describes, or goes on where the folder's run stopped.

  Args:
    config: of `dpjax.config`.
    workdir: the run's folder; made where there is none.

  Returns:
    The run with the parameters that were best by validation, and their test scores.

  Raises:
    ValueError: `setting: expected ..., got ...`.
    dpjax.training.loop.NonFiniteError: the training diverged.
    dpjax.training.loop.Interrupted: a signal stopped it; it has saved.
  """
  workdir = Path(workdir)
  data = _prepare(config, workdir)
  given = config
  config = _with_vocabulary(config, data.tokenizer)
  settings = config.train
  model = build_model(config.model)
  train_batches = _train_batches(config, data)
  steps_per_epoch = train_batches.steps_per_epoch
  num_steps = config_lib.steps_in(settings, "num", steps_per_epoch=steps_per_epoch)
  update = _make_optimizer(config, num_steps)
  sharding.check_rows(settings.batch_size, settings.accumulate_steps)
  _check_prompt(config, data.tokenizer, config.sample.prompt, "sample.prompt")
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  workdir_lib.claim(workdir, given)
  run = Run(config, model, {}, data.tokenizer, 0, data, workdir)
  if jax.process_index() == 0:
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    print(
      f"{config.model.mixer}, {size:,} parameters; {data.name}, "
      f"{data.counts['train']['tokens']:,} training tokens, vocabulary of "
      f"{config.model.vocab_size:,}; {num_steps:,} steps on {jax.device_count()} "
      f"{jax.devices()[0].platform} device(s)"
    )
  loop.fit(
    model,
    update,
    train_batches,
    lambda params: run._score_split(params, "valid"),
    workdir=workdir,
    num_steps=num_steps,
    eval_every_steps=config_lib.steps_in(
      settings, "eval_every", steps_per_epoch=steps_per_epoch
    ),
    log_every_steps=settings.log_every_steps,
    median_every_steps=settings.median_every_steps,
    checkpoint_every_steps=settings.checkpoint_every_steps,
    keep_checkpoints=settings.keep_checkpoints,
    accumulate_steps=settings.accumulate_steps,
    parameters=settings.parameters,
    objective=_objective(config),
    capacity=_capacity(config),
    seed=config.seed,
    initial=_initial(config, shapes["params"], data) if settings.initial_run else None,
    meta={"config": config.to_dict()},
    origin=_origin(data),
  )
  best = load(workdir)
  scores = best.score_split("test", progress=True)
  best.write_scores("test", scores)
  return best, scores


def load(workdir: str | Path, step: int | None = None) -> Run:
  """Reads a run from its folder.

  Args:
    workdir: of `train`.
    step: of the checkpoint; None is the best by validation.

  Returns:
    The run. A checkpoint that is damaged is named in a warning, and the one before it
    is read, unless `step` asks for it.

  Raises:
    ValueError: there is no run, no such step, or no checkpoint that is whole.
  """
  workdir = Path(workdir)
  config = workdir_lib.read_config(workdir)
  data = prepared.open_prepared(workdir / "data")
  config = _with_vocabulary(config, data.tokenizer)
  model = build_model(config.model)
  # The state's shapes do not depend on the length of the run.
  update = _make_optimizer(config, num_steps=2**31)
  abstract = step_lib.abstract_state(model, update, config.seed, sharding.make_mesh())
  with checkpoints.Checkpoints(workdir / "checkpoints") as saved:
    origin = {"tokenizer": data.tokenizer.to_json()}
    found = saved.restore_step(abstract, step, origin)
  return Run(
    config, model, found.state.params, data.tokenizer, found.step, data, workdir
  )


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
    raise ValueError(
      "torch_checkpoint: expected PyTorch to read it with, got none; pip install torch"
    ) from error
  try:
    content = torch.load(file, map_location="cpu", weights_only=True)
  # A damaged file shows as any of several types.
  except Exception as error:
    raise ValueError(
      f"torch_checkpoint: expected a file of the authors' code, got {file} ({error})"
    ) from error
  config_lib.check(config)
  settings = config.model
  if settings.mixer == "relative_attention":
    raise ValueError(
      "model.mixer: expected one of the Dispatcher's authors for a torch_checkpoint, got "
      "relative_attention; dpjax.interop.from_torch reads it, but its numbers of the "
      "characters are in no file"
    )
  model_config, params = from_torch(
    content,
    num_heads=settings.num_heads,
    variant="multihead" if settings.mixer == "dispatcher_multihead" else "paper",
    max_length=settings.max_length,
  )
  if model_config.mixer != settings.mixer:
    raise ValueError(
      f"model.mixer: expected the file's {model_config.mixer}, got {settings.mixer}"
    )
  data = workdir_lib.prepare_data(config, Path(folder) / "data")
  for key in ("dtype", "implementation", "remat", "scan_layers"):
    model_config[key] = settings[key]
  config = config.copy_and_resolve_references()
  config.model = model_config
  config = _with_vocabulary(config, data.tokenizer)
  return Run(config, build_model(model_config), params, data.tokenizer, 0, data)


def table(scores: Mapping[str, float]) -> str:
  """Scores for people, a line each."""
  return "\n".join(
    f"  {name.replace('_', ' '):22s}{value:12.6g}" for name, value in scores.items()
  )


def _with_vocabulary(config: ConfigDict, tokenizer: Tokenizer) -> ConfigDict:
  size = config.model.vocab_size
  if size not in (0, tokenizer.vocab_size):
    raise ValueError(
      f"model.vocab_size: expected 0 or the tokenizer's {tokenizer.vocab_size}, got {size}"
    )
  kind, space_ids = config.model.boundaries, config.model.space_ids
  space_ids = space_ids or tokenizer.space_ids
  if kind == "whitespace" and not space_ids:
    raise ValueError(
      "data.tokenizer: expected one with a space or a line end among its tokens, for the "
      f"boundaries whitespace, got {tokenizer.kind} without"
    )
  if max(space_ids, default=0) >= tokenizer.vocab_size:
    raise ValueError(
      f"model.space_ids: expected ids below {tokenizer.vocab_size}, got {space_ids}"
    )
  config = config.copy_and_resolve_references()
  config.model.vocab_size = tokenizer.vocab_size
  if kind in config_lib.ONLY_FOR_BOUNDARIES["model.space_ids"]:
    config.model.space_ids = space_ids
  return config


def _objective(config: ConfigDict) -> losses.Objective:
  return losses.Objective(
    boundaries=config.model.boundaries,
    prior=config.train.boundary_prior,
    entropy_left=config.train.entropy_left,
    double_sigmoid=config.train.double_sigmoid,
    space_ids=tuple(config.model.space_ids),
  )


def _capacity(config: ConfigDict) -> Callable[[Mapping[str, np.ndarray]], int | None]:
  """Batch -> how long its rows become where tokens alone tell it; None: the device says."""
  # Several processes would have to agree on it.
  if config.model.boundaries != "whitespace" or jax.process_count() > 1:
    return lambda batch: None

  def from_spaces(batch: Mapping[str, np.ndarray]) -> int:
    is_space = np.isin(batch["tokens"], config.model.space_ids)
    needed = int(is_space.sum(axis=1).max()) + 1
    sizes = ops.capacities(is_space.shape[1] + 1, config.model.num_capacities)
    return next(size for size in sizes if size >= needed)

  return from_spaces


def _prepare(config: ConfigDict, workdir: Path) -> prepared.Prepared:
  """The tokens of a run, made unless it goes on; before that, what can be refused."""
  config_lib.check(config)
  goes_on = workdir_lib.check(workdir, config)
  first = config.train.initial_run
  if first and not goes_on and not (Path(first) / "checkpoints").is_dir():
    raise ValueError(f"train.initial_run: expected the folder of a run, got {first}")
  return workdir_lib.prepare_data(config, workdir / "data", anew=not goes_on)


def _initial(config: ConfigDict, shapes, data: prepared.Prepared):
  """What reads the parameters of another run, if they fit this one."""
  folder = config.train.initial_run

  def read() -> dict:
    try:
      other = load(folder)
    except ValueError as error:
      raise ValueError(f"train.initial_run: expected a run that can be read, got {folder} "
                       f"({error})") from error
    if other.tokenizer.to_json() != data.tokenizer.to_json():
      raise ValueError(
        f"train.initial_run: expected a run with the vocabulary of this one, got {folder} "
        f"with another ({other.tokenizer.kind}, {other.tokenizer.vocab_size:,} entries)"
      )
    expected, found = (
      {jax.tree_util.keystr(path): tuple(leaf.shape)
       for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
      for params in (shapes, other.params)
    )
    wrong = [key for key in sorted(expected | found) if expected.get(key) != found.get(key)]
    if wrong:
      raise ValueError(
        f"train.initial_run: expected parameters of this model, {wrong[0]} of the shape "
        f"{expected.get(wrong[0])}, got {found.get(wrong[0])} in {folder}"
      )
    return other.params

  return read


def _round_up(number: int) -> int:
  """To a power of two."""
  return 1 << (number - 1).bit_length()


def _origin(data: prepared.Prepared) -> dict[str, str]:
  """What has to stay the same while a run goes on, and is in no setting."""
  origin = {
    "tokenizer": data.tokenizer.to_json(),
    "training text": data.counts["train"]["sha256"],
  }
  if data.unigram is not None:
    origin["unigram model"] = hashlib.sha256(data.unigram.model).hexdigest()
  return origin


def _check_prompt(config: ConfigDict, tokenizer, prompt: str, setting: str) -> None:
  length, longest = len(tokenizer.encode(prompt)), config.model.max_length
  if length > longest:
    raise ValueError(
      f"{setting}: expected 1 to {longest} tokens (the model's window), got {length}"
    )


def _train_batches(config: ConfigDict, data: prepared.Prepared):
  settings, tokens = config.train, data.splits["train"]
  boundaries = None if data.boundaries is None else data.boundaries["train"]
  size = settings.batch_size, settings.window or config.model.max_length
  if settings.batches == "random_windows":
    return batches.RandomWindows(tokens, *size, config.seed, boundaries=boundaries)
  options: dict[str, Any] = dict(boundaries=boundaries, pad_id=_pad_id(config))
  if settings.batches == "shuffled_windows":
    return batches.ShuffledWindows(tokens, *size, config.seed, **options)
  return batches.ContiguousRows(tokens, *size, **options)


def _pad_id(config: ConfigDict) -> int:
  """A token that ends no word: else windows that are not full would need more segments."""
  return next(i for i in itertools.count() if i not in config.model.space_ids)


def _make_optimizer(config: ConfigDict, num_steps: int):
  settings = config.train
  rate = optimizer.learning_rate(
    settings.schedule,
    settings.learning_rate,
    warmup_steps=settings.warmup_steps,
    num_steps=num_steps,
  )
  return optimizer.make_optimizer(
    settings.optimizer,
    rate,
    b1=settings.b1,
    b2=settings.b2,
    eps=settings.eps,
    weight_decay=settings.weight_decay,
    clip_norm=settings.clip_norm,
  )
