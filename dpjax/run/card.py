"""The card of an exported model: scores, how to load it, and its equations as NumPy code."""

import ast
import inspect
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpjax import __version__, files
from dpjax import config as config_lib
from dpjax.errors import UserError
from dpjax.run import numpy_model

_CARD = """# {name}

A language model of {size:,} parameters, trained with dpjax {version} for {run.step:,} updates
on {run.data.name} ({run.data.counts[train][tokens]:,} training tokens; {run.tokenizer.kind} of \
{run.tokenizer.vocab_size:,} entries).

| split | score | |
|---|---|---|
{scores}

```python
import dpjax

run = dpjax.load("{name}")
run.generate("...", length=100)
run.score("a text")
```

`model.safetensors` holds the parameters in {dtype}, `config.json` all settings.
"""
_DESCRIPTION = """
## The model

{model}
| array | shape |
|---|---|
{rows}
"""
_MODEL = """At most {max_length:,} tokens at once. Row t of the logits is for token t + 1; the token
{start_id} stands before a text. A matrix is [in, out], and heads lie side by side among the
features. Arrays of a stack of layers have the layers as their first axis. This is the whole model
in NumPy, without dropout{computes}:

```python
{code}
```

In PyTorch, `safetensors.torch.load_file` reads the arrays.
"""
_LOGITS = """arrays = load_file("model.safetensors")
arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
model = json.load(open("config.json"))["model"]
"""
_COMPUTE = """

def logits(tokens):  # [T] -> [T, V]
  return forward(tokens, arrays, model)"""


def _components(model: Mapping) -> set[str]:
  mixers = {section["name"] for section in config_lib.mixers_in(model).values()}
  kinds = {stage["boundaries"]["name"] for stage in config_lib.stages_in(model).values()}
  return (mixers | kinds) - {"none"}


def numpy_code(model: Mapping, frozen: Mapping | None = None, dtype: str = "float32") -> str:
  """A program with a function `logits`, [T] -> [T, V], that computes an exported model."""
  models = [model, frozen] if frozen else [model]
  stages = [stage for each in models for stage in config_lib.stages_in(each).values()]
  pooled = [stage for stage in stages if config_lib.is_pooled(stage)]
  mixers = [section for each in models for section in config_lib.mixers_in(each).values()]
  names = sorted({name for each in models for name in _components(each)})
  table = {name: numpy_model.FUNCTIONS[name].__name__ for name in names}
  known = {name: x for name, x in vars(numpy_model).items() if inspect.isfunction(x)}

  def settings_of(name: str) -> list[dict]:
    """What `model`, `mixer` and `kind` may be in a function."""
    if name == "hourglass":
      return [{"model": stage, "kind": stage["boundaries"]} for stage in pooled]
    if name in table.values():
      sections = [*mixers, *(stage["boundaries"] for stage in pooled)]
      mine = [section for section in sections if table[section["name"]] == name]
      return [{"mixer": section, "kind": section} for section in mine]
    activations = {each["activation"] for each in models}
    activations |= {"gelu"} if "predicted" in table.values() else set()
    if name == "feed_forward":
      return [{"activation": each} for each in activations]
    return [{"model": each, "mixer": mixer} for each in models for mixer in mixers]

  sources, wanted = {}, ["forward"]
  while wanted:
    name = wanted.pop()
    sources[name] = _decide(inspect.getsource(known[name]).strip(), settings_of(name))
    called = {*re.findall(r"(\w+)\(", sources[name])} & {*known}
    called |= {*table.values()} if "FUNCTIONS[" in sources[name] else set()
    wanted += called - {*sources, *wanted}
  shown = ", ".join(f'"{name}": {function}' for name, function in table.items())
  is_looked_up = any("FUNCTIONS[" in source for source in sources.values())
  settings = f"FUNCTIONS = {{{shown}}}\n" * is_looked_up + _LOGITS
  if "space_ids" in model["boundaries"]:  # filled in by the tokenizer
    settings += 'model["boundaries"] = json.load(open("boundaries.json"))\n'
  if frozen:
    settings += 'model["boundaries"]["frozen"] = json.load(open("frozen.json"))\n'
  parts = [sources[name] for name in known if name in sources]
  imports = ["import json", *["import math"] * any("math." in part for part in parts), ""]
  imports += ["import ml_dtypes  # lets NumPy read bfloat16"] * (dtype == "bfloat16")
  imports += ["import numpy as np", "from safetensors.numpy import load_file"]
  return "\n\n\n".join(["\n".join(imports), *parts, f"{settings}{_COMPUTE}"])


