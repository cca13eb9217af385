"""Files of earlier versions are read by today's names."""

import json
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file

import dpjax
from dpjax.models import build, names
from dpjax.runs import export, run_files
from dpjax.training import sharding
from dpjax.training.checkpoints import Checkpoints
from dpjax.training.losses import Objective
from dpjax.training.trainer import Trainer
from tests import helpers

LAYERS = [
  ("layers/mixer/out/kernel", "layers/blocks_0/mixer/out/kernel"),
  ("layers/mixer_norm/scale", "layers/blocks_0/mixer_norm/scale"),
  ("layers/feed_forward/out/bias", "layers/blocks_0/feed_forward/out/bias"),
  ("layers/feed_forward_norm/scale", "layers/blocks_0/feed_forward_norm/scale"),
  ("layers/mixer/relative_positions/bias", "layers/blocks_0/mixer/relative_positions/bias"),
  ("relative_positions/content_bias", "shared_positions/content_bias"),
]
PATTERN = [
  ("layers/period/place_0/mixer/taps", "layers/blocks_0/mixer/taps"),
  ("layers/period/place_1/mixer/taps", "layers/blocks_1/mixer/taps"),
  ("layers/period/place_12/mixer_norm/scale", "layers/blocks_12/mixer_norm/scale"),
  ("layers/rest/place_1/feed_forward/out/bias", "layers/blocks_1/feed_forward/out/bias"),
]
POOLED = [
  ("hourglass/first/mixer/skip", "stages_0/first/blocks_0/mixer/skip"),
  ("hourglass/last/period/place_1/mixer/skip", "stages_0/last/blocks_1/mixer/skip"),
  ("hourglass/middle/feed_forward/out/bias", "layers/blocks_0/feed_forward/out/bias"),
  ("hourglass/boundary_predictor/out/kernel", "stages_0/boundaries/out/kernel"),
  ("hourglass/null_group", "stages_0/null_group"),
  ("hourglass/middle_norm/scale", "stages_0/inner_norm/scale"),
  ("hourglass/relative_positions/content_bias", "stages_0/shared_positions/content_bias"),
  ("hourglass/middle_in", "stages_0/widen"),
  ("hourglass/middle_out", "stages_0/narrow"),
  ("hourglass/middle_padding", "stages_0/padding"),
  ("hourglass/first_out_norm/scale", "stages_0/first/out_norm/scale"),
  ("hourglass/last_out_norm/scale", "stages_0/last/out_norm/scale"),
  ("hourglass/middle_out_norm/scale", "layers/out_norm/scale"),
  ("hourglass/middle_positions/content_bias", "shared_positions/content_bias"),
]
NESTED = [
  ("hourglass/first/mixer/skip", "stages_0/first/blocks_0/mixer/skip"),
  ("hourglass/middle/first/mixer/skip", "stages_1/first/blocks_0/mixer/skip"),
  ("hourglass/middle/middle/last/mixer/skip", "stages_2/last/blocks_0/mixer/skip"),
  ("hourglass/middle/middle/middle/mixer/skip", "layers/blocks_0/mixer/skip"),
  ("hourglass/middle/middle/middle/rest/place_1/mixer/skip", "layers/blocks_1/mixer/skip"),
  ("hourglass/middle/boundary_predictor/query", "stages_1/boundaries/query"),
  ("hourglass/middle/middle/null_group", "stages_2/null_group"),
  ("hourglass/middle/middle_norm/scale", "stages_1/inner_norm/scale"),
  ("hourglass/middle/relative_positions/content_bias", "stages_1/shared_positions/content_bias"),
  ("hourglass/middle/middle_in", "stages_1/widen"),
  ("hourglass/middle/middle/middle_out", "stages_2/narrow"),
  ("hourglass/middle/last_out_norm/scale", "stages_1/last/out_norm/scale"),
  ("hourglass/middle/middle/middle_out_norm/scale", "layers/out_norm/scale"),
  ("hourglass/middle/middle/middle_positions/content_bias", "shared_positions/content_bias"),
]
FROZEN = [
  ("hourglass/middle/mixer/skip", "layers/blocks_0/mixer/skip"),
  *(
    (f"hourglass/boundary_predictor/frozen/{old}", f"stages_0/boundaries/frozen/{new}")
    for old, new in (*LAYERS, *POOLED[:1], *NESTED[3:4], ("logits/kernel", "logits/kernel"))
  ),
]
SAME = [
  ("embedding/tokens/embedding", "embedding/tokens/embedding"),
  ("final_norm/scale", "final_norm/scale"),
  ("logits/kernel", "logits/kernel"),
]
MODELS = [LAYERS, PATTERN, POOLED, NESTED, FROZEN]


