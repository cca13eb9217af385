"""The models in PyTorch are those of dpjax. Needs PyTorch, which is no dependency."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.models.build import build_model
from dpjax.training import losses
from tests import helpers

torch = pytest.importorskip("torch", reason="PyTorch is no dependency")
sys.path.insert(0, str(helpers.ROOT / "benchmarks"))
import harness  # noqa: E402
import step  # noqa: E402
import torch_models  # noqa: E402

SMALL = dict(vocab_size=13, num_layers=2, width=6, feed_forward_width=10, max_length=11)
PRE = dict(norm_position="pre", positions="learned", init_std=0.01)
RELATIVE = dict(mixer=dict(name="relative_attention", num_heads=3), positions="none")
RELATIVE |= dict(activation="gelu", init_std=0.02, norm_init_std=0.02)
POOLED = RELATIVE | dict(first=dict(num_layers=1), last=dict(num_layers=3))
MODELS: dict[str, dict[str, Any]] = {
  "dispatcher": dict(mixer=dict(name="dispatcher")),
  "attention, pre": dict(mixer=dict(name="attention", num_heads=3, use_bias=False), **PRE),
  "relative": RELATIVE,
  "fixed": POOLED | dict(boundaries=dict(name="fixed", shortening_factor=3)),
  "whitespace": POOLED
  | dict(boundaries=dict(name="whitespace", space_ids=(0, 7, 5), num_buckets=2)),
  **{name: dict(mixer=dict(name=name), **PRE) for name in ("she", "he", "we", "me")},
}
EXTRACTIONS = dict.fromkeys(step.FORMS, ("sum", "convolution", "fft"))
FORMS = [(name, form) for name in MODELS for form in EXTRACTIONS.get(name, ("convolution",))]


def settings_of(model):
  return dpjax.config.from_dict({"model": SMALL | model}).model.to_dict()


def to_params(arrays):
  """Arrays by the names of `torch_models` -> parameters of dpjax."""
  layers = {}
  for name, x in arrays.items():
    parts = name.split(".")
    index = next((int(part) for part in parts if part.isdigit()), None)
    *path, leaf = ("blocks_0" if part.isdigit() else part for part in parts)
    if leaf == "weight" and path[-1] == "tokens":
      leaf = "embedding"
    elif leaf == "weight":
      leaf, x = ("kernel", x.T) if x.ndim == 2 else ("scale", x)
    if path and path[-1] == "queries_keys_values":
      x = x.reshape(*x.shape[:-1], 3, -1)
    layers.setdefault((*path, leaf), {})[index] = x
  params: dict[str, Any] = {}
  for (*path, leaf), found in layers.items():
    place = params
    for part in path:
      place = place.setdefault(part, {})
    whole = found[None] if None in found else np.stack([found[i] for i in sorted(found)])
    place[leaf] = jnp.asarray(whole)
  return params


@pytest.mark.parametrize("name, form", FORMS)
def test_models_of_pytorch_are_those_of_dpjax(name, form):
  settings = settings_of(MODELS[name])
  model = torch_models.LanguageModel(settings | {"extraction": form})
  generator = np.random.default_rng(5)
  with torch.no_grad():
    for key, x in model.named_parameters():
      is_gain = key.endswith("norm.weight")
      x.copy_(torch.from_numpy(is_gain + 0.3 * generator.standard_normal(x.shape)))
  # Shorter than the window, and other than the number of rows.
  text = harness.draw_text(4, 9, SMALL["vocab_size"])
  tokens, targets = text[:, :-1], text[:, 1:]
  logits = model.eval()(torch.from_numpy(tokens).long())
  torch.nn.functional.cross_entropy(
    logits.flatten(0, 1), torch.from_numpy(targets).long().flatten(), reduction="sum"
  ).backward()

  def arrays(pick):
    return to_params({key: pick(x).numpy() for key, x in model.named_parameters()})

  def loss(params):
    output: Any = build_model(settings).apply({"params": params}, jnp.asarray(tokens))
    nats, _ = losses.cross_entropy(output.logits, jnp.asarray(targets), jnp.ones((4, 9)))
    return nats, output.logits

  params = arrays(torch.Tensor.detach)
  shapes = jax.eval_shape(build_model(settings).init, jax.random.key(0), tokens)["params"]
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, shapes)
  with jax.default_matmul_precision("highest"):
    gradients, expected = jax.jit(jax.grad(loss, has_aux=True))(params)
  np.testing.assert_allclose(logits.detach(), expected, rtol=1e-4, atol=1e-5)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=2e-4),
    arrays(lambda x: x.grad),
    gradients,
  )
