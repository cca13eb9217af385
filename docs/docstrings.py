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


class Equations(griffe.Extension):
  """Applies `with_blocks` to every docstring."""

  def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
    """Changes the docstring of a module, class or function in place."""
    if obj.docstring:
      obj.docstring.value = with_blocks(obj.docstring.value)