def make_tree(paths):
  """Arrays in nested dicts, with different values."""
  tree: dict = {}
  for i, path in enumerate(paths):
    *outer, last = path.split("/")
    inner = tree
    for key in outer:
      inner = inner.setdefault(key, {})
    inner[last] = np.full(2, i)
  return tree


def in_files(paths, *fields):
  return [".".join([field, *path.split("/")]) for field in fields for path in paths]


@pytest.mark.parametrize("rows", MODELS)
def test_a_tree_is_renamed_once(rows):
  old, new = (make_tree(paths) for paths in zip(*rows, *SAME, strict=True))
  renamed = names.renamed(old)
  assert jax.tree.structure(renamed) == jax.tree.structure(new)
  jax.tree.map(np.testing.assert_array_equal, renamed, new)
  jax.tree.map(np.testing.assert_array_equal, names.renamed(new), new)


@pytest.mark.parametrize("rows", MODELS)
def test_names_in_files_are_found_anywhere_in_a_state(rows):
  fields = "params", "average", "opt_state.1.inner_states.muon.inner_state.0.mu"
  old, new = (in_files(paths, *fields) for paths in zip(*rows, *SAME, strict=True))
  own = ["opt_state.0.count", "step", "key"]
  expected = {each: [name] for name, each in zip(old, new, strict=True)}
  assert names.find_parts([*old, *own], {*new, *own}) == expected | {x: [x] for x in own}
  assert names.find_parts(new, {*new}) == {x: [x] for x in new}


def test_the_layers_of_a_period_come_before_the_rest():
  place = "place_0/mixer/taps"
  for path, new in (
    ("layers", "layers"),
    ("hourglass/first", "stages_0/first"),
    ("hourglass/middle/middle", "layers"),
  ):
    paths = f"{path}/rest/{place}", f"{path}/period/{place}"
    tree = make_tree([*paths, f"{path}/period/place_1/mixer/taps"])
    (renamed,) = (x for x in jax.tree.leaves(names.renamed(tree)) if x.size == 4)
    np.testing.assert_array_equal(renamed, [1, 1, 0, 0])
    old, today = (
      in_files(paths, "opt_state.0.nu"),
      in_files([f"{new}/blocks_0/mixer/taps"], "opt_state.0.nu"),
    )
    assert names.find_parts(old, today) == {today[0]: old[::-1]}


OF_USERS = [
  "layers/blocks_0/attention/out/kernel",
  "layers/attention/kernel",
  "layers_0/mixer/kernel",
  "layers/period/kernel",
  "my_hourglass/first/mixer/kernel",
  "hourglass/first/kernel",
  "encoder/layers/mixer/kernel",
  "relative_positions/bias",
  "hourglass/middle_in",
  "rest/place_0/kernel",
]


def test_a_users_model_keeps_its_names():
  tree = make_tree(OF_USERS)
  assert names.renamed(tree) is tree
  # Even those of an earlier version, where the model itself has them.
  paths = [*OF_USERS, *(old for rows in MODELS for old, _ in rows)]
  stored = in_files(dict.fromkeys(paths), "params", "opt_state.0.mu")
  assert names.find_parts(stored, {*stored}) == {x: [x] for x in stored}


