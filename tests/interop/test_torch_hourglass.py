"""Token pooling: the authors' checkpoints against what their code computed from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpjax
from dpjax.interop import from_torch, to_torch
from dpjax.models import PoolingHints
from dpjax.models.build import build_boundaries
from dpjax.training import losses, metrics
from tests import helpers

FORWARD = dict(atol=1e-5, rtol=1e-5)
GRADIENT = dict(atol=1e-6, rtol=1e-4)

CASES = {
  "none": {},
  "fixed": dict(boundaries="fixed", shortening_factor=3),
  "whitespaces": dict(boundaries="whitespace", space_ids=(0,)),
  "unigram": dict(boundaries="unigram"),
  "entropy": dict(boundaries="entropy"),
  "gumbel": dict(boundaries="gumbel", space_ids=(0,), sample_boundaries=True),
}


@pytest.fixture(autouse=True)
def highest_precision():
  with jax.default_matmul_precision("highest"):
    yield


def convert(arrays, case, **options):
  return from_torch(arrays, **{"max_length": 24, **CASES[case], **options})


def state_of(case):
  return helpers.part(helpers.golden(f"D_hourglass_{case}"), "param/")


def nats_of(logits, targets):
  """[T, B], of every target, in float64."""
  logits = np.asarray(logits, np.float64)
  right = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
  return np.log(np.exp(logits).sum(-1)) - right


def check_scores(expected, sums):
  """The authors' statistics of the tokens whose targets count."""
  scores = metrics.boundary_scores({name: float(value) for name, value in sums.items()})
  assert bool(scores) == bool(expected)
  if scores:
    scores["shortened_length"] = scores["segments_max"] + 1
  ours = {"loss_boundaries": "boundary_loss", "acc": "accuracy"}
  for name, value in expected.items():
    got = scores[ours.get(name, name)]
    np.testing.assert_allclose(got, value, err_msg=name, **FORWARD)


@pytest.mark.parametrize("case", [helpers.slow_unless(case == "gumbel", case) for case in CASES])
def test_the_model_its_loss_and_every_gradient(case):
  golden = helpers.golden(f"D_hourglass_{case}")
  config, params = convert(helpers.part(golden, "param/"), case)
  of_case = {
    "unigram": dict(double_sigmoid=True),
    "entropy": dict(double_sigmoid=True, left=2, num_buckets=3),
    "gumbel": dict(prior=0.2, space_ids=(0,)),
  }
  if case not in ("none", "fixed"):
    config.boundaries.num_buckets = 1
  config.boundaries.update(of_case.get(case, {}))
  model = dpjax.build_model(config)
  objective = losses.Objective(build_boundaries(config))
  batch = {"tokens": golden["in/data"].T, "targets": golden["in/target"].T}
  if case == "unigram":
    batch["boundaries"] = golden["in/boundaries_gt"].T.astype(np.int32)

  def loss_of(params, weights):
    pooling = PoolingHints(noise=golden["in/noise_u"]) if "in/noise_u" in golden else None
    output = model.apply({"params": params}, batch["tokens"], pooling=pooling)
    sums = objective.sums(output, {**batch, "weights": weights})
    nats = sums["nats"] + sums.get("boundary_nats", 0.0)
    return nats / sums["count"], (sums, output)

  run = jax.jit(jax.value_and_grad(loss_of, has_aux=True))
  (total, (sums, output)), grads = run(params, jnp.ones((3, 24)))
  logits = output.logits.swapaxes(0, 1)
  np.testing.assert_allclose(logits, golden["out/logits"], **FORWARD)
  nats = nats_of(logits, golden["in/target"])
  np.testing.assert_allclose(nats, golden["out/loss_per_token"], **FORWARD)
  np.testing.assert_allclose(sums["nats"] / 72, golden["out/loss"], **FORWARD)
  np.testing.assert_allclose(total, golden["out/total"], **FORWARD)
  stage = output.stages[0] if output.stages else None
  for name, field in (("hard_boundaries", "boundaries"), ("boundary_logits", "logits")):
    got = getattr(stage, field, None)
    expected = golden.get(f"out/{name}")
    assert (got is None) == (expected is None)
    if got is not None:
      np.testing.assert_allclose(got, expected, **FORWARD)
  check_scores(helpers.part(golden, "out/stat_"), sums)

  # The conversion is linear, so the authors' gradients go through it as well.
  _, expected = convert(helpers.part(golden, "grad/"), case)
  helpers.assert_trees_close(grads, expected, **GRADIENT)
  # The parameters go back to the authors' names.
  names = {k: x for k, x in helpers.part(golden, "param/").items() if k != "pos_emb.inv_freq"}
  helpers.assert_trees_close(to_torch(config, params), names, rtol=0)

  # The same tokens, of which the last ten targets count.
  weights = jnp.asarray(np.arange(24) >= 14, jnp.float32)
  (_, (sums, output)), _ = run(params, jnp.tile(weights[None], (3, 1)))
  logits = output.logits.swapaxes(0, 1)[14:]
  np.testing.assert_allclose(logits, golden["ext/logits"], **FORWARD)
  expected = golden["ext/loss_per_token"]
  np.testing.assert_allclose(sums["nats"] / 30, expected.mean(), **FORWARD)
  # There the boundaries of all tokens, here of those that count.
  expected = helpers.part(golden, "ext/stat_")
  if expected:
    got = output.stages[0].boundaries.mean()
    np.testing.assert_allclose(expected.pop("p_ones"), got, **FORWARD)
  check_scores(expected, sums)


