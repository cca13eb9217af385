"""A model as a program of NumPy, for the cards of exported models.

The settings choose the parts of the program, which gives the model's logits from
model.safetensors and config.json alone. Tests run it for every component.
"""

import re
from collections.abc import Mapping
from string import Template
from typing import Any

from dpjax import config as config_lib

_BASE = """
import json
import math

import numpy as np
from safetensors.numpy import load_file

arrays = {name: x.astype(np.float32) for name, x in load_file("model.safetensors").items()}


def part(p, name):  # the arrays with this first part of their names
  return {key[len(name) + 1 :]: x for key, x in p.items() if key.startswith(name + ".")}


def linear(p, x):  # kernel [in, out], bias [out]
  return x @ p["kernel"] + p.get("bias", 0)


def shift(x, n):  # x[t - n], and 0 before the first
  return np.pad(x, [(n, 0)] + [(0, 0)] * (x.ndim - 1))[: len(x)]
"""
_NORMS = {
  "layer_norm": """
def $name(p, x):  # scale and bias [D]
  x = x - x.mean(-1, keepdims=True)
  return p["scale"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + $epsilon) + p.get("bias", 0)
""",
  "rms_norm": """
def $name(p, x):  # scale [D]
  return p["scale"] * x / np.sqrt((x**2).mean(-1, keepdims=True) + $epsilon)
""",
}
_GELU = "np.vectorize(math.erf, otypes=[np.float32])"
_FEED_FORWARD = {
  "relu": """
def $name(p, x):
  return linear(part(p, "out"), np.maximum(linear(part(p, "hidden"), x), 0))
""",
  "gelu": f"""
def $name(p, x):
  x = linear(part(p, "hidden"), x)
  return linear(part(p, "out"), x * (1 + {_GELU}(x / 2**0.5)) / 2)
""",
  "swiglu": """
def $name(p, x):
  gate = linear(part(p, "gate"), x)
  hidden = gate / (1 + np.exp(-gate)) * linear(part(p, "hidden"), x)
  return linear(part(p, "out"), hidden)
""",
}
_LAYERS = {
  "post": """
def $name(p, x, mixer):
  for i in range(len(p["mixer_norm.scale"])):
    q = {key: array[i] for key, array in p.items()}
    x = $norm(part(q, "mixer_norm"), x + mixer(part(q, "mixer"), x))
    x = $norm(part(q, "feed_forward_norm"), x + $feed_forward(part(q, "feed_forward"), x))
  return x
""",
  "pre": """
def $name(p, x, mixer):
  for i in range(len(p["mixer_norm.scale"])):
    q = {key: array[i] for key, array in p.items()}
    x = x + mixer(part(q, "mixer"), $norm(part(q, "mixer_norm"), x))
    x = x + $feed_forward(part(q, "feed_forward"), $norm(part(q, "feed_forward_norm"), x))
  return x
""",
}
_ROTATE = """
def $name(x):  # [T, H, E]; the pairs are (i, i + E / 2)
  angles = np.arange(len(x))[:, None] * $base ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
  cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
  a, b = np.split(x, 2, -1)
  return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(np.float32)
"""
_ATTEND = """
def $name(scores, values):  # [H, T, T], [T, H, E]
  scores = np.where(np.tri(len(values), dtype=bool), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  mixed = np.einsum("hts,she->the", weights / weights.sum(-1, keepdims=True), values)
  return mixed.reshape(len(values), -1)
"""
_BIAS = '  qkv = qkv + p["queries_keys_values.bias"][:, None]\n'
_QKV = """  qkv = np.einsum("td,dpe->pte", x, p["queries_keys_values.kernel"])  # [D, 3, D]
$bias  q, k, v = qkv.reshape(3, len(x), $num_heads, -1)  # [T, H, E] each
"""
_DISPATCHER = """
def $name(p, x):{note}
{start}
  g = linear(part(p, "gates"), x){gates}
  for k in range(g.shape[-1]):
    v = v + g[..., k, None] * shift(v, 2**k)
  return {out}
"""
_EXTRACTION = """
def $name(p, x):  # taps[j] is for x[t - j]
  y = {inputs}
  y = sum(shift(y, j) {product} p["taps"][j] for j in range(len(x)))
"""
_ADJUST = '  y = linear(part(p, "adjustment"), x) * y\n'
_PROJECT = '  y = linear(part(p, "out"), y)\n'
_MIXERS = {
  "dispatcher": _DISPATCHER.format(
    note="  # each head has the same three matrices",
    start='  x = x.reshape(len(x), $num_heads, -1)\n  v = linear(part(p, "values"), x)',
    gates="  # [T, H, K]\n  g = 1 / (1 + np.exp(-g))",
    out='linear(part(p, "out"), v).reshape(len(x), -1)',
  ),
  "dispatcher_multihead": _DISPATCHER.format(
    note="",
    start='  v = linear(part(p, "values"), x).reshape(len(x), $num_heads, -1)',
    gates=".reshape(len(x), $num_heads, -1)  # [T, H, K]",
    out='linear(part(p, "out"), v.reshape(x.shape))',
  ),
  "attention": f"""
def $name(p, x):
{_QKV}$rotate  scores = np.einsum("the,she->hts", q, k) / q.shape[-1] ** 0.5
  return linear(part(p, "out"), $attend(scores, v))
""",
  "relative_attention": f"""
def $name(p, x):  # content_bias and position_bias [H, E]
  t, width = np.arange(len(x)), x.shape[1]
  angles = t[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
  table = np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :width].astype(np.float32)
  distances = linear(part(p, "distances"), table).reshape(len(x), $num_heads, -1)
{_QKV}  scores = np.einsum("the,rhe->htr", q + p["position_bias"], distances)
  scores = scores[:, t[:, None], t[:, None] - t]  # of the distance t - s
  scores = scores + np.einsum("the,she->hts", q + p["content_bias"], k)
  return linear(part(p, "out"), $attend(scores / q.shape[-1] ** 0.5, v))
""",
  "she": _EXTRACTION.format(inputs="x", product="@"),
  "he": _EXTRACTION.format(inputs='linear(part(p, "values"), x)', product="*"),
  "we": _EXTRACTION.format(inputs="x", product="*"),
  "me": _EXTRACTION.format(inputs="x", product="*") + "  return y\n",
}
_PREDICTOR = """
def $name(p, x, tokens):  # a segment ends where a network of its own says so
  return $feed_forward(p, x)[:, 0] > 0
"""
_ENTROPY = """
def $name(p, x, tokens):  # by the entropy of a small model's prediction, in nats
  z = frozen_logits(tokens, part(p, "frozen"))
  z = z - z.max(-1, keepdims=True)
  z = z - np.log(np.exp(z).sum(-1, keepdims=True))
  entropy = -(np.exp(z) * z).sum(-1)
  rise = np.diff(entropy, prepend=-np.inf)
{rule}
"""
_COMBINED = """  ends = (entropy > $theta) & (rise > $theta_add)
  for t in range(1, len(ends)):
    ends[t] &= not ends[t - 1]
  return ends"""
