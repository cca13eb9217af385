"""Rotary positions: queries and keys are rotated by angles proportional to their position.

B batch, T position, H head, E feature of a head.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.ops import checks
from dpjax.ops.explicit_axes import automatic_axes
from dpjax.ops.products import sum_dtype


def rotary_angles(length: int, features: int, base: float = 10_000.0) -> np.ndarray:
  """The angles of positions 0 .. T - 1, in radians, without whole turns.

    angles[t, i] = t base ** (-2 i / E)  mod 2 pi,  i = 0 .. E / 2 - 1

  `length` is T, `features` E, even. The slowest pair turns once in about 2 pi base positions (E
  large). The result is float32, computed in float64: distant positions lose no digits.

  Raises:
    ValueError: `features` is odd, or a number is out of range.

  Source: Su et al. 2021, arXiv:2104.09864, Sec. 3.2.2.
  """
  checks.integers(length=length, features=features)
  checks.number("base", base, "a number above 0", lambda x: 0 < x < np.inf)
  if features % 2:
    raise ValueError(f"features: expected an even number for rotary positions, got {features}")
  frequencies = float(base) ** (-np.arange(0, features, 2) / features)
  angles = np.arange(length)[:, None] * frequencies
  return (angles % (2 * np.pi)).astype(np.float32)


@automatic_axes
def rotate(inputs: jax.Array, angles: jax.Array) -> jax.Array:
  """Rotates the pairs of features (i, i + E / 2) by their angles.

    output[i]         = x[i] cos(angles[i]) - x[i + E / 2] sin(angles[i])
    output[i + E / 2] = x[i] sin(angles[i]) + x[i + E / 2] cos(angles[i])

  The product of a rotated query and a rotated key depends on their positions only through the
  distance. The inputs are [B, T, H, E], floats, the angles [B, T, E / 2] or [1, T, E / 2].
  Computed in float32, or in float64 for such inputs.

  Raises:
    ValueError: the shapes do not match.

  Source: see `rotary_angles`, where the pairs are (2 i, 2 i + 1); pairs across halves, another
  order of the features, as here, are those of GPT-NeoX and Llama.
  """
  inputs = checks.array("inputs", inputs, "B T H E")
  batch, length, _, features = inputs.shape
  if features % 2:
    raise ValueError(f"inputs: expected an even E of [B, T, H, E], got the shape {inputs.shape}")
  axes, sizes = "1 T F | B T F", dict(B=batch, T=length, F=features // 2)
  angles = checks.array("angles", angles, axes, **sizes)
  dtype = sum_dtype(inputs)
  angles = angles.astype(dtype)[:, :, None]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  x, y = jnp.split(inputs.astype(dtype), 2, axis=-1)
  return jnp.concatenate([x * cos - y * sin, x * sin + y * cos], axis=-1).astype(inputs.dtype)
