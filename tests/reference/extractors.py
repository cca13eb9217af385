"""The Extractors of arXiv:2308.07661, Sec. 5, in float64 NumPy, written from Eqs. 23-29.

Parameters are a dict of arrays: "taps" [l], [l, D] or [l, D, D], and where an Extractor
has them "values" (W_in), "adjustment" (W_adj) and "out" (W_out), [D, D].
"""

import numpy as np


def causal_convolution(inputs, filters):
  """y[t] = sum over s <= t of inputs[s] * filters[t - s], pair of positions by pair.

  Args:
    inputs: [B, T, D].
    filters: [l], [l, D] or [l, D, E], T <= l.

  Returns:
    [B, T, D] or [B, T, E], float64.
  """
  inputs, filters = np.asarray(inputs, np.float64), np.asarray(filters, np.float64)
  width = filters.shape[2] if filters.ndim == 3 else inputs.shape[2]
  result = np.zeros((*inputs.shape[:2], width))
  for t in range(inputs.shape[1]):
    for s in range(t + 1):
      tap = filters[t - s]
      result[:, t] += inputs[:, s] @ tap if tap.ndim == 2 else inputs[:, s] * tap
  return result


def causal_convolution_gradients(inputs, filters, weights):
  """Gradients of sum(weights * causal_convolution(inputs, filters)).

  Args:
    inputs: as in `causal_convolution`.
    filters: as in `causal_convolution`.
    weights: of the shape of the result.

  Returns:
    The gradients by `inputs` and by `filters`, float64, of their shapes.
  """
  inputs, filters, weights = (np.asarray(x, np.float64) for x in (inputs, filters, weights))
  by_inputs, by_filters = np.zeros_like(inputs), np.zeros_like(filters)
  for t in range(inputs.shape[1]):
    for s in range(t + 1):
      tap, x, w = filters[t - s], inputs[:, s], weights[:, t]
      by_inputs[:, s] += w @ tap.T if tap.ndim == 2 else w * tap
      if tap.ndim == 2:
        by_filters[t - s] += x.T @ w
      elif tap.ndim == 1:
        by_filters[t - s] += (x * w).sum(axis=0)
      else:
        by_filters[t - s] += (x * w).sum()
  return by_inputs, by_filters


def she(inputs, params, *, adjustment=True, output_projection=True):
  """Eqs. 23, 24 and 25, the last two by a switch."""
  extraction = causal_convolution(inputs, params["taps"])
  return _finish(inputs, extraction, params, adjustment, output_projection)


def he(inputs, params, *, adjustment=True, output_projection=True):
  """Eqs. 27, 28, 24 and 25, the last two by a switch."""
  values = np.asarray(inputs, np.float64) @ params["values"]
  extraction = causal_convolution(values, params["taps"])
  return _finish(inputs, extraction, params, adjustment, output_projection)


def we(inputs, params, *, adjustment=True, output_projection=True):
  """Eqs. 26, 24 and 25, the last two by a switch."""
  extraction = causal_convolution(inputs, params["taps"])
  return _finish(inputs, extraction, params, adjustment, output_projection)


def me(inputs, params):
  """Eq. 29."""
  return causal_convolution(inputs, params["taps"])


def _finish(inputs, extraction, params, adjustment, output_projection):
  result = extraction
  if adjustment:
    result = (np.asarray(inputs, np.float64) @ params["adjustment"]) * result
  return result @ params["out"] if output_projection else result


def gradients(inputs, params, weights, *, adjustment=True, output_projection=True):
  """Gradients of sum(weights * layer(inputs, params)), derived by hand.

  Args:
    inputs: [B, T, D].
    params: of `she`, `he` or `we`; of `me` with both switches off.
    weights: [B, T, D].
    adjustment: as in the layer.
    output_projection: as in the layer.

  Returns:
    The gradient by `inputs` and a dict of those by the parameters in use, float64.
  """
  x, weights = np.asarray(inputs, np.float64), np.asarray(weights, np.float64)
  params = {name: np.asarray(p, np.float64) for name, p in params.items()}
  values = x @ params["values"] if "values" in params else x
  extraction = causal_convolution(values, params["taps"])
  factor = x @ params["adjustment"] if adjustment else np.ones_like(extraction)
  by_x, by = np.zeros_like(x), {}

  by_a = weights
  if output_projection:
    by["out"] = np.einsum("btd,bte->de", factor * extraction, weights)
    by_a = weights @ params["out"].T
  if adjustment:
    by["adjustment"] = np.einsum("btd,bte->de", x, by_a * extraction)
    by_x += (by_a * extraction) @ params["adjustment"].T
  by_values, by["taps"] = causal_convolution_gradients(values, params["taps"], by_a * factor)
  if "values" in params:
    by["values"] = np.einsum("btd,bte->de", x, by_values)
    by_values = by_values @ params["values"].T
  return by_x + by_values, by