@pytest.mark.slow
def test_six_updates():
  golden = helpers.golden("J_train_hourglass_fixed")
  config, params = convert(helpers.part(golden, "param/"), "fixed")
  helpers.check_updates(golden, config, params, eps=1e-8, grad_clip_norm=0.25)


def test_settings():
  fixed, gumbel = state_of("fixed"), state_of("gumbel")
  config, _ = convert(fixed, "fixed")
  assert (config.boundaries.shortening_factor, config.boundaries.offset) == (3, 0)
  config, _ = convert(fixed, "fixed", num_heads=2, max_length=99)
  assert config.max_length == 99
  config, _ = convert(fixed, "whitespaces", space_ids=[7])
  assert config.boundaries.space_ids == (7,)
  config, _ = convert(gumbel, "gumbel", temperature=0.7, sample_boundaries=False)
  assert (config.boundaries.temperature, config.boundaries.sample) == (0.7, False)
  # Each stack has its depth.
  more = {f"layers.2.1.{name}": 2 * x for name, x in helpers.part(fixed, "layers.2.0.").items()}
  config, params = convert({**fixed, **more}, "fixed")
  assert [config.first.num_layers, config.num_layers, config.last.num_layers] == [1, 2, 2]
  for leaf in jax.tree.leaves(params["stages_0"]["last"]):
    np.testing.assert_array_equal(leaf[1], 2 * leaf[0])


def test_whole_checkpoints():
  state = state_of("entropy")
  expected_config, expected = convert(state, "entropy")
  # As PyTorch saves a buffer, and the names of a model on several devices.
  frequencies = np.float32(1) / 10000 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
  parallel = {
    f"module.{name}": value for name, value in {**state, "pos_emb.inv_freq": frequencies}.items()
  }
  recorded = {"boundaries_type": "entropy", "activation_function": "gelu"}
  checkpoint = {"epoch": 7, "model_state": parallel, "model_config": recorded}
  config, params = from_torch(checkpoint, max_length=24)
  assert config == expected_config
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  recorded["activation_function"] = "relu"
  assert from_torch(checkpoint, max_length=24)[0].activation == "relu"
  with pytest.raises(ValueError, match="boundaries: expected entropy by .*, got gumbel"):
    from_torch(checkpoint, max_length=24, boundaries="gumbel")


def test_refusals_name_what_is_wrong():
  none, fixed, gumbel = (state_of(case) for case in ("none", "fixed", "gumbel"))

  def refused(state, message, **options):
    with pytest.raises(ValueError, match=message):
      from_torch(state, **{"max_length": 24, **options})

  kind = dict(CASES["fixed"])
  # Boundaries that do not fit.
  refused(fixed, "boundaries: expected fixed or whitespace .*, got None")
  refused(gumbel, "boundaries: expected unigram or entropy or gumbel .*, got fixed", **kind)
  refused(none, "boundaries: expected none .*, got entropy", boundaries="entropy")
  # Settings that are missing, or of other boundaries.
  refused(fixed, "shortening_factor: .*, got None", boundaries="fixed")
  refused(fixed, "space_ids: .*, got none", boundaries="whitespace")
  refused(fixed, "max_length: .*, got None", **kind, max_length=None)
  refused(fixed, "num_heads: expected the 2 of r_w_bias, got 4", **kind, num_heads=4)
  refused(fixed, "boundaries.temperature: .* setting of fixed", **kind, temperature=0.7)
  refused(gumbel, "space_ids.*, got", boundaries="entropy", space_ids=(0,))
  refused(none, "shortening_factor: .* setting of none", shortening_factor=3)
  refused(none, "variant: .*, got multihead", variant="multihead")
  plain = helpers.part(helpers.golden("A_dispatcher_nhead1_L5"), "param/")
  refused(plain, "boundaries: expected none .*, got gumbel", boundaries="gumbel")
  halves = {**fixed, "r_w_bias": np.ones((2, 4)), "r_r_bias": np.ones((2, 4))}
  refused(halves, r"r_w_bias: .* 16 features together.*\(2, 4\)", **kind)


def test_other_boundaries_keep_their_names():
  config, params = convert(state_of("fixed"), "fixed")
  for kind in ("routing", "spacebyte"):
    config.boundaries = dpjax.config.boundaries(kind)
    assert "stages_0.null_group" in to_torch(config, params)
