"""How a token is chosen: which ones can come, how often, and by whose key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.generation.sampling import sample

compiled = jax.jit(sample, static_argnames="top_k")


def plain_sample(logits, noise, temperature, top_k, top_p) -> list[int]:
  """What `sample` says, row by row in NumPy, with the noise of its draws."""
  tokens = []
  for row, noise_row in zip(logits, noise, strict=True):
    if temperature == 0:
      tokens.append(int(np.argmax(row)))
      continue
    scaled = np.array(row / np.float32(temperature), np.float64)
    if 0 < top_k < len(row):
      scaled[scaled < np.sort(scaled)[-top_k]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    stay = before / weights.sum() < top_p
    scaled[scaled < scaled[order[stay]].min()] = -np.inf
    tokens.append(int(np.argmax(scaled + noise_row)))
  return tokens


def test_settings_traced_or_not_are_those_of_a_plain_sampler():
  # Rounded logits have ties everywhere, of negative, zero and positive numbers.
  normal = 2 * jax.random.normal(jax.random.key(5), (11, 61))
  logits = jnp.round(normal).at[:, ::7].set(-jnp.inf).at[0, 1].set(-0.0)
  logits = logits.at[6:].set(normal[6:])
  keys = jax.random.split(jax.random.key(6), 11)
  noise = jax.vmap(lambda key: jax.random.gumbel(key, (61,)))(keys)
  traces, expected_all = [], set()

  @jax.jit
  def traced(logits, keys, settings):
    traces.append(settings)
    return sample(logits, keys, **settings)

  # The sum of what comes before is nowhere within 1e-4 of these top_p.
  cuts = [(1.0, 0, 1.0), (0.7, 1, 1.0), (1.3, 5, 1.0), (1.0, 60, 1.0), (2.0, 61, 1.0)]
  cuts += [(1.0, 97, 0.6001), (0.8, 0, 0.0503), (1.6, 13, 0.9007), (3.0, 2, 0.4003), (0.0, 3, 0.5)]
  for temperature, top_k, top_p in cuts:
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    expected = plain_sample(np.asarray(logits), np.asarray(noise), **settings)
    assert traced(logits, keys, settings).tolist() == expected, settings
    expected_all.add(tuple(expected))
    if top_k in (5, 13):
      assert compiled(logits, keys, **settings).tolist() == expected, settings
  assert len(traces) == 1 and len(expected_all) > 6


@pytest.mark.parametrize(
  ("temperature", "scale"), [(1e-37, 200), (1e-50, 200), (1e-20, 1e20), (1e-12, 1e37)]
)
def test_temperatures_that_float32_cannot_divide_by_are_greedy(temperature, scale):
  logits = scale * jax.random.normal(jax.random.key(4), (7, 53)).at[:, ::5].set(-jnp.inf)
  keys = jax.random.split(jax.random.key(9), 7)
  expected = jnp.argmax(logits, axis=1)
  for settings in ({}, dict(top_k=3), dict(top_p=0.7)):
    direct = sample(logits, keys, temperature=temperature, **settings)
    traced = compiled(logits, keys, temperature=temperature, **settings)
    np.testing.assert_array_equal(direct, expected)
    np.testing.assert_array_equal(traced, expected)


def test_draws_do_not_depend_on_an_offset_of_the_logits():
  keys = jax.random.split(jax.random.key(8), 500)
  logits = jnp.tile(jnp.array([[0.0, 8.0, -8.0, 16.0]]), (500, 1))
  tokens_b = sample(logits + 2.0**24, keys, temperature=16.0)
  np.testing.assert_array_equal(tokens_b, sample(logits, keys, temperature=16.0))


def test_bfloat16_logits():
  logits = jnp.array([[1, 3, 2, 3, 0]], jnp.bfloat16)
  keys = jax.random.split(jax.random.key(0), 1)
  assert jax.jit(sample)(logits, keys, temperature=0.0, top_k=2).tolist() == [1]
  assert sample(logits, keys, top_k=2).tolist()[0] in (1, 3)


@pytest.mark.parametrize(
  ("setting", "value", "message"),
  [
    ("temperature", -0.1, "temperature: expected a finite number .* got -0.1"),
    ("temperature", float("nan"), "temperature: expected a finite number .* got nan"),
    ("temperature", np.float32(np.inf), "temperature: expected a finite .* got inf"),
    ("top_k", jnp.int32(-1), "top_k: expected at least 0, got -1"),
    ("top_p", 0.0, "top_p: expected above 0 and at most 1, got 0.0"),
    ("top_p", 1.01, "top_p: expected above 0 and at most 1, got 1.01"),
    ("top_p", float("nan"), "top_p: expected above 0 and at most 1, got nan"),
  ],
)
def test_known_settings_outside_their_range_are_refused(setting, value, message):
  keys = jax.random.split(jax.random.key(0), 2)
  with pytest.raises(ValueError, match=message):
    sample(jnp.zeros((2, 5)), keys, **{setting: value})
  with pytest.raises(ValueError, match=r"logits: expected \[B, V\], got .*\(2, 3, 5\)"):
    sample(jnp.zeros((2, 3, 5)), keys)
