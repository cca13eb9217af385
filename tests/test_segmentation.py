"""Boundaries and conditional entropies of a text, of models made up or untrained."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import config as config_lib
from dpjax import run as run_lib
from dpjax.analysis import segmentation
from dpjax.analysis.segmentation import Segmentation, draw, render, segment
from dpjax.errors import UserError
from dpjax.models import build
from dpjax.models.language_model import LanguageModelOutput
from dpjax.text.factory import train_tokenizer
from tests import helpers

TEXT = "to be|\nor"
# Of characters, the line end first: "\n", " ", "b", "e", "o", "r", "t", "|", unknown.
NUM_IDS = 9


class Model:
  """Sure by 1 of `sure` ids after each token, the others being impossible."""

  def __init__(self, kind):
    self.kind = kind

  def apply(self, variables, tokens, rngs):
    assert set(rngs) == {"dropout"}
    sure = 1 + tokens % 3
    ids = jnp.broadcast_to(jnp.arange(NUM_IDS), (*tokens.shape, NUM_IDS))
    logits = jnp.where(ids < sure[..., None], variables["params"]["scale"], -jnp.inf)
    if self.kind == "vanilla":
      return LanguageModelOutput(logits)
    spaces = tokens <= 1
    if self.kind == "whitespace":
      return LanguageModelOutput(logits, spaces.astype(jnp.int32))
    # What a straight-through gradient leaves of 0 and 1 in float32.
    hard = jnp.where(spaces, 1 - 1e-7, 1e-7)
    predictor = jnp.where(spaces, math.log(3), -math.log(4)).astype(jnp.bfloat16)
    return LanguageModelOutput(logits, hard, predictor)


def made_up(kind, max_length=11):
  return SimpleNamespace(
    model=Model(kind),
    params={"scale": jnp.float32(0.5)},
    tokenizer=train_tokenizer("characters", [TEXT]),
    window=max_length,
    tokens=lambda split: np.array([6, 4, 1, 2, 3, 0, 5] * 30, np.uint16),
  )


def test_boundaries_and_entropies_are_the_models():
  found = segment(made_up("gumbel"), TEXT)
  assert found.pieces == ["t", "o", " ", "b", "e", "|", "\n", "o", "r"]
  assert np.flatnonzero(found.boundaries).tolist() == [2, 6]
  # The ids are 6, 4, 1, 2, 3, 7, 0, 4, 5.
  expected = np.log([1, 2, 2, 3, 1, 2, 1, 2, 3])
  np.testing.assert_allclose(found.entropies, expected, atol=1e-6)
  assert found.probabilities is not None and found.probabilities.dtype == np.float32
  chance = np.where(found.boundaries, 3 / 4, 1 / 5)
  np.testing.assert_allclose(found.probabilities, chance, atol=4e-3)


def test_a_model_may_have_no_predictor_but_has_segments():
  run = made_up("whitespace")
  tokens = run.tokenizer.encode(TEXT)
  found = segment(run, tokens)
  assert np.flatnonzero(found.boundaries).tolist() == [2, 6]
  assert found.probabilities is None
  with pytest.raises(UserError, match="^run: expected a model with token pooling, got one without"):
    segment(made_up("vanilla"), tokens)


@pytest.mark.parametrize(
  "outer, before", [pytest.param("fixed", 1, marks=pytest.mark.slow), ("routing", 0)]
)
def test_every_stage_is_shown(outer, before, monkeypatch, capsys):
  """Before fixed segments there is a group, which the second stage counts."""
  model = helpers.model_settings("relative_attention", outer, vocab_size=NUM_IDS)
  inner = config_lib.boundaries("fixed", shortening_factor=3)
  model.middle = config_lib.middle(inner, width=10)
  run = made_up("gumbel", max_length=29)
  run.config, run.model = SimpleNamespace(model=model), build.build_model(model)
  run.params = helpers.draw_params(run.model, 8, 0.5)
  found = segment(run, run.tokens("test")[:29])
  (stage,) = found.inner
  first, second = (np.flatnonzero(x.boundaries).tolist() for x in (found, stage))
  assert second == first[2 - before :: 3] and len(second) > 1
  if outer == "fixed":
    assert first == [*range(1, 29, 2)]
  assert render(found).count("||") == len(second)
  lines = draw(found).axes[0].get_lines()
  assert [line.get_xdata()[0] - 0.5 for line in lines] == first
  assert len({line.get_linewidth() for line in lines}) == 2
  monkeypatch.setattr(run_lib, "load", lambda folder: run)
  segmentation.main(["runs/a"])
  assert f"{len(first)} closed segments, {len(second)} of stage 2; mean" in capsys.readouterr().out


@pytest.mark.parametrize(
  "kind, text, pieces",
  [
    ("bytes", "aé\n", ["a", "\ufffd", "é", "\n"]),
    ("wordpiece", "the cat\n", ["the", " cat", "\n"]),
    ("bpe", "the cat", ["the", " cat"]),
  ],
)
def test_pieces_of_other_tokenizers(kind, text, pieces):
  chunks = ["the cat\nthe cat\n" * 5]
  vocabulary = {"wordpiece": 30, "bpe": 270}.get(kind, 0)
  tokenizer = train_tokenizer(kind, chunks, **helpers.vocabulary(kind, vocabulary))
  assert segmentation.split(tokenizer, tokenizer.encode(text)) == pieces


@pytest.mark.parametrize(
  "pieces, ends, expected",
  [
    ("to be", [2], "to␣|be"),
    ("to be", [], "to␣be"),
    ("to be", [0, 4], "t|o␣be|"),
    ("a|·\\␣", [1], r"a\||\·\\\␣"),
    ("a\n\t\x07 é\u200b", [0], r"a|\n\t\x07␣é\u200b"),
    (["the", " quick", " brow", "n", " fox"], [1, 3], "the·␣quick|␣brow·n|␣fox"),
    (["the", " fox"], [1], "the·␣fox|"),
    (["the", "·"], [], r"the·\·"),
  ],
)
def test_rendering(pieces, ends, expected):
  boundaries = np.isin(np.arange(len(pieces)), ends)
  made = Segmentation([*pieces], boundaries, np.zeros(len(pieces)), None)
  assert render(made) == expected


def test_enrichment_is_the_surprise_of_tokens_that_begin_segments():
  ends, surprisals = np.isin(np.arange(5), [1, 2, 4]), np.array([1.0, 3.0, 5.0, 0.5])
  made = Segmentation([*"abcde"], ends, np.zeros(5), None, surprisals)
  # Tokens 2 and 3, of 3 and 5 nats; behind the last token there is none.
  assert made.enrichment() == pytest.approx(4.0 / (9.5 / 4))
  chance = [made.enrichment(seed=seed) for seed in range(200)]
  assert np.mean(chance) == pytest.approx(1, abs=0.1) and len({*chance}) > 3
  assert math.isnan(made._replace(boundaries=ends & False).enrichment())
  assert math.isnan(made._replace(surprisals=np.full(4, np.inf)).enrichment())


def test_the_figure():
  pieces = [*"a $b$\n"]
  entropies = np.array([0.5, 2.0, 0.25, 1.0, 3.0, 0.75])
  made = Segmentation(pieces, np.isin(np.arange(6), [1, 5]), entropies, None)
  (axes,) = draw(made).axes
  assert [tick.get_text() for tick in axes.get_xticklabels()] == [*"a␣$b$", r"\n"]
  assert not any(tick.get_parse_math() for tick in axes.get_xticklabels())
  bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches]
  np.testing.assert_allclose(bars, [*enumerate(made.entropies)])
  # A segment ends with a token, so the line is behind it.
  assert [[*line.get_xdata()] for line in axes.get_lines()] == [[1.5, 1.5], [5.5, 5.5]]

  made = made._replace(probabilities=np.array([0.1, 0.9, 0.2, 0.3, 0.4, 0.8]))
  above, below = draw(made).axes
  assert below.get_ylabel() == "probability\nof a boundary"
  assert len(above.get_lines()) == 2 and len(below.get_lines()) == 3
  assert below.get_lines()[0].get_xydata().tolist() == [*map(list, enumerate(made.probabilities))]


def test_the_command_prints_and_draws(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(run_lib, "load", lambda folder: made_up("gumbel"))
  out = tmp_path / "made/segments.png"
  segmentation.main(["runs/a", "--text=to be|", f"--out={out}"])
  assert capsys.readouterr().out == (
    "to␣|be\\|\n\n6 tokens, 1 closed segments; mean conditional entropy 0.5297 nats\n"
  )
  assert out.read_bytes().startswith(b"\x89PNG")
  assert [*tmp_path.iterdir()] == [out.parent]
  with pytest.raises(SystemExit, match="^--text: expected 1 to 11 tokens .*window.*, got 14$"):
    segmentation.main(["runs/a", "--text=to be or to be"])
  # Without a text, the test split is shown.
  monkeypatch.setattr(run_lib, "load", lambda folder: made_up("gumbel", max_length=121))
  segmentation.main(["runs/a"])
  assert "\n120 tokens" in capsys.readouterr().out
