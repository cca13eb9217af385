"""Writes the page of all settings, docs/settings.md, from their declarations.

python docs/settings_page.py

A setting's meaning is in `dpjax/config/schema.py`; that of a component's setting is in the
docstring of its class.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import dpjax
import dpjax_relatives
from dpjax.config import registry, sections
from dpjax.config.setting import Setting

PAGE = Path(__file__).parent / "settings.md"
_INTRODUCTION = """# All settings

`python docs/settings_page.py` writes this page from the code. Each setting goes on the command
line, with its section (`--config.model.width=256`), or into a configuration file:
[the guide](guides/settings.md) shows both. A setting with a star may change when a run resumes in
its folder.
"""
_COMPONENTS = {
  "model.mixer": "The token mixer, which replaces self-attention. `model.first.mixer` and "
  "`model.last.mixer` have the same settings; their default, None, means `model.mixer`. Several "
  "mixers alternate: `--config.model.mixer=we,attention`; `--config.model.mixer.1.num_heads=4` "
  "then changes a setting of the second. "
  f"{', '.join(f'`{name}`' for name in dpjax_relatives.MIXERS)} need the package of "
  "[linear attention](relatives.md).",
  "model.boundaries": "Where segments end, in a model with token pooling. "
  "`model.middle.boundaries` has the same settings.",
  "data.tokenizer": "Splits the text into tokens. `file` may also be `bert_base_cased`, `gpt2`, or "
  "the folder of a run, to take its tokenizer. Without a file, the tokenizer is taken from "
  "`train.init_from`, or trained on the train split.",
  "train.optimizer": "`adam`, `adamw`, `lion` and `sgd` are optax's.",
  "train.schedule": "The learning rate schedule; `train.learning_rate` is its peak.",
}


def of_docstring(component: object) -> dict[str, str]:
  """The meanings of a component's settings in its docstring."""
  text = inspect.getdoc(component) or ""
  lines = re.split(r"^(?:Attributes|Args):\n", text, flags=re.M)[1:]
  meanings = {}
  name = ""
  for line in lines[0].splitlines() if lines else ():
    if line and not line.startswith(" "):
      break
    if match := re.match(r"^(?:  |    )(\w+): (.*)", line):
      name = match[1]
      meanings[name] = match[2]
    elif name and line.strip():
      meanings[name] += f" {line.strip()}"
  return {name: re.split(r"(?<=\.) (?=[A-Z`])", x)[0] for name, x in meanings.items()}


def meaning(component: Callable, name: str) -> str:
  """The meaning of a component's setting; follows references to other docstrings."""
  for owner in (component, *getattr(component, "__mro__", ())[1:]):
    text = of_docstring(owner).get(name, "")
    other = re.match(r"[Ss]ee `(\w+)`[;.]?\s*", text)
    if other:
      module = inspect.getmodule(owner)
      if source := getattr(module, other[1], None) or _boundaries().get(other[1]):
        return " ".join(filter(None, [meaning(source, name), text[other.end() :]]))
    if text:
      return text
  return ""


def _boundaries() -> dict[str, type]:
  """The classes of boundaries by their Python names."""
  names = (name for name in registry.boundaries.names() if name != "none")
  components = map(registry.boundaries.component, names)
  return {each.__name__: each for each in components if isinstance(each, type)}


def row(name: str, setting: Setting, text: str) -> str:
  """A line of a table."""
  if re.match(r"\w\w|a ", text):
    text = text[0].upper() + text[1:]
  text = text.rstrip(".").replace("``", "`") + "." if text else ""
  if limits := ", ".join(f"{words} {limit}" for words, limit in setting.limits.items()):
    text += f" {limits.capitalize()}."
  if setting.choices:
    text += " Or" if setting.value_type is tuple else " One of"
    text += f" {', '.join(f'`{x}`' for x in setting.choices)}."
  default = None if setting.default is inspect.Parameter.empty else setting.default
  value = repr(default).replace("'", '"')
  type_name = setting.value_type.__name__.replace("ConfigDict", "section")
  if setting.is_optional:
    type_name += " or None"
  star = " \\*" if setting.is_free else ""
  text = text.strip().replace("|", "\\|")
  return f"| `{name}`{star} | {type_name} | `{value}` | {text} |"


def table(rows: list[str]) -> str:
  """A table of settings."""
  return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows])


def page() -> str:
  """The full page, with the mixers of `dpjax_relatives`, but without those of other plugins."""
  for name, mixer in dpjax_relatives.MIXERS.items():
    dpjax.register_mixer(name, mixer)
  config = dpjax.config.default()
  parts = [_INTRODUCTION]
  of_components = tuple(f"{key}." for key in sections.component_keys(config))
  settings = {
    key: setting
    for key, _, setting in dpjax.config.walk(config)
    if not f"{key}.".startswith(of_components)
  }
  for section in ("model", "data", "train", "eval", "sample", ""):
    rows = [
      row(key.removeprefix(f"{section}."), setting, setting.meaning)
      for key, setting in settings.items()
      if (key.startswith(f"{section}.") if section else "." not in key)
    ]
    parts.append(f"## {section or 'The rest'}\n\n{table(rows)}\n")
  for key, about in _COMPONENTS.items():
    components = sections.component_keys(config)[key].registry
    parts.append(f"## {key}\n\n{about}\n")
    for name in components.names():
      if not components.is_builtin(name) and name not in dpjax_relatives.MIXERS:
        continue
      if name == "none":
        parts.append("### none\n\nA model without token pooling.\n")
        continue
      component = components.component(name)
      # A tokenizer is the method of a class.
      described = getattr(component, "__self__", component)
      first = (inspect.getdoc(described) or "").split("\n\n")[0].replace("\n", " ")
      rows = [
        row(x, setting, setting.meaning or meaning(component, x))
        for x, setting in components.settings(name).items()
      ]
      parts.append(f"### {name}\n\n{first}\n" + (f"\n{table(rows)}\n" if rows else ""))
  return "\n".join(parts)


if __name__ == "__main__":
  PAGE.write_text(page(), encoding="utf-8")
