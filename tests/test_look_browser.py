"""The page of `dpjax look` in a real browser: chromium, and pip install -e '.[browser]'."""

import re
import shutil

import numpy as np
import pytest

import dpjax
from dpjax.analysis import reading
from tests import test_look

REASON = "needs pip install -e '.[browser]' and a chromium"
sync_api = pytest.importorskip("playwright.sync_api", reason=REASON)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason=REASON)

# A combining character, right to left, markup, control characters, and an emoji of five.
TEXT = "to be\u0301, שלום or </script><b>\x07 \u202eיום\n👩\u200d👩\u200d👧 Ti\u1ebfng Vi\u1ec7t"
CLUSTERS = ["e\u0301", "👩\u200d👩\u200d👧", "ế"]


@pytest.fixture(scope="module")
def runs():
  """A predictor before a second stage, on characters; and bytes without boundaries."""
  middle = dpjax.config.middle(dpjax.config.boundaries("fixed", shortening_factor=3), width=10)
  two = test_look.untrained("gumbel", "attention", text=TEXT, middle=middle)
  one = test_look.untrained("none", "attention", "bytes", TEXT, num_layers=1)
  return [test_look.with_both(two, TEXT), one]


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


@pytest.fixture(params=[(400, "dark"), (1600, "light")])
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


def test_page_shows_the_segments_and_the_surprisals(tab, segmentations):
  for number, segmentation in enumerate(segmentations):
    units = tab.evaluate(f"runs[{number}].units")
    assert "".join(unit["text"] for unit in units) == TEXT
    texts = [unit["text"] for unit in units]
    assert {*CLUSTERS} <= {*texts} and "\u202e" in texts
    spans = tab.locator("section").nth(number).locator(".u")
    labels = spans.all_text_contents()
    assert [x for x in labels if x.startswith("U+")] == ["U+0007", "U+202E"]
    bits = tab.evaluate(f"runs[{number}].bits")
    assert np.log(2) * sum(bits) == pytest.approx(segmentation.surprisals.sum(), rel=1e-5)
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


def test_a_layer_shades_what_a_position_reads(tab, runs):
  layers = reading.layers(runs[0], TEXT)
  number = [layer.name for layer in layers].index("middle first 1 SelfAttention")
  weights = layers[number].weights
  tab.locator("select").nth(0).select_option(str(number))
  tab.wait_for_function("runs[0].matrix")
  units = tab.evaluate("runs[0].units")
  at = max(i for i, unit in enumerate(units) if unit["last"] < len(weights[0]))
  tab.locator("section").nth(0).locator(".u").nth(at).hover()
  shades = tab.evaluate("runs[0].spans.map(x => +x.style.getPropertyValue('--r'))")
  row = weights.mean(axis=0)[units[at]["last"]]
  expected = [max(row[unit["first"] : unit["last"] + 1], default=0) / row.max() for unit in units]
  assert max(shades) == 1
  np.testing.assert_allclose(shades, expected, atol=3e-3)
  assert f"largest weight is {row.max():.3g}" in tab.locator("#info").inner_text()
