"""What models read in a text, and the page that shows it; the models are untrained."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import dpjax
from dpjax.analysis import page, reading
from dpjax.analysis.reading import Segmentation, Stage, render
from dpjax.commands import look
from dpjax.errors import UserError
from dpjax.layers import Block, Context, FeedForward, Mixer, Norm, attention
from dpjax.models import build
from dpjax.models.stack import Stack
from dpjax.text.tokenizer import train_tokenizer
from tests import helpers

TEXT = "to be, or not to be|\nthat is the question"
WINDOW = 29


def untrained(boundaries, mixer, tokenizer="characters", text=TEXT, **changes):
  """A run whose parameters are drawn."""
  config = dpjax.config.default()
  if boundaries != "none":
    changes |= dict(num_layers=1, first=dict(num_layers=1), last=dict(num_layers=1))
  config.model = helpers.model_settings(
    mixer, boundaries, vocab_size=0, max_length=WINDOW, **changes
  )
  tokenizer = train_tokenizer(tokenizer, [text])
  config = build.with_vocabulary(config, tokenizer)
  model = build.build_model(config.model)
  return dpjax.runs.Run(config, model, helpers.draw_params(model, 8, 0.5), tokenizer, 0)


def with_both(run, text):
  """The run, with its predictor changed so that it finds some boundaries and not all."""
  tokens = run.tokenizer.encode(text)[None, :WINDOW]
  output = jax.jit(run.model.apply)({"params": run.params}, tokens)
  helpers.balance(run.params, output.stages[0].logits)
  return run


@pytest.fixture(scope="module")
def gumbel():
  """A run of two windows with a predictor, and its segmentation."""
  run = with_both(untrained("gumbel", "relative_attention"), TEXT)
  return run, reading.segment(run, TEXT)


@pytest.fixture(scope="module")
def two_stages():
  """A run with two stages, which pool 2 tokens and then 3 segments, and its layers."""
  inner = dpjax.config.boundaries("fixed", shortening_factor=3)
  run = untrained("fixed", "he", middle=dpjax.config.middle(inner, width=10))
  return run, reading.segment(run, TEXT)


def content(html: str) -> list[dict]:
  """The data of a page."""
  return json.loads(re.search(r'id="content">(.*?)</script>', html, re.DOTALL)[1])


def test_segment_equals_the_score_and_the_model(gumbel):
  run, result = gumbel
  count, score = len(TEXT), run.score(TEXT)
  assert "".join(result.pieces) == TEXT
  assert result.surprisals.sum() / count == pytest.approx(score["nats_per_token"], abs=1e-5)
  for name in ("enrichment", "f1", "shortening_factor", "bits_per_byte"):
    assert result.scores[name] == pytest.approx(score[name], rel=1e-5), name
  assert result.enrichment() == pytest.approx(score["enrichment"], rel=1e-5)
  tokens = run.tokenizer.encode(TEXT)
  inputs = np.append(run.tokenizer.start_id, tokens)[:WINDOW]
  output = jax.jit(run.model.apply)({"params": run.params}, inputs[None])
  (stage,) = result.stages
  (found,) = output.stages
  np.testing.assert_array_equal(stage.begins[:WINDOW], np.asarray(found.boundaries[0]) == 1)
  assert 1 < stage.begins.sum() < count and not stage.boundaries[-1]
  np.testing.assert_array_equal(stage.boundaries[:-1], stage.begins[1:])
  chances = jax.nn.sigmoid(found.logits[0])
  np.testing.assert_allclose(stage.probabilities[:WINDOW], chances, atol=1e-6)
  log_p = jax.nn.log_softmax(output.logits[0])
  np.testing.assert_allclose(
    result.surprisals[:WINDOW], -log_p[np.arange(WINDOW), tokens[:WINDOW]], rtol=1e-5
  )
  entropies = -(np.exp(log_p) * log_p).sum(axis=1)
  np.testing.assert_allclose(result.entropies[:WINDOW], entropies, rtol=1e-5)
  # The reference of gumbel: a segment ends with each space and line end, as before the text.
  assert result.targets.tolist() == [True, *(x in " \n" for x in TEXT[:-1])]


def test_segment_has_every_stage(two_stages):
  run, result = two_stages
  outer, inner = (np.flatnonzero(stage.begins[:WINDOW]).tolist() for stage in result.stages)
  # Positions count the start token; before the segments is a group, which the second stage counts.
  assert outer == [*range(1, WINDOW, 2)] and inner == outer[1::3]
  assert [stage.probabilities for stage in result.stages] == [None, None]
  assert "||" in render(result)
  assert f"{len(inner) + 2} of stage 2; mean" in page.describe(result)


def test_segment_refuses_no_text_and_a_long_one(gumbel):
  for text, count in (("", "0"), ("a" * 10_001, "10,001")):
    with pytest.raises(UserError, match=f"text: expected 1 to 10,000 tokens, got {count}"):
      dpjax.look(gumbel[0], text)


@pytest.mark.parametrize(
  "mixer",
  [
    attention.SelfAttention(num_heads=2, max_length=9, rotary_base=100.0),
    attention.RelativeAttention(num_heads=2, max_length=9),
  ],
)
def test_weights_of_attention_give_its_output(mixer):
  x_btd = jnp.asarray(np.random.default_rng(3).standard_normal((1, 7, 8)), jnp.float32)

  @jax.jit
  def run(x_btd):
    expected, variables = mixer.init_with_output(jax.random.key(2), x_btd)
    params = variables["params"]
    weights = reading._weights(mixer, params, x_btd, {}, Context())
    qkv, out = params["queries_keys_values"], params["out"]
    v_btd = x_btd @ qkv["kernel"][:, 2] + qkv["bias"][None, None, 2]
    y = jnp.einsum("hts,she->the", weights, v_btd.reshape(7, 2, 4)).reshape(7, 8)
    return weights, y @ out["kernel"] + out["bias"][None], expected[0]

  weights, y, expected = run(x_btd)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_allclose(weights.sum(axis=2), np.ones((2, 7)), rtol=1e-5)
  assert weights.shape == (2, 7, 7) and not np.triu(weights, 1).any()


def test_layers_on_segments_read_those_that_are_closed(two_stages):
  run, segmentation = two_stages
  layers = {layer.name: layer.weights[0] for layer in reading.layers(run, TEXT)}
  count = WINDOW - 1
  outer = ["middle first 1", "middle first 2", "middle middle 1", "middle last 1", "middle last 2"]
  assert [*layers] == [f"{name} HE" for name in ("first 1", *outer, "last 1")]
  taps = run.params["stages_0"]["first"]["blocks_0"]["mixer"]["taps"][0]
  sizes = np.sqrt(np.mean(np.square(taps), axis=1))
  t, s = np.tril_indices(count)
  np.testing.assert_allclose(layers["first 1 HE"][t, s], sizes[t - s], rtol=1e-5)
  for name, matrix in layers.items():
    assert matrix.shape == (count, count) and not np.triu(matrix, 1).any(), name
  for name, stage in (("middle first 1 HE", 0), ("middle middle 1 HE", 1)):
    ends = segmentation.stages[stage].boundaries[:count]
    number = np.cumsum(segmentation.stages[stage].begins[:count])
    for t in (9, 15, 22):
      row, closed = layers[name][t], number < number[t] + ends[t]
      assert (row[closed] > 0).all() and not row[~closed].any(), (name, t)
      # Tokens of one segment have one weight, and a row lasts until the next end.
      assert len({*row[closed].tolist()}) <= len({*number[closed].tolist()})
      assert ends[t] or (row == layers[name][t - 1]).all()


class Middling(Mixer):
  """A mixer of the user's: the mean of the past."""

  tells: bool

  @nn.compact
  def mix(self, inputs, context, cache):
    length = inputs.shape[1]
    weights = jnp.tri(length) / jnp.arange(1.0, length + 1)[:, None]
    if self.tells:
      self.sow("intermediates", "reads", weights[None, None])
    return jnp.einsum("ts,bsd->btd", weights, inputs), None


