r"""Compares our training with the authors' own code, with the same weights and batches.

  python benchmarks/trajectories.py --reference=FOLDER --ptb=FOLDER --vocabulary=FILE \
      --text8=FILE --work=runs/trajectories --only=same
  python benchmarks/trajectories_report.py runs/trajectories --out=results/trajectories

FOLDER of --reference has the authors' repositories (`benchmarks/authors.py` says which);
--ptb train.txt, valid.txt and test.txt of Penn Treebank; --vocabulary that of
bert-base-cased; --text8 the beginning of text8. Only missing runs are trained, with a file
in --work for each, so that it may be killed; --part=0/2 and --part=1/2 share it between
two processes, --list shows it. There are four experiments:

  same   Their initial weights, their batches in their order, their rates, no dropout, and
         for Gumbel boundaries the same noise: the loss of every update, theirs and ours.
         Also theirs with another number of threads, which is the floor: how far
         float32 alone drives two runs apart. And theirs with a fault, which must show.
         In "exact_adam" ours has Adam's corrections 1 - b**t as in PyTorch, from
         float64; optax computes them in float32, where 1 - 0.999 is off by 1.3e-5.
  seeds  Independent runs with dropout: 5 seeds per side. The validation split is scored
         by one program. Equivalence is tested by two one-sided t-tests (Welch's), with a
         margin of 2% of perplexity, or of 0.02 bits per character.
  sizes  Only ours: the difference between variants over sizes, at equal tokens. The largest
         Dispatcher and self-attention also at a lower rate, and the authors' Dispatcher.
  products  Only ours, without --reference: "seeds" in float32, with train.matmul_dtype=bfloat16,
         and with model.dtype=bfloat16, from the same weights on the same batches.

Models are 48 to 128 wide, with windows of 256 tokens; --small makes them, and the runs,
small enough to try the program.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import shutil
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpjax import files
from dpjax.errors import exit_on_user_error

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for configs, if the package is installed elsewhere

ATTENTION = ("dispatcher", "msa")
POOLING = ("none", "fixed4", "whitespace", "unigram", "entropy", "gumbel")
FAULTS = (  # (model, fault)
  ("dispatcher", "one_level_less"),
  ("dispatcher", "shifted_mask"),
  ("whitespace", "epsilon"),
  ("whitespace", "tanh_gelu"),
)
EXACT_ADAM = ("none", "fixed4", "whitespace", "unigram", "gumbel")  # above the floor else
SAME_STEPS, FAULT_STEPS, SEED_STEPS, SIZE_STEPS = 1000, 300, 1200, 1000
LENGTH, BATCH = 256, 4
SIZES = ((48, 3), (64, 3), (96, 4), (128, 6))  # width, layers
SEEDS = 5
PLATEAU_SEEDS = 8  # plateau lengths vary far more than losses
BFLOAT16 = {"products": "train.matmul_dtype", "dtype": "model.dtype"}  # side, setting
PEAK, POOLING_PEAK = 1e-4, 2.5e-4  # for "same": the papers'
OWN_PEAK = 1e-3  # for the others, which have few updates
LOWER_PEAK = 3e-4  # also, where the Dispatcher with 6 layers stays on a plateau at OWN_PEAK
CHARACTERS = {"train": 2_000_000, "valid": 100_000, "test": 100_000}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One training run.

  Attributes:
    experiment: "same", "seeds", "sizes" or "products".
    name: the model's name.
    side: "authors", "again" (other threads), "dpjax", "exact_adam", a fault of theirs;
      "float32" or a key of BFLOAT16.
    seed: the seed of all random draws.
    width: D.
    num_layers: the layers of all stacks together.
    num_steps: updates.
    peak: the peak learning rate, except for "same".
  """

  experiment: str
  name: str
  side: str
  seed: int = 0
  width: int = 128
  num_layers: int = 4
  num_steps: int = SAME_STEPS
  peak: float = OWN_PEAK

  @property
  def stem(self) -> str:
    """The stem of its file."""
    size = f"{self.width}x{self.num_layers}"
    stem = f"{self.experiment}-{self.name}-{self.side}-{self.seed}-{size}-{self.num_steps}"
    return stem if self.peak == OWN_PEAK else f"{stem}-{self.peak}"


