"""A Transformer layer in float64 NumPy, from the equations of its docstrings."""

import math

import numpy as np

ACTIVATIONS = {
  "relu": lambda x: np.maximum(x, 0),
  "gelu": np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
}


def positions(length, width):
  """The sine and cosine of t / 10000 ** (2i / D) by turns, [T, D]."""
  table = np.zeros((length, width))
  for t in range(length):
    for feature in range(width):
      angle = t / 10000 ** (feature // 2 * 2 / width)
      table[t, feature] = math.cos(angle) if feature % 2 else math.sin(angle)
  return table


def layer_norm(x, params):
  """(x - mean) / sqrt(variance + 1e-5), scaled and moved."""
  mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
  return (x - mean) / np.sqrt(variance + 1e-5) * params["scale"] + params["bias"]


def feed_forward(x, params, activation):
  """W2 activation(W1 x + b1) + b2."""
  hidden, out = params["hidden"], params["out"]
  x = ACTIVATIONS[activation](x @ hidden["kernel"] + hidden["bias"])
  return x @ out["kernel"] + out["bias"]


def block(x, params, mix, norm, activation):
  """A mixer and a feed-forward network, norms after ("post") or before ("pre") them."""
  branches = {
    "mixer_norm": mix,
    "feed_forward_norm": lambda x: feed_forward(x, params["feed_forward"], activation),
  }
  for name, branch in branches.items():
    if norm == "post":
      x = layer_norm(x + branch(x), params[name])
    else:
      x = x + branch(layer_norm(x, params[name]))
  return x
