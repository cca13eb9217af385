"""An exported model in pure NumPy, without dropout. An export has a copy beside its arrays.

  python numpy_model.py FOLDER 5 17 3       prints the tokens that are likely to follow these

  logits = load("FOLDER")                   from Python
  logits([5, 17, 3])                        [T] -> [T, V]; row t is for token t + 1

Tokens are ids of the vocabulary in data/tokenizer.json, at most `max_length` of config.json; others
are refused.
In the functions below, `p` maps names in model.safetensors to arrays, and `model` has the
settings `config.model`. A matrix is [in, out]; the features of heads are concatenated; arrays of a
stack of layers have the layers as their first axis. A model in bfloat16 agrees up to rounding, and
boundaries that dpjax samples are placed where their probability is above one half.
"""

import json
import math
import pathlib
import sys

import numpy as np


def read_arrays(path):  # a safetensors file: the size of the header, the header, the arrays
  with open(path, "rb") as file:
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    content = file.read()
  header.pop("__metadata__", None)
  arrays = {}
  for name, about in header.items():
    bits = content[slice(*about["data_offsets"])]
    if about["dtype"] == "BF16":  # the upper half of a float32
      x = (np.frombuffer(bits, "<u2").astype("<u4") << 16).view("<f4")
    else:
      x = np.frombuffer(bits, "<f4")
    arrays[name] = x.reshape(about["shape"])
  return arrays


def load(folder):
  folder = pathlib.Path(folder)
  read = lambda name: json.loads((folder / name).read_text(encoding="utf-8"))
  model = read("config.json")["model"]
  arrays = read_arrays(folder / "model.safetensors")
  if (folder / "boundaries.json").exists():  # with settings that the tokenizer filled in
    model["boundaries"] = read("boundaries.json")
  if (folder / "frozen.json").exists():
    model["boundaries"]["frozen"] = read("frozen.json")

  def logits(tokens):
    check_tokens(tokens, len(arrays["embedding.tokens.embedding"]), model["max_length"])
    return forward(tokens, arrays, model)

  return logits


def check_tokens(tokens, vocab_size, max_length):  # NumPy would take -1 for the last id
  shape = np.shape(tokens)
  if len(shape) != 1 or not 1 <= shape[0] <= max_length:
    raise ValueError(f"tokens: expected [T] with 1 <= T <= {max_length}, got the shape {shape}")
  for token in np.asarray(tokens).tolist():
    if type(token) is not int or not 0 <= token < vocab_size:
      raise ValueError(f"tokens: expected ids in 0 .. {vocab_size - 1}, got {token}")


def part(p, name):  # the arrays whose names begin with this part
  return {key[len(name) + 1 :]: x for key, x in p.items() if key.startswith(name + ".")}


def linear(p, x):  # kernel [in, out], bias [out]
  return x @ p["kernel"] + p.get("bias", 0)


def shift(x, n):  # x[t - n], and 0 before the first
  return np.pad(x, [(n, 0)] + [(0, 0)] * (x.ndim - 1))[: len(x)]


def norm(p, x, model):  # scale and bias [D]
  if model["norm_type"] == "layer_norm":
    x = x - x.mean(-1, keepdims=True)
  scale = p["scale"] / np.sqrt((x**2).mean(-1, keepdims=True) + model["norm_epsilon"])
  return scale * x + p.get("bias", 0)


def feed_forward(p, x, activation):
  y = linear(part(p, "hidden"), x)
  if activation == "relu":
    y = np.maximum(y, 0)
  elif activation == "gelu":
    y = y * (1 + np.vectorize(math.erf, otypes=[np.float32])(y / 2**0.5)) / 2
  else:
    gate = linear(part(p, "gate"), x)
    y = gate / (1 + np.exp(-gate)) * y  # swiglu
  return linear(part(p, "out"), y)


