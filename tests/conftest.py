"""What every test runs under: 8 virtual devices, and JAX at its strictest."""

import gc
import os
import pathlib
import tempfile
from importlib import metadata

# Tests compile much and compute little: machine code that is not optimised is there in
# less than half the time. (The scripts that tests start are compiled as a user's are, and with
# XLA_LEVEL=default everything.)
_FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if metadata.version("jaxlib").split(".")[:2] == ["0", "10"]:  # unknown to later ones
  _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
if os.environ.get("XLA_LEVEL") != "default":
  os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX_PLATFORMS=cuda: on a GPU
os.environ.setdefault("TQDM_DISABLE", "1")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Many tests compile the same small runs; one compilation of each is enough, for all processes of
# the tests, which inherit the variable, and for several runs with the same DPJAX_TEST_CACHE.
if not os.environ.get("DPJAX_TEST_CACHE"):
  _CACHE = tempfile.TemporaryDirectory()
  os.environ["DPJAX_TEST_CACHE"] = _CACHE.name
jax.config.update("jax_compilation_cache_dir", os.environ["DPJAX_TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


# What is imported stays: the collector need not look at it again and again, nor often at
# the many small objects of a trace.
gc.freeze()
gc.set_threshold(100_000)


def is_beside(path: pathlib.Path) -> bool:
  """Whether the file tests what stands beside the package, which is left to CI."""
  return path.parent.name in ("benchmarks", "reproduce")


def pytest_ignore_collect(collection_path, config):
  """Does not import test files whose tests are all slow."""
  return is_beside(collection_path) and config.option.markexpr == "not slow" or None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
  for item in filter(lambda item: is_beside(item.path), items):
    item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def forget_what_was_compiled():
  """A process that keeps all programs of all tests becomes slow."""
  yield
  jax.clear_caches()


@pytest.fixture(scope="module")
def standard_promotion():
  """For modules that train: Optax raises floats to the power of its integer count."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
  """A file of 400 lines of few words, whose folder is its own."""
  from tests import helpers

  return helpers.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
  """The folder of a run of 12 steps on `text`, the run, and its test scores.

  Many modules read it: only copies may change.
  """
  import dpjax
  from tests import helpers

  workdir = tmp_path_factory.mktemp("finished") / "run"
  config = helpers.small_config(text)
  config.sample.prompt, config.sample.length = "the cat", 9
  with jax.numpy_dtype_promotion("standard"):
    return workdir, *dpjax.train(config, workdir)
