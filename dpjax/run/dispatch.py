"""The dispatch matrices of a model for a text."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from dpjax import ops
from dpjax.errors import UserError
from dpjax.models.language_model import LanguageModel


def dispatch_matrices(model: Any, params: dict, tokens: np.ndarray) -> list[np.ndarray]:
  """The matrix of each layer and head; see `dpjax.run.Run.dispatch_matrices`.

  Args:
    model: the model of the run.
    params: its parameters.
    tokens: [T].

  Raises:
    UserError: a layer is not a Dispatcher, or the model pools tokens.
  """
  stack = model.layers if isinstance(model, LanguageModel) else None
  if stack is None:
    raise UserError("run: expected a model of Dispatchers without token pooling, got another")

  seen: Any
  _, seen = model.apply(
    {"params": params},
    jnp.asarray(tokens)[None],
    capture_intermediates=lambda module, _: module.name == "embedding",
    mutable=["intermediates"],
  )
  (x_btd,) = seen["intermediates"]["embedding"]["__call__"]
  block, matrices = stack.make_block(parent=None), []
  for layer in stack.unstack(params["layers"]).values():
    x_btd, seen = block.apply({"params": layer}, x_btd, mutable=["intermediates"])
    if "intermediates" not in seen:
      name = type(stack.make_mixer()).__name__
      raise UserError(f"run: expected a model of Dispatchers, got one of {name}")
    (g_bthk,) = seen["intermediates"]["mixer"]["level_gates"]
    matrices.append(np.asarray(ops.dispatch_matrix(g_bthk)[0]))
  return matrices
