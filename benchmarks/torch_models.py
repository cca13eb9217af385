"""The papers' models in PyTorch, for comparison with dpjax.

  python benchmarks/torch_models.py '{"model": {"mixer": "dispatcher", ...}, ...}'

builds a model with its optimiser, prints a line of JSON when it is ready, and for every line that
it reads runs a training step and prints its cost (`harness.serve`). `benchmarks/step.py`
starts it.

Written from the papers, as their readers would: PyTorch modules, run eagerly,
without custom kernels. Where PyTorch has a fused function for a formula it is used:

  Dispatcher     Alg. 1: `torch.roll`, times the masked gates; a dropped level is skipped
  attention      `F.scaled_dot_product_attention`, which fuses what it can on the device
  relative       Transformer-XL's, scores by content and by distance, and their shift
  Extractors     "sum" over the lags as in the equations; "convolution", `F.conv1d`, for ME
                 the product with a Toeplitz matrix; or "fft" (not SHE)
  pooling        by the dense matrix that assigns tokens to segments

Modules have the names of dpjax's parameters, with the number of the layer for `blocks_0`; settings
have those of `config.model`.

Sources: the Dispatcher, aclanthology.org/2022.clasp-1.3; the Extractors, arXiv:2308.07661;
dynamic token pooling, arXiv:2211.09761; Transformer-XL, arXiv:1901.02860.

B batch, T position, D width, H head, E feature of a head, S segments and the null group.
"""

import json
import math
import os
import sys
import time

import numpy as np
from harness import draw_text, peak_mib, serve

try:
  import torch
  from torch import nn
  from torch.nn import functional as F
except ImportError as error:
  raise ImportError("torch: expected PyTorch, no dependency of dpjax, got none") from error

EXTRACTORS = ("she", "he", "we", "me")


def linear(inputs, outputs, settings, bias=True):
  """PyTorch's own initial values, or N(0, init_std**2) and biases of 0."""
  layer = nn.Linear(inputs, outputs, bias=bias)
  if settings["init_std"]:
    nn.init.normal_(layer.weight, std=settings["init_std"])
    if bias:
      nn.init.zeros_(layer.bias)
  return layer


def layer_norm(settings):
  norm = nn.LayerNorm(settings["width"])
  nn.init.normal_(norm.weight, mean=1.0, std=settings["norm_init_std"])
  return norm


def embedding_init(weight, settings):
  if settings["init_std"]:
    nn.init.normal_(weight, std=settings["init_std"])
  else:
    nn.init.uniform_(weight, -0.1, 0.1)


class Dispatcher(nn.Module):
  """Alg. 1, with one head."""

  def __init__(self, settings):
    super().__init__()
    mixer = settings["mixer"]
    if mixer["num_heads"] != 1:
      raise ValueError(f"num_heads: expected 1 of a Dispatcher here, got {mixer['num_heads']}")
    width, length = settings["width"], settings["max_length"]
    self.num_levels = mixer["num_levels"] or max(1, (length - 1).bit_length())
    self.level_dropout = mixer["level_dropout"]
    self.values = linear(width, width, settings, bias=False)
    self.gates = linear(width, self.num_levels, settings, bias=False)
    self.out = linear(width, width, settings, bias=False)
    shifts = 2 ** torch.arange(self.num_levels)
    mask_tk = torch.arange(length)[:, None] >= shifts
    self.register_buffer("mask_tk", mask_tk.float(), persistent=False)

  def forward(self, x_btd, _=None):
    """[B, T, D] -> [B, T, D]."""
    length = x_btd.shape[1]
    gates_btk = torch.sigmoid(self.gates(x_btd)) * self.mask_tk[:length]
    v_btd = self.values(x_btd)
    for k in range(self.num_levels):
      if 2**k >= length:
        break
      # Drawn on the CPU, so as not to wait for the accelerator.
      if self.training and self.level_dropout and torch.rand(()) < self.level_dropout:
        continue
      v_btd = v_btd + gates_btk[:, :, k, None] * torch.roll(v_btd, 2**k, dims=1)
    return self.out(v_btd)


