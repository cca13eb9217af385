"""examples/my_mixer, a package of a mixer; broken copies of it break the contract."""

import importlib
import os
import runpy
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import dpjax
from dpjax import layers, testing
from dpjax.config import registry
from dpjax.runs import numpy_program
from tests import helpers

EXAMPLE = helpers.ROOT / "examples/my_mixer"


@pytest.fixture
def min_gru(monkeypatch):
  """The mixer's class; nothing of it is left in the registry."""
  monkeypatch.setattr(registry.mixers, "_registered", dict(registry.mixers._registered))
  monkeypatch.setattr(sys, "dont_write_bytecode", True)
  monkeypatch.syspath_prepend(EXAMPLE)
  yield importlib.import_module("my_mixer").MinGRU
  del sys.modules["my_mixer"]
  del sys.modules["my_mixer.in_numpy"]


def peeks_ahead(module, mix, x, context, cache):
  return mix(x.at[:, :-1].add(0.01 * x[:, 1:]), context, cache)


def sees_two(module, mix, x, context, cache):
  y, cache = mix(x, context, cache)
  return y * 0 + x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], cache


def centres_the_batch(module, mix, x, context, cache):
  return mix(x - jnp.mean(x, axis=0, keepdims=True), context, cache)


def divides_by_the_length(module, mix, x, context, cache):
  y, cache = mix(x, context, cache)
  return y / x.shape[1], cache


def drops_nothing(module, mix, x, context, cache):
  return mix(x, context, cache)


def drops_by_one_key(module, mix, x, context, cache):
  y, cache = mix(x, context, cache)
  drop = nn.Dropout(module.rate, deterministic=context.deterministic)
  return drop(y, rng=jax.random.key(0)), cache


def always_draws_a_key(module, mix, x, context, cache):
  if not context.deterministic:
    module.make_rng("dropout")
  return mix(x, context, cache)


def has_an_unused_parameter(module, mix, x, context, cache):
  module.param("unused", nn.initializers.ones, (3,))
  return mix(x, context, cache)


def joins_two_documents(module, mix, x, context, cache):
  if context.document_starts is not None:
    starts = context.document_starts * np.int32(np.arange(18) < 5)[None]
    context = context.replace(document_starts=starts)
  return mix(x, context, cache)


def forgets(module, mix, x, context, cache):
  y, _ = mix(x, context, cache)
  return y, cache


def ignores_padding(module, mix, x, context, cache):
  return mix(x, context.replace(lengths=None), cache)


def rounds_in_steps(module, mix, x, context, cache):
  # 1.001**500 is 1.65, and 1 where bfloat16 rounds the factor.
  factor = module.param("factor", nn.initializers.constant(1.001), (1,))
  if cache is not None:
    factor = factor.astype(module.dtype)
  y, cache = mix(x, context, cache)
  return y * (factor.astype(jnp.float32) ** 500).astype(module.dtype)[None, None], cache


def divides_by_zero_alone(module, mix, x, context, cache):
  y, cache = mix(x, context, cache)
  return y / (module.max_length - 1), cache


def gives_float32(module, mix, x, context, cache):
  y, cache = mix(x, context, cache)
  return y.astype(jnp.float32), cache


BROKEN = [
  ("causality", peeks_ahead, "an output depends on later inputs"),
  ("causality", sees_two, "an output depends on 2 positions, expected 11"),
  ("causality", centres_the_batch, "an output depends on another row"),
  ("lengths", divides_by_the_length, "T = 1"),
  ("single_position", divides_by_zero_alone, "an output is not finite"),
  ("bfloat16", gives_float32, "expected outputs of bfloat16, got float32"),
  ("dropout", drops_nothing, "drops nothing"),
  ("dropout", drops_by_one_key, "ignores the key"),
  ("no_key", always_draws_a_key, "InvalidRngError"),
  ("gradients", has_an_unused_parameter, "'unused'"),
  ("chunks", forgets, "row 0 from position 5 on"),
  ("chunks", ignores_padding, "row 1 from position 2 on"),
  ("tokens", forgets, "all tokens"),
  ("bfloat16_steps", rounds_in_steps, "all tokens"),
  ("documents", joins_two_documents, "of packed documents"),
]


