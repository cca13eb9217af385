"""The Extractors of arXiv:2308.07661, Sec. 5, written from Eqs. 23-29.

Parameters are a dict of arrays: "taps" [l], [l, D] or [l, D, D], and where an Extractor
has them "values" (W_in), "adjustment" (W_adj) and "out" (W_out), [D, D].
"""

import jax.numpy as jnp


def causal_convolution(inputs, filters):
  """y[t] = sum over s <= t of inputs[s] * filters[t - s], [B, T, D] or [B, T, E].

  Filters are [l], [l, D] or [l, D, E].
  """
  if filters.ndim < 3:
    filters = filters.reshape(len(filters), -1, 1) * jnp.eye(inputs.shape[2])
  place = jnp.arange(inputs.shape[1])
  distance = place[:, None] - place
  taps = jnp.where(distance[..., None, None] >= 0, filters[distance], 0)
  return jnp.einsum("bsd,tsde->bte", inputs, taps)


def extractor(inputs, params):
  """SHE, HE, WE or ME with the parts that the parameters are of, Eqs. 23-29."""
  values = inputs @ params["values"] if "values" in params else inputs
  result = causal_convolution(values, params["taps"])
  if "adjustment" in params:
    result = (inputs @ params["adjustment"]) * result
  return result @ params["out"] if "out" in params else result