def dispatcher(p, x, mixer):
  shape = (len(x), mixer["num_heads"], -1)
  if mixer["name"] == "dispatcher":
    x = x.reshape(shape)  # each head has the same three matrices
  v = linear(part(p, "values"), x).reshape(shape)
  g = linear(part(p, "gates"), x).reshape(shape)
  if mixer["name"] == "dispatcher":
    g = 1 / (1 + np.exp(-g))  # [T, H, K]
  for k in range(g.shape[-1]):
    v = v + g[..., k, None] * shift(v, 2**k)
  if mixer["name"] != "dispatcher":
    v = v.reshape(x.shape)
  return linear(part(p, "out"), v).reshape(len(x), -1)


def extractor(p, x, mixer):
  y = linear(part(p, "values"), x) if mixer["name"] == "he" else x
  if mixer["name"] == "she":
    y = sum(shift(y, j) @ p["taps"][j] for j in range(len(x)))  # matrices [D, D] for x[t - j]
  else:
    y = sum(shift(y, j) * p["taps"][j] for j in range(len(x)))  # vectors [D] for x[t - j]
  if mixer.get("adjustment"):
    y = linear(part(p, "adjustment"), x) * y
  return linear(part(p, "out"), y) if mixer.get("output_projection") else y


def short_convolution(p, x, mixer):
  b, c, v = np.split(linear(part(p, "in"), x), 3, -1)
  y = sum(shift(b * v, j) * tap for j, tap in enumerate(p["taps"][: len(x)]))
  return linear(part(p, "out"), c * y)


def mamba2(p, x, mixer):
  inner = mixer["expand"] * x.shape[1]
  heads = len(p["a_log"])
  z, u, dt = np.split(linear(part(p, "in"), x), [inner, -heads], -1)
  u = sum(shift(u, j) * tap for j, tap in enumerate(p["taps"][: len(x)])) + p["taps_bias"]
  v, b, c = np.split(u / (1 + np.exp(-u)), [inner, -mixer["state_width"]], -1)
  v = v.reshape(len(x), heads, -1)
  dt = np.logaddexp(0, dt + p["dt_bias"])
  keep = np.exp(-dt * np.exp(p["a_log"]))
  s = np.zeros((*v.shape[1:], mixer["state_width"]), np.float32)  # the state [H, P, N]
  y = []
  for t in range(len(x)):
    s = keep[t, :, None, None] * s + (dt[t, :, None] * v[t])[..., None] * b[t]
    y.append(s @ c[t] + p["skip"][:, None] * v[t])
  g = np.reshape(y, z.shape) * z / (1 + np.exp(-z))
  g = g / np.sqrt((g**2).mean(-1, keepdims=True) + 1e-5) * p["gain"]
  return linear(part(p, "out"), g.astype(np.float32))


def rotate(x, base, features):  # [T, H, E]; rotates pairs (i, i + E / 2) of the first features
  x, rest = np.split(x, [features or x.shape[2]], -1)
  angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
  cos = np.cos(angles)[:, None]
  sin = np.sin(angles)[:, None]
  a, b = np.split(x, 2, -1)
  return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], -1).astype(np.float32)