@pytest.mark.parametrize("relation, breakage, message", BROKEN)
def test_the_contract_finds_what_is_broken(min_gru, relation, breakage, message):
  class Broken(min_gru):
    rate: float = 0.0

    @nn.compact
    def mix(self, inputs, context, cache):
      return breakage(self, super().mix, inputs, context, cache)

  with pytest.raises(AssertionError, match=rf"(?s)^{relation}: .*({message})"):
    testing.check_mixer(Broken, dropout="rate", relations=[relation])


def test_a_mixer_that_cuts_its_inputs_is_broken(min_gru):
  class Cuts(min_gru):
    def __call__(self, inputs, context=None, **keywords):
      return super().__call__(inputs[:, : self.max_length], context, **keywords)

  message = r"(?s)^refusals: .*an input of shape \(2, 14, 6\) is taken"
  with pytest.raises(AssertionError, match=message):
    testing.check_mixer(Cuts, relations=["refusals"])


def test_a_mixer_that_does_not_say_that_it_separates_documents_is_broken(min_gru):
  class Silent(min_gru):
    separates_documents = False

  with pytest.raises(AssertionError, match="(?s)^documents: .*set `separates_documents = True`"):
    testing.check_mixer(Silent, relations=["documents"])

  class Joins(min_gru):
    separates_documents = False

    @nn.compact
    def mix(self, inputs, context, cache):
      return joins_two_documents(self, super().mix, inputs, context, cache)

  # It reads the starts, but not as it would have to.
  testing.check_mixer(Joins, relations=["documents"])


def test_weights_of_another_size_are_noticed():
  class Plain(layers.Mixer):
    @nn.compact
    def mix(self, inputs, context, cache):
      return self.make_out(inputs.shape[-1])(inputs), cache

    def make_out(self, width):
      return nn.Dense(width, name="out")

  class Unscaled(Plain):
    def make_out(self, width):
      return layers.linear(self, width, "out")

  class Right(Plain):
    def make_out(self, width):
      return layers.linear(self, width, "out", scale=self.out_scale)

  for mixer, message in (
    (Plain, "init_std has no effect"),
    (Unscaled, "out_scale has no effect on out"),
  ):
    with pytest.raises(AssertionError, match=rf"(?s)^initial_values: .*{message}"):
      testing.check_mixer(mixer, relations=["initial_values"])
  testing.check_mixer(Right, relations=["initial_values"])


def test_a_breakage_is_known_of_every_relation():
  assert {"refusals", "initial_values", *(relation for relation, *_ in BROKEN)} == {
    *testing.RELATIONS
  }


def test_what_a_mixer_is_said_to_have_is_checked(min_gru):
  with pytest.raises(AssertionError, match="(?s)^causality: .*on 11 positions, expected 10"):
    testing.check_mixer(min_gru, reach=10)
  with pytest.raises(ValueError, match="(?s)^max_length: expected at least 11, got 3"):
    testing.check_mixer(min_gru, max_length=3)
  with pytest.raises(ValueError, match="^relations: expected one of .*got 'chunk'"):
    testing.check_mixer(min_gru, relations=["chunk"])
  with pytest.raises(
    ValueError, match="^make: expected a subclass of dpjax.layers.Mixer, got .*NoM"
  ):
    testing.check_mixer(NoMixer)


def test_rounding_of_weights_is_no_error_in_bfloat16(min_gru):
  class Steep(min_gru):
    @nn.compact
    def mix(self, inputs, context, cache):
      # 1.001**500 is 1.65, and 1 where bfloat16 rounds the factor.
      factor = self.param("factor", nn.initializers.constant(1.001), (1,)).astype(self.dtype)
      y, cache = super().mix(inputs, context, cache)
      return y * (factor.astype(jnp.float32) ** 500).astype(self.dtype)[None, None], cache

  testing.check_mixer(Steep, relations=["bfloat16"])


