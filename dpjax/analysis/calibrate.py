"""Measures the text statistics that `entropy_threshold` and `flexitokens` boundaries need.

`dpjax.ops.entropy_theta` finds a theta from the entropies. Lengths are in tokens. A tail shorter
than a window is dropped.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dpjax.errors import UserError

if TYPE_CHECKING:
  import jax

  from dpjax.runs import Run


def entropies(run: "Run", tokens: np.ndarray, window: int) -> "jax.Array":
  """The entropy of a model's prediction of each next token, [B, T], in nats, float32.

  The tokens [N] are cut into B windows of T = `window`, each read independently; B = 1 if N < T.
  """
  from dpjax.ops import conditional_entropy

  return _read(run, tokens, window, lambda _, output: conditional_entropy(output.logits))


def rates(run: "Run", tokens: np.ndarray, window: int) -> "jax.Array":
  """The boundaries for each token, [B], float32, of every window of tokens [N]; see `entropies`.

    r_b = (1 / T) sum over t of b_t

  for the model's boundaries; without pooling, for those after spaces, i.e. of words. Their mean
  and standard deviation are the alpha and sigma of `dpjax.layers.FlexiTokens`. A `ValueError` if
  the model does not pool and no token ends a word.
  """
  from dpjax.ops import whitespace_boundaries

  ids = run.tokenizer.space_ids
  if run.config.model.boundaries.name == "none":
    if not ids:
      raise UserError("run: expected token pooling, or a tokenizer with spaces, got neither")
    return _read(run, tokens, window, lambda x, _: whitespace_boundaries(x, ids).mean(1))
  return _read(run, tokens, window, lambda _, output: output.stages[0].boundaries.mean(1))


def _read(run: "Run", tokens: np.ndarray, window: int, of_output: Callable) -> "jax.Array":
  """Applies a function to windows, [B, T], and the model's output; returns float32."""
  import jax
  import jax.numpy as jnp

  window = min(window, len(tokens))
  count = len(tokens) // window
  size = run.config.eval.batch_size
  rows = np.zeros((-(-count // size) * size, window), np.int32)
  rows[:count] = tokens[: count * window].reshape(count, window)

  @jax.jit
  def read(params, tokens_bt):
    rngs = {"dropout": jax.random.key(0)}  # Some boundaries are sampled.
    output = run.model.apply({"params": params}, tokens_bt, rngs=rngs)
    return of_output(tokens_bt, output).astype(jnp.float32)

  parts = [read(run.params, rows[i : i + size]) for i in range(0, len(rows), size)]
  return jnp.concatenate(parts)[:count]
