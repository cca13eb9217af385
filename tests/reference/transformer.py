"""A Transformer layer in float64 NumPy, from the equations of its docstrings."""

import math

import numpy as np

ACTIVATIONS = {
  "relu": lambda x: np.maximum(x, 0),
  "silu": lambda x: x / (1 + np.exp(-x)),
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


def rms_norm(x, params):
  """Scales x over the root of its mean square."""
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * params["scale"]


def linear(x, params):
  """W x + b, b where there is one."""
  return np.tensordot(x, params["kernel"], axes=1) + params.get("bias", 0)


def feed_forward(x, params, activation):
  """W2 activation(W1 x + b1) + b2, or W2 (silu(Wg x + bg) * (W1 x + b1)) + b2."""
  hidden = linear(x, params["hidden"])
  if activation == "swiglu":
    hidden = hidden * ACTIVATIONS["silu"](linear(x, params["gate"]))
  else:
    hidden = ACTIVATIONS[activation](hidden)
  return linear(hidden, params["out"])


def rotate(x, base):
  """Features i and i + E / 2 as one complex number, times exp(j t base ** (-2 i / E))."""
  half = x.shape[3] // 2
  output = np.zeros_like(x)
  for t in range(x.shape[1]):
    for i in range(half):
      turn = np.exp(1j * t * base ** (-2 * i / (2 * half)))
      found = (x[:, t, :, i] + 1j * x[:, t, :, i + half]) * turn
      output[:, t, :, i], output[:, t, :, i + half] = found.real, found.imag
  return output


def rotary_attention(x, params, heads, base):
  """Attention to oneself and the past, a query at a time; queries and keys are turned."""
  parts = linear(x, params["queries_keys_values"]).reshape(*x.shape[:2], 3, heads, -1)
  queries, keys, values = rotate(parts[:, :, 0], base), rotate(parts[:, :, 1], base), parts[:, :, 2]
  output = np.zeros_like(values)
  for t in range(x.shape[1]):
    scores = np.einsum("bhe,bshe->bhs", queries[:, t], keys[:, : t + 1]) / values.shape[3] ** 0.5
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    output[:, t] = np.einsum("bhs,bshe->bhe", weights, values[:, : t + 1])
  return linear(output.reshape(x.shape), params["out"])


def block(x, params, mix, norm, activation, normed=layer_norm):
  """A mixer and a feed-forward network, norms after ("post") or before ("pre") them."""
  branches = {
    "mixer_norm": mix,
    "feed_forward_norm": lambda x: feed_forward(x, params["feed_forward"], activation),
  }
  for name, branch in branches.items():
    if norm == "post":
      x = normed(x + branch(x), params[name])
    else:
      x = x + branch(normed(x, params[name]))
  return x