def test_a_mixer_may_say_how_much_rounding_passes_between_documents(min_gru):
  class Leaks(min_gru):
    @nn.compact
    def mix(self, inputs, context, cache):
      y, cache = super().mix(inputs, context, cache)
      return y + 1e-7 * inputs[:, :1], cache

  with pytest.raises(AssertionError, match="(?s)^documents: .*an output changes by 1e-07"):
    testing.check_mixer(Leaks, relations=["documents"])
  testing.check_mixer(Leaks, rounding_between_documents=1e-5, relations=["documents"])


@pytest.mark.usefixtures("standard_promotion")
def test_the_program_of_an_export_has_its_function(min_gru, text, tmp_path):
  config = helpers.small_config(text)
  config.model.mixer = dpjax.config.mixer("min_gru", expansion=2)
  run, _ = dpjax.train(config, tmp_path / "run")
  run.save(tmp_path / "out")
  path = str(tmp_path / "out/numpy_model.py")
  logits = runpy.run_path(path)["load"](tmp_path / "out")([3, 1, 4, 1, 5])
  inputs = np.array([[3, 1, 4, 1, 5]])
  expected = jax.jit(run.model.apply)({"params": run.params}, inputs).logits[0]
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
  card = (tmp_path / "out/README.md").read_text()
  assert "the whole model in NumPy" in card and "lacks the code of min_gru" in card


def test_a_function_in_numpy_stands_alone(min_gru, monkeypatch):
  config = dpjax.config.default()
  config.model.mixer = dpjax.config.mixer("min_gru")

  def reads_a_variable(p, x, mixer):
    return x * factor

  def reads_another_module(p, x, mixer):
    return helpers.anything(x)

  def reads_another_module_within(p, x, mixer):
    return np.array([(lambda row: helpers.anything(row))(row) for row in x])

  def has_an_annotation(p, x: jax.Array, mixer):
    return x

  def has_a_default(p, x, mixer, scale=helpers.__name__):
    return x

  def imports_another_package(p, x, mixer):
    import scipy.special

    return scipy.special.expit(x)

  def imports_a_neighbour(p, x, mixer):
    from . import json

    return json.loads(x)

  def linear(p, x):
    return x

  def sum(p, x):
    return x

  factor = 2.0
  for function, message in (
    (reads_a_variable, "got reads_a_variable, which uses factor"),
    (reads_another_module, "got reads_another_module, which uses helpers"),
    (reads_another_module_within, "got reads_another_module_within, which uses helpers"),
    (has_an_annotation, "got has_an_annotation, which uses jax"),
    (has_a_default, "got has_a_default, which uses helpers"),
    (imports_another_package, "got imports_another_package, which uses scipy.special"),
    (imports_a_neighbour, r"got imports_a_neighbour, which uses \."),
    (linear, "with a name that dpjax.runs.numpy_model lacks, got linear"),
    (sum, "with a name that dpjax.runs.numpy_model lacks, got sum"),
    (lambda p, x, mixer: x, "with a name, got <lambda>"),
    (len, "with a name, got len"),
    (3, "with a name, got 3"),
  ):
    monkeypatch.setitem(registry.mixers._numpy_functions, "min_gru", function)
    with pytest.raises(dpjax.UserError, match=f"^min_gru: expected numpy_function .*{message}$"):
      numpy_program.write([config.model])

  def recurs(p, x, mixer):
    import math

    return x / math.pi if len(x) < 2 else recurs(p, x[1:], mixer)

  monkeypatch.setitem(registry.mixers._numpy_functions, "min_gru", recurs)
  assert "MIXERS['min_gru'] = recurs\n" in numpy_program.write([config.model])


