"""The Dispatcher in place of self-attention. B batch, T position, D width, K level.

Source: aclanthology.org/2022.clasp-1.3, Alg. 1; fractalego/dispatcher@239608c. Differences
from the authors' code:
- Heads split the D features. The authors' reshape of [B, T, D] to [B * H, T, D / H] cuts the
  positions. With one head, as in all published results, both are the same.
- K = ceil(log2(max_length)); the authors take the floor. Powers of two give the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import ops
from dpjax.layers import initializers, mixer

MOST_LEVELS = 24  # beyond 2**24 no window fits a machine


class Dispatcher(nn.Module):
  """The paper's layer: y = W_out shift_and_sum(W_in x, sigmoid(W_c x)).

  The three matrices have the size of a head and are shared by the heads; there are no
  biases.

  Attributes:
    num_heads: H, a divisor of D.
    max_length: the longest T; required.
    num_levels: K; None is ceil(log2(max_length)), at least 1, so that the last position
      reaches the first. Position t reaches back to t - 2**K + 1.
    level_dropout: probability with which a level is skipped in training, for the
      whole batch (Dispatcher dropout, Sec. 2.1).
    implementation: see `dpjax.ops.shift_and_sum`.
    init_std: standard deviation of all weights, N(0, init_std**2); 0: PyTorch's defaults.
    dtype: the dtype of the computation; parameters are float32.
  """

  num_heads: int = 1
  max_length: int = 0
  num_levels: int | None = None
  level_dropout: float = 0.0
  implementation: str | None = None
  init_std: float = 0.0
  dtype: jnp.dtype = jnp.float32

  def __post_init__(self):
    """Checks that the settings are in range."""
    mixer.check_settings(
      self,
      sizes=("num_heads", "max_length", "num_levels"),
      rates=("level_dropout",),
      implementations=ops.SHIFT_AND_SUM,
    )
    # A model of the authors may have more levels than its length needs.
    if (self.num_levels or 0) > MOST_LEVELS:
      raise ValueError(f"num_levels: expected at most {MOST_LEVELS}, got {self.num_levels}")
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
    is_start: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]; `level_keep` [K] sets the kept levels instead of drawing them."""
    mixer.check_input(
      inputs, max_length=self.max_length, num_heads=self.num_heads, is_start=is_start
    )
    num_levels = self._num_levels
    if level_keep is None:
      level_keep = _draw_levels(self, num_levels, deterministic)
    per_head = (*inputs.shape[:2], self.num_heads, -1)
    # One array of rows: each product would keep a reshape of its own for the gradient.
    x_re = inputs.reshape(-1, inputs.shape[-1] // self.num_heads)
    v_bthe = _linear(self, x_re.shape[-1], "values")(x_re).reshape(per_head)
    g_bthk = nn.sigmoid(_linear(self, num_levels, "gates")(x_re)).reshape(per_head)
    v_bthe, cache = _shift_and_sum(self, v_bthe, g_bthk, level_keep, cache, lengths, is_start)
    y_btd = _linear(self, x_re.shape[-1], "out")(v_bthe).reshape(inputs.shape)
    return y_btd if cache is None else (y_btd, cache)

  def init_cache(self, batch: int, width: int) -> ops.ShiftAndSumCache:
    """See `dpjax.layers.mixer.Mixer`; [B, 2**K - 1, H, E], whatever the length."""
    features = width // self.num_heads
    return ops.init_shift_and_sum_cache(
      batch, self.num_heads, features, self._num_levels, self.dtype
    )

  @property
  def _num_levels(self) -> int:
    return self.num_levels or max(1, ops.num_levels(self.max_length))


class MultiHeadDispatcher(Dispatcher):
  """The authors' later layer: matrices of full width, and gates without the sigmoid.

  W_in and W_out are [D, D], W_c is [D, H * K]; head h of level k reads column h * K + k.
  Level 0 is never skipped. For the attributes see `Dispatcher`.
  """

  @nn.compact
  def __call__(
    self,
    inputs: jax.Array,
    *,
    deterministic: bool = True,
    level_keep: jax.Array | None = None,
    cache: ops.ShiftAndSumCache | None = None,
    lengths: jax.Array | None = None,
    is_start: jax.Array | None = None,
  ) -> Any:
    """Mixes [B, T, D]; `level_keep` [K] sets the kept levels instead of drawing them."""
    mixer.check_input(
      inputs, max_length=self.max_length, num_heads=self.num_heads, is_start=is_start
    )
    width = inputs.shape[-1]
    num_levels = self._num_levels
    if level_keep is None:
      level_keep = _draw_levels(self, num_levels, deterministic)
      if level_keep is not None:
        level_keep = level_keep.at[0].set(True)
    per_head = (*inputs.shape[:2], self.num_heads, -1)
    x_rd = inputs.reshape(-1, width)  # As above.
    v_bthe = _linear(self, width, "values")(x_rd).reshape(per_head)
    g_bthk = _linear(self, self.num_heads * num_levels, "gates")(x_rd).reshape(per_head)
    v_bthe, cache = _shift_and_sum(self, v_bthe, g_bthk, level_keep, cache, lengths, is_start)
    y_btd = _linear(self, width, "out")(v_bthe.reshape(inputs.shape))
    return y_btd if cache is None else (y_btd, cache)


def _shift_and_sum(module, v_bthe, g_bthk, level_keep, cache, lengths, is_start):
  module.sow("intermediates", "level_gates", g_bthk)  # of `Run.dispatch_matrices`
  if cache is not None:
    return ops.shift_and_sum_cached(v_bthe, g_bthk, cache, lengths=lengths, is_start=is_start)
  v_bthe = ops.shift_and_sum(
    v_bthe,
    g_bthk,
    level_keep=level_keep,
    is_start=is_start,
    implementation=module.implementation,
  )
  return v_bthe, None


def _linear(module: nn.Module, features: int, name: str) -> nn.Dense:
  return nn.Dense(
    features,
    use_bias=False,
    dtype=module.dtype,
    kernel_init=initializers.weights(module.init_std, initializers.linear_kernel),
    dot_general=ops.dot_general,
    name=name,
  )


def _draw_levels(module, num_levels: int, deterministic: bool) -> jax.Array | None:
  """[K] booleans, one draw for the whole batch; None if every level is kept."""
  if deterministic or not module.level_dropout:
    return None
  key = module.make_rng("dropout")
  return jax.random.bernoulli(key, 1 - module.level_dropout, (num_levels,))
