"""Imports go down only, and cost no more than they have to."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.helpers import ROOT

# Each room may import from itself and from those on the lines above.
ROOMS = [
  {"ops", "text"},
  {"layers", "data"},
  {"models"},
  {"training", "interop"},
  {"generation"},
  {"testing", "runs"},
  {"analysis"},
  {"commands"},
  {"__main__", "reproduce"},
  {"scripts"},
]
LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
READS_CONFIG = {"interop", "training", "generation", "runs", "commands", "analysis"}
READS_CONFIG |= {"reproduce", "scripts"}
# Each of these may import those before it, and none of the rooms.
BASE = ["lazy", "errors", "hub", "files", "config"]
NEVER = {"chex", "pytest", "tensorflow"}
INSIDE = "google huggingface_hub pyarrow pooch sentencepiece tensorboard tensorflow_datasets"
ONLY_INSIDE_FUNCTIONS = {*INSIDE.split(), "tokenizers", "torch"}
SCRIPTS = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("reproduce/*.py")]
FILES = [path for path in ROOT.glob("dpjax/**/*.py") if path != ROOT / "dpjax/__init__.py"]
PACKAGES = "analysis config data generation interop layers models ops runs text training"
FACES = ["dpjax", *(f"dpjax.{name}" for name in PACKAGES.split())]


def modules(nodes):
  """The full names that the nodes import, `from a import b` as `a.b`."""
  for node in nodes:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
      assert not node.level, "relative import"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def check_imports(path):
  parts = path.relative_to(ROOT).with_suffix("").parts
  room = parts[1] if parts[0] == "dpjax" else "scripts"
  room = "reproduce" if parts[0] == "reproduce" else room
  if room in BASE:
    allowed = {*BASE[: BASE.index(room) + 1]}
    if parts[1:] == ("config", "registry"):
      allowed |= {"layers", "text", "training"}  # the components, imported when they are named
  else:
    assert room in LEVELS, f"a new room: say in {Path(__file__).name} what it may import"
    allowed = {name for name in LEVELS if LEVELS[name] < LEVELS[room]}
    allowed |= {room, "errors", "files", "hub", "lazy", "__version__"}
    if room in READS_CONFIG or parts[1:] == ("models", "build"):
      allowed |= {"config"}
    if parts[1:] in (("training", "optimizers"), ("data", "sources"), ("data", "remote")):
      allowed |= {"config"}  # the last two for plugins, which register corpora
  tree = ast.parse(path.read_text(encoding="utf-8"))
  everywhere = [*modules(ast.walk(tree))]
  for name in everywhere:
    top, _, rest = name.partition(".")
    assert top not in NEVER, (path, name)
    if top == "dpjax" and (rest or room not in ("reproduce", "scripts")):
      assert rest.split(".")[0] in allowed, (path, name)
    if room == "ops" and top != "dpjax":
      assert top in ("jax", "jaxtyping", "numpy") or top in sys.stdlib_module_names, (path, name)
  for name in modules(tree.body):
    assert name.partition(".")[0] not in ONLY_INSIDE_FUNCTIONS, (path, name)


def test_imports_go_down():
  for path in FILES + SCRIPTS:
    check_imports(path)


LOADED = """
dpjax, dpjax_papers.complexity, dpjax_papers.significance | jax numpy scipy ml_collections
dpjax.layers, dpjax.training, dpjax.analysis.plots, dpjax.analysis.calibrate, dpjax.analysis.page \
  | jax orbax matplotlib ml_collections dpjax.layers.dispatcher
dpjax.ops | flax optax orbax tensorflow ml_collections
dpjax.runs | tensorflow tensorflow_datasets torch chex sentencepiece tokenizers
"""


def python(code: str) -> subprocess.CompletedProcess:
  return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("modules, unwanted", helpers.cases(LOADED))
def test_what_an_import_loads(modules, unwanted):
  loaded = {*python(f"import {modules}, sys; print(*sys.modules)").stdout.split()}
  assert {*modules.split(", ")} <= loaded
  assert not {*unwanted.split()} & loaded


def test_modules_are_attributes_without_an_import_of_their_own():
  code = """
