"""The card of an exported model: scores, how to load it, and its equations as NumPy code."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpjax import __version__, files
from dpjax.errors import UserError
from dpjax.run.numpy_code import foreign, numpy_code

_CARD = """# {name}

A language model of {size:,} parameters, trained with dpjax {version} for {step:,} updates
on {data} ({tokens:,} training tokens; {kind} of {vocab_size:,} entries).

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
{model}"""
_MODEL = """
## The model

At most {max_length:,} tokens at once. Row t of the logits is for token t + 1; the token {start_id}
stands before a text. A matrix is [in, out], and heads lie side by side among the features.
Arrays of a stack of layers have the layers as their first axis. This is the whole model in NumPy,
without dropout{dtype}:

```python
{code}
```

In PyTorch, `safetensors.torch.load_file` reads the arrays.
"""
_OWN = """
## The model

Its code is its author's own, and no part of this folder: {names}.
"""
_ARRAYS = """
| array | shape |
|---|---|
{rows}
"""


def describe(
  model: Mapping | None,
  shapes: Mapping[str, tuple[int, ...]],
  *,
  frozen: Mapping | None = None,
  start_id: int = 0,
  dtype: str = "float32",
) -> str:
  """The part of a card that describes a model: its code and its arrays.

  Args:
    model: see `numpy_code`; None for a model that was made in Python.
    shapes: the shapes of the arrays by name.
    frozen: see `numpy_code`.
    start_id: the token before a text.
    dtype: the dtype of the file.
  """
  rows = "\n".join(f"| `{name}` | {', '.join(map(str, x))} |" for name, x in sorted(shapes.items()))
  arrays = _ARRAYS.format(rows=rows)
  if model is None or foreign(model):
    names = ["its class"] if model is None else foreign(model)
    return _OWN.format(names=", ".join(names)) + arrays
  code = numpy_code(model, frozen)
  if dtype == "bfloat16":
    code = code.replace(
      "import numpy", "import ml_dtypes  # lets NumPy read bfloat16\nimport numpy"
    )
  computes = "" if model["dtype"] == "float32" else f", up to rounding to {model['dtype']}"
  if model["boundaries"].get("sample"):
    computes += ", with rounded boundaries where dpjax draws them"
  return (
    _MODEL.format(max_length=model["max_length"], start_id=start_id, dtype=computes, code=code)
    + arrays
  )


def write(
  run: Any,
  name: str,
  shapes: Mapping[str, tuple[int, ...]],
  *,
  is_built: bool = True,
  frozen: Mapping | None = None,
  dtype: str = "float32",
) -> str:
  """The card of a run, in Markdown.

  Args:
    run: a `dpjax.run.Run` with a folder.
    name: the name of the folder of the export.
    shapes: see `describe`.
    is_built: whether the model is that of the settings, and none made in Python.
    frozen: see `describe`.
    dtype: see `describe`.

  Raises:
    UserError: a file of scores is damaged.
  """
  data = run.data
  return _CARD.format(
    name=name,
    size=sum(math.prod(shape) for shape in shapes.values()),
    version=__version__,
    step=run.step,
    data=data.name,
    tokens=data.counts["train"]["tokens"],
    kind=run.tokenizer.kind,
    vocab_size=run.tokenizer.vocab_size,
    scores="\n".join(_scores(run)) or "| - | not scored | |",
    dtype=dtype,
    model=describe(
      run.config.model if is_built else None,
      shapes,
      frozen=frozen,
      start_id=run.tokenizer.start_id,
      dtype=dtype,
    ),
  )


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
      raise UserError(
        f"{path}: expected scores of the run, got damaged JSON ({error!r})"
      ) from error
  return rows
