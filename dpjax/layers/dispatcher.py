"""The Dispatcher in place of self-attention. B batch, T position, D width, K level.

Source: aclanthology.org/2022.clasp-1.3, Alg. 1; fractalego/dispatcher@239608c, which differs:
- Its reshape of [B, T, D] to [B * H, T, D / H] splits positions. Here heads split the D features;
  with one head, as in all published results, both are the same.
- Its K is floor(log2(max_length)) instead of ceil; both agree for powers of two.
"""

from typing import ClassVar

import jax
from flax import linen as nn

from dpjax import ops
from dpjax.layers.common import check_settings, linear
from dpjax.layers.mixer import Context, Mixer, features_per_head
from dpjax.ops import arrays


class Dispatcher(Mixer):
  """The paper's layer: y = W_out shift_and_sum(W_in x, sigmoid(W_c x)).

  The three matrices have the size of a head and are shared by the heads, without biases.

  Attributes:
    num_heads: H, a divisor of D.
    num_levels: K; None means ceil(log2(max_length)), at least 1. Position t reaches back to
      t - 2**K + 1.
    level_dropout: probability with which a level is skipped in training, for the whole batch
      (Dispatcher dropout, Sec. 2.1).
    implementation: see `dpjax.ops.shift_and_sum`.

  For the other attributes see `Mixer`.
  """

  separates_documents: ClassVar[bool] = True

  num_heads: int = 1
  num_levels: int | None = None
  level_dropout: float = 0.0
  implementation: str | None = None

  def __post_init__(self):
    check_settings(
      self, sizes=("num_heads",), rates=("level_dropout",), implementations=ops.SHIFT_AND_SUM
    )
    if self.num_levels is not None:
      arrays.integer("num_levels", self.num_levels, most=24)  # The cache has 2**K - 1 slots.
    super().__post_init__()

  def check_width(self, width: int) -> None:
    """See `Mixer`."""
    features_per_head(width, self.num_heads)

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: ops.ShiftAndSumCache | None
  ) -> tuple[jax.Array, ops.ShiftAndSumCache | None]:
    """See `Mixer`."""
    level_keep = self._draw_levels(context)
    v_bthe, g_bthk = self._values_and_gates(inputs)
    self.sow("intermediates", "level_gates", g_bthk)  # for `Run.dispatch_matrices`
    if cache is None:
      y_bthe = ops.shift_and_sum(
        v_bthe,
        g_bthk,
        level_keep=level_keep,
        document_starts=context.document_starts,
        implementation=self.implementation,
      )
    else:
      y_bthe, cache = ops.shift_and_sum_cached(v_bthe, g_bthk, cache, lengths=context.lengths)
    return self._project(y_bthe), cache

  def init_cache(self, batch: int, width: int) -> ops.ShiftAndSumCache:
    """See `Mixer`; [B, 2**K - 1, H, E], whatever the length."""
    features = features_per_head(width, self.num_heads)
    return ops.init_shift_and_sum_cache(batch, self.num_heads, features, self.levels, self.dtype)

  @property
  def levels(self) -> int:
    """K."""
    return self.num_levels or max(1, ops.num_levels(self.max_length))

  def _values_and_gates(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, T, H, E] and [B, T, H, K]."""
    batch, length, width = inputs.shape
    features = features_per_head(width, self.num_heads)
    # One array of rows: otherwise each product would keep its own reshape for the gradient.
    rows = ops.as_factor(inputs.reshape(-1, features))
    values = ops.as_factor(linear(self, features, "values")(rows))
    v_bthe = values.reshape(batch, length, self.num_heads, features)
    gates = nn.sigmoid(linear(self, self.levels, "gates")(rows))
    return v_bthe, gates.reshape(batch, length, self.num_heads, self.levels)

  def _draw_levels(self, context: Context) -> jax.Array | None:
    """[K], which levels are kept; None for all."""
    if context.deterministic or not self.level_dropout:
      return None
    return jax.random.bernoulli(self.make_rng("dropout"), 1 - self.level_dropout, (self.levels,))

  def _project(self, y_bthe: jax.Array) -> jax.Array:
    """[B, T, H, E] -> [B, T, D]."""
    batch, length, heads, features = y_bthe.shape
    y_bthe = linear(self, features, "out", scale=self.out_scale)(y_bthe)
    return y_bthe.reshape(batch, length, heads * features)


class MultiHeadDispatcher(Dispatcher):
  """The authors' later layer: matrices of full width, and gates without the sigmoid.

  W_in and W_out are [D, D], W_c is [D, H * K]; level k of head h reads column h * K + k.
  Level 0 is never skipped. For the attributes see `Dispatcher`.
  """

  def _values_and_gates(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, length, width = inputs.shape
    features = features_per_head(width, self.num_heads)
    rows = ops.as_factor(inputs.reshape(-1, width))
    values = ops.as_factor(linear(self, width, "values")(rows))
    v_bthe = values.reshape(batch, length, self.num_heads, features)
    gates = linear(self, self.num_heads * self.levels, "gates")(rows)
    return v_bthe, gates.reshape(batch, length, self.num_heads, self.levels)

  def _draw_levels(self, context: Context) -> jax.Array | None:
    level_keep = super()._draw_levels(context)
    return None if level_keep is None else level_keep.at[0].set(True)

  def _project(self, y_bthe: jax.Array) -> jax.Array:
    batch, length, heads, features = y_bthe.shape
    y_btd = y_bthe.reshape(batch, length, heads * features)
    return linear(self, heads * features, "out", scale=self.out_scale)(y_btd)
