"""The products of models, against the exact counts of `dpjax.analysis.complexity`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import dpjax
from dpjax.analysis import complexity
from dpjax.training import profiling
from tests import helpers

WINDOW, WIDTH, VOCAB, LAYERS, HIDDEN = 8, 6, 13, 3, 10


def make(*components, **settings):
  usual = dict(vocab_size=VOCAB, num_layers=LAYERS, width=WIDTH, feed_forward_width=HIDDEN)
  config = helpers.model_settings(*components, **{**usual, "max_length": WINDOW, **settings})
  model = dpjax.build_model(config)
  variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  return model, variables["params"]


def test_counts_loops_branches_and_what_is_within():
  x, y = jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3), jnp.float32)

  def function(x, y):
    x, _ = lax.scan(lambda x, _: (x @ y, None), x, length=5)
    return lax.cond(x[0, 0] > 0, lambda x: x @ y @ y, jax.jit(lambda x: x @ y), x)

  assert profiling.count_products(function, x, y) == (5 + 2) * 2 * (2 * 3 * 3)


@pytest.mark.parametrize("mixer", ["dispatcher", "attention"])
def test_a_model_is_the_sum_of_its_parts(mixer):
  model, params = make(dpjax.config.mixer(mixer, num_heads=1), activation="relu")
  counts = complexity.count_operations(mixer, length=WINDOW, width=WIDTH)
  products = counts.multiplications
  if mixer == "attention":  # What the mask hides is computed, too.
    products += 2 * WIDTH * (WINDOW**2 - WINDOW * (WINDOW + 1) // 2)
  else:  # Gates of tokens that have none before them are, too; levels are no products.
    num_levels, level_reads = 3, 7 + 6 + 4
    products += WIDTH * (WINDOW * num_levels - 2 * level_reads)
  products = LAYERS * (products + 2 * WINDOW * WIDTH * HIDDEN) + WINDOW * WIDTH * VOCAB
  utilisation = profiling.Utilisation(model, params, WINDOW, False, rate=1e3)
  assert utilisation.operations() * WINDOW == 3 * 2 * products
  scores = utilisation.scores(20.0, {})
  assert scores["model_flops_per_second"] == 20 * utilisation.operations()
  assert scores["model_flops_utilisation"] == pytest.approx(20 * utilisation.operations() / 1e3)


def test_pooling_counts_at_the_segments_there_were():
  spaces = helpers.component(dpjax.config.registry.boundaries, "whitespace", space_ids=(0,))
  layers = dict(first=dict(num_layers=1), last=dict(num_layers=2))
  model, params = make("relative_attention", spaces, max_length=32, **layers)
  utilisation = profiling.Utilisation(model, params, 32, True, rate=1e3)
  tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)
  for segments in (4, 25):

    def forward(params, tokens, segments=segments):
      return model.apply({"params": params}, tokens, capacity=segments)

    expected = 3 * profiling.count_products(forward, params, tokens) / 32
    assert utilisation.operations(segments) == pytest.approx(expected, rel=0.01)
    scores = utilisation.scores(2.0, {"segments_mean": segments})
    assert scores["model_flops_per_second"] == 2 * utilisation.operations(segments)


def test_the_rate_is_that_of_a_product(monkeypatch):
  monkeypatch.setattr(profiling, "_SECONDS", 0.0)
  now = iter(range(100, 1000, 10))
  monkeypatch.setattr(profiling.time, "perf_counter", lambda: float(next(now)))
  assert profiling.product_rate() == 2 * 1024**3 / 10  # Slow enough.
