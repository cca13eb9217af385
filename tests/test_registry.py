"""Components bring their own settings, and anybody's are found by name."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import dpjax
from dpjax import layers
from dpjax.config import registry
from dpjax.config.registry import Setting
from dpjax.layers.boundaries import Boundaries, TextBoundaries
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Decay(layers.Mixer):
  """A mixer of somebody else's: each position keeps a part of the one before."""

  rate: float = 0.5
  num_steps: int | None = None
  variants: tuple[str, ...] = ("a",)

  def __post_init__(self):
    if not 0 < self.rate < 1:
      raise ValueError(f"rate: expected a number in (0, 1), got {self.rate}")
    super().__post_init__()

  @nn.compact
  def mix(self, inputs, context, cache):
    shifted = jnp.pad(inputs, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return nn.Dense(inputs.shape[-1])(inputs + self.rate * shifted), cache


@pytest.fixture(autouse=True)
def mixers(monkeypatch):
  """The registry, of which nothing that a test adds is left, as of the others."""
  for reference in (registry.mixers, registry.boundaries, registry.optimizers):
    monkeypatch.setattr(reference, "_registered", dict(reference._registered))
  return registry.mixers


def test_the_default_of_a_float_may_be_a_whole_number(mixers):
  class Amplified(Decay):
    gain: float = 1

  dpjax.register_mixer("amplified", Amplified)
  assert dpjax.config.mixer("amplified").gain == 1.0
  assert dpjax.config.mixer("amplified", gain=0.5).gain == 0.5


def test_settings_are_the_fields_that_a_person_can_set(mixers):
  dpjax.register_mixer("decay", Decay)
  of_frame = {"has_feed_forward": Setting(True, "whether a feed-forward network follows")}
  assert mixers.settings("decay") == of_frame | {
    "rate": Setting(0.5, explicit_type=float),
    "num_steps": Setting(None, explicit_type=int, is_optional=True),
    "variants": Setting(("a",), explicit_type=tuple),
  }
  section = dpjax.config.mixer("decay", rate=0.8, num_steps=3)
  settings = dict(rate=0.8, num_steps=3, variants=("a",), has_feed_forward=True)
  assert section.to_dict() == dict(name="decay", **settings)


def test_settings_of_functions_are_their_arguments():
  assert [*registry.optimizers.settings("sgd")] == ["momentum", "nesterov"]
  momentum = registry.optimizers.settings("sgd")["momentum"]
  assert momentum == Setting(None, explicit_type=float, is_optional=True)
  assert "learning_rate" not in registry.optimizers.settings("adam")


@pytest.mark.parametrize(
  ("error", "raised", "message"),
  [
    (ValueError("rate: expected less"), dpjax.UserError, "^model.mixer.rate: expected less$"),
    (ValueError("expected another day"), dpjax.UserError, "^model.mixer: expected another day$"),
    (TypeError("a fault of the mixer"), TypeError, "^a fault of the mixer$"),
  ],
)
def test_only_errors_that_name_a_setting_are_of_that_setting(mixers, error, raised, message):
  class Fails(Decay):
    def __post_init__(self):
      raise error

  dpjax.register_mixer("fails", Fails)
  config = dpjax.config.default()
  config.model.mixer = dpjax.config.mixer("fails")
  with pytest.raises(raised, match=message):
    dpjax.config.check(config)


@dataclasses.dataclass
class RareText(TextBoundaries):
  """Letters that are rare in the train split."""

  share: float
  others: str

  def fit(self, texts):
    letters = "".join(texts)
    rare = {x for x in letters if letters.count(x) < self.share * len(letters)}
    return "".join(sorted(rare | {*self.others})).encode()

  def compute(self, text, tokenizer, fitted):
    assert len(tokenizer.encode(text)) == len(text)
    return np.array([x in fitted.decode() for x in text], int)


class AfterRare(Boundaries):
  """A segment ends with a letter that is rare in the train split; no `file`, no `size`."""

  share: float = 0.05
  others: str = ""

  def find(self, hidden, tokens, context, cache, noise):
    return layers.BoundaryOutput(jnp.zeros_like(tokens))

  @property
  def text_boundaries(self):
    return RareText(self.share, self.others)


def pooled_by_text(text, variant, **settings):
  dpjax.register_boundaries("by_text", variant)
  config = helpers.small_config(text, num_steps=2)
  config.model.boundaries = dpjax.config.boundaries("by_text", **settings)
  config.model.first.num_layers = config.model.last.num_layers = 1
  return config


def test_boundaries_of_somebody_elses_that_need_the_text(text, tmp_path):
  """Their settings, and what they learned, say which tokens they are."""
  for i, others in enumerate(("", "x", "")):
    config = pooled_by_text(text, AfterRare, others=others)
    config.data.data_dir = str(tmp_path / "data")
    data = dpjax.runs.tokenize_only(config, tmp_path / str(i))
    whole = data.tokenizer.decode(data.splits["train"])
    rare = {x for x in whole if whole.count(x) < 0.05 * len(whole)} | {*others}
    assert 1 < len(rare) < 15 and data.fitted.decode() == "".join(sorted(rare))
    for split, ids in data.splits.items():
      expected = [x in rare for x in data.tokenizer.decode(ids)]
      np.testing.assert_array_equal(data.boundaries[split], expected)
    assert data.segment("no xat").tolist() == [x in rare for x in "no xat"]
  assert len([*(tmp_path / "data/tokens").glob("*/data.json")]) == 2


@pytest.mark.parametrize("wrong", ["shape", "twos"])
def test_boundaries_of_a_text_that_are_none_are_refused(text, tmp_path, wrong):
  @dataclasses.dataclass
  class WrongText(TextBoundaries):
    def compute(self, text, tokenizer, fitted):
      return np.full(len(text) + (wrong == "shape"), 2 * (wrong == "twos"))

  class Wrong(AfterRare):
    text_boundaries = WrongText()

  config = pooled_by_text(text, Wrong)
  with pytest.raises(dpjax.UserError, match="^model.boundaries: expected 0 or 1 for each of"):
    dpjax.runs.tokenize_only(config, tmp_path / "run")


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(rates=0.5), "rates: .* setting of decay, .* nearest known is mixer.rate"),
    (dict(rate="fast"), "rate: .* of type float, got 'fast'"),
    (dict(num_steps=1.5), "num_steps: expected a value of type int or None, got 1.5"),
    (dict(parent=None), "parent: expected a setting of decay"),
  ],
)
def test_settings_that_are_wrong(mixers, settings, message):
  dpjax.register_mixer("decay", Decay)
  with pytest.raises(dpjax.UserError, match=f"^mixer.{message}"):
    dpjax.config.mixer("decay", **settings)


