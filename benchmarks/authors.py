"""The authors' own models, optimisers and batches, from checkouts of their repositories.

FOLDER holds clones of the two; no part of them belongs to this project:

  git clone https://github.com/fractalego/dispatcher        # 239608c
  git clone https://github.com/PiotrNawrot/dynamic-pooling  # 1e6f360

Their training scripts cannot be imported (one needs a GPU, the other a torchtext that no
longer exists), so the few lines of an update are repeated here. One change is for current
PyTorch: it passes `is_causal` to the layers of self-attention, which do not accept it.

B batch, T position.
"""

import contextlib
import functools
import importlib
import importlib.util
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dpjax.errors import UserError

try:
  import torch
  from torch import nn
except ImportError as error:
  raise ImportError("torch: expected PyTorch, no dependency of dpjax, got none") from error

ATTENTION = ("dispatcher", "msa")
# Where segments end -> the name in their code.
BOUNDARIES = {
  "none": "none",
  "fixed4": "fixed",
  "whitespace": "whitespaces",
  "unigram": "unigram",
  "entropy": "entropy",
  "gumbel": "gumbel",
}
NAMES = (*ATTENTION, *BOUNDARIES)
FIXED, SPIKES_LEFT, TEMPERATURE, PRIOR = 4, 2, 0.5, 0.2
INIT_STD = 0.02
PIECES = "tokenizer_data/spm/text8/spmunigram-5000.model"
FAULTS = ("epsilon", "tanh_gelu", "one_level_less", "shifted_mask")

Batch = dict[str, np.ndarray]


class Authors:
  """One of their models and its optimiser."""

  def __init__(
    self,
    reference: Path,
    name: str,
    *,
    vocab_size: int,
    width: int,
    num_layers: int,
    length: int,
    dropout: float = 0.0,
    seed: int = 0,
  ):
    """Builds and initialises the model as their scripts do.

    Args:
      reference: the folder with their repositories.
      name: one of `NAMES`.
      vocab_size: V.
      width: D; the Dispatcher's feed-forward layers have D, those of pooling 4 D.
      num_layers: the layers of all stacks; with pooling, the first and last have one.
      length: the longest T.
      dropout: the rate everywhere.
      seed: the seed of initial weights and dropout.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    self.name = name
    if name in ATTENTION:
      self.model = _attention(reference, name, vocab_size, width, num_layers, length, dropout)
      self.grad_clip_norm, eps = 0.5, 1e-8
    else:
      self.model = _pooling(reference, name, vocab_size, width, num_layers, dropout)
      self.grad_clip_norm, eps = 0.25, 1e-8
    self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.999), eps=eps)
    self.model.train()

  def state(self) -> dict[str, np.ndarray]:
    """The parameters by their names."""
    return {name: x.detach().numpy().copy() for name, x in self.model.state_dict().items()}

  def update(self, batch: Batch, rate: float) -> tuple[float, float]:
    """Performs one update of their training loop.

    Returns:
      The loss of the tokens before the update, in nats per token, and the share of positions
      at which a segment ends, 0 without pooling.
    """
    self.optimizer.param_groups[0]["lr"] = rate
    self.optimizer.zero_grad()
    tokens, targets = (torch.from_numpy(batch[x].T.astype(np.int64)) for x in ("tokens", "targets"))
    stats: Mapping[str, float] = {}
    if self.name in ATTENTION:
      logits = self.model(tokens)
      loss = total = nn.functional.cross_entropy(
        logits.view(-1, logits.shape[-1]), targets.reshape(-1)
      )
    else:
      boundaries, noise = (
        None if batch.get(x) is None else torch.from_numpy(batch[x])
        for x in ("boundaries", "noise")
      )
      # Without dropout, this function is called only for the Gumbel noise.
      drawn = mock.patch.object(torch, "rand", lambda *_, **__: noise)
      with contextlib.nullcontext() if noise is None else drawn:
        nats, stats, aux, _ = self.model(
          tokens, targets, None if boundaries is None else boundaries.T
        )
      loss = nats.mean()
      total = loss + aux
    total.backward()
    nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip_norm)
    self.optimizer.step()
    return loss.item(), stats.get("p_ones", 0.0)

  def spoil(self, fault: str) -> None:
    """Puts one of `FAULTS` into the model, to show that a comparison detects it."""
    if fault == "epsilon":
      for norm in self._all(nn.LayerNorm):
        norm.eps = 1e-6
    elif fault == "tanh_gelu":
      for gelu in self._all(nn.GELU):
        gelu.approximate = "tanh"
    elif fault == "one_level_less":
      for layer in self.model.transformer_encoder.layers:
        layer.self_attn._shifts = layer.self_attn._shifts[:-1]
    else:
      model = self.model
      length = 2**model._levels
      right = model._generate_square_subsequent_mask(length)
      model.src_mask = torch.cat([right[1:], right[-1:]])  # each level opens one token early

  def _all(self, kind: type) -> Iterator[Any]:
    found = [module for module in self.model.modules() if isinstance(module, kind)]
    if not found:
      raise ValueError(f"fault: expected one of a model with {kind.__name__}, got {self.name}")
    yield from found


def rates(name: str, peak: float, num_steps: int) -> np.ndarray:
  """The rate of each update, [num_steps].

  The Dispatcher's is constant. With pooling: the first update at the peak, a linear
  warm-up of a fiftieth of the updates, half a cosine.
  """
  if name in ATTENTION:
    return np.full(num_steps, peak)
  warmup = max(1, num_steps // 50)
  done = np.arange(num_steps)  # updates before this one
  after = peak * (1 + np.cos(np.pi * (done - warmup) / (num_steps - warmup))) / 2
  found = np.where(done < warmup, peak * done / warmup, after)
  found[0] = peak
  return found


def rows_of(tokens: np.ndarray, batch_size: int, length: int) -> Iterator[Batch]:
  """The Dispatcher's batches: B rows of the text, windows in order, repeated forever."""
  steps = len(tokens) // batch_size
  rows = np.asarray(tokens[: steps * batch_size]).reshape(batch_size, steps)
  while True:
    # A shorter last window would need another compilation: both sides leave it out.
    for begin in range(0, steps - length, length):
      yield {
        "tokens": rows[:, begin : begin + length],
        "targets": rows[:, begin + 1 : begin + length + 1],
      }