def make_trainer(name) -> Trainer:
  """Of the runs in tests/golden, which dpjax wrote after update 3, with other names."""
  mixers = tuple(
    dpjax.config.mixer(x, has_feed_forward=False)
    for x in ("short_convolution", "relative_attention")
  )
  config = dpjax.config.default_model()
  config.update(vocab_size=13, width=8, feed_forward_width=10, max_length=16)
  config.update(norm_position="pre", norm_type="rms_norm", use_bias=False, tie_embeddings=True)
  config.update(dropout=0.0, hidden_dropout=0.0, num_layers=3, mixer=mixers)
  if name == "pooled":
    boundaries = dpjax.config.boundaries("routing", factor=3.0, num_buckets=1)
    config.update(positions="none", boundaries=boundaries, stack_norms=True)
    config.first.update(num_layers=1, mixer=mixers[0])
    config.last.update(num_layers=1, mixer=mixers[1])
    inner = dpjax.config.boundaries("fixed", shortening_factor=2)
    config.middle = dpjax.config.middle(inner, width=6)
  optimizer = dpjax.config.optimizer("muon" if name == "plain" else "adamw", weight_decay=0.1)
  average = 0.9 if name == "plain" else 0.0
  train = dpjax.config.Train(
    learning_rate=0.01,
    optimizer=optimizer,
    ema_decay=average,
    grad_clip_norm=0.5,
    param_sharding="fsdp",
  )
  objective = Objective(build.build_boundaries(config))
  return Trainer(dpjax.build_model(config), train, 6, objective=objective, seed=3)


def make_batch(step):
  rows = np.random.default_rng(step).integers(0, 13, (2, 17))
  tokens = rows.astype(np.int32)
  weights = np.ones((2, 16), np.float32)
  return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def read_old_run(name, folder) -> Trainer:
  with tarfile.open(helpers.ROOT / f"tests/golden/N_old_{name}.tar.xz") as archive:
    archive.extractall(folder, filter="data")
  return make_trainer(name)


@pytest.mark.parametrize("name", ["plain", pytest.param("pooled", marks=pytest.mark.slow)])
def test_an_old_run_goes_on_as_if_nothing_had_changed(name, tmp_path, standard_promotion):
  trainer = read_old_run(name, tmp_path)
  mesh = sharding.make_mesh(jax.devices()[:2])
  with Checkpoints(tmp_path) as saved:
    state, meta = saved.restore(trainer.abstract_state(mesh))
    step, params = saved.restore_step(trainer.abstract_state(mesh).params)
  assert step == state.step == 3
  jax.tree.map(np.testing.assert_array_equal, params, state.params)
  losses = []
  update = trainer.jit_step(mesh)
  for i in range(3, 6):
    state, metrics = update(state, sharding.put_batch(make_batch(i), mesh))
    losses.append(metrics["loss"])
  np.testing.assert_allclose(losses, meta["losses"], rtol=1e-5)


@pytest.mark.parametrize("name", ["plain", "pooled"])
def test_an_old_export_is_read_one_array_at_a_time(name, tmp_path):
  trainer = read_old_run(name, tmp_path)
  abstract = trainer.abstract_state(sharding.make_mesh()).params
  with Checkpoints(tmp_path) as saved:
    _, params = saved.restore_step(abstract)
  metadata = json.loads((tmp_path / "3/state/_METADATA").read_text())["tree_metadata"]
  paths = [[key["key"] for key in x["key_metadata"]] for x in metadata.values()]
  old = [".".join(path[1:]) for path in paths if path[0] == "params"]
  arrays = {}
  for name, parts in names.find_parts(old, now := names.by_name(params)).items():
    # Of 3 layers of 2 blocks in turn, both the period and the rest have one of the first block.
    pieces = np.split(np.asarray(now[name]), len(parts)) if len(parts) > 1 else [now[name]]
    arrays |= zip(parts, map(jnp.asarray, pieces), strict=True)
  save_file(arrays, tmp_path / run_files.PARAMETERS, {"step": "3"})
  restored, step = export.restore(tmp_path, abstract)
  assert step == 3
  jax.tree.map(np.testing.assert_array_equal, restored, params)
