"""Log-linear Mamba-2. B batch, T position, D width, H head, P and N features, L level."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax.layers import Context, Mamba2, check_settings, linear
from dpjax.layers.mamba2 import SelectiveInputs
from dpjax.ops.documents import check_lengths, is_real
from dpjax_relatives import recurrences


class LevelStates(NamedTuple):
  """The states of each row after its last position.

  Attributes:
    states: one for each level, [B, H, L, N, P], float32.
    num_before: the number of earlier positions in each row, [B], int32.
  """

  states: jax.Array
  num_before: jax.Array


class LogLinearMamba2(Mamba2):
  """`dpjax.layers.Mamba2` with one state for each level of the past, and not one for all of it.

    y_t = sum over levels l of softplus(w_l (u_t W_levels)_l) h_{t,l} c_t            w [H, L]

  in place of h_t c_t; it has D H L + H L parameters more. The states are those of a Fenwick tree
  with L = 1 + ceil(log2(max_length)) levels: h_{t,0} is what position t writes, and a state of
  level l > 0 is what 2**(l-1) positions before it have written. Before position t, with z zeros at
  the end of the binary number t, the states of the levels 0 .. z are added up in level z + 1.

  Whole rows cost O(T log T). A cached step reads and writes all states, [L, N, P] for each head;
  several positions in a step are read one by one. A row cannot grow beyond `max_length`.

  Attributes:
    implementation: `reference` runs whole rows position by position; `chunked` and None, by chunks.

  Raises:
    UserError: `jla` is not installed.
    ValueError: a setting is out of range.

  Source: Guo et al. 2025, arXiv:2506.04761.
  """

  is_unbounded: ClassVar[bool] = False

  implementation: str | None = None

  def __post_init__(self):
    """Checks that the settings are in range, and that `jla` is installed."""
    check_settings(self, implementations=("reference", "chunked"))
    recurrences.check_installed(self)
    super().__post_init__()

  @property
  def num_levels(self) -> int:
    """L."""
    return _num_levels(self.max_length)

  def read_states(
    self,
    inputs: jax.Array,
    selective: SelectiveInputs,
    context: Context,
    state: LevelStates | None,
  ) -> tuple[jax.Array, LevelStates | None]:
    """See `dpjax.layers.Mamba2`."""
    batch, length, num_heads, _ = selective.x.shape
    logits = linear(self, num_heads * self.num_levels, "levels")(inputs).astype(jnp.float32)
    shape = (num_heads, self.num_levels)
    gain_hl = self.param("level_gain", nn.initializers.ones, shape, jnp.float32)
    logits_bthl = gain_hl[None, None] * logits.reshape(batch, length, *shape)
    keys = (batch, length, num_heads, self.state_width)
    dt_bth = selective.dt
    values_bthp = dt_bth[..., None] * selective.x.astype(jnp.float32)
    arrays = {
      "q": jnp.broadcast_to(selective.c, keys),
      "k": jnp.broadcast_to(selective.b, keys),
      "v": values_bthp.astype(self.dtype),
      "g": selective.a[None, None] * dt_bth,
      "level_scales": nn.softplus(logits_bthl),
    }
    if state is not None:
      return _continue(arrays, state, context.lengths)
    # A row of documents may be longer than `max_length`, but no document reaches its levels.
    more = max(0, _num_levels(length) - self.num_levels)
    arrays["level_scales"] = jnp.pad(arrays["level_scales"], [(0, 0), (0, 0), (0, 0), (0, more)])
    y_bthp, _ = recurrences.run(
      "log_linear_simple_gla",
      arrays,
      context,
      implementation=self.implementation,
      scale=1.0,
    )
    return y_bthp, None

  def init_state(self, batch: int, num_heads: int) -> LevelStates:
    """See `dpjax.layers.Mamba2`."""
    shape = (batch, num_heads, self.num_levels, self.state_width, self.head_width)
    return LevelStates(jnp.zeros(shape, jnp.float32), jnp.zeros((batch,), jnp.int32))


def _num_levels(length: int) -> int:
  return 1 + (length - 1).bit_length()


def _continue(
  arrays: dict[str, jax.Array], state: LevelStates, lengths: jax.Array | None
) -> tuple[jax.Array, LevelStates]:
  """Continues every row position by position; `jla` cannot begin with a state."""
  batch, length = arrays["q"].shape[:2]
  lengths_b = jnp.full(batch, length) if lengths is None else check_lengths(lengths, length)
  is_real_tb = is_real(lengths_b, length).T
  by_position = {name: jnp.moveaxis(x.astype(jnp.float32), 1, 0) for name, x in arrays.items()}

  def step(state, position):
    array, is_real_b = position
    after = _write(state, array)
    y_bhp = jnp.einsum(
      "bhl,bhn,bhlnp->bhp",
      array["level_scales"],
      array["q"],
      after.states,
      precision="highest",
    )

    def keep(new, old):
      return jnp.where(is_real_b.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(keep, after, state), y_bhp

  after, y_tbhp = jax.lax.scan(step, state, (by_position, is_real_tb))
  return jnp.moveaxis(y_tbhp, 0, 1), after


def _write(state: LevelStates, array: dict[str, jax.Array]) -> LevelStates:
  """The states after one position, whose arrays are k [B, H, N], v [B, H, P] and g [B, H]."""
  level = jnp.arange(state.states.shape[2], dtype=jnp.int32)[None]
  # The lowest 1 of t, minus 1, has as many ones as t has zeros at its end.
  lowest = state.num_before & -state.num_before
  target = 1 + jax.lax.population_count(lowest - 1)[:, None]
  is_below = (level < target)[:, None, :, None, None]
  is_target = (level == target)[:, None, :, None, None]
  merged = jnp.sum(jnp.where(is_below, state.states, 0), axis=2, keepdims=True)
  states = jnp.where(is_below, 0, state.states) + jnp.where(is_target, merged, 0)
  states = states * jnp.exp(array["g"])[:, :, None, None, None]
  states = states.at[:, :, 0].set(array["k"][..., None] * array["v"][:, :, None])
  return LevelStates(states, state.num_before + 1)
