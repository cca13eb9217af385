"""Imports go down only, and cost no more than they have to."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each room may import from itself and from those on the lines above.
ROOMS = [
  {"ops", "text"},
  {"layers", "data"},
  {"models"},
  {"training", "decoding", "interop"},
  {"command_line", "generation", "workdir"},
  {"run"},
  {"complexity", "plots"},
  {"calibrate", "segmentation", "significance"},
  {"reproduce"},
  {"scripts"},
]
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
READS_CONFIG = {
  "interop", "command_line", "generation", "workdir", "run", "plots", "reproduce", "scripts"
}
# Each of these may import those before it, and none of the rooms.
BASE = ["errors", "registry", "old_settings", "config"]
NEVER = {"chex", "tensorflow"}
# (tensorboardX imports PyTorch where there is one.)
ONLY_INSIDE_FUNCTIONS = {
  "sentencepiece", "tensorboardX", "tensorflow_datasets", "tokenizers", "torch"
}
SCRIPTS = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")]
FILES = [
  path for path in ROOT.glob("dpjax/**/*.py") if path != ROOT / "dpjax/__init__.py"
]


def modules(nodes):
  """The full names that the nodes import, `from a import b` as `a.b`."""
  for node in nodes:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
      assert not node.level, "relative import"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_rooms_are_found():
  assert len(FILES) > 20 and len(SCRIPTS) >= 3


@pytest.mark.parametrize(
  "path", FILES + SCRIPTS, ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_go_down(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  room = parts[1] if parts[0] == "dpjax" else "scripts"
  if room in BASE:
    allowed = {*BASE[: BASE.index(room)]}
  else:
    assert room in LEVELS, f"a new room: say in {Path(__file__).name} what it may import"
    allowed = {name for name in LEVELS if LEVELS[name] < LEVELS[room]} | {room, "errors"}
    if room in READS_CONFIG or parts[1:] == ("models", "build"):
      allowed |= {"config", "registry"}
    if parts[1:] == ("training", "optimizer"):
      allowed |= {"registry"}
  tree = ast.parse(path.read_text(encoding="utf-8"))
  everywhere = [*modules(ast.walk(tree))]
  for name in everywhere:
    top, _, rest = name.partition(".")
    assert top not in NEVER, name
    if top == "dpjax" and (rest or room != "scripts"):
      assert rest.split(".")[0] in allowed, name
    if room == "ops" and top != "dpjax":
      assert top in ("jax", "numpy") or top in sys.stdlib_module_names, name
  only_inside = ONLY_INSIDE_FUNCTIONS
  if parts[:3] == ("dpjax", "data", "builders"):  # imported once a corpus is asked for
    only_inside = only_inside - {"tensorflow_datasets"}
  for name in modules(tree.body):
    assert name.partition(".")[0] not in only_inside, name


@pytest.mark.parametrize(
  "module, unwanted",
  [
    ("dpjax", ("jax", "numpy", "ml_collections")),
    ("dpjax.ops", ("flax", "optax", "orbax", "tensorflow", "ml_collections")),
    ("dpjax.complexity", ("jax", "numpy", "ml_collections")),
    ("dpjax.plots", ("jax", "matplotlib", "ml_collections")),
    ("dpjax.calibrate", ("jax", "matplotlib", "ml_collections")),
    ("dpjax.segmentation", ("jax", "matplotlib", "ml_collections")),
    ("dpjax.significance", ("jax", "numpy", "scipy", "ml_collections")),
    (
      "dpjax.run",
      ("tensorflow", "tensorflow_datasets", "torch", "chex", "sentencepiece", "tokenizers"),
    ),
  ],
)
def test_what_an_import_loads(module, unwanted):
  code = f"import {module}, sys; print(*sys.modules)"
  loaded = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
  ).stdout.split()
  assert module in loaded
  assert not {*unwanted} & {*loaded}


def test_every_public_name_is_there():
  code = "import dpjax; [getattr(dpjax, name) for name in dir(dpjax)]; dpjax.nothing"
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
  )
  assert "module 'dpjax' has no attribute 'nothing'" in done.stderr
