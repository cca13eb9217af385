"""Exports a trained run as a small folder for others to load.

  config.json           the settings, as given, and SHA-256 of them and of each file below
                        except the card; frozen.json has those of a model that boundaries use
  boundaries.json       the settings of boundaries that use token ids, including these ids
  data/                 the tokenizer, and the sizes of the corpus; no tokens
  model.safetensors     the parameters, with names joined by dots
  README.md             a model card: scores, and how to load the model
  numpy_model.py        the model in pure NumPy, if it has a function for each component

`dpjax.load(OUT)` gives a run that scores any text and generates.
"""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from dpjax import files, hub
from dpjax.config import loading
from dpjax.data.token_files import write_reference
from dpjax.errors import UserError, not_writable
from dpjax.models import names
from dpjax.models.build import assemble
from dpjax.runs import model_card, numpy_program, run_files
from dpjax.training import checkpoints

if TYPE_CHECKING:
  from dpjax.runs.run import Run
  from dpjax.training.trainer import Params

DTYPES = ("float32", "bfloat16")
_FILES = (*run_files.EXPORTED, "numpy_model.py")
_log = logging.getLogger(__name__)


def save(
  run: "Run",
  folder: str | Path,
  dtype: str = "",
  *,
  license: str = "",
  private: bool = False,
) -> None:
  """Writes a run into a new or empty folder, or commits it to a model on the Hub, atomically.

  A killed process may leave a partial export in an existing folder, without model.safetensors.

  Args:
    run: a `Run`.
    folder: the folder; or the model on the Hugging Face Hub, "hf://OWNER/NAME" or
      "hf://OWNER/NAME@BRANCH", which is made if missing.
    dtype: the saved dtype: "float32" keeps every bit, "bfloat16" halves the size; "": bfloat16 if
      that keeps every bit, as for an export in bfloat16, or else float32.
    license: the Hub's name for the model's licence in the model card, such as "cc-by-4.0".
    private: whether a model on the Hub is private.

  Raises:
    ValueError: the folder is not empty or not writable, the run has no folder, or the dtype is
      unknown.
  """
  if dtype not in ("", *DTYPES):
    raise UserError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
  if run.workdir is None:
    raise UserError("run: expected one that has a folder, got one without")
  dtype = dtype or _smallest_dtype(run.params)
  if hub.is_address(folder):
    repository, _ = hub.split_address(str(folder))
    with tempfile.TemporaryDirectory() as scratch:
      _write(run, Path(scratch), f"{hub.PREFIX}{repository}", dtype, license)
      hub.upload(Path(scratch), str(folder), _FILES, private=private)
    return
  if private:
    raise UserError(f"private: expected a folder hf://OWNER/NAME with it, got {folder}")
  files.check_local("folder", folder)
  folder = Path(os.path.expanduser(folder)).resolve()
  _remove_unfinished(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise UserError(f"folder: expected a new or an empty one, got {folder}")
  try:
    _save_folder(run, folder, dtype, license)
  except (OSError, SafetensorError) as error:
    raise not_writable("folder", folder, error) from error


def _smallest_dtype(params: "Params") -> str:
  """The smallest dtype that keeps every bit of the parameters."""
  leaves = jax.tree.leaves(params)
  is_exact = all((x.astype("bfloat16").astype(x.dtype) == x).all() for x in leaves)
  return "bfloat16" if is_exact else "float32"


def _remove_unfinished(folder: Path) -> None:
  """Removes what killed processes left of an export to a folder."""
  inside = folder / folder.name
  for left in (*files.left_beside(folder), *files.left_beside(inside)):
    shutil.rmtree(left.with_suffix(".partial"), ignore_errors=True)
  if folder.is_dir() and _is_unfinished(folder):
    for name in {Path(x).parts[0] for x in _FILES}:
      path = folder / name
      if path.is_dir():
        shutil.rmtree(path)
      else:
        path.unlink(missing_ok=True)


def _save_folder(run: "Run", folder: Path, dtype: str, license: str) -> None:
  """Writes a run into a new or empty folder."""
  # An empty folder is filled in place: it may be a working directory, or a mount.
  exists = folder.exists()
  folder.parent.mkdir(parents=True, exist_ok=True)
  with files.temporary(folder / folder.name if exists else folder) as lock:
    partial = Path(lock.name).with_suffix(".partial")
    try:
      partial.mkdir()
      _write(run, partial, folder.name, dtype, license)
      if not exists:
        os.replace(partial, folder)
      else:
        # config.json first and the parameters last, see `_is_unfinished`.
        order = {"config.json": -1, run_files.PARAMETERS: 1}
        for path in sorted(partial.iterdir(), key=lambda x: order.get(x.name, 0)):
          os.replace(path, folder / path.name)
    finally:
      shutil.rmtree(partial, ignore_errors=True)


def _is_unfinished(folder: Path) -> bool:
  """Whether a process was killed while it moved an export into the folder."""
  settings = files.read_json(folder / "config.json")
  return loading.CHECKSUMS in settings and not run_files.is_exported(folder)


def _write(run: "Run", folder: Path, address: str, dtype: str, license: str) -> None:
  assert run.workdir is not None and run.data is not None
  frozen = run_files.read_frozen(run.config, run.workdir)
  if frozen is not None:
    files.write_json(folder / "frozen.json", frozen.to_dict())
  if "space_ids" in run.config.model.boundaries:
    files.write_json(folder / "boundaries.json", run.config.model.boundaries.to_dict())
  write_reference(run.data, folder / "data", is_export=True)
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), run.params)
  path = folder / run_files.PARAMETERS
  save_file(names.by_name(params), path, {"step": str(run.step)})
  # A model made in Python may differ from its settings in any way.
  built = assemble(run.config.model, None if frozen is None else assemble(frozen))
  is_built = repr(run.model) == repr(built)
  models = [run.config.model] if frozen is None else [run.config.model, frozen]
  missing = numpy_program.missing(models) if is_built else ["a model class of your own"]
  if missing:
    parts = ", ".join(missing)
    _log.warning("%s: exported without numpy_model.py, which does not support %s", address, parts)
  text = model_card.write(
    run,
    address,
    dtype,
    foreign=model_card.foreign_components(models) if is_built else ["its class"],
    has_program=not missing,
    license=license,
  )
  (folder / "README.md").write_text(text, encoding="utf-8")
  if not missing:
    (folder / "numpy_model.py").write_text(numpy_program.write(models), encoding="utf-8")
  # safetensors makes its file readable only by the owner.
  path.chmod((folder / "README.md").stat().st_mode)
  settings = run_files.read_config(run.workdir).to_dict()
  checked = [name for name in run_files.CHECKED if (folder / name).exists()]
  sums = {name: files.checksum(folder / name) for name in checked}
  sums["config.json"] = loading.digest(settings)
  files.write_json(folder / "config.json", {**settings, loading.CHECKSUMS: sums})


