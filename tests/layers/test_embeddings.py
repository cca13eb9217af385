import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.layers import Context, embeddings

VOCAB, WIDTH, MAX_LENGTH = 11, 6, 7
TOKENS = np.array([[3, 10, 0, 3, 7], [5, 1, 2, 8, 4]])


def apply(positions="sinusoidal", tokens=TOKENS, **settings):
  layer = embeddings.TokenAndPosition(VOCAB, WIDTH, MAX_LENGTH, positions, **settings)
  output, variables = jax.jit(layer.init_with_output)(jax.random.key(0), tokens)
  return output, variables["params"]


def sinusoids(places, width):
  """[..., width]: the sine and the cosine of t / 10000 ** (2i / D) by turns."""
  angle = np.asarray(places)[..., None] * 10000.0 ** (-np.arange(0, width, 2) / width)
  pairs = np.stack([np.sin(angle), np.cos(angle)], -1)
  return pairs.reshape(*np.shape(places), -1)[..., :width]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
def test_tokens_and_learned_positions_are_scaled_and_sinusoidal_ones_are_not(positions):
  output, params = apply(positions)
  expected = params["tokens"]["embedding"][TOKENS]
  if positions == "sinusoidal":
    expected = np.sqrt(6) * expected + sinusoids(np.arange(5), WIDTH)[None]
  if positions == "learned":
    places = params["positions"]
    assert places.shape == (MAX_LENGTH, WIDTH) and places.dtype == jnp.float32
    expected = np.sqrt(6) * (expected + places[:5][None])
  np.testing.assert_allclose(output, expected, rtol=1e-6, atol=1e-6)
  assert params.keys() == {"tokens", *(["positions"] if positions == "learned" else [])}
  half, params = apply(positions, dtype=jnp.bfloat16)
  assert half.dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
  np.testing.assert_allclose(half.astype(jnp.float32), output, rtol=0, atol=0.02)


def test_dropout_is_of_the_sum():
  layer = embeddings.TokenAndPosition(VOCAB, WIDTH, MAX_LENGTH, dropout=0.5)
  expected, params = apply()
  rngs = {"dropout": jax.random.key(1)}
  output = layer.apply({"params": params}, TOKENS, deterministic=False, rngs=rngs)
  is_kept = np.asarray(output != 0)
  assert 10 < is_kept.sum() < 50
  np.testing.assert_allclose(output[is_kept], 2 * expected[is_kept], rtol=1e-6)


def positions_from(start, positions="sinusoidal", width=WIDTH, length=5):
  """The rows alone: [B, length, width], with no tokens; and the parameters."""
  layer = embeddings.TokenAndPosition(VOCAB, width, MAX_LENGTH, positions)
  tokens = np.zeros((len(start), length), np.int32)

  @jax.jit
  def rows(start):
    variables = layer.init(jax.random.key(0), tokens)["params"]
    variables["tokens"] = jax.tree.map(jnp.zeros_like, variables["tokens"])
    return layer.apply({"params": variables}, tokens, Context(num_before=start)), variables

  return rows(jnp.asarray(start, jnp.int32))


@pytest.mark.parametrize("width", [6, 5])
def test_sinusoidal_positions_go_on(width):
  start = [0, 2, 4, MAX_LENGTH, 8190, 1_000_003, 2**31 - 5]
  rows, _ = positions_from(start, width=width)
  assert rows.dtype == jnp.float32
  place = np.array(start)[..., None] + np.arange(5)
  np.testing.assert_allclose(rows, sinusoids(place, width), rtol=0, atol=1e-6)
  # Within the table they are its rows to the last bit.
  table = embeddings.sinusoidal_positions(MAX_LENGTH, width)
  is_within = place < MAX_LENGTH
  assert is_within.sum() == 5 + 5 + 3
  np.testing.assert_array_equal(rows[is_within], table[place[is_within]])


def test_learned_positions_end():
  rows, params = positions_from([1, 5, 9], "learned")
  table = np.sqrt(np.float32(WIDTH)) * np.asarray(params["positions"])
  np.testing.assert_allclose(rows[0], table[1:6], rtol=1e-6)
  np.testing.assert_allclose(rows[1, :2], table[5:], rtol=1e-6)
  assert np.isnan(rows[1, 2:]).all() and np.isnan(rows[2]).all()