def test_what_a_component_refuses_is_told_by_the_sections_name(mixers):
  dpjax.register_mixer("decay", Decay)
  config = dpjax.config.default()
  config.model.mixer = dpjax.config.mixer("decay", rate=1.5)
  with pytest.raises(dpjax.UserError, match=r"^model.mixer.rate: .* in \(0, 1\), got 1.5"):
    dpjax.config.check(config)


def test_a_function_without_max_length_is_refused_where_it_is_registered(mixers):
  def make_short(rate: float = 0.5):
    return Decay(max_length=3, rate=rate)

  message = "^mixer: expected a class or function that takes max_length, got .*short.*takes rate"
  with pytest.raises(ValueError, match=message):
    dpjax.register_mixer("short", make_short)
  assert "short" not in mixers.names()


class NoMixer(nn.Module):
  """A module as dpjax took them before it had a base class."""

  max_length: int

  def __call__(self, inputs, *, deterministic=True):
    return inputs


class NoMix(layers.Mixer):
  def __call__(self, inputs, *, deterministic=True):
    return inputs


@pytest.mark.parametrize("component", [NoMixer, NoMix, layers.Mixer, nn.Dense, int])
def test_a_class_that_is_no_mixer_is_refused_where_it_is_registered(mixers, component):
  message = "^mixer: expected a subclass of dpjax.layers.Mixer that writes `mix`, got <class .*>$"
  with pytest.raises(dpjax.UserError, match=message):
    dpjax.register_mixer("other", component)
  assert "other" not in mixers.names()


class NoFind(Boundaries):
  share: float = 0.1


@pytest.mark.parametrize("component", [NoFind, Boundaries, nn.Dense, int, lambda: AfterRare()])
def test_what_finds_no_boundaries_is_refused_where_it_is_registered(component):
  message = "^boundaries: expected a subclass of dpjax.layers.Boundaries that writes `find`, got <"
  with pytest.raises(dpjax.UserError, match=message):
    dpjax.register_boundaries("other", component)
  assert "other" not in registry.boundaries.names()


