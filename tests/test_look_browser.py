"""The page of `dpjax look` in a real browser: chromium, and pip install -e '.[browser]'."""

import re
import shutil

import numpy as np
import pytest

import dpjax
from dpjax import config as config_lib
from dpjax import run as run_lib
from dpjax.analysis import reading
from dpjax.models import build
from dpjax.text.factory import train_tokenizer
from tests import helpers

REASON = "needs pip install -e '.[browser]' and a chromium"
sync_api = pytest.importorskip("playwright.sync_api", reason=REASON)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason=REASON)

# A combining character, right to left, markup, control characters, and an emoji of five.
TEXT = "to be\u0301, שלום or </script><b>\x07 \u202eיום\n👩\u200d👩\u200d👧 Ti\u1ebfng Vi\u1ec7t"
CLUSTERS = ["e\u0301", "👩\u200d👩\u200d👧", "ế"]


def untrained(tokenizer, boundaries, **changes):
  config = config_lib.default()
  settings = dict(vocab_size=0, num_layers=1, **changes)
  if boundaries != "none":
    settings |= dict(first=dict(num_layers=1), last=dict(num_layers=1))
  config.model = helpers.model_settings("attention", boundaries, **settings)
  tokenizer = train_tokenizer(tokenizer, [TEXT])
  config = build.with_vocabulary(config, tokenizer)
  model = build.build_model(config.model)
  return run_lib.Run(config, model, helpers.draw_params(model, 8, 0.5), tokenizer, 0)


@pytest.fixture(scope="module")
def runs():
  """A predictor before a second stage, on characters; and bytes without boundaries."""
  inner = config_lib.boundaries("fixed", shortening_factor=3)
  two = untrained("characters", "gumbel", middle=config_lib.middle(inner, width=10))
  tokens = two.tokenizer.encode(TEXT)[None, :29]
  helpers.balance(two.params, two.model.apply({"params": two.params}, tokens).boundary_logits)
  return [two, untrained("bytes", "none")]


@pytest.fixture(scope="module")
def segmentations(runs):
  return [reading.segment(run, TEXT) for run in runs]


@pytest.fixture(scope="module")
def path(runs, tmp_path_factory):
  path = tmp_path_factory.mktemp("page") / "page.html"
  path.write_text(dpjax.look(runs, TEXT), encoding="utf-8")
  return path


@pytest.fixture(scope="module")
def browser():
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    yield browser
    browser.close()


@pytest.fixture(params=[(400, "light"), (400, "dark"), (1600, "light"), (1600, "dark")])
def tab(request, browser, path):
  """Opens the page at a width and in a theme; fails if it logs an error or sends a request."""
  width, theme = request.param
  tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
  events: list[str] = []
  tab.on("console", lambda message: events.append(message.text))
  tab.on("pageerror", lambda error: events.append(str(error)))
  tab.on("request", lambda request: events.append(request.url))
  tab.goto(path.as_uri())
  yield tab
  assert tab.evaluate("document.documentElement.scrollWidth") <= width
  left = [event for event in events if not event.startswith(("data:", path.as_uri()))]
  assert not left
  tab.close()


@pytest.fixture(scope="module")
def nats(runs):
  return [run.score(TEXT)["nats_per_token"] * len(run.tokenizer.encode(TEXT)) for run in runs]


def test_page_shows_the_segments_and_the_surprisals(tab, segmentations, nats):
  for number, segmentation in enumerate(segmentations):
    units = tab.evaluate(f"runs[{number}].units")
    assert "".join(unit["text"] for unit in units) == TEXT
    texts = [unit["text"] for unit in units]
    assert {*CLUSTERS} <= {*texts} and "\u202e" in texts
    spans = tab.locator("section").nth(number).locator(".u")
    labels = spans.all_text_contents()
    assert [x for x in labels if x.startswith("U+")] == ["U+0007", "U+202E"]
    bits = tab.evaluate(f"runs[{number}].bits")
    assert np.log(2) * sum(bits) == pytest.approx(nats[number], rel=1e-5)
    for stage, name in zip(segmentation.stages, ("hue", "inner"), strict=False):
      ends = stage.boundaries
      number_t = np.append(0, np.cumsum(ends)[:-1])
      hues = spans.evaluate_all(f"x => x.map(y => y.style.getPropertyValue('--{name}'))")
      data = ["even" in hue for hue in hues]
      assert data == [bool(number_t[unit["last"]] % 2 == 0) for unit in units]
  assert tab.locator("section b, section script").count() == 0


def test_pointing_at_a_token_shows_its_numbers(tab, segmentations):
  result = segmentations[0]
  first, second = result.stages
  spans = tab.locator("section").nth(0).locator(".u")
  tokens = [unit["last"] for unit in tab.evaluate("runs[0].units")]
  for unit in (2, 9, 30):
    spans.nth(unit).hover()
    t, line = tokens[unit], tab.locator("#info div").nth(0).inner_text()
    bits = result.surprisals[t] / np.log(2)
    assert f"{bits:.2f} bits" in line
    starts = np.append(0, np.flatnonzero(first.boundaries) + 1)
    segment = np.searchsorted(starts, t, "right")
    stop = np.append(starts, len(tokens) + 9)[segment]
    length = min(stop, len(result.pieces)) - starts[segment - 1]
    assert re.search(rf"; segment {segment}, {length} token", line)
    assert f"p = {first.probabilities[t + 1]:.3f} of an end here" in line
    segment = 1 + second.boundaries[:t].sum()
    assert f"stage 2: segment {segment}, " in line
    assert ("a target end" in line) == bool(result.targets[t + 1])
  # The other run shows the same characters; the keyboard goes on from there.
  assert "bits" in tab.locator("#info div").nth(1).inner_text()
  tab.locator(".text[tabindex]").nth(0).focus()
  tab.keyboard.press("ArrowRight")
  assert tab.evaluate("runs[0].current") == 31
  tab.keyboard.press("Home")
  assert "“t”" in tab.locator("#info div").nth(0).inner_text()


@pytest.fixture(scope="module")
def layers(runs):
  return reading.layers(runs[0], TEXT)


def test_a_layer_shades_what_a_position_reads(tab, layers):
  number = [layer.name for layer in layers].index("middle first 1 SelfAttention")
  tab.locator("select").nth(0).select_option(str(number))
  tab.wait_for_function("runs[0].matrix")
  units = tab.evaluate("runs[0].units")
  at = max(i for i, unit in enumerate(units) if unit["last"] < len(layers[number].weights[0]))
  tab.locator("section").nth(0).locator(".u").nth(at).hover()
  shades = tab.evaluate("runs[0].spans.map(x => +x.style.getPropertyValue('--r'))")
  row = layers[number].weights.mean(axis=0)[units[at]["last"]]
  expected = [max(row[unit["first"] : unit["last"] + 1], default=0) / row.max() for unit in units]
  assert max(shades) == 1
  np.testing.assert_allclose(shades, expected, atol=3e-3)
  assert f"largest weight is {row.max():.3g}" in tab.locator("#info").inner_text()
