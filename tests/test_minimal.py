"""examples/minimal.py: its layer is dpjax's, it is causal, and its loss falls."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import layers
from tests import helpers

sys.path.insert(0, str(helpers.ROOT / "examples"))  # as for a script there
import minimal  # noqa: E402

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(autouse=True)
def small(monkeypatch):
  sizes = dict(BATCH=6, LENGTH=17, WIDTH=24, NUM_LAYERS=1, LOG_EVERY=40)
  for name, size in sizes.items():
    monkeypatch.setattr(minimal, name, size)
  with jax.numpy_rank_promotion("allow"):
    yield


def test_its_dispatcher_is_that_of_the_library():
  x_btd = jax.random.normal(jax.random.key(0), (3, 13, minimal.WIDTH))
  ours, theirs = minimal.Dispatcher(), layers.Dispatcher(max_length=minimal.LENGTH)
  variables = jax.jit(ours.init)(jax.random.key(1), x_btd)
  expected = jax.jit(theirs.apply)(variables, x_btd)
  np.testing.assert_allclose(jax.jit(ours.apply)(variables, x_btd), expected, rtol=1e-5, atol=1e-6)


def test_it_is_causal():
  model, tokens_bt = minimal.Model(11), jnp.arange(17)[None] % 11
  variables = jax.jit(model.init)(jax.random.key(0), tokens_bt)
  rows = jnp.concatenate([tokens_bt, tokens_bt.at[0, 9].set(3)])
  logits_tv, changed_tv = jax.jit(model.apply)(variables, rows)
  is_same = (logits_tv == changed_tv).all(axis=1)
  assert is_same[:9].all() and not is_same[9]


def test_it_trains_and_samples(capsys):
  minimal.main(120)
  text = capsys.readouterr().out
  first, _, last = map(float, re.findall(r"loss ([\d.]+)", text))
  assert last < first - 0.5
  sample = text[text.index("The statement ") :]
  assert len(sample) == len("The statement ") + 300 + 1


def test_it_is_read_in_ten_minutes():
  assert len((helpers.ROOT / "examples/minimal.py").read_text().splitlines()) <= 120
