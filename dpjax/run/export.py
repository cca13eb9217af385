"""Exports a trained run as a small folder for others to load.

  config.json           the settings; frozen.json those of a model that boundaries use
  data/                 the tokenizer, and the sizes of the corpus; no tokens
  model.safetensors     the parameters, with names joined by dots
  README.md             a model card: scores, how to load the model, its equations in NumPy

`dpjax.load(OUT)` gives a run that scores any text and generates. `dpjax.run.card` says what
others need to read the parameters.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpjax.errors import UserError

FILE = "model.safetensors"
DTYPES = ("float32", "bfloat16")


def save(run: Any, folder: str | Path, dtype: str = "float32") -> None:
  """Writes a run into a folder of its own, completely or not at all.

  The files are written from what was read of the run: no file is copied.

  Args:
    run: from `dpjax.load` or `dpjax.train`.
    folder: a new or empty folder.
    dtype: the dtype of the stored parameters: "float32" keeps every bit, "bfloat16" halves the
      size.

  Raises:
    ValueError: the folder is not empty or cannot be written, the run has no folder, or the
      dtype is unknown.
  """
  from safetensors import SafetensorError

  if dtype not in DTYPES:
    raise UserError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
  if run.workdir is None:
    raise UserError("run: expected one that has a folder, got one without")
  folder = Path(folder).resolve()
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"folder: expected a new or an empty one, got {folder}")
  # An empty folder is filled: it may be somebody's current one, or a mount.
  is_there = folder.exists()
  partial = (folder if is_there else folder.parent) / f"{folder.name}.{os.getpid()}.partial"
  try:
    partial.mkdir(parents=True)
    _write(run, partial, folder.name, dtype)
    if is_there:
      for path in sorted(partial.iterdir(), key=lambda path: path.name == FILE):
        os.replace(path, folder / path.name)
    else:
      os.replace(partial, folder)
  except (OSError, SafetensorError) as error:
    reason = getattr(error, "strerror", None) or error
    raise UserError(f"folder: expected one that can be written, got {folder} ({reason})") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _write(run: Any, folder: Path, name: str, dtype: str) -> None:
  import jax
  import jax.numpy as jnp
  from safetensors.flax import save_file

  from dpjax import files
  from dpjax.data.tokens import write_reference
  from dpjax.run import build, card, workdir

  frozen = workdir.read_frozen(run.workdir) if build.needs_run(run.config) else None
  files.write_json(folder / "config.json", run.config.to_dict())
  if frozen is not None:
    files.write_json(folder / "frozen.json", frozen.to_dict())
  write_reference(run.data, folder / "data", is_export=True)
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), run.params)
  flat: Any = {".".join(path): x for path, x in _flatten(params)}
  save_file(flat, folder / FILE, {"step": str(run.step)})
  # A model that was made in Python may differ in anything, and its settings do not say it.
  built = build.model(run.config, None, build.saved_frozen(run.config, run.workdir))
  text = card.write(
    run,
    name,
    {name: x.shape for name, x in flat.items()},
    is_built=repr(run.model) == repr(built),
    frozen=frozen,
    dtype=dtype,
  )
  (folder / "README.md").write_text(text, encoding="utf-8")
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
  if not path.is_file():  # A pipe would never end.
    raise UserError(f"{path}: expected a file of safetensors, got a folder, a device or a pipe")
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
