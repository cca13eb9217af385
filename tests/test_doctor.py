"""What `dpjax doctor` finds, and versions that are known to compute wrongly."""

import re
import subprocess
import sys
from importlib import metadata

import jax
import jax.numpy as jnp
import pytest

from dpjax import versions
from dpjax.training import profiling
from tests import helpers


@pytest.fixture(autouse=True)
def rates(monkeypatch):
  """Known at once."""
  rates = {"float32": 123e9, "bfloat16": 45.6e9}
  monkeypatch.setattr(profiling, "product_rate", rates.__getitem__)


def of_installed(monkeypatch, **others):
  """As if other versions were installed, or None."""
  real = metadata.version

  def version(name):
    found = others[name] if name in others else real(name)
    if found is None:
      raise metadata.PackageNotFoundError(name)
    return found

  monkeypatch.setattr(metadata, "version", version)


def test_all_is_right_here(capsys):
  assert helpers.command("doctor") is None
  shown = capsys.readouterr().out
  for name in ("operators", "product", "attention", "compilation cache"):
    assert re.search(rf"^{name} +right$", shown, re.MULTILINE), shown
  assert f"jaxlib              {metadata.version('jaxlib')}\n" in shown
  assert "8 cpu (cpu)" in shown and re.search(r"^memory +[\d.]+ GiB of the machine$", shown, re.M)
  assert "products, float32   123 Gflop/s" in shown and "products, bfloat16  46 Gflop/s" in shown
  assert shown.endswith("\n\nall right\n")


def test_a_wrong_product_is_found_and_named(monkeypatch):
  einsum = jnp.einsum

  def wrong(spec, x, y, **settings):  # as jaxlib 0.10.2: one row of many
    found = einsum(spec, x, y, **settings)
    return found.at[1, 32_770:].multiply(1.5) if found.shape[-1] > 32_768 else found

  monkeypatch.setattr(jnp, "einsum", wrong)
  message = helpers.command("doctor")
  expected = (
    r"product: of \[3, 3\] and \[3, 32803\] in float32: expected NumPy's numbers within 0.0001"
  )
  assert re.fullmatch(rf"\nwrong:\n{expected}, got numbers 0\.\d+ away; try another .*", message)


def test_wrong_operators_and_attention_are_found_and_named(monkeypatch):
  sqrt = jnp.sqrt
  monkeypatch.setattr(jnp, "sqrt", lambda x: sqrt(x) * jnp.nan)
  monkeypatch.setattr("dpjax.ops.causal_attention", lambda queries, keys, values: values)
  _, _, *lines = helpers.command("doctor").splitlines()
  names = [line.partition(":")[0] for line in lines]
  assert names == ["operators", "attention"] and "got numbers nan away" in lines[0]


def test_what_cannot_run_is_named_and_the_others_are_looked_at(monkeypatch, capsys):
  def fail(*_):
    raise jax.errors.JaxRuntimeError("INTERNAL: no cuDNN\nmore of it")

  monkeypatch.setattr("dpjax.ops.causal_attention", fail)
  message = helpers.command("doctor")
  expected = "attention: expected a result, got: INTERNAL: no cuDNN; try another version of jax"
  assert message == f"\nwrong:\n{expected}"
  assert re.search("^compilation cache +right$", capsys.readouterr().out, re.MULTILINE)


def test_a_cache_that_finds_nothing_again_is_found(monkeypatch):
  monkeypatch.setattr("jax.monitoring.register_event_listener", lambda listen: None)
  monkeypatch.setattr("jax.monitoring.unregister_event_listener", lambda listen: None)
  assert "compilation cache: expected a program to be found again" in helpers.command("doctor")


@pytest.mark.parametrize(
  ("package", "version", "about"),
  [
    ("jaxlib", "0.10.2", "narrow matrices"),
    ("jax-cuda12-plugin", "0.11.0", "jax#40633"),
    ("jax-cuda13-plugin", "0.11.1", "jax#40633"),
    ("jaxlib", "0.11.1", ""),
    ("jax-cuda13-plugin", "0.12.0", ""),
  ],
)
def test_a_version_that_computes_wrongly_is_named(package, version, about, monkeypatch, caplog):
  others = {"jaxlib": "0.12.0", "jax-cuda12-plugin": None, "jax-cuda13-plugin": None}
  of_installed(monkeypatch, **others | {package: version})
  versions.warn()
  assert len(caplog.messages) == bool(about)
  for line in caplog.messages:
    assert line.startswith(f"{package} {version}: ") and about in line


def test_the_first_operator_warns():
  code = "from importlib import metadata; metadata.version = lambda name: '0.10.2'; import dpjax; "
  run = [sys.executable, "-c", code + "print('lazy'); dpjax.ops"]
  done = subprocess.run(run, cwd=helpers.ROOT, capture_output=True, text=True, check=True)
  assert done.stdout == "lazy\n"
  # Without fcntl, filelock warns before it.
  assert done.stderr.splitlines()[-1].startswith("jaxlib 0.10.2: ")
  assert done.stderr.count("jaxlib") == 1