_BOUNDARIES = {
  "fixed": """
def $name(p, x, tokens):  # where segments end
  return np.arange(len(x)) % $shortening_factor == $first
""",
  "whitespace": """
def $name(p, x, tokens):  # where segments end
  return np.isin(tokens, json.load(open("$file"))$place["boundaries"]["space_ids"])
""",
  "spacebyte": """
def $name(p, x, tokens):  # where segments end
  ids = json.load(open("$file"))$place["boundaries"]
  return np.isin(tokens, ids["space_ids"]) & ~shift(np.isin(tokens, ids["end_ids"]), 1)
""",
  **dict.fromkeys(("unigram", "entropy", "gumbel"), _PREDICTOR),
  "routing": """
def $name(p, x):  # the probabilities that segments end: query and key [D, D]
  unit = lambda x: x / np.sqrt(np.maximum((x**2).sum(-1, keepdims=True), 1e-24))
  cosine = (unit(x[:-1] @ p["query"]) * unit(x[1:] @ p["key"])).sum(-1)
  return np.append(np.float32(1), np.clip((1 - cosine) / 2, 0, 1))
""",
}
_POOL = {
  "mean": """np.reshape(
    [x[np.cumsum(ends) - ends == m].mean(0) for m in range(ends.sum())], (-1, x.shape[1])
  )""",
  "last": "x[ends]",
}
_HOURGLASS = """
def $name(p, x, tokens):
  x = $first
  ends = $boundaries(part(p, "boundary_predictor"), x, tokens)  # [T]
  s = $pool$widen
  s = $norm(part(p, "middle_norm"), np.concatenate([p["null_group"][None], s]))
  s = $middle$narrow
  x = x + s[np.cumsum(ends)]  # the last segment that has ended
  return $last
"""
_ROUTED = """
def $name(p, x, tokens):
  x = $first
  chance = $boundaries(part(p, "boundary_predictor"), x)  # [T]
  ends = chance > 0.5
  s = x[ends]$widen
  s = $middle$narrow
  q = np.clip(chance[ends], 1e-4, 1 - 1e-4)[:, None]
  s[0] = q[0] * s[0]
  for m in range(1, len(s)):
    s[m] = q[m] * s[m] + (1 - q[m]) * s[m - 1]
  x = s[np.cumsum(ends) - 1] + linear(part(p, "boundary_predictor.residual"), x)
  return $last
"""
_SINUSOIDS = """  t = np.arange(len(x))[:, None]
  angles = t * 10000.0 ** (-np.arange(0, $width, 2) / $width)
  table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(x), -1)[:, :$width]
  x = x * $width**0.5 + table.astype(np.float32)
"""
_POSITIONS = {
  "sinusoidal": _SINUSOIDS,
  "learned": '  x = (x + p["embedding.positions"][: len(x)]) * $width**0.5\n',
  "none": "",
}
_LOGITS = """
def {name}(tokens, p=arrays):  # [T] -> [T, V]
  x = p["embedding.tokens.embedding"][np.asarray(tokens)]
{positions}  x = {layers}
{norm}  return {output}
"""