class SelfAttention(nn.Module):
  """MSA by `F.scaled_dot_product_attention`."""

  def __init__(self, settings):
    super().__init__()
    width, mixer = settings["width"], settings["mixer"]
    bias, self.num_heads, self.dropout = mixer["use_bias"], mixer["num_heads"], mixer["dropout"]
    self.queries_keys_values = linear(width, 3 * width, settings, bias)
    self.out = linear(width, width, settings, bias)
    if not settings["init_std"]:
      nn.init.xavier_uniform_(self.queries_keys_values.weight)
    if bias:
      nn.init.zeros_(self.queries_keys_values.bias)
      nn.init.zeros_(self.out.bias)

  def forward(self, x_btd, _=None):
    """[B, T, D] -> [B, T, D]."""
    shape = (*x_btd.shape[:2], 3, self.num_heads, -1)
    q_bhte, k_bhte, v_bhte = self.queries_keys_values(x_btd).view(shape).permute(2, 0, 3, 1, 4)
    y_bhte = F.scaled_dot_product_attention(
      q_bhte,
      k_bhte,
      v_bhte,
      is_causal=True,
      dropout_p=self.dropout if self.training else 0.0,
    )
    return self.out(y_bhte.transpose(1, 2).reshape(x_btd.shape))


class RelativePositions(nn.Module):
  """The table of distances, and the two biases that all layers share."""

  def __init__(self, settings):
    super().__init__()
    width, heads = settings["width"], settings["mixer"]["num_heads"]
    shape = heads, width // heads
    self.content_bias = nn.Parameter(settings["init_std"] * torch.randn(shape))
    self.position_bias = nn.Parameter(settings["init_std"] * torch.randn(shape))
    self.dropout = nn.Dropout(settings["dropout"])
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    self.register_buffer("frequencies", frequencies.float(), persistent=False)

  def forward(self, length):
    """[T, D], the farthest distance first."""
    distances = torch.arange(length - 1, -1, -1.0, device=self.frequencies.device)
    angles = distances[:, None] * self.frequencies
    table_td = torch.cat([angles.sin(), angles.cos()], dim=1)
    return self.dropout(table_td), self.content_bias, self.position_bias


class RelativeAttention(nn.Module):
  """That of Transformer-XL, without memory."""

  def __init__(self, settings):
    super().__init__()
    width = settings["width"]
    self.num_heads = settings["mixer"]["num_heads"]
    self.dropout = nn.Dropout(settings["mixer"]["dropout"])
    self.queries_keys_values = linear(width, 3 * width, settings)
    self.distances = linear(width, width, settings)
    self.out = linear(width, width, settings)

  def forward(self, x_btd, positions):
    """[B, T, D] -> [B, T, D]."""
    batch, length, width = x_btd.shape
    heads, features = self.num_heads, width // self.num_heads
    table_td, content_bias, position_bias = positions
    qkv = self.queries_keys_values(x_btd).view(batch, length, 3, heads, features)
    q_bthe, k_bthe, v_bthe = qkv.unbind(2)
    r_rhe = self.distances(table_td).view(length, heads, features)
    by_content = torch.einsum("bthe,bshe->bhts", q_bthe + content_bias, k_bthe)
    by_distance = torch.einsum("bthe,rhe->bhtr", q_bthe + position_bias, r_rhe)
    scores_bhts = (by_content + self.shift(by_distance)) * features**-0.5
    is_future = torch.ones(length, length, dtype=torch.bool, device=x_btd.device).triu(1)
    scores_bhts = scores_bhts.masked_fill(is_future, -math.inf)
    weights_bhts = self.dropout(scores_bhts.softmax(dim=-1))
    y_bthe = torch.einsum("bhts,bshe->bthe", weights_bhts, v_bthe)
    return self.out(y_bthe.reshape(x_btd.shape))

  @staticmethod
  def shift(scores_bhtr):
    """Shifts row t left by T - 1 - t: the paper's App. B."""
    batch, heads, length, _ = scores_bhtr.shape
    padded = F.pad(scores_bhtr, (1, 0)).view(batch, heads, length + 1, length)
    return padded[:, :, 1:]


def sum_of_lags(x_btd, taps):
  """Eqs. 23, 26, 28 and 29 as they stand."""
  length = x_btd.shape[1]

  def term(lag):
    past, tap = x_btd[:, : length - lag], taps[lag]
    return F.pad(past @ tap if tap.ndim == 2 else past * tap, (0, 0, lag, 0))

  y_btd = term(0)
  for lag in range(1, length):
    y_btd = y_btd + term(lag)
  return y_btd


def convolution(x_btd, taps):
  """The same by `F.conv1d`; for scalars by their Toeplitz matrix."""
  _, length, width = x_btd.shape
  taps = taps[:length]
  if taps.ndim == 1:
    place = torch.arange(length, device=x_btd.device)
    lags_ts = place[:, None] - place
    return torch.where(lags_ts >= 0, taps[lags_ts.clamp(min=0)], 0.0) @ x_btd
  padded_bdt = F.pad(x_btd.transpose(1, 2), (length - 1, 0))
  if taps.ndim == 3:
    return F.conv1d(padded_bdt, taps.flip(0).permute(2, 1, 0)).transpose(1, 2)
  kernel_d1t = taps.flip(0).T[:, None]
  return F.conv1d(padded_bdt, kernel_d1t, groups=width).transpose(1, 2)