def test_look_shows_what_a_mixer_of_the_user_offers(caplog):
  run = untrained("none", "me")

  def make(tells):
    return Block(
      Middling(max_length=WINDOW, tells=tells),
      FeedForward(7),
      mixer_norm=Norm(),
      feed_forward_norm=Norm(),
    )

  layers = Stack(2, (make(True), make(False)))
  model = run.model.clone(core=run.model.core.clone(layers=layers))
  run = dpjax.runs.Run(run.config, model, helpers.draw_params(model, 2, 0.5), run.tokenizer, 0)
  (data,) = content(dpjax.look(run, "to be"))
  assert data["stages"] == [] and len(data["bits"]) == 5
  (layer,) = data["layers"]
  assert layer["name"] == "1 Middling"
  assert "no weights for layers that do not report them, 2 Middling" in caplog.text
  # Behind the start token position t reads t + 2 tokens, all alike.
  np.testing.assert_allclose(layer["images"][0]["largest"], 1 / np.arange(2, 7), rtol=5e-3)


def test_look_holds_the_segments_and_no_markup_of_the_text(gumbel):
  run, segmentation = gumbel
  html = page.write([run], TEXT, [segmentation._replace(pieces=["</script><b>", "\x00", "é"])])
  assert html.count("</script>") == 2 and "<b>" not in html
  (data,) = content(html)
  assert data["pieces"] == ["</script><b>", "\x00", "é"]
  (stage,) = data["stages"]
  assert stage["ends"] == segmentation.stages[0].boundaries.tolist()
  np.testing.assert_allclose(
    stage["chances"][:-1], segmentation.stages[0].probabilities[1:], atol=1e-4
  )
  assert stage["chances"][-1] is None and len(data["targets"]) == len(TEXT)
  nats = math.log(2) * np.sum(data["bits"])
  assert nats == pytest.approx(segmentation.surprisals.sum(), abs=1e-4)
  assert data["scores"].keys() == {"bits per byte", "shortening factor", "enrichment", "f1"}
  assert "&lt;!doctype html&gt;" in html._repr_html_() and "<!doctype" not in html._repr_html_()


