"""Makes Markdown of docstrings: equations as blocks of code, powers as they stand."""

import re

import griffe

_SECTION = re.compile(r"[A-Z][a-z]+:$")
_STAR = re.compile(r"(?<=[\w)\]])(\*+)")


def with_blocks(docstring: str) -> str:
  """Indents equations as Markdown wants it, and leaves sections such as Args alone.

  A block is what stands two spaces in after a blank line; it ends with the first line that
  does not. Elsewhere the stars of 2**k are escaped, unless they are within backticks.
  """
  lines, is_block, is_section, before = [], False, False, "x"
  for line in docstring.splitlines():
    is_in = line.startswith("  ")
    if line and not is_in:
      is_section = bool(_SECTION.match(line))
    is_block = is_in and not is_section and (is_block or not before) or is_block and not line
    lines.append(f"  {line}" if is_block and line else line if is_block else _escape(line))
    before = line
  return "\n".join(lines)


def _escape(line: str) -> str:
  parts = line.split("`")
  parts[::2] = [_STAR.sub(lambda found: r"\*" * len(found[1]), part) for part in parts[::2]]
  return "`".join(parts)


def call(made: griffe.Class) -> str:
  """How a class is called, with its fields and their defaults; "" without any."""
  fields = {}
  for owner in (*reversed(made.mro()), made):
    if init := owner.members.get("__init__"):
      fields = {x.name: x.default for x in init.parameters if x.name != "self"}
      continue
    for name, member in owner.members.items():
      # A ClassVar has no label of an instance.
      if "instance-attribute" in member.labels and member.annotation:
        fields[name] = member.value
  words = [x if y is None else f"{x}={y}" for x, y in fields.items() if not x.startswith("_")]
  line, rest = f"{made.name}({', '.join(words)})", ",\n    ".join(words)
  line = line if len(line) < 80 else f"{made.name}(\n    {rest},\n)"
  return line if words else ""


class Equations(griffe.Extension):
  """Applies `with_blocks` to every docstring, and shows how classes are called."""

  def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
    """Changes the docstring of a module, class or function in place."""
    if obj.docstring:
      obj.docstring.value = with_blocks(obj.docstring.value)
      if obj.is_class and (made := call(obj)):
        obj.docstring.value = f"```python\n{made}\n```\n\n{obj.docstring.value}"
