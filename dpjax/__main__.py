"""The `dpjax` command.

dpjax train --config=quickstart --workdir=runs/quickstart
dpjax evaluate --workdir=runs/quickstart
"""

import importlib
import sys

from dpjax.errors import exit_on_user_error

COMMANDS = {
  "train": ("dpjax.commands.train", "train an experiment, or go on with a run"),
  "sweep": ("dpjax.commands.sweep", "train an experiment with several values of its settings"),
  "evaluate": ("dpjax.commands.evaluate", "score a split or a text with a run"),
  "generate": ("dpjax.commands.generate", "continue a prompt"),
  "export": ("dpjax.commands.export", "write a small folder to load a run elsewhere"),
  "doctor": (
    "dpjax.commands.doctor",
    "check that JAX computes correctly on this machine, and how fast",
  ),
  "data": ("dpjax.commands.data", "list the named corpora"),
  "plots": ("dpjax.commands.plots", "plot training costs and validation scores of runs"),
  "look": ("dpjax.commands.look", "show what runs read in a text, on one page"),
  "compile": ("dpjax.commands.compile", "tell what a training step takes of a GPU or TPU"),
  "calibrate": ("dpjax.commands.calibrate", "find the theta of entropy_threshold boundaries"),
}


def main() -> None:
  """Runs the command that the first argument names."""
  command = sys.argv.pop(1) if len(sys.argv) > 1 else ""
  if command in COMMANDS:
    with exit_on_user_error():  # of an import, too
      return importlib.import_module(COMMANDS[command][0]).main()
  lines = [f"  {name:14}{about}" for name, (_, about) in COMMANDS.items()]
  usage = "\n".join(["usage: dpjax COMMAND ...", "", *lines, "", "dpjax COMMAND --help tells more"])
  if command in ("-h", "--help"):
    return print(usage)
  sys.exit(f"{usage}\n\ncommand: expected one of {', '.join(COMMANDS)}, got {command or 'none'}")


if __name__ == "__main__":
  main()
