"""examples/my_mixer, a package of a mixer; broken copies of it break the contract."""

import importlib
import os
import shutil
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from dpjax import layers, testing
from dpjax.config import registry
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


def peeks_ahead(module, call, x, **options):
  return call(x.at[:, :-1].add(0.01 * x[:, 1:]), **options)


def sees_two(module, call, x, **options):
  return call(x, **options) * 0 + x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def centres_the_batch(module, call, x, **options):
  return call(x - jnp.mean(x, axis=0, keepdims=True), **options)


def divides_by_the_length(module, call, x, **options):
  return call(x, **options) / x.shape[1]


def drops_by_one_key(module, call, x, *, deterministic, **options):
  drop = nn.Dropout(module.rate, deterministic=deterministic)
  return drop(call(x, **options), rng=jax.random.key(0))


def always_draws_a_key(module, call, x, *, deterministic, **options):
  if not deterministic:
    module.make_rng("dropout")
  return call(x, **options)


def has_an_unused_parameter(module, call, x, **options):
  module.param("unused", nn.initializers.ones, (3,))
  return call(x, **options)


def joins_two_documents(module, call, x, *, document_starts=None, **options):
  if document_starts is not None:
    options["document_starts"] = document_starts * (np.arange(18) < 5)
  return call(x, **options)


def forgets(module, call, x, *, cache=None, **options):
  output = call(x, cache=cache, **options)
  return output if cache is None else (output[0], cache)


def ignores_padding(module, call, x, *, lengths=None, **options):
  return call(x, **options)


def divides_by_zero_alone(module, call, x, **options):
  return call(x, **options) / (module.max_length - 1)


def cuts_what_is_too_long(module, call, x, **options):
  return call(x[:, : module.max_length], **options)


def gives_float32(module, call, x, **options):
  return call(x, **options).astype(jnp.float32)


BROKEN = [
  ("causality", peeks_ahead, "an output depends on later inputs"),
  ("causality", sees_two, "an output depends on 2 positions, expected 11"),
  ("causality", centres_the_batch, "an output depends on another row"),
  ("lengths", divides_by_the_length, "T = 1"),
  ("single_position", divides_by_zero_alone, "an output is not finite"),
  ("refusals", cuts_what_is_too_long, r"an input of shape \(2, 14, 6\) is taken"),
  ("bfloat16", gives_float32, "expected outputs of bfloat16, got float32"),
  ("dropout", ignores_padding, "drops nothing"),
  ("dropout", drops_by_one_key, "ignores the key"),
  ("no_key", always_draws_a_key, "InvalidRngError"),
  ("gradients", has_an_unused_parameter, "'unused'"),
  ("chunks", forgets, "row 0 from position 5 on"),
  ("chunks", ignores_padding, "row 1 from position 2 on"),
  ("tokens", forgets, "all tokens"),
  ("documents", joins_two_documents, "of packed documents"),
]


@pytest.mark.parametrize("relation, breakage, message", BROKEN)
def test_the_contract_finds_what_is_broken(min_gru, relation, breakage, message):
  class Broken(min_gru):
    rate: float = 0.0

    @nn.compact
    def __call__(self, inputs, *, deterministic=True, **cached):
      call = partial(min_gru.__call__, self)
      return breakage(self, call, inputs, deterministic=deterministic, **cached)

  with pytest.raises(AssertionError, match=rf"(?s)^{relation}: .*({message})"):
    testing.check_mixer(Broken, dropout="rate", relations=[relation])


def test_a_breakage_is_known_of_every_relation():
  assert {relation for relation, *_ in BROKEN} == {*testing.RELATIONS}


def test_what_a_mixer_is_said_to_have_is_checked(min_gru):
  with pytest.raises(AssertionError, match="(?s)^causality: .*on 11 positions, expected 10"):
    testing.check_mixer(min_gru, reach=10)
  with pytest.raises(AssertionError, match="(?s)^chunks: .*has_cache: expected True"):
    testing.check_mixer(min_gru, has_cache=False, relations=["chunks"])
  with pytest.raises(ValueError, match="(?s)^max_length: expected at least 11, got 3"):
    testing.check_mixer(min_gru, max_length=3)
  with pytest.raises(ValueError, match="^relations: expected one of .*got 'chunk'"):
    testing.check_mixer(min_gru, relations=["chunk"])


class Decay(nn.Module):
  """Without a cache, a dtype, dropout; a field of its own named reach."""

  max_length: int
  reach: int = 5

  @nn.compact
  def __call__(self, inputs, *, deterministic=True):
    if inputs.ndim != 3 or inputs.shape[1] > self.max_length:
      raise ValueError(f"expected T <= max_length = {self.max_length}, got {inputs.shape}")
    x_btd = nn.Dense(inputs.shape[-1], dtype=inputs.dtype)(inputs)
    return x_btd + jnp.pad(x_btd, ((0, 0), (1, 0), (0, 0)))[:, :-1] / 2


def test_a_mixer_without_a_cache_is_checked_without_it():
  testing.check_mixer(
    Decay, width=5, max_length=17, reach=2, has_cache=False, takes_document_starts=False
  )
  with pytest.raises(AssertionError, match="(?s)^tokens: .*has_cache: expected False"):
    testing.check_mixer(Decay, reach=2, relations=["tokens"])
  message = "(?s)^documents: .*takes_document_starts: expected False"
  with pytest.raises(AssertionError, match=message):
    testing.check_mixer(Decay, reach=2, relations=["documents"])
  message = "(?s)an\nargument of `check_mixer`: a field of that name .*on 2 positions, expected 11"
  with pytest.raises(AssertionError, match=message):
    testing.check_mixer(Decay, relations=["causality"])


def test_a_mixer_that_begins_as_zeros_is_taken():
  class Gaps(Decay):
    """Reads the positions t and t - 4, by a kernel that begins as zeros."""

    @nn.compact
    def __call__(self, inputs, *, deterministic=True):
      inputs = layers.check_input(inputs, max_length=self.max_length)
      past = jnp.pad(inputs, ((0, 0), (4, 0), (0, 0)))[:, : inputs.shape[1]]
      zeros = nn.initializers.zeros
      return nn.Dense(inputs.shape[2], kernel_init=zeros, dtype=inputs.dtype)(inputs + past)

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