class _Code:
  """Functions of a program: each once, by a free name."""

  def __init__(self, file: str, place: str):
    self.names: dict[str, str] = {}
    self.where = dict(file=file, place=place)

  def add(self, name: str, body: str, **values: Any) -> str:
    """Adds a function unless it is there; its name."""
    text = Template(body).safe_substitute(values).strip("\n")
    if text not in self.names:
      taken = self.names.values()
      others = (f"{name}_{i}" for i in range(2, len(taken) + 3))
      self.names[text] = name if name not in taken else next(x for x in others if x not in taken)
    return self.names[text]

  def __str__(self) -> str:
    functions = (Template(text).substitute(name=name) for text, name in self.names.items())
    text = "\n\n\n".join([_BASE.strip("\n"), *functions])
    shift = _BASE[_BASE.index("\n\n\ndef shift") :].rstrip("\n")
    for name, whole in (("json", "import json\n"), ("math", "import math\n"), ("shift", shift)):
      if not re.search(rf"\b{name}[.(]", text.replace(whole, "")):
        text = text.replace(whole, "")
    return text.strip("\n")


def foreign(model: Mapping) -> list[str]:
  """The names of a model's components that are not dpjax's own."""
  mixers = {section["name"] for section in config_lib.mixers_in(model).values()}
  kinds = {stage["boundaries"]["name"] for stage in config_lib.stages_in(model).values()}
  return sorted((mixers - {*_MIXERS}) | (kinds - {*_BOUNDARIES, "none", "entropy_threshold"}))


def numpy_code(model: Mapping, frozen: Mapping | None = None) -> str:
  """A program with a function `logits`, [T] -> [T, V], that computes a model with NumPy.

  Args:
    model: `config.model`, with what follows from the tokenizer.
    frozen: the same of the model that its boundaries use, if any.

  Raises:
    KeyError: a component is not dpjax's own; see `foreign`.
  """
  code = _Code("config.json", '["model"]')
  if frozen is not None:
    within = _Code("frozen.json", "")
    within.names = code.names
    _add_model(within, frozen, "frozen_logits")
  _add_model(code, model, "logits")
  return str(code)


