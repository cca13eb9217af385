"""The Dispatcher in place of self-attention. B batch, T position, D width, K level.

Source: aclanthology.org/2022.clasp-1.3, Alg. 1; fractalego/dispatcher@239608c, which differs:
- Its reshape of [B, T, D] to [B * H, T, D / H] splits positions. Here heads split the D features;
  with one head, as in all published results, both are the same.
- Its K is floor(log2(max_length)) instead of ceil; both agree for powers of two.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import mixer
from dpjax.layers.common import linear
from dpjax.ops import arrays


class Dispatcher(nn.Module):
  """The paper's layer: y = W_out shift_and_sum(W_in x, sigmoid(W_c x)).

  The three matrices have the size of a head and are shared by the heads, without biases.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T; required.
    num_levels: K; None means ceil(log2(max_length)), at least 1. Position t reaches back to
      t - 2**K + 1.
    level_dropout: probability with which a level is skipped in training, for the whole batch
      (Dispatcher dropout, Sec. 2.1).
    implementation: see `dpjax.ops.shift_and_sum`.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters are float32.
    out_scale: a factor of the output matrix's initial values.
  """

  shares_matrices: ClassVar[bool] = True

  num_heads: int = 1
  max_length: int = 0
  num_levels: int | None = None
  level_dropout: float = 0.0
  implementation: str | None = None
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32
  out_scale: float = 1.0

  def __post_init__(self):
    sizes, rates = ("num_heads", "max_length"), ("level_dropout",)
    mixer.check_settings(self, sizes=sizes, rates=rates, implementations=ops.SHIFT_AND_SUM)
    if self.num_levels is not None:
      arrays.integer("num_levels", self.num_levels, most=24)  # The cache has 2**K - 1 slots.
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    level_keep: jax.Array | None = None,
    cache: ops.ShiftAndSumCache | None = None,
    lengths: jax.Array | None = None,
    document_starts: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]; `level_keep` [K] sets the kept levels instead of drawing them."""
    sizes: Any = dict(max_length=self.max_length, num_heads=self.num_heads)
    inputs = mixer.check_input(inputs, document_starts=document_starts, cache=cache, **sizes)
    num_levels, shape = self._num_levels, inputs.shape
    if level_keep is None and self.level_dropout and not deterministic:
      key = self.make_rng("dropout")
      level_keep = jax.random.bernoulli(key, 1 - self.level_dropout, (num_levels,))
      if not self.shares_matrices:
        level_keep = level_keep.at[0].set(True)
    width, num_gates = shape[-1], self.num_heads * num_levels
    if self.shares_matrices:
      width, num_gates = width // self.num_heads, num_levels
    # One array of rows: otherwise each product would keep its own reshape for the gradient.
    rows, per_head = ops.as_factor(inputs.reshape(-1, width)), (*shape[:2], self.num_heads)
    values = ops.as_factor(linear(self, width, "values")(rows))
    v_bthe = values.reshape(*per_head, shape[-1] // self.num_heads)
    gates = linear(self, num_gates, "gates")(rows)
    g_bthk = (nn.sigmoid(gates) if self.shares_matrices else gates).reshape(*per_head, num_levels)
    self.sow("intermediates", "level_gates", g_bthk)  # for `Run.dispatch_matrices`
    if cache is not None:
      if level_keep is not None:
        g_bthk = jnp.where(level_keep, g_bthk, 0)
      v_bthe, cache = ops.shift_and_sum_cached(v_bthe, g_bthk, cache, lengths=lengths)
    else:
      options: Any = dict(level_keep=level_keep, implementation=self.implementation)
      v_bthe = ops.shift_and_sum(v_bthe, g_bthk, document_starts=document_starts, **options)
    x = v_bthe if self.shares_matrices else v_bthe.reshape(shape)
    y_btd = linear(self, width, "out", scale=self.out_scale)(x).reshape(shape)
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> ops.ShiftAndSumCache:
    """See `dpjax.layers.mixer.Mixer`; [B, 2**K - 1, H, E], whatever the length."""
    sizes = batch, self.num_heads, width // self.num_heads, self._num_levels
    return ops.init_shift_and_sum_cache(*sizes, self.dtype)

  @property
  def _num_levels(self) -> int:
    return self.num_levels or max(1, ops.num_levels(self.max_length))


class MultiHeadDispatcher(Dispatcher):
  """The authors' later layer: matrices of full width, and gates without the sigmoid.

  W_in and W_out are [D, D], W_c is [D, H * K]; level k of head h reads column h * K + k.
  Level 0 is never skipped. For the attributes see `Dispatcher`.
  """

  shares_matrices: ClassVar[bool] = False