def windows_of(
  reference: Path,
  name: str,
  folder: Path,
  characters: Sequence[str],
  *,
  batch_size: int,
  length: int,
  seed: int = 0,
) -> Iterator[Batch]:
  """The batches of pooling, from their own iterator: rolled rows, windows in another order.

  Args:
    reference: as in `Authors`.
    name: one of `BOUNDARIES`.
    folder: contains train.txt, valid.txt and test.txt.
    characters: the character of each id; their own order is by frequency.
    batch_size: B.
    length: T.
    seed: the seed of rolls, orders and noise.
  """
  data_utils = _pooling_module(reference, "data_utils")
  corpus = data_utils.get_lm_corpus(str(folder), "text8")
  corpus.vocab.sym2idx = {character: i for i, character in enumerate(characters)}
  boundaries = BOUNDARIES[name]
  if boundaries in ("entropy", "gumbel"):
    boundaries = "none"  # found by the model
  train = corpus.get_iterator(
    "train",
    bsz=batch_size,
    tgt_len=length,
    ext_len=0,
    device="cpu",
    boundaries_type=boundaries,
    fixed_sf=FIXED,
    tokenizer_path=str(reference / "dynamic-pooling" / PIECES),
  )
  noise = np.random.default_rng(seed)
  epoch = 0
  while True:
    epoch += 1
    # Fixed boundaries are theirs for the full text, which a roll would move within windows.
    if name != "fixed4":
      train.roll(seed=seed + epoch)
    begins = list(range(0, train.data_len - 1 - length, length))
    random.Random(seed + epoch).shuffle(begins)
    for begin in begins:
      data, target, _, found = train.get_batch([begin])
      batch = {"tokens": data.T.numpy(), "targets": target.T.numpy()}
      if found is not None:
        batch["boundaries"] = found.T.numpy()
      if name == "gumbel":
        batch["noise"] = noise.uniform(1e-6, 1 - 1e-6, data.T.shape).astype(np.float32)
      yield batch


def settings_of(name: str, space_ids: tuple[int, ...]) -> dict[str, Any]:
  """The settings that `dpjax.interop.from_torch` cannot infer from their file."""
  if name in ATTENTION:
    return {}
  kind = {"fixed4": "fixed"}.get(name, name)
  own: Mapping[str, dict] = {
    "fixed": {"shortening_factor": FIXED},
    "whitespace": {"space_ids": space_ids},
    "gumbel": {"temperature": TEMPERATURE, "sample_boundaries": True, "space_ids": space_ids},
  }
  return {"boundaries": kind, **own.get(kind, {})}


def _attention(reference, name, vocab_size, width, num_layers, length, dropout) -> nn.Module:
  folder = reference / "dispatcher" / "dispatcher"
  if name == "dispatcher":
    module = _load(folder / "dispatcher_model.py")
    return module.DispatcherModel(vocab_size, width, 1, width, num_layers, length, dropout)
  module = _load(folder / "msa_model.py")

  forward = module.TransformerEncoderLayer.forward
  module.TransformerEncoderLayer.forward = lambda *arguments, is_causal=None, **named: forward(
    *arguments, **named
  )
  return module.TransformerModel(vocab_size, width, 1, width, num_layers, dropout)


def _pooling(reference, name, vocab_size, width, num_layers, dropout) -> nn.Module:
  hourglass = _pooling_module(reference, "hourglass")
  stacks = f"[{num_layers}, (0,), 0]" if name == "none" else f"[1, ({num_layers - 2},), 1]"
  model = hourglass.MemTransformerLM(
    n_token=vocab_size,
    n_head=4,
    d_model=width,
    d_head=width // 4,
    d_inner=4 * width,
    dropout=dropout,
    dropatt=dropout,
    pre_lnorm=False,
    model_config=stacks,
    activation_function="gelu",
    boundaries_type=BOUNDARIES[name],
    spikes_left=SPIKES_LEFT,
    temp=TEMPERATURE,
    prior=PRIOR,
  )
  draw = functools.partial(
    _pooling_module(reference, "utils").weights_init,
    args=types.SimpleNamespace(init="normal", init_std=INIT_STD),
  )
  model.apply(draw)
  model.word_emb.apply(draw)
  return model


def _pooling_module(reference: Path, name: str) -> Any:
  """Imports one of their modules; they import each other by name."""
  folder = str(reference / "dynamic-pooling")
  if not Path(folder).is_dir():
    raise UserError(f"reference: expected the authors' repository in {folder}, got no such folder")
  if folder not in sys.path:
    sys.path.insert(0, folder)
  return importlib.import_module(name)


def _load(file: Path) -> Any:
  spec = importlib.util.spec_from_file_location(f"authors_{file.stem}", file)
  if spec is None or spec.loader is None or not file.exists():
    raise UserError(f"reference: expected the authors' repository with {file}, got no such file")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