def cells(small: bool = False) -> list[Cell]:
  """All runs of the experiments."""
  layers = {name: 4 if name in ATTENTION else 6 for name in ATTENTION + POOLING}
  found = [
    Cell("same", name, side, num_layers=depth)
    for name, depth in layers.items()
    for side in ("authors", "again", "dpjax")
  ]
  found += [Cell("same", name, "exact_adam", num_layers=layers[name]) for name in EXACT_ADAM]
  found += [
    Cell("same", name, fault, num_layers=layers[name], num_steps=FAULT_STEPS)
    for name, fault in FAULTS
  ]
  found += [
    Cell("seeds", name, side, seed, num_layers=layers[name], num_steps=SEED_STEPS)
    for name in (*ATTENTION, "none", "whitespace")
    for seed in range(SEEDS)
    for side in ("authors", "dpjax")
  ]
  found += [
    Cell("sizes", name, "dpjax", seed, *size, num_steps=SIZE_STEPS)
    for i, size in enumerate(SIZES)
    for name in (*ATTENTION, *POOLING)
    for seed in range(3 if i < 2 or name in ATTENTION else 1)
  ]
  found += [
    Cell("sizes", name, side, seed, *SIZES[-1], num_steps=SIZE_STEPS, peak=peak)
    for name, side, peak, seeds in (
      ("dispatcher", "authors", OWN_PEAK, PLATEAU_SEEDS),
      ("dispatcher", "dpjax", OWN_PEAK, PLATEAU_SEEDS),
      ("dispatcher", "dpjax", LOWER_PEAK, 3),
      ("msa", "dpjax", LOWER_PEAK, 3),
    )
    for seed in range(seeds)
  ]
  found += [
    Cell("products", name, side, seed, num_layers=depth, num_steps=SEED_STEPS)
    for seed in range(2)
    for name, depth in layers.items()
    for side in ("float32", *BFLOAT16)
  ]
  if small:
    found = [
      dataclasses.replace(cell, width=32 * (1 + (cell.width > 100)), num_layers=4, num_steps=40)
      for cell in found
      if cell.seed < 2
    ]
  return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class Texts:
  """The paths of the texts, and of what is derived from them in `work`."""

  work: Path
  ptb: Path
  vocabulary: Path
  text8: Path

  def config(self, cell: Cell):
    """The configuration of the papers, reduced to the cell's size."""
    import dpjax
    from configs import dispatcher_ptb, msa_ptb, pooling_text8

    if cell.name in ATTENTION:
      config = (dispatcher_ptb if cell.name == "dispatcher" else msa_ptb).get_config()
      config.data.path, config.data.tokenizer.file = str(self.ptb), str(self.vocabulary)
      config.model.num_layers = cell.num_layers
      config.model.feed_forward_width = cell.width
    else:
      config = pooling_text8.get_config(cell.name)
      config.data.path = str(self._text8())
      config.model.mixer.num_heads = 4
      config.model.num_layers = cell.num_layers
      if dpjax.config.is_pooled(config.model):
        config.model.first.num_layers = config.model.last.num_layers = 1
        config.model.num_layers -= 2
      config.model.feed_forward_width = 4 * cell.width
      config.train.schedule.warmup_steps = max(1, cell.num_steps // 50)
    config.data.data_dir = str(self.work / "data")
    config.seed = cell.seed
    config.model.width, config.model.max_length = cell.width, LENGTH
    train = config.train
    train.batch_size, train.learning_rate = BATCH, cell.peak
    train.num_steps, train.num_epochs = cell.num_steps, 0.0
    train.eval_every_steps, train.eval_every_epochs = cell.num_steps, 0.0
    train.checkpoint_every_steps = cell.num_steps
    train.log_every_steps = cell.num_steps
    config.eval.batch_size, config.eval.stride = 8, LENGTH // 2
    if cell.side in BFLOAT16:
      config.update_from_flattened_dict({BFLOAT16[cell.side]: "bfloat16"})
    return config

  def prepared(self, cell: Cell):
    """The tokens of the model's text."""
    from dpjax.runs import prepare

    return prepare.tokenize_only(self.config(cell), self.work / "prepared" / cell.stem)

  def batches(self, cell: Cell, reference: Path, data: Any) -> Iterator[dict[str, np.ndarray]]:
    """The batches of the authors' code."""
    import authors

    if cell.name in ATTENTION:
      return authors.rows_of(data.splits["train"], BATCH, LENGTH)
    characters = [data.tokenizer.decode([i]) for i in range(data.tokenizer.vocab_size)]
    return authors.windows_of(
      reference,
      cell.name,
      self._text8(),
      characters,
      batch_size=BATCH,
      length=LENGTH,
      seed=cell.seed,
    )

  def _text8(self) -> Path:
    """A folder with the three splits of a small piece."""
    folder = self.work / "text8"
    text, begin = self.text8.read_text(encoding="utf-8"), 0
    for split, size in CHARACTERS.items():
      if not (path := folder / f"{split}.txt").exists():
        files.write_file(path, text[begin : begin + size].encode())
      begin += size
    return folder


@dataclasses.dataclass(frozen=True)
class Bench:
  """Trains the cells."""

  texts: Texts
  reference: Path

  def __call__(self, cell: Cell) -> dict[str, Any]:
    """A run's losses and shares of boundaries, [num_steps], or its validation loss.

    Losses are in nats a token.
    """
    begin = time.perf_counter()
    if cell.experiment == "same":
      losses, p_ones = zip(*self._same(cell), strict=True)
      found: dict[str, Any] = {"losses": losses, "p_ones": p_ones}
    elif cell.side == "authors":
      found = {"valid": self._authors(cell)}
    else:
      found = self._dpjax(cell)
    return {**dataclasses.asdict(cell), **found, "seconds": time.perf_counter() - begin}

  def _same(self, cell: Cell) -> list[tuple[float, float]]:
    import authors
    import torch

    # The floor: float32 sums in another order.
    torch.set_num_threads(1 if cell.side == "again" else 2)
    data = self.texts.prepared(cell)
    model = self._model_of_authors(cell, data, dropout=0.0)
    peak = PEAK if cell.name in ATTENTION else POOLING_PEAK
    # A fault's shorter run is the beginning of the full one.
    rates = authors.rates(cell.name, peak, max(cell.num_steps, SAME_STEPS))[: cell.num_steps]
    batches = itertools.islice(self.texts.batches(cell, self.reference, data), cell.num_steps)
    if cell.side in ("dpjax", "exact_adam"):
      make_update = exact_adam if cell.side == "exact_adam" else optimizer_of_dpjax
      settings = self._settings(cell, data)
      return train_dpjax(model.state(), settings, batches, rates, make_update)
    if cell.side in authors.FAULTS:
      model.spoil(cell.side)
    return [model.update(batch, rate) for batch, rate in zip(batches, rates, strict=True)]

  def _authors(self, cell: Cell) -> float:
    import authors
    import torch

    from dpjax import interop
    from dpjax.models.build import build_model, with_vocabulary
    from dpjax.runs import Run

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    data = self.texts.prepared(cell)
    config = with_vocabulary(self.texts.config(cell), data.tokenizer)
    model = self._model_of_authors(cell, data, dropout=config.model.dropout)
    rates = authors.rates(cell.name, cell.peak, cell.num_steps)
    for batch, rate in zip(self.texts.batches(cell, self.reference, data), rates, strict=False):
      model.update(batch, rate)
    settings, params = interop.from_torch(model.state(), **self._settings(cell, data))
    run = Run(config, build_model(settings), params, data.tokenizer, 0, data)
    scores = run.score_split("valid")
    return math.log(scores["perplexity"])

  def _dpjax(self, cell: Cell) -> dict[str, Any]:
    import jax

    import dpjax
    from dpjax.models.build import build_model

    workdir = self.texts.work / f"run-{cell.stem}"
    shutil.rmtree(workdir, ignore_errors=True)
    run, _ = dpjax.train(self.texts.config(cell), workdir)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    found = {"valid": math.log(run.score_split("valid")["perplexity"]), "parameters": parameters}
    if cell.side == "dtype":
      run.config.model.dtype = "float32"
      alike = dataclasses.replace(run, model=build_model(run.config.model))
      found["valid_in_float32"] = math.log(alike.score_split("valid")["perplexity"])
    shutil.rmtree(workdir)
    return found

  def _model_of_authors(self, cell: Cell, data: Any, dropout: float) -> Any:
    import authors

    return authors.Authors(
      self.reference,
      cell.name,
      vocab_size=data.tokenizer.vocab_size,
      width=cell.width,
      num_layers=cell.num_layers,
      length=LENGTH,
      dropout=dropout,
      seed=cell.seed,
    )

  def _settings(self, cell: Cell, data: Any) -> dict[str, Any]:
    import authors

    return {"max_length": LENGTH, **authors.settings_of(cell.name, data.tokenizer.space_ids)}


def optimizer_of_dpjax(rate: Any, grad_clip_norm: float) -> Any:
  """Adam as `config.train.optimizer` builds it."""
  from dpjax.training import optimizers

  return optimizers.make_optimizer("adam", rate, eps=1e-8, grad_clip_norm=grad_clip_norm)


def exact_adam(rate: Any, grad_clip_norm: float) -> Any:
  """The same with 1 - b**t as in PyTorch: b is not rounded to float32."""
  import jax
  import jax.numpy as jnp
  import optax

  b1, b2, eps = 0.9, 0.999, 1e-8
  empty = optax.scale_by_adam(b1, b2, eps)

  def update(grads, state, params=None):
    del params
    mu = optax.tree.update_moment(grads, state.mu, b1, 1)
    nu = optax.tree.update_moment(grads, state.nu, b2, 2)
    count = state.count + 1
    first, second = (-jnp.expm1(count * jnp.float32(math.log(b))) for b in (b1, b2))
    steps = jax.tree.map(lambda m, n: m / first / (jnp.sqrt(n / second) + eps), mu, nu)
    return steps, optax.ScaleByAdamState(count, mu, nu)

  return optax.chain(
    optax.clip_by_global_norm(grad_clip_norm),
    optax.GradientTransformation(empty.init, update),
    optax.scale_by_learning_rate(rate),
  )


def train_dpjax(
  state: Mapping, settings: Mapping, batches: Iterator[dict], rates, make_update
) -> list[tuple[float, float]]:
  """The results of `authors.Authors.update` for ours, with their weights, batches and rates."""
  import jax
  import jax.numpy as jnp

  from dpjax import interop
  from dpjax.config import Train
  from dpjax.models import PoolingHints
  from dpjax.models.build import build_boundaries, build_model
  from dpjax.training import losses
  from dpjax.training.trainer import Trainer, TrainState

  config, params = interop.from_torch(state, **settings)
  switches: dict[str, dict[str, Any]] = {
    "unigram": dict(double_sigmoid=True),
    "entropy": dict(double_sigmoid=True, left=2),
    "gumbel": dict(prior=0.2),
  }
  config.boundaries.update(switches.get(config.boundaries.name, {}))
  model, objective = build_model(config), losses.Objective(build_boundaries(config))
  grad_clip_norm = 0.5 if config.boundaries.name == "none" and config.positions != "none" else 0.25
  rates = jnp.asarray(rates, jnp.float32)
  update = make_update(lambda k: rates[k], grad_clip_norm)

  @jax.jit
  def train(state, batch, noise):
    apply = partial(model.apply, pooling=PoolingHints(noise=noise))
    trainer = Trainer(types.SimpleNamespace(apply=apply), Train(), len(rates), update, objective)
    return trainer.step(state, batch)

  now = TrainState(jnp.zeros((), jnp.int32), params, update.init(params), jax.random.key(0))
  found = []
  for batch in batches:
    known = {name: x.astype(np.int32) for name, x in batch.items() if name != "noise"}
    known["weights"] = np.ones(known["tokens"].shape, np.float32)
    now, measured = train(now, known, batch.get("noise"))
    ends = float(measured.get("boundaries", 0.0) / measured["count"])
    found.append((float(measured["loss"]), ends))
  return found


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name in ("reference", "ptb", "vocabulary", "text8", "work"):
    is_required = name != "reference"
    parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), required=is_required)
  parser.add_argument("--only", default="", help="only runs whose name contains this")
  parser.add_argument("--part", default="0/1", help="I/N: every N-th of them, starting at the I-th")
  parser.add_argument("--list", action="store_true", help="list the runs without training")
  parser.add_argument("--small", action="store_true", help="small models and runs, as a trial")
  given = parser.parse_args(arguments)
  part, parts = map(int, given.part.split("/"))
  todo = [cell for cell in cells(given.small) if given.only in cell.stem][part::parts]
  todo = [cell for cell in todo if not (given.work / f"{cell.stem}.json").exists()]
  given.work.mkdir(parents=True, exist_ok=True)
  bench = Bench(Texts(given.work, given.ptb, given.vocabulary, given.text8), given.reference)
  for i, cell in enumerate(todo):
    print(f"{i + 1} of {len(todo)}: {cell.stem}", flush=True)
    if not given.list:
      if not given.reference and (cell.experiment == "same" or cell.side == "authors"):
        parser.error("reference: expected a folder with the authors' repositories, got nothing")
      with exit_on_user_error(vars(given)):
        found = json.dumps(bench(cell))
      (given.work / f"{cell.stem}.json").write_text(found, encoding="utf-8")


if __name__ == "__main__":
  main()
