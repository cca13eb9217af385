"""Runs notebooks and stores the outputs of their cells.

python examples/run_notebook.py examples/tour.ipynb examples/your_own.ipynb

Cells run as plain Python: for the same, Jupyter would need many packages and open ports.
"""

import ast
import base64
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


def run(notebook: Path) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
  """Runs the cells of a notebook in order.

  Returns:
    The outputs of each code cell, as a notebook stores them, and the variables at the end.
  """
  import matplotlib.pyplot as plt

  names, outputs = {"__name__": "__main__"}, []
  for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
    if cell["cell_type"] != "code":
      continue
    *body, last = ast.parse("".join(cell["source"])).body
    # A cell shows its last expression, unless it ends with a semicolon.
    shows = isinstance(last, ast.Expr) and not "".join(cell["source"]).rstrip().endswith(";")
    body, value = (body, last.value) if shows else ([*body, last], None)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
      exec(compile(ast.Module(body, []), cell["id"], "exec"), names)
      shown = eval(compile(ast.Expression(value), cell["id"], "eval"), names) if value else None
    outputs.append(_outputs(text.getvalue(), shown, plt))
  return outputs, names


def _outputs(text: str, shown: Any, plt) -> list[dict[str, Any]]:
  figures = [plt.figure(number) for number in plt.get_fignums()]
  found = []
  # Each run has other temporary folders.
  text = re.sub(rf"{re.escape(tempfile.gettempdir())}[/\\]\w+", "TEMPORARY", text)
  if text:
    found.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(True)})
  if hasattr(shown, "savefig"):
    figures = [shown, *(figure for figure in figures if figure is not shown)]
  elif shown is not None:
    data = {"text/plain": repr(shown).splitlines(True)}
    found.append(
      {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
    )
  for figure in figures:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=70)
    data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
    found.append({"data": data, "metadata": {}, "output_type": "display_data"})
  plt.close("all")
  return found


def store(notebook: Path, outputs: list[list[dict[str, Any]]]) -> None:
  """Writes the outputs into the notebook, as Jupyter does."""
  content = json.loads(notebook.read_text(encoding="utf-8"))
  cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
  for count, (cell, found) in enumerate(zip(cells, outputs, strict=True), start=1):
    cell["execution_count"] = count
    cell["outputs"] = [
      {**x, "execution_count": count} if "execution_count" in x else x for x in found
    ]
  written = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
  notebook.write_text(written, encoding="utf-8")


if __name__ == "__main__":
  for argument in sys.argv[1:]:
    store(Path(argument), run(Path(argument))[0])
