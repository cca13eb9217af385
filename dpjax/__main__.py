"""The `dpjax` command.

dpjax train --config=quickstart --workdir=runs/quickstart
dpjax evaluate runs/quickstart
"""

import importlib
import sys

from dpjax.errors import exit_on_user_error, unknown

# The command NAME is `dpjax.commands.NAME.main`, which is imported when it is called.
COMMANDS = {
  "train": "train an experiment, or go on with a run",
  "sweep": "train an experiment with several values of its settings",
  "evaluate": "score a split or a text with a run",
  "generate": "continue a prompt",
  "export": "write a small folder to load a run elsewhere",
  "doctor": "check that JAX computes correctly on this machine, and how fast",
  "data": "list the named corpora",
  "plots": "plot training costs and validation scores of runs",
  "look": "show what runs read in a text, on one page",
  "compile": "tell what a training step takes of a GPU or TPU",
  "calibrate": "find the theta of entropy_threshold boundaries",
}


def main() -> None:
  """Runs the command that the first argument names."""
  command = sys.argv[1] if len(sys.argv) > 1 else ""
  if command in COMMANDS:
    with exit_on_user_error():  # of an import, too
      return importlib.import_module(f"dpjax.commands.{command}").main(sys.argv[2:])
  lines = [f"  {name:14}{about}" for name, about in COMMANDS.items()]
  usage = "\n".join(["usage: dpjax COMMAND ...", "", *lines, "", "dpjax COMMAND --help tells more"])
  if command in ("-h", "--help"):
    return print(usage)
  sys.exit(f"{usage}\n\n{unknown('command', COMMANDS, command or 'none')}")


if __name__ == "__main__":
  main()
