"""Runs from the Dispatcher authors' checkpoints."""

from pathlib import Path

from dpjax.config import rules, sections
from dpjax.config.setting import ConfigDict
from dpjax.errors import UserError
from dpjax.models import build
from dpjax.runs import prepare
from dpjax.runs.run import Run


def load_torch(file: str | Path, config: ConfigDict, folder: str | Path) -> Run:
  """Reads a checkpoint of the Dispatcher's authors, with a configuration's data.

  These files do not have a vocabulary: `config.data` must make the authors', as
  configs/dispatcher_wikitext2.py does. The pooling paper's authors number characters by
  frequency: read their files with `dpjax.interop.from_torch`.

  Args:
    file: a file that the authors' scripts saved.
    config: gives the mixer, heads, longest input, data and tokenizer.
    folder: the folder of the tokens, made if missing.

  Raises:
    ValueError: PyTorch is missing, or the file does not match the configuration.
  """
  from dpjax.interop.torch_checkpoints import from_torch

  try:
    import torch  # pyright: ignore[reportMissingImports]  (optional)
  except ImportError as error:
    message = "torch_checkpoint: expected PyTorch to read it with, got none; pip install torch"
    raise UserError(message) from error
  try:
    content = torch.load(file, map_location="cpu", weights_only=True)
  except (MemoryError, OSError):
    raise
  except Exception as error:  # A damaged file can raise any of several types.
    message = f"torch_checkpoint: expected a file of the authors' code, got {file} ({error})"
    raise UserError(message) from error
  config = sections.expand_paths(config)
  rules.check(config)
  settings = config.model
  name = sections.mixer_names(settings.mixer)
  if "," in name:
    raise UserError(f"model.mixer: expected one for a torch_checkpoint, got {name}")
  if name == "relative_attention":
    raise UserError(
      "model.mixer: expected one of the Dispatcher's authors for a torch_checkpoint, got "
      "relative_attention; dpjax.interop.from_torch reads it, but its numbers of the "
      "characters are in no file"
    )
  model_config, params = from_torch(
    content,
    num_heads=settings.mixer.get("num_heads"),
    variant="multihead" if name == "dispatcher_multihead" else "paper",
    max_length=settings.max_length,
  )
  if model_config.mixer.name != name:
    raise UserError(f"model.mixer: expected the file's {model_config.mixer.name}, got {name}")
  data = prepare.prepare_tokens(config, Path(folder) / "data")
  model_config.update({key: settings[key] for key in ("dtype", "remat", "scan_layers")})
  if "implementation" in model_config.mixer:
    model_config.mixer.implementation = settings.mixer.implementation
  config = config.copy_and_resolve_references()
  config.model = model_config
  config = build.with_vocabulary(config, data.tokenizer)
  return Run(config, build.assemble(config.model), params, data.tokenizer, 0, data)
