"""Scores a run: dpjax evaluate --workdir=runs/quickstart [--split=test] [--step=N].

The scores also go into the run's folder, or into that of --out, as JSON. An exported model's
folder is left as it is.

To score a checkpoint of the authors' PyTorch code on a configuration's data and tokenizer:
dpjax evaluate --torch_checkpoint=FILE.pt --config=dispatcher_wikitext2
"""

import tempfile
from typing import Any

from absl import flags

from dpjax.commands import flags as command_line
from dpjax.errors import UserError

_CONFIG = command_line.define_config()
flags.adopt_module_key_flags(command_line)
_WORKDIR = flags.DEFINE(command_line.PATH, "workdir", None, "the run's folder")
_SPLIT = flags.DEFINE_enum("split", "test", ("train", "valid", "test"), "what to score")
_STEP = flags.DEFINE_integer("step", None, "checkpoint to score; default: the best by validation")
_WINDOW = flags.DEFINE_integer("window", 0, "tokens the model sees at once; 0: eval.window")
_STRIDE = flags.DEFINE_integer("stride", 0, "tokens each window scores; 0: eval.stride")
_DOCUMENTS = flags.DEFINE_enum(
  "documents",
  "",
  ("", "joined", "isolated"),
  "isolated: score each document as if it stood alone; '': as data.documents",
)
_TORCH = flags.DEFINE(command_line.PATH, "torch_checkpoint", None, "a file of the authors' code")
_OUT = flags.DEFINE(
  command_line.PATH,
  "out",
  None,
  "a folder for the scores as JSON; default: that of the run, and none for an exported model",
)


def main(_) -> None:
  """Prints a table of scores and writes them as JSON."""
  import jax

  from dpjax import run as run_lib

  if bool(_TORCH.value) == bool(_WORKDIR.value):
    raise UserError(
      "--workdir, --torch_checkpoint: expected one of them, got "
      f"{'both' if _WORKDIR.value else 'none'}"
    )
  if bool(_TORCH.value) != (_CONFIG.value is not None):
    raise UserError(
      "--config: expected it with --torch_checkpoint, to name data and tokenizer, and "
      "not with --workdir, which has its own"
    )
  if _TORCH.value and _STEP.value is not None:
    raise UserError(f"--step: expected none with --torch_checkpoint, got {_STEP.value}")
  with tempfile.TemporaryDirectory() as scratch:
    if _TORCH.value:
      run = run_lib.load_torch(_TORCH.value, _CONFIG.value, scratch)
    else:
      run = run_lib.load(str(_WORKDIR.value), _STEP.value)
    size: dict[str, Any] = dict(
      window=_WINDOW.value, stride=_STRIDE.value, documents=_DOCUMENTS.value
    )
    scores = run.score_split(_SPLIT.value, progress=True, **size)
  if jax.process_index() == 0:
    is_isolated = (_DOCUMENTS.value or run.config.data.documents) == "isolated"
    alone = ", each document as if it stood alone" if is_isolated else ""
    print(f"The {_SPLIT.value} split, by {_TORCH.value or f'step {run.step}'}{alone}:")
    print(run_lib.table(scores))
  if _OUT.value or not _is_exported(run):
    run.write_scores(_SPLIT.value, scores, folder=_OUT.value, **size)


def _is_exported(run: Any) -> bool:
  from dpjax.run import export

  return run.workdir is not None and (run.workdir / export.FILE).exists()


if __name__ == "__main__":
  command_line.start(main)