def test_image_is_a_png_of_rows_scaled_to_their_largest(tmp_path):
  from matplotlib import image

  weights = np.tril(np.random.default_rng(1).random((5, 5))).astype(np.float32)
  result = page._image("all", weights)
  path = tmp_path / "a.png"
  path.write_bytes(page.base64.b64decode(result["png"]))
  rows = image.imread(path) * np.array(result["largest"])[:, None]
  np.testing.assert_allclose(rows, weights, atol=3e-3)


def test_main_prints_and_writes(gumbel, monkeypatch, tmp_path, capsys):
  run, segmentation = gumbel
  monkeypatch.setattr(dpjax.runs, "load", lambda folder: run)
  monkeypatch.setattr(reading, "segment", lambda run, text: segmentation)
  monkeypatch.setattr(reading, "layers", lambda run, text: [])
  (tmp_path / "a.txt").write_text(TEXT)
  out = tmp_path / "made/page.html"
  look.main(["runs/a", "runs/b", f"--text={tmp_path / 'a.txt'}", f"--out={out}"])
  printed = capsys.readouterr().out
  ends = segmentation.stages[0].boundaries.sum()
  assert printed.count(f"{len(TEXT)} tokens, {ends} closed segments; mean conditional entr") == 2
  assert printed.startswith(f"runs/a:\n{render(segmentation)}\n\n")
  assert re.search(r"enrichment [\d.]+: .* of as many tokens at random [\d.]+", printed)
  assert [data["pieces"] for data in content(out.read_text())] == [[*TEXT]] * 2


def test_split_gives_the_last_token_of_a_character_its_text():
  tokenizer = train_tokenizer("bytes", [""])
  assert reading.split(tokenizer, tokenizer.encode("aé\n")) == ["a", "", "é", "\n"]


def made_up(pieces, begins, surprisals=()):
  stage = Stage(np.asarray(begins, bool), None)
  return Segmentation([*pieces], np.asarray(surprisals), np.zeros(len(pieces)), (stage,), None, {})


@pytest.mark.parametrize(
  "pieces, begins, expected",
  [
    ("to be", [0, 3], "to␣|be"),
    ("to be", [1], "t|o␣be"),
    ("a|·\\␣", [2], r"a\||\·\\\␣"),
    ("a\n\t\x07 é\u200b", [1], r"a|\n\t\x07␣é\u200b"),
    (["the", " quick", " brow", "n", " fox"], [2, 4], "the·␣quick|␣brow·n|␣fox"),
    (["the", " fox"], [1], "the|␣fox"),
  ],
)
def test_render(pieces, begins, expected):
  assert render(made_up(pieces, np.isin(np.arange(len(pieces)), begins))) == expected


def test_describe_shows_a_thousand_tokens_and_counts_segments_where_tokens_are_pooled():
  pooled = made_up("ab" * 600, np.arange(1200) % 1100 == 7, np.ones(1200))
  shown = "aba" + "b" + "aba|b" + "ab" * 496 + " ... (200 tokens more)\n"
  assert page.describe(pooled).startswith(shown) and "1,200 tokens, 2 closed" in page.describe(
    pooled
  )
  assert "1,200 tokens; mean conditional" in page.describe(pooled._replace(stages=()))
  assert "2 tokens, no closed segments;" in page.describe(made_up("ab", [0, 0], np.ones(2)))


def test_enrichment_is_the_surprise_of_tokens_that_begin_segments():
  result = made_up("abcde", [0, 0, 1, 1, 0], [0.5, 1.0, 3.0, 5.0, 0.5])
  assert result.enrichment() == pytest.approx(4.0 / 2.0)
  chance = [result.enrichment(seed=seed) for seed in range(200)]
  assert np.mean(chance) == pytest.approx(1, abs=0.1) and len({*chance}) > 3
  assert math.isnan(made_up("ab", [0, 0], [1.0, 2.0]).enrichment())
  assert math.isnan(made_up("ab", [0, 1], [1.0, math.inf]).enrichment())
