"""Documents packed into rows: each gives what it gives alone, in every operator."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import ops
from dpjax.ops import convolution
from tests.reference.exact import normal

BATCH, LENGTH, HEADS, FEATURES = 2, 37, 3, 5
# The second row's long document goes across several tiles and blocks.
DOCUMENTS = [(1, 1, 9, 26), (19, 1, 17)]
STARTS = np.zeros((BATCH, LENGTH), np.int32)
PARTS = []
for row, sizes in enumerate(DOCUMENTS):
  ends = np.cumsum(sizes)
  STARTS[row, ends - sizes] = 1
  PARTS += [(row, slice(end - n, end)) for end, n in zip(ends, sizes, strict=True)]


def check(operator, of_tokens, shared=()):
  """Packed = alone, values and gradients; and no bit depends on another document."""
  shape = jax.eval_shape(partial(operator, document_starts=STARTS), *of_tokens, *shared).shape
  weights = normal(*shape, seed=7)

  def with_gradients(mix):
    def loss(arrays):
      output = mix(*arrays)
      return jnp.sum(output * weights), output

    return jax.jit(jax.value_and_grad(loss, has_aux=True))

  def packed(of_tokens, shared):
    return operator(*of_tokens, *shared, document_starts=STARTS)

  def alone(of_tokens, shared):
    # A row for each document, filled up behind it.
    most = max(part.stop - part.start for _, part in PARTS)
    rows = [
      jnp.stack([jnp.pad(x[at], [(0, most)] + [(0, 0)] * (x.ndim - 2))[:most] for at in PARTS])
      for x in of_tokens
    ]
    output = operator(*rows, *shared)
    actual = [y[: part.stop - part.start] for (_, part), y in zip(PARTS, output, strict=True)]
    return jnp.concatenate(actual).reshape(shape)

  arrays, run = (of_tokens, shared), with_gradients(packed)
  (_, before), grads = run(arrays)
  (_, output), expected = with_gradients(alone)(arrays)
  for want, got in zip(
    jax.tree.leaves((output, expected)), jax.tree.leaves((before, grads)), strict=True
  ):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1, abs(want).max()))
  for row, part in PARTS:
    changed = jax.tree.map(lambda x: x.at[row, part].add(1), of_tokens)  # noqa: B023
    (_, after), _ = run((changed, shared))
    is_other = np.ones((BATCH, LENGTH), bool)
    is_other[row, part] = False
    np.testing.assert_array_equal(after[is_other], before[is_other])
    assert (after[row, part] != before[row, part]).any()


@pytest.mark.parametrize("operator", [ops.causal_attention, ops.relative_attention])
def test_attention(operator):
  of_tokens = [normal(BATCH, LENGTH, HEADS, FEATURES, seed=seed) for seed in range(3)]
  shared = ()
  if operator is ops.relative_attention:
    shared = normal(LENGTH, HEADS, FEATURES), *(normal(HEADS, FEATURES, seed=s) for s in (4, 5))
  check(partial(operator, block_size=8), of_tokens, shared)


@pytest.mark.parametrize("implementation, shape", [("scan", ()), ("fft", (FEATURES,))])
def test_causal_convolution(implementation, shape, monkeypatch):
  # Four pairs of halves of one, two and four blocks.
  monkeypatch.setattr(convolution, "_BLOCK", 5)
  operator = partial(ops.causal_convolution, implementation=implementation)
  # Fewer taps than positions: documents have no more than there are.
  check(operator, (normal(BATCH, LENGTH, FEATURES),), (normal(29, *shape),))


ENTROPIES = normal(BATCH, LENGTH)
TOKENS = np.random.default_rng(1).integers(7, size=(BATCH, LENGTH))
MATRIX = normal(FEATURES, 4)
RULES = {
  "fixed": lambda part, **x: ops.fixed_boundaries(TOKENS[part].shape, 3, **x),
  "spacelike": lambda part, **x: ops.spacelike_boundaries(TOKENS[part], (0, 3), (3, 5), **x),
  "spikes": lambda part, **x: ops.entropy_spikes(ENTROPIES[part], 3, **x),
  "global": lambda part, **x: ops.entropy_threshold(ENTROPIES[part], "global", 0.2, **x),
  "monotonic": lambda part, **x: ops.entropy_threshold(ENTROPIES[part], "monotonic", 0.2, **x),
  "combined": lambda part, **x: ops.entropy_threshold(ENTROPIES[part], "combined", -0.8, -0.9, **x),
  "routing": lambda part, **x: ops.route(
    normal(BATCH, LENGTH, FEATURES)[part], MATRIX, MATRIX[::-1], **x
  )[0],
  "smoothing": lambda part, **x: ops.smooth_segments(
    normal(BATCH, LENGTH, FEATURES)[part], jax.nn.sigmoid(ENTROPIES[part]), **x
  ),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_boundaries_begin_anew(rule):
  def find(part, **document_starts):
    return jax.jit(lambda: RULES[rule](part, **document_starts))()

  whole, joined = find(np.s_[:], document_starts=STARTS), find(np.s_[:])
  assert (np.asarray(whole) != np.asarray(joined)).any() or rule == "global"
  for row, part in PARTS:
    alone = find(np.s_[row : row + 1, part])
    np.testing.assert_allclose(whole[row, part], alone[0], rtol=1e-6, atol=1e-6)