def test_a_value_error_in_a_mixer_names_its_class():
  class Refuses(layers.Mixer):
    @nn.compact
    def mix(self, inputs, context, cache):
      raise ValueError(f"inputs: expected an even T, got {inputs.shape[1]}")

    def init_cache(self, batch, width):
      return ()

  inputs = jnp.zeros((2, 3, 6))
  message = "^Refuses: inputs: expected an even T, got 3 .DPJAX_TRACEBACK=1 shows where."
  with pytest.raises(dpjax.UserError, match=message):
    Refuses(max_length=3).apply({}, inputs)
  with pytest.raises(dpjax.UserError, match=message):
    Refuses(max_length=3).apply({}, inputs, (), method="step")

  class Typo(Refuses):
    @nn.compact
    def mix(self, inputs, context, cache):
      return inputs + self.rate, cache

  with pytest.raises(AttributeError):
    Typo(max_length=3).apply({}, inputs)


class NoMixer(nn.Module):
  max_length: int

  def __call__(self, inputs):
    return inputs


class AddPrevious(layers.Mixer):
  """Without a cache, documents, dropout; a field of its own named reach."""

  reach: int = 5

  @nn.compact
  def mix(self, inputs, context, cache):
    x_btd = layers.linear(self, inputs.shape[-1], "both", use_bias=True)(inputs)
    return x_btd + jnp.pad(x_btd, ((0, 0), (1, 0), (0, 0)))[:, :-1] / 2, cache


def test_a_mixer_without_a_cache_is_checked_without_it():
  module = AddPrevious(max_length=17)
  assert not module.has_cache and not module.separates_documents
  testing.check_mixer(AddPrevious, width=5, max_length=17, reach=2)
  message = "(?s)an\nargument of `check_mixer`: a field of that name .*on 2 positions, expected 11"
  with pytest.raises(AssertionError, match=message):
    testing.check_mixer(AddPrevious, relations=["causality"])


def test_a_mixer_that_begins_as_zeros_is_taken():
  class Gaps(layers.Mixer):
    """Reads the positions t and t - 4, by a kernel that begins as zeros."""

    @nn.compact
    def mix(self, inputs, context, cache):
      past = jnp.pad(inputs, ((0, 0), (4, 0), (0, 0)))[:, : inputs.shape[1]]
      zeros = nn.initializers.zeros
      return nn.Dense(inputs.shape[2], kernel_init=zeros, dtype=self.dtype)(inputs + past), cache

  testing.check_mixer(Gaps, reach=5, relations=["causality", "gradients"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
  """A copy of the package in `source`, installed in a folder of its own beside dpjax."""
  folder = tmp_path_factory.mktemp("my_mixer")
  ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
  shutil.copytree(EXAMPLE, folder / "source", ignore=ignored)
  options = "--quiet --no-deps --no-index --no-build-isolation --target".split()
  pip = [sys.executable, "-m", "pip", "install", *options]
  done = subprocess.run([*pip, folder, folder / "source"], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return folder


def run(site, *command):
  """The output of a Python command that finds the package."""
  done = subprocess.run(
    [sys.executable, *map(str, command)],
    cwd=site,
    env=helpers.environment(PYTHONPATH=os.pathsep.join([str(site), str(helpers.ROOT)])),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.slow
def test_the_package_passes_its_own_tests(site):
  run(site, "-m", "pytest", "-q", "source/tests")


@pytest.mark.slow
def test_the_package_trains_scores_and_writes(site, tmp_path):
  text, workdir = helpers.write_text(tmp_path / "text.txt"), f"--workdir={tmp_path / 'run'}"
  settings = f"data.path={text} train.num_steps=50 train.eval_every_steps=25 sample.length=7"
  flags = [f"--config.{x}" for x in [*settings.split(), "sample.prompt=the cat"]]
  run(site, "-m", "dpjax", "train", f"--config={EXAMPLE / 'config.py'}:hourglass", workdir, *flags)
  # Its entry point alone makes the mixer known to these.
  scores = run(site, "-m", "dpjax", "evaluate", workdir)
  assert "bits per character" in scores and "shortening factor" in scores
  written = run(site, "-m", "dpjax", "generate", workdir, "--prompt=the cat", "--length=11")
  assert written.startswith("the cat") and len(written.strip("\n")) == len("the cat") + 11
