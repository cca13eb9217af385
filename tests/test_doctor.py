"""What `dpjax doctor` checks."""

import re
from importlib import metadata

import jax
import jax.numpy as jnp
import pytest

from dpjax.commands import doctor
from tests import helpers

CONVOLUTIONS = doctor._CONVOLUTIONS


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(doctor, "_gigaflops", {"float32": 123.0, "bfloat16": 45.6}.__getitem__)
  monkeypatch.setattr(doctor, "_CONVOLUTIONS", "print(0.0)")


def test_doctor_here(monkeypatch, capsys):
  monkeypatch.setattr(doctor, "_CONVOLUTIONS", CONVOLUTIONS)
  assert helpers.command("doctor") is None
  text = capsys.readouterr().out
  for name in ("operators", "products", "attention", "convolution"):
    assert re.search(rf"^{name} +right$", text, re.MULTILINE), text
  assert f"jaxlib              {metadata.version('jaxlib')}\n" in text
  assert re.search(r"^devices +8 cpu \(cpu\), [\d.]+ GiB of the machine$", text, re.MULTILINE)
  assert "speed in float32    123 Gflop/s" in text and "speed in bfloat16   46 Gflop/s" in text
  assert text.endswith("\n\nall right\n")


def test_wrong_results(monkeypatch):
  sqrt, einsum = jnp.sqrt, jnp.einsum

  def wrong(spec, x, y, **options):  # as jaxlib 0.10.2: one row of many
    result = einsum(spec, x, y, **options)
    return result.at[1, 32_770].multiply(1.5) if result.shape[-1] > 32_770 else result

  monkeypatch.setattr(jnp, "sqrt", lambda x: sqrt(x) * jnp.nan)
  monkeypatch.setattr(jnp, "einsum", wrong)
  monkeypatch.setattr("dpjax.ops.causal_attention", lambda queries, keys, values: values)
  _, title, *lines = helpers.command("doctor").splitlines()
  expected = "expected NumPy's numbers, got a relative error of "
  assert title == "wrong:" and len(lines) == 3
  assert lines[0] == f"operators: {expected}nan; try another version of jax"
  assert lines[1].startswith(f"products: {expected}0.")
  assert lines[2].startswith(f"attention: {expected}")


def test_a_failing_check_does_not_stop_the_others(monkeypatch, capsys):
  def fail(x):
    raise jax.errors.JaxRuntimeError("INTERNAL: no cuDNN\nmore of it")

  monkeypatch.setattr(jnp, "sqrt", fail)
  message = helpers.command("doctor")
  expected = "operators: expected a result, got: INTERNAL: no cuDNN; try another version of jax"
  assert message == f"\nwrong:\n{expected}"
  assert re.search("^attention +right$", capsys.readouterr().out, re.MULTILINE)


def test_versions_with_defects(monkeypatch):
  narrow, cuda = "narrow matrices", "jax#40633"
  defects = {
    "jaxlib 0.10.2": narrow,
    "jax-cuda12-plugin 0.11.0": cuda,
    "jax-cuda13-plugin 0.11.1": cuda,
  }
  versions = dict(package.split() for package in defects)

  def find(name):
    if name not in versions:
      raise metadata.PackageNotFoundError(name)
    return versions[name]

  monkeypatch.setattr(metadata, "version", find)
  _, _, *lines = helpers.command("doctor").splitlines()
  for line, (package, about) in zip(lines, defects.items(), strict=True):
    assert line.startswith(f"{package}: ") and about in line


@pytest.mark.parametrize(
  "program, seconds, expected",
  [
    ("import time; time.sleep(999)", 1, "expected a result, got: no end within 1 s"),
    ("raise SystemExit('no room')", 99, "expected a result, got: no room"),
    ("print(0.5)", 99, "expected NumPy's numbers, got a relative error of 0.5"),
  ],
)
def test_convolutions_run_in_a_process_of_their_own(program, seconds, expected, monkeypatch):
  monkeypatch.setattr(doctor, "_CONVOLUTIONS", program)
  monkeypatch.setattr(doctor, "_MOST_SECONDS", seconds)
  message = helpers.command("doctor")
  assert message == f"\nwrong:\nconvolution: {expected}; try another version of jax"
