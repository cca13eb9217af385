"""The contract of a token mixer. B batch, T position, D width."""

from typing import Protocol

import jax


class Mixer(Protocol):
  """What stands in the place of self-attention: [B, T, D] -> [B, T, D].

  A mixer is a Linen module. It is causal (position t of the output depends on
  positions 0 .. t of the input), treats the rows of a batch apart, and takes any
  1 <= T <= `max_length`. Random choices come from the "dropout" stream, and only
  where `deterministic` is False.

  Attributes:
    max_length: the longest T; a longer input raises a `ValueError`.
  """

  max_length: int

  def __call__(self, inputs: jax.Array, *, deterministic: bool = True) -> jax.Array:
    """Mixes the positions of [B, T, D]."""
    ...


def check_input(inputs: jax.Array, *, max_length: int, num_heads: int) -> None:
  """Refuses what no mixer can take.

  Args:
    inputs: what the mixer was given.
    max_length: the longest T.
    num_heads: has to divide D.

  Raises:
    ValueError: `inputs` is not [B, T, D], is too long, or D is no multiple of
      `num_heads`.
  """
  if inputs.ndim != 3:
    raise ValueError(f"inputs: expected [B, T, D], got the shape {inputs.shape}")
  length, width = inputs.shape[1:]
  if length > max_length:
    raise ValueError(f"inputs: expected T <= max_length = {max_length}, got T = {length}")
  if width % num_heads:
    raise ValueError(
      f"num_heads: expected a divisor of the width {width}, got {num_heads}"
    )