def fourier(x_btd, taps):
  """The same by Fourier transforms over time."""
  length = x_btd.shape[1]
  taps = taps[:length]
  # Half precision does not support transforms of all lengths.
  with torch.autocast(x_btd.device.type, enabled=False):
    f_bfd = torch.fft.rfft(x_btd.float(), 2 * length, dim=1)
    if taps.ndim == 3:
      g_fde = torch.fft.rfft(taps, 2 * length, dim=0)
      product_bfe = torch.einsum("bfd,fde->bfe", f_bfd, g_fde)
    else:
      product_bfe = f_bfd * torch.fft.rfft(taps.view(length, -1), 2 * length, dim=0)
    return torch.fft.irfft(product_bfe, 2 * length, dim=1)[:, :length]


EXTRACTIONS = {"sum": sum_of_lags, "convolution": convolution, "fft": fourier}


class Extractor(nn.Module):
  """SHE, HE, WE, ME."""

  def __init__(self, settings):
    super().__init__()
    width, length = settings["width"], settings["max_length"]
    mixer = settings["mixer"]
    name = mixer["name"]
    self.extract = EXTRACTIONS[settings["extraction"]]
    shape = {"she": (length, width, width), "me": (length,)}.get(name, (length, width))
    fan_in = length * (width if name == "she" else 1)
    self.taps = nn.Parameter(torch.empty(shape))
    if settings["init_std"]:
      nn.init.normal_(self.taps, std=settings["init_std"])
    else:
      nn.init.uniform_(self.taps, -(fan_in**-0.5), fan_in**-0.5)

    def square(is_there):
      return linear(width, width, settings, bias=False) if is_there else None

    self.values = square(name == "he")
    self.adjustment = square(mixer.get("adjustment"))
    self.out = square(mixer.get("output_projection"))

  def forward(self, x_btd, _=None):
    """[B, T, D] -> [B, T, D]."""
    y_btd = self.extract(x_btd if self.values is None else self.values(x_btd), self.taps)
    if self.adjustment is not None:
      y_btd = self.adjustment(x_btd) * y_btd
    return y_btd if self.out is None else self.out(y_btd)


MIXERS = {
  "dispatcher": Dispatcher,
  "attention": SelfAttention,
  "relative_attention": RelativeAttention,
  **dict.fromkeys(EXTRACTORS, Extractor),
}


class FeedForward(nn.Module):
  """W2 drop(activation(W1 x + b1)) + b2."""

  def __init__(self, settings):
    super().__init__()
    width, hidden = settings["width"], settings["feed_forward_width"]
    self.hidden = linear(width, hidden, settings)
    self.activation = {"relu": nn.ReLU, "gelu": nn.GELU}[settings["activation"]]()
    self.dropout = nn.Dropout(settings["hidden_dropout"])
    self.out = linear(hidden, width, settings)

  def forward(self, x_btd):
    """[B, T, D] -> [B, T, D]."""
    return self.out(self.dropout(self.activation(self.hidden(x_btd))))


class Block(nn.Module):
  """A mixer and a feed-forward network, the norm after or before each."""

  def __init__(self, settings):
    super().__init__()
    self.mixer = MIXERS[settings["mixer"]["name"]](settings)
    self.feed_forward = FeedForward(settings)
    self.mixer_norm, self.feed_forward_norm = layer_norm(settings), layer_norm(settings)
    self.dropout = nn.Dropout(settings["dropout"])
    self.is_post = settings["norm_position"] == "post"

  def forward(self, x, positions=None):
    """[B, T, D] -> [B, T, D]."""
    if self.is_post:
      x = self.mixer_norm(x + self.dropout(self.mixer(x, positions)))
      return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))
    x = x + self.dropout(self.mixer(self.mixer_norm(x), positions))
    return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def blocks(settings, number):
  return nn.ModuleList(Block(settings) for _ in range(number))


def run_blocks(layers, x_btd, make_positions):
  positions = None if make_positions is None else make_positions(x_btd.shape[1])
  for layer in layers:
    x_btd = layer(x_btd, positions)
  return x_btd


def shared_positions(settings):
  is_relative = settings["mixer"]["name"] == "relative_attention"
  return RelativePositions(settings) if is_relative else None


