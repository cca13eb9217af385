"""Reads many short prompts in one pass, as documents of a few rows.

N prompt, R row, W place of a row, V vocabulary. Prompts 3 1 4, 1 5 and 9 2 6 in rows of 5:

  tokens [3 1 4 1 5]   starts [1 0 0 1 0]
         [9 2 6 . .]          [1 0 0 . .]

A cache holds one document for each row, its last. So `Generator`, which continues each prompt,
gives each a row of its own; packing suits questions about prompts alone, such as the next token.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.errors import UserError


class Packed(NamedTuple):
  """Prompts in rows.

  Attributes:
    tokens: [R, W], int32, each row padded at its end.
    starts: [R, W], int32, 1 at the first token of each prompt.
    rows: [N], int32, the row of each prompt.
    ends: [N], int32, the place of its last token there.
  """

  tokens: np.ndarray
  starts: np.ndarray
  rows: np.ndarray
  ends: np.ndarray


def pack(prompts: Sequence[Sequence[int]], width: int, fill: int = 0) -> Packed:
  """Puts prompts into rows, the longest first, each into the first row with room.

  Args:
    prompts: N prompts of 1 .. W tokens.
    width: W.
    fill: the token that pads a row.

  Raises:
    UserError: there are no prompts, or one is empty or longer than W.
  """
  sizes = [len(prompt) for prompt in prompts]
  if not sizes or not 1 <= min(sizes) <= max(sizes) <= width:
    raise UserError(f"prompts: expected some of 1 to {width} tokens each, got {sizes}")
  used: list[int] = []
  rows, begins = np.zeros(len(sizes), np.int32), np.zeros(len(sizes), np.int32)
  for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
    row = next((r for r, size in enumerate(used) if size + sizes[number] <= width), len(used))
    if row == len(used):
      used.append(0)
    rows[number], begins[number] = row, used[row]
    used[row] += sizes[number]
  tokens = np.full((len(used), width), fill, np.int32)
  starts = np.zeros_like(tokens)
  for prompt, row, begin in zip(prompts, rows, begins, strict=True):
    tokens[row, begin : begin + len(prompt)] = prompt
    starts[row, begin] = 1
  return Packed(tokens, starts, rows, begins + np.array(sizes, np.int32) - 1)


def next_logits(logits: Callable[[jax.Array, jax.Array], jax.Array], packed: Packed) -> jax.Array:
  """The logits of the token after each prompt, from one pass.

    packed = pack(prompts, model.max_length)
    next_logits(lambda x, s: model.apply(variables, x, starts=s).logits, packed)

  Args:
    logits: [R, W] tokens, [R, W] starts -> [R, W, V]: documents of a row do not see each
      other.
    packed: from `pack`.

  Returns:
    [N, V], for each prompt as if it were alone.
  """
  return logits(jnp.asarray(packed.tokens), jnp.asarray(packed.starts))[packed.rows, packed.ends]
