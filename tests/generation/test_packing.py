import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.errors import UserError
from dpjax.generation.packing import next_logits, pack
from dpjax.models import build
from tests import helpers

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5], [3, 5], [8, 9, 7, 9, 3, 2, 3], [8, 4], [6, 2, 6]]


def test_every_prompt_has_its_place():
  packed = pack(PROMPTS, 7, fill=11)
  assert packed.tokens.shape == packed.starts.shape == (4, 7)
  np.testing.assert_array_equal(
    packed.tokens,
    [[8, 9, 7, 9, 3, 2, 3], [5, 9, 2, 6, 5, 3, 5], [3, 1, 4, 6, 2, 6, 1], [8, 4, *[11] * 5]],
  )
  np.testing.assert_array_equal(
    packed.starts,
    [[1, *[0] * 6], [1, 0, 0, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0, 1], [1, *[0] * 6]],
  )
  for prompt, row, end in zip(PROMPTS, packed.rows, packed.ends, strict=True):
    assert packed.tokens[row, end + 1 - len(prompt) : end + 1].tolist() == prompt


def sums(tokens, starts):
  """Of each document so far, at every place: a model whose state is a number."""

  def add(carry, x):
    token, start = x
    carry = jnp.where(start > 0, 0, carry) + token
    return carry, carry

  return jax.vmap(lambda *row: jax.lax.scan(add, jnp.int32(0), row)[1])(tokens, starts)[..., None]


def test_the_sums_of_each_alone():
  found = next_logits(sums, pack(PROMPTS, 9))
  assert found.tolist() == [[sum(prompt)] for prompt in PROMPTS]


@pytest.mark.parametrize(
  "settings",
  [
    pytest.param(dict(mixer="relative_attention"), marks=pytest.mark.slow),
    pytest.param(
      dict(mixer="dispatcher", num_levels=4, positions="sinusoidal"), marks=pytest.mark.slow
    ),
    dict(mixer="she", positions="learned"),
    pytest.param(
      dict(mixer="attention", boundaries="fixed", shortening_factor=3), marks=pytest.mark.slow
    ),
  ],
  ids=lambda x: "_".join(map(str, x.values())),
)
def test_logits_are_those_of_each_alone(settings):
  model = build.build_model(helpers.tiny_model(**settings))
  params = helpers.draw_params(model, 5, 0.3)
  apply = jax.jit(lambda x, s: model.apply({"params": params}, x, starts=s).logits)
  found = next_logits(apply, pack(PROMPTS, 13))
  for prompt, logits in zip(PROMPTS, found, strict=True):
    alone = model.apply({"params": params}, jnp.array([prompt])).logits[0, -1]
    np.testing.assert_allclose(logits, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompts", [[], [[]], [[1, 2], []], [[1], [1, 2, 3, 4]]], ids=str)
def test_prompts_without_room_are_refused(prompts):
  with pytest.raises(UserError, match="^prompts: expected some of 1 to 3 tokens each, got"):
    pack(prompts, 3)
