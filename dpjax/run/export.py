"""Exports a trained run as a small folder for others to load.

  config.json           the settings
  data/                 the tokenizer, and the sizes of the corpus; no tokens
  model.safetensors     the parameters, with names joined by dots
  README.md             a model card: description, scores, and how to load the model

`dpjax.load(OUT)` gives a run that scores any text and generates. The parameters need
`safetensors` alone: `safetensors.numpy.load_file("model.safetensors")`.
"""

import importlib.metadata
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpjax.errors import UserError

FILE = "model.safetensors"
DTYPES = ("float32", "bfloat16")
_CARD = """# {name}

A language model of {size:,} parameters, trained with dpjax {version} for {step:,} updates
on {data} ({tokens:,} training tokens; {kind} of {vocab_size:,} entries).

| split | score | |
|---|---|---|
{scores}

```python
import dpjax

run = dpjax.load("{folder}")
run.generate("...", length=100)
run.score("a text")
```

`model.safetensors` holds the parameters in {dtype}, `config.json` all settings.
"""


def save(run: Any, folder: str | Path, dtype: str = "float32") -> None:
  """Writes a run into a folder of its own.

  Args:
    run: from `dpjax.load` or `dpjax.train`.
    folder: a new or empty folder.
    dtype: the dtype of the stored parameters: "float32" keeps every bit, "bfloat16" halves the
      size.

  Raises:
    ValueError: the folder is not empty, the run has no folder, or the dtype is unknown.
  """
  import jax
  import jax.numpy as jnp
  from safetensors.flax import save_file

  if dtype not in DTYPES:
    raise UserError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
  if run.workdir is None:
    raise UserError("run: expected one that has a folder, got one without")
  folder = Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"folder: expected a new or an empty one, got {folder}")
  card = _card(run, folder, dtype)  # before anything is written
  (folder / "data").mkdir(parents=True, exist_ok=True)
  names = (
    "config.json",
    "frozen.json",
    *(f"data/{name}" for name in ("data.json", "tokenizer.json", "unigram.model")),
  )
  for name in names:
    if (run.workdir / name).exists():
      shutil.copy(run.workdir / name, folder / name)
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), run.params)
  flat: Any = {".".join(path): x for path, x in _flatten(params)}
  save_file(flat, folder / FILE, {"step": str(run.step)})
  (folder / "README.md").write_text(card, encoding="utf-8")
  # safetensors makes its file readable for the owner alone.
  (folder / FILE).chmod((folder / "README.md").stat().st_mode)


def restore(folder: Path, shapes: Any, step: int | None = None) -> tuple[dict, int]:
  """The parameters of an exported run, and its step.

  Args:
    folder: a folder that `save` wrote.
    shapes: the abstract parameters of the model, with their shardings.
    step: the expected step; None accepts any.

  Returns:
    The parameters, in the dtypes of the model, and the step.

  Raises:
    ValueError: the file is damaged, or belongs to another model or step.
  """
  import jax
  import numpy as np
  from safetensors import SafetensorError, safe_open

  path = folder / FILE
  expected = {".".join(names): shape for names, shape in _flatten(shapes)}
  try:
    with safe_open(path, "flax") as file:
      found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
      at = int((file.metadata() or {}).get("step", 0))
      if step not in (None, at):
        raise UserError(f"step: expected None or {at} of an exported run, got {step}")
      wrong = sorted(
        name
        for name in expected.keys() | found.keys()
        if name not in expected or found.get(name) != expected[name].shape
      )
      if wrong:
        ours = expected[wrong[0]].shape if wrong[0] in expected else "none"
        raise UserError(
          f"{path}: expected parameters of this model, {wrong[0]} of the "
          f"shape {ours}, got {found.get(wrong[0], 'none')}"
        )
      params: dict[str, Any] = {}
      for name, shape in expected.items():
        *parents, last = name.split(".")
        place = params
        for parent in parents:
          place = place.setdefault(parent, {})
        # Through the host, which holds one array at a time.
        array = np.asarray(file.get_tensor(name)).astype(shape.dtype)
        place[last] = jax.device_put(array, shape.sharding)
  except (OSError, SafetensorError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(f"{path}: expected a whole file of safetensors, got {error}") from error
  return params, at


def _flatten(tree: Any, parents: tuple[str, ...] = ()):
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _flatten(value, (*parents, name))
    else:
      yield (*parents, name), value


def _card(run: Any, folder: Path, dtype: str) -> str:
  import jax

  rows = []
  for path in sorted((run.workdir or folder).glob(f"scores_*_{run.step}.json")):
    try:
      content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
      rows += [
        f"| {content['split']} | {name.replace('_', ' ')} | {value:.4g} |"
        for name, value in content["scores"].items()
        if value is not None
      ]
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
      raise UserError(f"run: expected scores in {path}, got {error!r}") from error
  data: Any = run.data
  return _CARD.format(
    name=folder.name,
    size=sum(x.size for x in jax.tree.leaves(run.params)),
    version=importlib.metadata.version("dpjax"),
    step=run.step,
    data=data.name,
    tokens=data.counts["train"]["tokens"],
    kind=run.tokenizer.kind,
    vocab_size=run.tokenizer.vocab_size,
    scores="\n".join(rows) or "| - | not scored | |",
    folder=folder.name,
    dtype=dtype,
  )
