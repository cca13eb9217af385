"""The recurrences of jax-linear-attention (`jla`), which is imported when one of them runs.

B batch, T position, H head, K feature of a key, V feature of a value.
"""

import importlib
import importlib.util
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from dpjax import UserError
from dpjax.layers import Context
from dpjax.ops.documents import mask_padding

IMPLEMENTATIONS = ("reference", "chunked", "mosaic_gpu")


def check_installed(module: nn.Module) -> None:
  """Raises a `UserError` that says how to install `jla` if it is missing."""
  if importlib.util.find_spec("jla") is None:
    raise UserError(
      f"{type(module).__name__}: expected the package jax-linear-attention, got none "
      "(pip install 'dpjax[relatives]', on Python 3.12 or newer)"
    )


def run(
  kind: str,
  arrays: Mapping[str, jax.Array],
  context: Context,
  state: jax.Array | None = None,
  *,
  implementation: str | None = None,
  scale: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs a recurrence; returns its outputs, [B, T, H, V] in float32, and the state after them.

  Args:
    kind: the name of the recurrence in `jla.ops.linear_attention`.
    arrays: its queries q and keys k, [B, T, H, K], values v, [B, T, H, V], and gates, by name.
    context: the starts of documents in whole rows; with a state, the lengths.
    state: None for whole rows, or the one before them, [B, H, K, V] in float32.
    implementation: one of `IMPLEMENTATIONS`; None: a kernel where one can run, else chunks. A step
      of one position always runs `reference`.
    scale: a factor of the queries; None: 1/sqrt(K).
  """
  ops = importlib.import_module("jla.ops")
  length = arrays["q"].shape[1]
  segment_ids = None
  # A single position is one document; `jla` 0.1.0 fails if it is told so.
  if context.document_starts is not None and length > 1:
    segment_ids = jnp.cumsum(context.document_starts, axis=1, dtype=jnp.int32)
  if state is not None:
    # Padding then neither decays the state nor writes to it.
    arrays = {name: mask_padding(x, context.lengths)[0] for name, x in arrays.items()}
    if length == 1:
      implementation = "reference"  # A chunk would be mostly padding.
  outputs, state_after = ops.linear_attention(
    kind,
    **arrays,
    impl=implementation or "auto",
    scale=scale,
    segment_ids=segment_ids,
    initial_state=state,
    output_final_state=state is not None,
  )
  return outputs.astype(jnp.float32), state_after