class Stage(nn.Module):
  """Sec. 3 of the pooling paper: mean pooling between fixed positions or spaces."""

  def __init__(self, settings):
    super().__init__()
    self.boundaries = settings["boundaries"]
    self.kind = self.boundaries["name"]
    if self.kind not in ("fixed", "whitespace"):
      raise ValueError(f"boundaries: expected fixed or whitespace here, got {self.kind}")
    self.first = blocks(settings, settings["first"]["num_layers"])
    self.last = blocks(settings, settings["last"]["num_layers"])
    self.null_group = nn.Parameter(torch.randn(settings["width"]))
    self.inner_norm = layer_norm(settings)
    self.shared_positions = shared_positions(settings)

  def forward(self, x_btd, tokens_bt, layers):
    """[B, T, D] -> [B, T, D], with `layers` on the segments."""
    h_btd = run_blocks(self.first, x_btd, self.shared_positions)
    b_bt = self.find_boundaries(tokens_bt)
    ended_bt = b_bt.cumsum(dim=1)
    # Token t is in segment i if i segments ended before it; the last one is not closed.
    segments = torch.arange(int(ended_bt[:, -1].max()), device=tokens_bt.device)
    member_bts = ((ended_bt - b_bt)[..., None] == segments).to(h_btd.dtype)
    weights_bts = member_bts / member_bts.sum(dim=1, keepdim=True).clamp(min=1)
    s_bsd = torch.einsum("bts,btd->bsd", weights_bts, h_btd)
    null_b1d = self.null_group.to(s_bsd.dtype).expand(len(s_bsd), 1, -1)
    s_bsd = self.inner_norm(torch.cat([null_b1d, s_bsd], dim=1))
    s_bsd = run_blocks(layers, s_bsd, self.shared_positions)
    places = torch.arange(len(segments) + 1, device=tokens_bt.device)
    reads_bts = (ended_bt[..., None] == places).to(s_bsd.dtype)
    u_btd = torch.einsum("bts,bsd->btd", reads_bts, s_bsd)
    return run_blocks(self.last, u_btd + h_btd, self.shared_positions)

  def find_boundaries(self, tokens_bt):
    """[B, T], 1 where a segment ends."""
    if self.kind == "whitespace":
      spaces = torch.tensor(self.boundaries["space_ids"], device=tokens_bt.device)
      return torch.isin(tokens_bt, spaces).long()
    b_bt = torch.zeros_like(tokens_bt)
    factor = self.boundaries["shortening_factor"]
    b_bt[:, factor - 1 :: factor] = 1
    return b_bt


