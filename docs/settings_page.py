"""Writes the page of all settings, docs/settings.md, from the places that define them.

python docs/settings_page.py

A setting's meaning is the comment beside it in `dpjax/config/sections.py`; that of a
component's setting is in the docstring of its class.
"""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

from dpjax import config as config_lib
from dpjax import registry
from dpjax.config import sections

PAGE = Path(__file__).parent / "settings.md"
_INTRODUCTION = """# All settings

`python docs/settings_page.py` writes this page from the code. Each setting goes on the command
line, with its section (`--config.model.width=256`), or into a configuration file:
[the guide](guides/settings.md) shows both. A setting with a star may change when a run goes on in
its folder.
"""
_COMPONENTS = {
  "model.mixer": "Takes the place of self-attention. `model.first.mixer` and `model.last.mixer` "
  "have the same settings. Several mixers take turns: `--config.model.mixer=we,attention`, and "
  "`--config.model.mixer.1.num_heads=4` sets one of the second.",
  "model.boundaries": "Where segments end, in a model with token pooling. "
  "`model.middle.boundaries` has the same settings.",
  "train.optimizer": "`adam`, `adamw`, `lion` and `sgd` are optax's.",
  "train.schedule": "Of the learning rate; `train.learning_rate` is its peak.",
}
_OWNERS = {"config": "", "stack": "model.first.", "section": "model."}
_LINE = re.compile(r"^  (?: {2})?(?:\w+ = )?(\w+)\.(\w+(?:\.\w+)?) = [^#]*?(?:  # (.*))?$")


def meanings() -> dict[str, str]:
  """The comments on the settings in `sections.py`, by the settings' names."""
  found, above = {}, []
  for line in inspect.getsource(sections).splitlines():
    if match := re.match(r"^ +# (.*)", line):
      above.append(match[1])
      continue
    if match := _LINE.match(line):
      owner, name, beside = match.groups()
      prefix = _OWNERS.get(owner, f"{owner}.")
      if beside or above:
        found.setdefault(f"{prefix}{name}", beside or " ".join(above))
    above = []
  last = {key.replace("first", "last"): x for key, x in found.items() if "model.first" in key}
  return found | last


def of_docstring(component: object) -> dict[str, str]:
  """The meanings of a component's settings in its docstring."""
  text = inspect.getdoc(component) or ""
  lines = re.split(r"^(?:Attributes|Args):\n", text, flags=re.M)[1:]
  found, name = {}, ""
  for line in lines[0].splitlines() if lines else ():
    if line and not line.startswith(" "):
      break
    if match := re.match(r"^(?:  |    )(\w+): (.*)", line):
      name = match[1]
      found[name] = match[2]
    elif name and line.strip():
      found[name] += f" {line.strip()}"
  return {name: re.split(r"(?<=\.) (?=[A-Z`])", x)[0] for name, x in found.items()}


def meaning(component: type, name: str) -> str:
  """The meaning of a component's setting, also where the docstring points elsewhere."""
  for owner in (component, *getattr(component, "__mro__", ())[1:]):
    text = of_docstring(owner).get(name, "")
    other = re.match(r"[Ss]ee `(\w+)`[;.]?\s*", text)
    if other and (found := getattr(inspect.getmodule(owner), other[1], None)):
      rest = text[other.end() :]
      return " ".join(filter(None, [meaning(found, name), rest]))
    if other and (found := _boundaries().get(other[1])):
      return " ".join(filter(None, [meaning(found, name), text[other.end() :]]))
    if text:
      return text
  return ""


def _boundaries() -> Mapping[str, type]:
  kinds = map(registry.boundaries.component, registry.boundaries.names())
  return {kind.__name__: kind for kind in kinds}  # pyright: ignore


def row(key: str, name: str, value: object, kind: str, text: str) -> str:
  """A line of a table."""
  choices = config_lib.CHOICES.get(key)
  known = f" One of {', '.join(f'`{x}`' for x in choices)}." if choices else ""
  if re.match(r"\w\w|a ", text):
    text = text[0].upper() + text[1:]
  text = text.rstrip(".").replace("``", "`") + "." if text else ""
  shown = repr(value).replace("'", '"') if value != "" else '""'
  is_free = key.startswith(config_lib.FREE_KEYS) or name in config_lib.FREE_NAMES
  star = " \\*" if is_free else ""
  cells = f"`{name}`{star}", kind, f"`{shown}`", (text + known).strip().replace("|", "\\|")
  return f"| {' | '.join(cells)} |"


def table(rows: list[str]) -> str:
  """A table of settings."""
  return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows])


def page() -> str:
  """The whole page."""
  said, flat, parts = meanings(), config_lib.flatten(config_lib.default()), [_INTRODUCTION]
  held = tuple(f"{key}." for key in config_lib.COMPONENTS)
  for section in ("model", "data", "train", "eval", "sample", ""):
    rows = [
      row(key, key.removeprefix(f"{section}."), value, _kind(value), said.get(key, ""))
      for key, value in flat.items()
      if (key.startswith(f"{section}.") if section else "." not in key) and not key.startswith(held)
    ]
    parts.append(f"## {section or 'The rest'}\n\n{table(rows)}\n")
  for key, about in _COMPONENTS.items():
    known = config_lib.COMPONENTS[key]
    parts.append(f"## {key}\n\n{about}\n")
    for name in known.names():
      component = known.component(name)
      first = (inspect.getdoc(component) or "").split("\n\n")[0].replace("\n", " ")
      rows = [
        row(
          f"{key}.{x}",
          x,
          None if y.default is inspect.Parameter.empty else y.default,
          f"{y.kind.__name__}{' or None' if y.is_optional else ''}",
          meaning(component, x),  # pyright: ignore
        )
        for x, y in known.settings(name).items()
      ]
      parts.append(f"### {name}\n\n{first}\n" + (f"\n{table(rows)}\n" if rows else ""))
  return "\n".join(parts)


def _kind(value: object) -> str:
  return "section or None" if value is None else type(value).__name__


if __name__ == "__main__":
  PAGE.write_text(page(), encoding="utf-8")