def test_no_boundaries_are_a_name_without_a_class():
  assert registry.boundaries.names()[0] == "none" and registry.boundaries.is_builtin("none")
  assert dict(dpjax.config.boundaries("none")) == {"name": "none"}
  with pytest.raises(ValueError, match="expected a name that is free, got none"):
    dpjax.register_boundaries("none", AfterRare)
  assert dpjax.models.build.build_boundaries(helpers.model_settings("we")) == ()


def test_a_function_that_makes_no_mixer_is_refused_where_the_model_is_built(mixers):
  dpjax.register_mixer("other", lambda **supplied: NoMixer(supplied["max_length"]))
  with pytest.raises(dpjax.UserError, match="^mixer: expected a dpjax.layers.Mixer, got NoMixer"):
    dpjax.build_model(helpers.model_settings("other"))


def test_a_function_of_any_settings_gets_what_a_model_supplies(mixers):
  dpjax.register_mixer("any", lambda **supplied: Decay(max_length=supplied["max_length"]))
  maker = mixers.maker(dpjax.config.mixer("any"), max_length=11, dtype=jnp.float32)
  assert maker().max_length == 11


def test_fields_of_somebody_elses_mixer_mean_what_he_likes(mixers):
  class Other(Decay):
    num_levels: int = 99
    num_heads: int = 7
    rotary_base: float = 3.0

  dpjax.register_mixer("other", Other)
  config = dpjax.config.default()
  config.model.mixer = "other"
  dpjax.config.check(config)


def test_names_are_free_once(mixers):
  dpjax.register_mixer("decay", Decay)
  dpjax.register_mixer("decay", Decay)  # a module that is imported again
  with pytest.raises(ValueError, match="expected a name that is free, got decay"):
    dpjax.register_mixer("decay", layers.WE)
  with pytest.raises(ValueError, match="got 'a b'"):
    dpjax.register_mixer("a b", Decay)
  for _ in range(2):  # a cell of a notebook that runs again

    def make(max_length, rate: float = 0.5, *args, **others):
      return Decay(max_length=max_length, rate=rate)

    dpjax.register_mixer("made", make)
  assert [*mixers.settings("made")] == ["rate", "has_feed_forward"]


def test_a_plugin_that_fails_hides_no_message(mixers, monkeypatch, caplog):
  broken = types.SimpleNamespace(load=lambda: 1 / 0, value="broken:module")
  message = "one of dispatcher, .*; did you mean dispatcher[?] .dpjax.register_mixer adds another"
  monkeypatch.setattr(registry.importlib.metadata, "entry_points", lambda group: [broken])
  registry.load_plugins.cache_clear()
  with pytest.raises(dpjax.UserError, match=message):
    dpjax.config.mixer("dispacher")
  assert "broken:module cannot be imported (ZeroDivisionError" in caplog.text
  registry.load_plugins.cache_clear()


def test_an_optimizer_of_somebody_elses():
  def signs(learning_rate, *, strength: float = 2.0):
    return optax.chain(optax.scale_by_sign(), optax.scale(-learning_rate * strength))

  dpjax.register_optimizer("signs", signs)
  section = dpjax.config.optimizer("signs", strength=3.0)
  update = registry.optimizers.build(section, "train.optimizer", learning_rate=0.5)
  grads = {"a": jnp.array([4.0, -0.1])}
  got, _ = update.update(grads, update.init(grads))
  np.testing.assert_allclose(got["a"], [-1.5, 1.5])


@pytest.mark.slow
def test_a_run_of_boundaries_that_need_the_text(text, tmp_path):
  class Rare(dpjax.layers.Unigram):
    text_boundaries = property(lambda self: RareText(0.05, ""))

  run, scores = dpjax.train(pooled_by_text(text, Rare), tmp_path / "run")
  assert scores["boundary_loss"] > 0 and 0 < scores["recall"] < 1
  run.save(tmp_path / "small")
  new = "a cat and one rat in a bat"
  assert dpjax.load(tmp_path / "small").score(new) == run.score(new)


def test_the_module_whose_import_registers_is_the_plugin(mixers, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "a_helper.py").write_text(
    "import dpjax\n\n\ndef register(name, mixer):\n  dpjax.register_mixer(name, mixer)\n"
  )
  (tmp_path / "its_plugin.py").write_text(
    "from dpjax.layers import WE\n\nimport a_helper\n\n\nclass Mine(WE):\n"
    "  pass\n\n\na_helper.register('by_a_helper', Mine)\n"
  )
  registry.import_plugin("its_plugin")
  assert registry.mixers.origin("by_a_helper") == "its_plugin"