def sinusoidal_positions(length, width):
  angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
  table = torch.empty(length, width)
  table[:, 0::2] = torch.from_numpy(np.sin(angles))
  table[:, 1::2] = torch.from_numpy(np.cos(angles))[:, : width // 2]
  return table


class Embedding(nn.Module):
  """Tokens times sqrt(D) and positions; with "none" just the tokens, not scaled."""

  def __init__(self, settings):
    super().__init__()
    size, width, length = (settings[key] for key in ("vocab_size", "width", "max_length"))
    self.tokens = nn.Embedding(size, width)
    embedding_init(self.tokens.weight, settings)
    self.kind, self.scale = settings["positions"], width**0.5
    if self.kind == "learned":
      self.positions = nn.Parameter(torch.empty(length, width))
      embedding_init(self.positions, settings)
    if self.kind == "sinusoidal":
      table = sinusoidal_positions(length, width)
      self.register_buffer("table", table, persistent=False)
    self.dropout = nn.Dropout(settings["dropout"])

  def forward(self, tokens_bt):
    """[B, T, D] -> [B, T, D]."""
    length = tokens_bt.shape[1]
    x_btd = self.tokens(tokens_bt)
    if self.kind == "learned":
      x_btd = (x_btd + self.positions[:length]) * self.scale
    if self.kind == "sinusoidal":
      x_btd = x_btd * self.scale + self.table[:length]
    return self.dropout(x_btd)


class LanguageModel(nn.Module):
  """[B, T] token ids -> logits [B, T, V].

  Args:
    settings: all of `config.model`, and "extraction", one of `EXTRACTIONS`;
      its default is "convolution".
  """

  def __init__(self, settings):
    super().__init__()
    settings = {"extraction": "convolution"} | dict(settings)
    mixer = settings["mixer"]["name"]
    if mixer not in MIXERS:
      raise ValueError(f"mixer: expected one of {', '.join(MIXERS)}, got {mixer}")
    self.embedding = Embedding(settings)
    self.is_pooled = settings["boundaries"]["name"] != "none"
    if self.is_pooled:
      self.stages_0 = Stage(settings)
      longer = settings | {"max_length": settings["max_length"] + 1}
      self.layers = blocks(longer, settings["num_layers"])
    else:
      self.layers = blocks(settings, settings["num_layers"])
      self.shared_positions = shared_positions(settings)
    self.final_norm = layer_norm(settings) if settings["norm_position"] == "pre" else None
    self.logits = nn.Linear(settings["width"], settings["vocab_size"])
    embedding_init(self.logits.weight, settings)
    # Those of dpjax also begin at 0.
    nn.init.zeros_(self.logits.bias)

  def forward(self, tokens_bt):
    """[B, T] token ids -> [B, T, V]."""
    x_btd = self.embedding(tokens_bt)
    if self.is_pooled:
      x_btd = self.stages_0(x_btd, tokens_bt, self.layers)
    else:
      x_btd = run_blocks(self.layers, x_btd, self.shared_positions)
    if self.final_norm is not None:
      x_btd = self.final_norm(x_btd)
    return self.logits(x_btd)


class Runner:
  """A model, its optimiser and a batch.

  Args:
    settings: "model", for `LanguageModel`; "optimizer", with "name", "adam" or "adamw",
      "learning_rate", "grad_clip_norm", 0 for none, and adamw's "weight_decay"; "batch", the number
      of rows; "device", "cpu" or "cuda"; "dtype", "float32" or "bfloat16" by autocast;
      "compile", whether by `torch.compile`.
  """

  def __init__(self, settings):
    torch.manual_seed(0)
    # JAX's default for float32 on a GPU.
    torch.set_float32_matmul_precision("high")
    self.device = torch.device(settings["device"])
    self.dtype = getattr(torch, settings["dtype"])
    model = LanguageModel(settings["model"]).to(self.device)
    self.parameters = list(model.parameters())
    optimizer = settings["optimizer"]
    self.grad_clip_norm = optimizer["grad_clip_norm"]
    kind, more = torch.optim.Adam, {"fused": True}
    if optimizer["name"] == "adamw":
      kind, more = torch.optim.AdamW, more | {"weight_decay": optimizer["weight_decay"]}
    self.optimizer = kind(self.parameters, lr=optimizer["learning_rate"], **more)
    self.model = torch.compile(model) if settings["compile"] else model
    of_model = settings["model"]
    text = draw_text(settings["batch"], of_model["max_length"], of_model["vocab_size"])
    text = torch.from_numpy(text).long().to(self.device)
    self.tokens, self.targets = text[:, :-1], text[:, 1:]

  def facts(self):
    """The content of the first line."""
    self.ready = peak_mib()
    return {
      "parameters": sum(x.numel() for x in self.parameters),
      "threads": torch.get_num_threads(),
      "version": torch.__version__,
    }

  def run(self):
    """A step's time, the loss before it, and the peak memory so far."""
    self.wait()
    start = time.perf_counter()
    loss = self.train()
    self.wait()
    seconds = time.perf_counter() - start
    # The first step creates Adam's moments, which dpjax has before.
    moments = 2 * 4 * sum(x.numel() for x in self.parameters) / 2**20
    grown = peak_mib() - self.ready - moments
    if self.device.type == "cuda":
      grown = torch.cuda.max_memory_allocated() / 2**20
    return {"seconds": seconds, "loss": loss.item(), "grown_mib": grown}

  def train(self):
    """Runs one step; returns the loss before it."""
    self.model.train()
    self.optimizer.zero_grad()
    loss = self.loss()
    loss.backward()
    if self.grad_clip_norm:
      nn.utils.clip_grad_norm_(self.parameters, self.grad_clip_norm)
    self.optimizer.step()
    return loss.detach()

  def loss(self):
    """The mean over the tokens of the batch."""
    is_half = self.dtype != torch.float32
    with torch.autocast(self.device.type, self.dtype, enabled=is_half):
      logits_btv = self.model(self.tokens)
      return F.cross_entropy(logits_btv.flatten(0, 1), self.targets.flatten())

  def wait(self):
    """Waits until the device has finished its work."""
    if self.device.type == "cuda":
      torch.cuda.synchronize()


def main():
  if len(sys.argv) != 2:
    raise SystemExit(f"settings: expected one argument of JSON, got {len(sys.argv) - 1}")
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  runner = Runner(json.loads(sys.argv[1]))
  serve(runner.facts(), runner.run)


if __name__ == "__main__":
  main()
