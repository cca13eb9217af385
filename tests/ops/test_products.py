"""Products with the leading axes as one, and products whose factors are of 16 bits."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax.models.build import build_model
from dpjax.ops import dot_general, products
from dpjax.training import losses
from tests import helpers
from tests.reference.exact import both, normal

OVER_LAST = (((2,), (0,)), ((), ()))


@pytest.mark.parametrize(
  "lhs, rhs, numbers",
  [
    ((2, 3, 5), (5, 7, 4), OVER_LAST),  # DenseGeneral's
    ((0, 3, 5), (5, 7), OVER_LAST),
    ((2, 3, 5), (7, 5), (((2,), (1,)), ((), ()))),
    ((2, 3, 5), (3, 7), (((1,), (0,)), ((), ()))),  # Not over the last axis.
  ],
)
def test_is_jaxs_own(lhs, rhs, numbers):
  x, w = normal(*lhs), normal(*rhs)

  def run(product):
    multiply = partial(product, dimension_numbers=numbers, precision=jax.lax.Precision.HIGHEST)

    @jax.jit
    def both(x, w):
      result, pull = jax.vjp(multiply, x, w)
      return result, *pull(jnp.cos(jnp.arange(result.size)).reshape(result.shape))

    return both(x, w)

  for ours, theirs in zip(run(dot_general), run(jax.lax.dot_general), strict=True):
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_jaxlib_multiplies_many_narrow_rows_correctly():
  """Fails with jaxlib 0.10.2 on CPU, which pyproject.toml therefore excludes."""
  rows, matrix = normal(32803, 3), normal(3, 3)
  squares = jax.jit(lambda rows, matrix: jnp.sum((matrix @ rows.T) ** 2, axis=0))
  expected = np.sum((np.asarray(matrix) @ np.asarray(rows).T) ** 2, axis=0)
  np.testing.assert_allclose(squares(rows, matrix), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixer", ["dispatcher", "relative_attention"])
def test_every_product_of_a_step_sums_over_one_axis_and_has_factors_of_16_bits(mixer):
  config = helpers.model_settings(mixer, max_length=11, tie_embeddings=mixer == "dispatcher")
  model, tokens = build_model(config), jnp.zeros((3, 5), jnp.int32)

  def loss(params):
    output = model.apply({"params": params}, tokens)
    weights = jnp.ones(tokens.shape)
    return losses.output_nats(output.hidden, *model.output_layer(params), tokens, weights)

  with ops.product_dtype("bfloat16"):
    text = str(jax.make_jaxpr(jax.grad(loss))(helpers.draw_params(model, 1, 1.0)))
  factors = re.findall(r"f32\[[0-9,]*\] = dot_general\[.*?\] (\w+) (\w+)\n", text, re.DOTALL)
  types = dict(re.findall(r"\b(\w+):(\w+)\[", text))
  wide = [names for names in factors if {types[name] for name in names} != {"bf16"}]
  assert len(factors) > 10
  assert len(wide) <= (0 if mixer != "dispatcher" else len(factors) // 2), wide
  sums = re.findall(r"dimension_numbers=\(\(\[([0-9, ]*)\], \[[0-9, ]*\]\)", text)
  assert len(sums) >= len(factors)
  assert mixer != "dispatcher" or {axes.count(",") for axes in sums} == {0}


def rounded(x) -> np.ndarray:
  return np.asarray(x.astype(jnp.bfloat16), np.float64)


def product_and_gradients(spec, x, y, multiply=products.product):
  def run(x, y):
    result, pull = jax.vjp(lambda x, y: multiply(spec, x, y), x, y)
    return result, *pull(jnp.cos(jnp.arange(result.size, dtype=x.dtype)).reshape(result.shape))

  return run(x, y)


SPECS = {
  "rk,kn->rn": ((7, 5), (5, 3)),
  "bthe,bshe->bhts": ((2, 3, 4, 5), (2, 6, 4, 5)),
  "hbqr,hbqe->hre": ((2, 3, 4, 5), (2, 3, 4, 6)),
  "btld,lde->bte": ((2, 3, 4, 5), (4, 5, 6)),
  # One row.
  "btd,dn->btn": ((1, 1, 192), (192, 3)),
  "bhe,bhme->bhm": ((2, 3, 5), (2, 3, 4, 5)),
  "bhcm,bhme->bche": ((2, 3, 1, 4), (2, 3, 4, 5)),
}


@pytest.mark.parametrize("spec", SPECS)
def test_bfloat16_factors_have_float32_sums(spec):
  x, y = (normal(*shape) for shape in SPECS[spec])
  with ops.product_dtype("bfloat16"):
    actual = jax.jit(partial(product_and_gradients, spec))(x, y)
    mapped = jax.jit(jax.vmap(partial(products.product, spec), (0, None)))(jnp.stack([x, -x]), y)
  result = np.einsum(spec, rounded(x), rounded(y))
  grad = rounded(jnp.cos(jnp.arange(result.size, dtype=jnp.float32)).reshape(result.shape))
  terms, z = spec.split("->")
  a, b = terms.split(",")
  by_x, by_y = (
    np.einsum(f"{z},{b}->{a}", grad, rounded(y)),
    np.einsum(f"{a},{z}->{b}", rounded(x), grad),
  )
  for ours, expected in zip(actual, (result, by_x, by_y), strict=True):
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(mapped, np.stack([result, -result]), rtol=1e-5, atol=1e-5)
  plain = product_and_gradients(spec, x, y)
  for ours, theirs in zip(
    plain, product_and_gradients(spec, x, y, lambda spec, *xy: jnp.einsum(spec, *xy)), strict=True
  ):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_what_bfloat16_products_leave():
  x, w = normal(2, 3, 5), normal(5, 7)
  with ops.product_dtype("bfloat16"):
    exact = dot_general(x, w, OVER_LAST, precision=jax.lax.Precision.HIGHEST)
    low = dot_general(x, w, OVER_LAST)
    assert ops.as_factor(x).dtype == jnp.bfloat16
    with jax.enable_x64(True):
      wide = products.product("btd,de->bte", x.astype(jnp.float64), w.astype(jnp.float64))
  np.testing.assert_allclose(exact, x @ w, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(wide, np.asarray(x, float) @ np.asarray(w, float), rtol=1e-12)
  assert low.dtype == jnp.float32 and float(jnp.abs(low - exact).max()) > 1e-4
  assert ops.as_factor(x).dtype == jnp.float32


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_layout_is_for_a_cpu_alone(platform):
  with ops.product_dtype("bfloat16"):
    traced = jax.jit(partial(product_and_gradients, "rk,kn->rn")).trace(normal(7, 5), normal(5, 3))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert text.count("LayoutConstraint") == (platform == "cpu")
  assert text.count("stablehlo.transpose") <= (1 if platform == "cpu" else 2)
  assert len(re.findall("dot_general.*bf16.*bf16.*-> tensor<[0-9x]*f32>", text)) == 3


def test_a_result_or_a_factor_that_is_transposed():
  x, w = normal(70, 50), normal(50, 30)
  with ops.product_dtype("bfloat16"):
    result = jax.jit(lambda x, w: products.product("rk,kn->rn", x, w).T + 1)(x, w)
    swapped = jax.jit(lambda x, w: products.product("rk,nk->rn", w.T, x) + 1)(x, w)
    column = jax.jit(lambda x, w: products.product("rk,kn->rn", x, w[:, :1]))(x, w)
  expected = rounded(x) @ rounded(w)
  np.testing.assert_allclose(result.T - 1, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(swapped.T - 1, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(column, expected[:, :1], rtol=1e-4, atol=1e-4)


def test_derivatives_in_forward_mode_are_refused_with_advice():
  x, w = normal(3, 5).astype(jnp.bfloat16), normal(5, 7).astype(jnp.bfloat16)
  with pytest.raises(TypeError, match="expected float32 for forward-mode"):
    jax.jvp(lambda x: dot_general(x, w, (((1,), (0,)), ((), ()))), (x,), (x,))


@pytest.mark.parametrize("length", [32, 18, 7])  # In parts of 2, of 2 and of 1.
def test_row_product_is_the_sum_in_float64(length):
  x, y = normal(2, 3, length), normal(2, 3, length, 5)
  actual = both(products.row_product, partial(jnp.einsum, "bhk,bhkn->bhn"), (x, y))
  for ours, expected in zip(*actual, strict=True):
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
  low = jax.jit(products.row_product)(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
  assert low.dtype == jnp.float32
  expected = np.einsum("bhk,bhkn->bhn", rounded(x), rounded(y))
  np.testing.assert_allclose(low, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "width"), [(18, 1), (18, 5), (7, 5), (1, 5)])
def test_sum_products_is_the_sum_of_the_rows_it_is_given(length, width):
  x, y = normal(2, length, width), normal(1, length, 5)
  rows = jnp.array([np.roll(np.arange(length), 4), [length - 1] * length])
  taken = np.stack([np.asarray(x)[b, rows[b]] for b in range(2)])
  for factor, arguments in ((x, (x, y)), (taken, (x, y, rows))):
    expected = (np.float64(factor) * np.float64(y)).sum(axis=1)
    np.testing.assert_allclose(
      jax.jit(products.sum_products)(*arguments), expected, rtol=1e-5, atol=1e-5
    )