def _decide(source: str, settings: list[dict]) -> str:
  """The source of a function with only the branches that any of the settings takes."""

  def evaluate(node: ast.expr) -> set:
    code = compile(ast.Expression(node), "card", "eval")
    try:
      return {eval(code, {**vars(numpy_model), **each}) for each in settings}
    except (NameError, KeyError, TypeError):  # It depends on arrays, or on the component.
      return set()

  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.If | ast.IfExp):
      found = evaluate(node.test)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "FUNCTIONS":
      found = evaluate(node)
    else:
      continue
    lines, line = source.split("\n"), source.split("\n")[node.lineno - 1]
    if len(found) != 1 or line.lstrip().startswith("elif"):
      continue
    (value,) = found
    if isinstance(node, ast.If):
      kept = node.body if value else node.orelse
      new = lines[kept[0].lineno - 1 : kept[-1].end_lineno] if kept else []
      is_chain = new and new[0].lstrip().startswith("elif")
      new = [new[0].replace("elif", "if", 1), *new[1:]] if is_chain else [x[2:] for x in new]
      lines[node.lineno - 1 : node.end_lineno] = new
    else:
      is_table = isinstance(node, ast.Subscript)
      chosen = value.__name__ if is_table else ast.unparse(node.body if value else node.orelse)
      lines[node.lineno - 1] = line[: node.col_offset] + chosen + line[node.end_col_offset :]
    return _decide("\n".join(lines), settings)
  return re.sub(r"^ *(\w+) = \1\n", "", source, flags=re.MULTILINE)


def describe(
  model: Mapping | None,
  shapes: Mapping[str, tuple[int, ...]],
  *,
  frozen: Mapping | None = None,
  start_id: int = 0,
  dtype: str = "float32",
) -> str:
  """A model's code and arrays; None: made in Python; `frozen`: the model of its boundaries."""
  rows = "\n".join(f"| `{name}` | {', '.join(map(str, x))} |" for name, x in sorted(shapes.items()))
  names = ["its class"] if model is None else sorted(_components(model) - {*numpy_model.FUNCTIONS})
  if names or model is None:
    about = f"Its code is its author's own, and no part of this folder: {', '.join(names)}.\n"
  else:
    computes = "" if model["dtype"] == "float32" else f", up to rounding to {model['dtype']}"
    if model["boundaries"].get("sample"):
      computes += ", with rounded boundaries where dpjax draws them"
    given = dict(max_length=model["max_length"], start_id=start_id, computes=computes)
    about = _MODEL.format(code=numpy_code(model, frozen, dtype), **given)
  return _DESCRIPTION.format(model=about, rows=rows)


def write(run: Any, name: str, shapes: Mapping, *, is_built: bool = True, **description) -> str:
  """The card of a run, in Markdown; `is_built`: its model is that of the settings."""
  head = _CARD.format(
    name=name,
    run=run,
    size=sum(math.prod(shape) for shape in shapes.values()),
    version=__version__,
    scores="\n".join(_scores(run)) or "| - | not scored | |",
    dtype=description["dtype"],
  )
  model, start_id = run.config.model if is_built else None, run.tokenizer.start_id
  return head + describe(model, shapes, start_id=start_id, **description)


def _scores(run: Any) -> list[str]:
  rows = []
  for path in sorted(Path(run.workdir).glob(f"scores_*_{run.step}.json")):
    try:
      content = files.load_json(path)
      split = {x: x for x in run.data.counts}[content["split"]]
      rows += [
        f"| {split} | {name.replace('_', ' ')} | {float(value):.4g} |"
        for name, value in content["scores"].items()
        if value is not None
      ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      expected = "expected scores of the run"
      raise UserError(f"{path}: {expected}, got damaged JSON ({error!r})") from error
  return rows