import importlib, inspect, pkgutil
packages = ["dpjax.testing", "dpjax", "dpjax_papers", "dpjax_relatives"]
for package in packages:
  parent = importlib.import_module(package)
  for found in pkgutil.iter_modules(parent.__path__):
    name = f"{package}.{found.name}"
    is_hidden = not inspect.ismodule(vars(parent).get(found.name, parent))
    if is_hidden or found.name.startswith("_"):
      continue  # by a function of the same name, or since it is a program
    if found.ispkg and name not in packages:
      packages.append(name)
    if hasattr(parent, "__getattr__"):
      vars(parent).pop(found.name, None)  # Other modules may have imported it.
    assert getattr(parent, found.name).__name__ == name
print(*packages)
"""
  done = python(code)
  assert done.returncode == 0, done.stderr
  assert {*FACES, "dpjax.commands", "dpjax_relatives"} <= {*done.stdout.split()}


def public_names() -> dict[str, list[str]]:
  """What each package says of itself, in a process that has imported nothing else."""
  code = f"""
import importlib, json, pkgutil
names = {{}}
for package in {FACES}:
  module = importlib.import_module(package)
  names[package] = module.__all__
  assert set(module.__all__) <= set(dir(module)), package
  if package not in ("dpjax", "dpjax.analysis", "dpjax.ops"):
    # An import of the module would hide the name.
    modules = {{found.name for found in pkgutil.iter_modules(module.__path__)}}
    assert not modules & set(module.__all__), package
  for name in module.__all__:
    getattr(module, name)
  try:
    module.nothing
  except AttributeError as error:
    assert str(error) == f"module {{package!r}} has no attribute 'nothing'"
  else:
    assert False, package
print(json.dumps(names))
"""
  done = python(code)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_every_public_name_is_there():
  names = public_names()
  assert {"Dispatcher", "HE"} <= {*names["dpjax.layers"]}
  assert {"layers", "testing", "train", "register_mixer"} <= {*names["dpjax"]}


TYPES = {
  'run.generate("a", length=3, stop=["b"])': "list[str]",
  'run.generate(["a", "b"], top_p=0.5, overflow="error")': "list[list[str]]",
  'run.generate("a", temperature=0.0, top_k=2)': "list[str]",
  'run.generate(("a", "b"), seed=5, num_samples=2)': "list[list[str]]",
  'run.stream("a", length=3)': "Iterator[list[Piece]]",
  "run.model": "LanguageModel",
}
MISTYPED = ['run.generate("a", lenght=3)', 'run.generate("a", length="3")', "run.stream(3)"]


@pytest.mark.slow
def test_a_type_checker_knows_every_public_name_and_a_run(tmp_path):
  pages = [(ROOT / page).read_text(encoding="utf-8") for page in ("docs/index.md", "README.md")]
  lines = "\n".join(re.search(r"```python\n(.*?)```", page, re.S)[1] for page in pages).splitlines()
  names = [f"{package}.{name}" for package, known in public_names().items() for name in known]
  lines += map("reveal_type({})".format, [*TYPES, *names])
  wrong = [*MISTYPED, *(f"{package}.nothing" for package in FACES)]
  (tmp_path / "face.py").write_text("\n".join([*lines, *wrong]) + "\n", encoding="utf-8")
  # At its first start, pyright fetches what it runs on.
  done = subprocess.run(
    [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "face.py"],
    cwd=tmp_path,
    env=helpers.environment(),
    capture_output=True,
    text=True,
  )
  found = json.loads(done.stdout)["generalDiagnostics"]
  told = [x["message"] for x in found if x["severity"] == "information"]
  types = [re.search(r' is "(.*)"$', message, re.S)[1] for message in told]
  assert types[: len(TYPES)] == [*TYPES.values()] and len(types) == len(TYPES) + len(names)
  assert "Unknown" not in types
  errors = {x["range"]["start"]["line"] for x in found if x["severity"] != "information"}
  assert sorted(errors) == [*range(len(lines), len(lines) + len(wrong))], found