def restore(folder: Path, shapes: "Params", step: int | None = None) -> tuple["Params", int]:
  """The parameters of an exported run and its step; `shapes` are abstract, with shardings.

  Raises a `UserError` if the file has another model, or another step than `step`, for which only
  its header is read; or if it is damaged. An export without checksums, from an earlier version, is
  read with a warning.
  """
  path = folder / run_files.PARAMETERS
  expected = names.by_name(shapes)
  files.check_plain(path)  # A pipe would never end.
  try:
    with safe_open(path, "flax") as file:
      saved_step = int((file.metadata() or {}).get("step", 0))
      if saved_step < 0:
        raise ValueError(f"step {saved_step}")
      if step not in (None, saved_step):
        raise UserError(f"step: expected None or {saved_step} of an exported run, got {step}")
      parts = names.find_parts(file.keys(), expected)
      arrays = {}
      for name, each in parts.items():
        shapes_of_parts = [tuple(file.get_slice(part).get_shape()) for part in each]
        arrays[name] = names.joined_shape(shapes_of_parts)
      message = f"{path}: expected parameters of this model, got others"
      checkpoints.check_arrays(arrays, {name: x.shape for name, x in expected.items()}, message)
      # The checksum reads the whole file.
      if not run_files.check_exported(folder, run_files.PARAMETERS):
        _log.warning("%s: an export without checksums: damage would not be noticed", folder)
      leaves = []
      for name, x in expected.items():  # Via the host, one array at a time.
        array = np.asarray(names.join([file.get_tensor(part) for part in parts[name]]))
        leaves.append(jax.device_put(array.astype(x.dtype), x.sharding))
  except UserError:
    raise
  except (OSError, SafetensorError, ValueError) as error:
    raise UserError(f"{path}: expected a complete file of safetensors, got {error}") from error
  return jax.tree.unflatten(jax.tree.structure(shapes), leaves), saved_step
