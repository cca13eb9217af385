"""minGRU as a token mixer of dpjax. B batch, T position, D width, E hidden width."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

import dpjax
from dpjax.layers import Context, Mixer, check_settings, linear
from my_mixer.in_numpy import min_gru


def linear_recurrence(decay: jax.Array, update: jax.Array, state: jax.Array) -> jax.Array:
  """h_t = decay_t * h_{t-1} + update_t, from h_{-1} = state, in O(log T) steps.

  Args:
    decay: [B, T, E].
    update: [B, T, E].
    state: [B, E].

  Returns:
    h, [B, T, E].
  """

  def combine(earlier, later):
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]

  update = update.at[:, 0].add(decay[:, 0] * state)
  return jax.lax.associative_scan(combine, (decay, update), axis=1)[1]


class MinGRU(Mixer):
  """A gated recurrence whose gates do not read its state.

    z_t = sigmoid(W_z x_t)
    h_t = (1 - z_t) * h_{t-1} + z_t * g(W_h x_t)
    y_t = W_out h_t

  with g(x) = x + 0.5 for x >= 0, else sigmoid(x). The recurrence is float32.

  Source: Feng et al. 2024, arXiv:2410.01201, Sec. 3.1 and App. B.

  Attributes:
    expansion: E / D.

  For the other attributes see `dpjax.layers.Mixer`.
  """

  separates_documents: ClassVar[bool] = True

  expansion: int = 1

  def __post_init__(self):
    """Checks that the settings are in range."""
    check_settings(self, sizes=("expansion",))
    super().__post_init__()

  @nn.compact
  def mix(
    self, inputs: jax.Array, context: Context, cache: jax.Array | None
  ) -> tuple[jax.Array, jax.Array]:
    """Mixes [B, T, D]; see `dpjax.layers.Mixer`."""
    batch, length, width = inputs.shape
    hidden = width * self.expansion
    gates = linear(self, hidden, "gates", use_bias=True)(inputs)
    values = linear(self, hidden, "values", use_bias=True)(inputs)
    z_bte = nn.sigmoid(gates.astype(jnp.float32))
    v_bte = values.astype(jnp.float32)
    v_bte = jnp.where(v_bte >= 0, v_bte + 0.5, nn.sigmoid(v_bte))
    if context.lengths is not None:
      # Padding keeps the state.
      is_real_bt = jnp.arange(length)[None] < context.lengths[:, None]
      z_bte = jnp.where(is_real_bt[..., None], z_bte, 0)
    decay_bte = 1 - z_bte
    if context.document_starts is not None:
      # A document begins with a state of 0.
      decay_bte = jnp.where(context.document_starts[..., None] > 0, 0, decay_bte)
    state = self.init_cache(batch, width) if cache is None else cache
    h_bte = linear_recurrence(decay_bte, z_bte * v_bte, state)
    out = linear(self, width, "out", scale=self.out_scale, use_bias=True)
    return out(h_bte.astype(self.dtype)), h_bte[:, -1]

  def init_cache(self, batch: int, width: int) -> jax.Array:
    """The state, [B, E]."""
    return jnp.zeros((batch, width * self.expansion), jnp.float32)


dpjax.register_mixer("min_gru", MinGRU, numpy_function=min_gru)
