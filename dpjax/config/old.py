"""The settings of dpjax 0.1, where components had no sections of their own."""

from collections.abc import Mapping
from typing import Any

from dpjax import registry

# The field of a component that now holds a flat setting: each takes those that it has.
_MIXERS = {
  "num_heads": "model.num_heads",
  "num_levels": "model.num_levels",
  "level_dropout": "model.mixer_dropout",
  "dropout": "model.mixer_dropout",
  "use_bias": "model.attention_bias",
  "adjustment": "model.adjustment",
  "output_projection": "model.output_projection",
  "implementation": "model.implementation",
}
_BOUNDARIES = {
  "shortening_factor": "model.shortening_factor",
  "offset": "model.boundary_offset",
  "pooling": "model.pooling",
  "space_ids": "model.space_ids",
  "temperature": "model.boundary_temperature",
  "sample": "model.sample_boundaries",
  "num_capacities": "model.num_capacities",
  "prior": "train.boundary_prior",
  "left": "train.entropy_left",
  "double_sigmoid": "train.double_sigmoid",
  "file": "data.unigram_file",
  "size": "data.unigram_size",
}
_OPTIMIZERS = {name: f"train.{name}" for name in ("b1", "b2", "eps", "weight_decay")}
_SCHEDULES = {"warmup_steps": "train.warmup_steps"}
_STACKS = {
  f"model.{place}_{what}": (place, what)
  for place in ("first", "last")
  for what in ("mixer", "layers")
}
_FLAT = {
  "model.mixer",
  "model.boundaries",
  "train.optimizer",
  "train.schedule",
  *_STACKS,
  *_MIXERS.values(),
  *_BOUNDARIES.values(),
  *_OPTIMIZERS.values(),
  *_SCHEDULES.values(),
}
# Values that meant "the default", which is None now.
_NONE = {"num_levels": 0, "implementation": "", "offset": -1}


def to_sections(settings: Mapping) -> dict[str, Any]:
  """Settings of any version, with sections for components.

    {"model": {"mixer": "he", "adjustment": False}}
      -> {"model": {"mixer": {"name": "he", "adjustment": False}}}

  Settings that are in sections already stay as they are.
  """
  new, flat = {}, {}
  for section, values in settings.items():
    if not isinstance(values, Mapping):
      new[section] = values
      continue
    new[section] = {}
    for name, value in values.items():
      is_flat = f"{section}.{name}" in _FLAT and not isinstance(value, Mapping)
      (flat if is_flat else new[section])[f"{section}.{name}" if is_flat else name] = value
  if any(key.startswith("model.") for key in flat):
    new["model"] = _model(flat) | new["model"]
  if any(key.startswith("train.") and key not in _BOUNDARIES.values() for key in flat):
    new["train"] = {
      name: _section(known, f"train.{name}", usual, fields, flat)
      for name, known, usual, fields in (
        ("optimizer", registry.optimizers, "adam", _OPTIMIZERS),
        ("schedule", registry.schedules, "constant", _SCHEDULES),
      )
    } | new["train"]
  return new


def _model(flat: Mapping) -> dict[str, Any]:
  model: dict[str, Any] = {
    "mixer": _section(registry.mixers, "model.mixer", "dispatcher", _MIXERS, flat),
    "boundaries": _section(registry.boundaries, "model.boundaries", "none", _BOUNDARIES, flat),
  }
  for key, (place, what) in _STACKS.items():
    if flat.get(key):
      is_mixer = what == "mixer"
      model.setdefault(place, {})["mixer" if is_mixer else "num_layers"] = (
        _section(registry.mixers, key, "", _MIXERS, flat) if is_mixer else flat[key]
      )
  return model


def _section(
  known: registry.Registry, key: str, usual: str, fields: Mapping, flat: Mapping
) -> dict[str, Any]:
  section = {"name": flat.get(key, usual)}
  known.component(section["name"], key)  # Refused under its own name.
  for field in known.settings(section["name"]):
    if fields.get(field) in flat:
      value = flat[fields[field]]
      section[field] = None if value == _NONE.get(field, ...) else value
  return section