def attention(p, x, mixer):
  t = np.arange(len(x))
  width = x.shape[1]
  qkv = np.einsum("td,dpe->pte", x, p["queries_keys_values.kernel"])  # [D, 3, D]
  if mixer.get("use_bias", True):
    qkv = qkv + p["queries_keys_values.bias"][:, None]
  q, k, v = qkv.reshape(3, len(x), mixer["num_heads"], -1)  # [T, H, E] each
  if mixer.get("rotary_base") is not None:
    q = rotate(q, mixer["rotary_base"], mixer.get("rotary_features"))
    k = rotate(k, mixer["rotary_base"], mixer.get("rotary_features"))
  if mixer["name"] == "relative_attention":  # content_bias and position_bias [H, E]
    angles = t[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    table = np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :width].astype(np.float32)
    distances = linear(part(p, "distances"), table).reshape(q.shape)
    scores = np.einsum("the,rhe->htr", q + p["position_bias"], distances)
    scores = scores[:, t[:, None], t[:, None] - t]  # the distance t - s
    scores = scores + np.einsum("the,she->hts", q + p["content_bias"], k)
  else:
    scores = np.einsum("the,she->hts", q, k)
  lag = t[:, None] - t
  seen = (lag >= 0) & (lag < mixer.get("window", len(x)))
  scores = np.where(seen, scores / q.shape[-1] ** 0.5, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  mixed = np.einsum("hts,she->the", weights / weights.sum(-1, keepdims=True), v)
  return linear(part(p, "out"), mixed.reshape(x.shape))


def stack(p, x, model, mixers, positions):  # positions: arrays that relative attention shares
  mixers = mixers if isinstance(mixers, list) else [mixers]
  blocks = [part(p, f"blocks_{i}") for i in range(len(mixers))]
  num_layers = sum(len(block.get("mixer_norm.scale", ())) for block in blocks)
  for i in range(num_layers):  # layer i is block i mod P
    arrays = {name: array[i // len(blocks)] for name, array in blocks[i % len(blocks)].items()}
    x = layer(arrays, x, model, mixers[i % len(blocks)], positions)
  return norm(part(p, "out_norm"), x, model) if "out_norm.scale" in p else x


def layer(p, x, model, mixer, positions):
  for name in ("mixer", "feed_forward"):
    q = part(p, name)
    of_norm = part(p, name + "_norm")
    if not of_norm:  # a layer without a feed-forward network
      continue
    y = norm(of_norm, x, model) if model["norm_position"] == "pre" else x
    if name == "mixer":
      y = MIXERS[mixer["name"]]({**q, **positions}, y, mixer)
    else:
      y = feed_forward(q, y, model["activation"])
    x = x + y if model["norm_position"] == "pre" else norm(of_norm, x + y, model)
  return x


def fixed(p, x, tokens, boundaries):  # [T] where segments end
  factor = boundaries["shortening_factor"]
  offset = boundaries["offset"]
  return np.arange(len(x)) % factor == (factor - 1 if offset is None else offset)


def by_token(p, x, tokens, boundaries):  # [T] where segments end
  ends = np.isin(tokens, boundaries["space_ids"])
  if boundaries["name"] == "spacebyte":
    ends = ends & ~shift(np.isin(tokens, boundaries["end_ids"]), 1)
  return ends


def predicted(p, x, tokens, boundaries):  # [T] where segments end, by a small network
  return feed_forward(p, x, "gelu")[:, 0] > 0


def by_entropy(p, x, tokens, boundaries):  # [T] where segments end, by a small model
  z = forward(tokens, part(p, "frozen"), boundaries["frozen"])
  z = z - z.max(-1, keepdims=True)
  z = z - np.log(np.exp(z).sum(-1, keepdims=True))
  entropy = -(np.exp(z) * z).sum(-1)  # nats
  rise = np.diff(entropy, prepend=-np.inf)
  if boundaries["rule"] == "combined":
    ends = (entropy > boundaries["theta"]) & (rise > boundaries["theta_add"])
    for t in range(1, len(ends)):
      ends[t] &= not ends[t - 1]
    return ends
  return (entropy if boundaries["rule"] == "global" else rise) > boundaries["theta"]


def routing(p, x, tokens, boundaries):  # [T] the probabilities that segments end
  # query and key are [D, D]
  unit = lambda x: x / np.sqrt(np.maximum((x**2).sum(-1, keepdims=True), 1e-24))
  cosine = (unit(x[:-1] @ p["query"]) * unit(x[1:] @ p["key"])).sum(-1)
  return np.append(np.float32(1), np.clip((1 - cosine) / 2, 0, 1))


def down(p, x, tokens, model):  # the tokens' vectors, the chance of each boundary, the segments
  boundaries = model["boundaries"]
  mixers = model["first"]["mixer"] or model["mixer"]
  x = stack(part(p, "first"), x, model, mixers, part(p, "shared_positions"))
  chance = BOUNDARIES[boundaries["name"]](part(p, "boundaries"), x, tokens, boundaries)
  ends = chance > 0.5
  s = x[ends]
  if boundaries["name"] != "routing" and boundaries.get("pooling", "mean") == "mean":
    s = [x[np.cumsum(ends) - ends == m].mean(0) for m in range(ends.sum())]
    s = np.reshape(s, (-1, x.shape[1]))
  if "widen" in p:
    s = s @ p["widen"]
  if "padding" in p:
    s = np.hstack([s, np.tile(p["padding"], (len(s), 1))])
  if "null_group" in p:
    s = norm(part(p, "inner_norm"), np.concatenate([p["null_group"][None], s]), model)
  return x, chance, s


def up(p, x, chance, s, model):  # from the results for the segments to those for the tokens
  ends = chance > 0.5
  s = s[:, : x.shape[1]] if "padding" in p else s
  if "narrow" in p:
    s = s @ p["narrow"]
  if model["boundaries"]["name"] == "routing":
    q = np.clip(chance[ends], 1e-4, 1 - 1e-4)[:, None]
    s[0] = q[0] * s[0]
    for m in range(1, len(s)):
      s[m] = q[m] * s[m] + (1 - q[m]) * s[m - 1]
    x = s[np.cumsum(ends) - 1] + linear(part(p, "boundaries.residual"), x)
  else:
    x = x + s[np.cumsum(ends)]  # the last segment that has ended
  mixers = model["last"]["mixer"] or model["mixer"]
  return stack(part(p, "last"), x, model, mixers, part(p, "shared_positions"))


def stages_in(model):  # the settings of the model and of each middle, which inherits them
  stages = [model]
  while stages[-1]["middle"] is not None:
    changes = {key: x for key, x in stages[-1]["middle"].items() if x or x is None}
    stages.append({**stages[-1], **changes})
  return stages


def forward(tokens, p, model):  # [T] -> [T, V]
  x = p["embedding.tokens.embedding"][np.asarray(tokens)]
  width = model["width"]
  if model["positions"] == "sinusoidal":
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
    table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(x), -1)[:, :width]
    x = x * width**0.5 + table.astype(np.float32)
  if model["positions"] == "learned":
    x = (x + p["embedding.positions"][: len(x)]) * width**0.5
  stages = stages_in(model)
  shared = part(p, "shared_positions")
  ways = []  # what each pooling needs for its way up
  for i, settings in enumerate(stages):
    if settings["boundaries"]["name"] == "none":
      break
    q = part(p, f"stages_{i}")
    x, chance, segments = down(q, x, tokens, settings)
    ways.append((q, x, chance, settings))
    x = segments
    shared = part(p, "shared_positions") or part(q, "shared_positions")
  x = stack(part(p, "layers"), x, stages[-1], model["mixer"], shared)
  for q, of_tokens, chance, settings in reversed(ways):
    x = up(q, of_tokens, chance, x, settings)
  if "final_norm.scale" in p:
    x = norm(part(p, "final_norm"), x, model)
  if model["tie_embeddings"]:
    return x @ p["embedding.tokens.embedding"].T
  return linear(part(p, "logits"), x)


MIXERS = {
  **dict.fromkeys(("dispatcher", "dispatcher_multihead"), dispatcher),
  **dict.fromkeys(("attention", "relative_attention", "local_attention"), attention),
  "short_convolution": short_convolution,
  "mamba2": mamba2,
  **dict.fromkeys(("she", "he", "we", "me"), extractor),
}
BOUNDARIES = {
  **dict.fromkeys(("whitespace", "spacebyte"), by_token),
  **dict.fromkeys(("unigram", "entropy", "gumbel", "flexitokens"), predicted),
  "fixed": fixed,
  "entropy_threshold": by_entropy,
  "routing": routing,
}


def main(folder, *tokens):
  try:
    z = load(folder)([int(token) for token in tokens])[-1]
  except ValueError as error:
    sys.exit(str(error))
  chances = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
  for token in np.argsort(-z)[:10]:
    print(f"{token:8}  {chances[token]:.4f}")


if __name__ == "__main__":
  main(*sys.argv[1:])