def _add_model(code: _Code, model: Mapping, name: str) -> None:
  norm = _norm(code, model)
  if config_lib.is_pooled(model):
    hourglass = _hourglass(code, [*config_lib.stages_in(model).values()])
    layers = f'{hourglass}(part(p, "hourglass"), x, tokens)'
  else:
    layers = _layers(code, model, model["mixer"], "layers", "relative_positions")
  tied = 'x @ p["embedding.tokens.embedding"].T'
  body = _LOGITS.format(
    name=name,
    positions=Template(_POSITIONS[model["positions"]]).substitute(width=model["width"]),
    layers=layers,
    norm=f'  x = {norm}(part(p, "final_norm"), x)\n' if model["norm"] == "pre" else "",
    output=tied if model["tie_embeddings"] else 'linear(part(p, "logits"), x)',
  )
  code.add(name, body)


def _norm(code: _Code, model: Mapping) -> str:
  return code.add("norm", _NORMS[model["norm_kind"]], epsilon=model["norm_epsilon"])


def _layers(code: _Code, model: Mapping, mixer: Mapping, name: str, positions: str) -> str:
  """The call of a stack, whose arrays begin with `name`."""
  parts = dict(
    norm=_norm(code, model),
    feed_forward=code.add("feed_forward", _FEED_FORWARD[model["activation"]]),
  )
  function = code.add("layers", _LAYERS[model["norm"]], **parts)
  kind, values = mixer["name"], dict(mixer)
  del values["name"]
  body = _MIXERS[kind]
  if kind in ("she", "he", "we"):
    body += (_ADJUST if mixer["adjustment"] else "") + (
      _PROJECT if mixer["output_projection"] else ""
    )
    body += "  return y\n"
  if "attention" in kind:
    values["attend"] = code.add("attend", _ATTEND)
    values["bias"] = _BIAS if mixer.get("use_bias", True) else ""
    values["rotate"] = ""
  if mixer.get("rotary_base") is not None:
    rotate = code.add("rotate", _ROTATE, base=mixer["rotary_base"])
    values["rotate"] = f"  q, k = {rotate}(q), {rotate}(k)\n"
  mix = code.add(kind, body, **values)
  if kind == "relative_attention":
    mix = f'lambda q, x: {mix}({{**q, **part(p, "{positions}")}}, x)'
  return f'{function}(part(p, "{name}"), {"s" if name == "middle" else "x"}, {mix})'


def _hourglass(code: _Code, stages: list[Mapping]) -> str:
  model, inner = stages[0], [*stages[1:], {**stages[0], "boundaries": {"name": "none"}}][0]
  section = dict(model["boundaries"])
  kind = section.pop("name")
  body, values = _BOUNDARIES[kind] if kind != "entropy_threshold" else _entropy(section), section
  if kind == "fixed" and values["offset"] is None:
    values["offset"] = values["shortening_factor"] - 1
  if body is _PREDICTOR:
    values["feed_forward"] = code.add("predictor", _FEED_FORWARD["gelu"])
  values["first"] = values.get("offset")
  has_own_width = inner["width"] != model["width"]
  first, last = (
    _layers(code, model, model[x]["mixer"] or model["mixer"], x, "relative_positions")
    for x in ("first", "last")
  )
  if config_lib.is_pooled(inner):
    middle = f'{_hourglass(code, stages[1:])}(part(p, "middle"), s, None)'
  else:
    positions = "middle_positions" if has_own_width else "relative_positions"
    middle = _layers(code, inner, inner["mixer"], "middle", positions)
  return code.add(
    "hourglass",
    _ROUTED if kind == "routing" else _HOURGLASS,
    first=first,
    middle=middle,
    last=last,
    norm=_norm(code, model),
    boundaries=code.add("boundaries", body, **{**values, **code.where}),
    pool=_POOL[section.get("pooling", "mean")],
    widen=' @ p["middle_in"]' if has_own_width else "",
    narrow=' @ p["middle_out"]' if has_own_width else "",
  )


def _entropy(section: Mapping) -> str:
  rules = {
    "global": "  return entropy > $theta",
    "monotonic": "  return rise > $theta",
    "combined": _COMBINED,
  }
  return _ENTROPY.format(rule=rules[section["rule"]])
