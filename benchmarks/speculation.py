"""Measures whether an hourglass would gain from drafting its own text with its outer layers.

  python benchmarks/speculation.py RUN --out results/speculation

writes results/speculation.json and .png. RUN is the folder of a run with whitespace boundaries.
Greedy decoding runs the middle layers where a segment ends. A draft skips them: the outer layers
go on with the last segment's vector for k tokens, and one chunk through all layers verifies the
k tokens and gives one more. At every boundary of a part of the test split, greedy decoding and
a draft both write k tokens, and we count how many the draft has right before its first error.

Decoding reads each layer's parameters once a step, whatever the length of a chunk, so the cost is
in layers read per token: for `outer` layers around `middle` ones and segments of S tokens,

  greedy   outer + middle / S
  drafts   ((k + 1) outer + middle) / (right + 1)

Drafting the outer layers' own tokens again is what makes `(k + 1) outer`: after a boundary,
the last layers' inputs change.
"""

import argparse
import json
import pathlib

import timing

from dpjax.analysis import style

LENGTHS = (1, 2, 4, 8, 16)
ROWS, PLACES, SEED = 16, 256, 0


def right_tokens(run, rows):
  """How many tokens drafts have right after each token of `rows`, [B, T] -> [B, T] integers."""
  import jax
  import jax.numpy as jnp

  from dpjax.models.build import build_model

  config = run.config.model.copy_and_resolve_references()
  # A token that does not occur: the middle layers never run.
  config.boundaries.space_ids = (run.tokenizer.unknown_id,)
  drafter = build_model(config)

  def step(model, cache, token_b):
    output = model.apply({"params": run.params}, token_b[:, None], cache=cache)
    return output.cache, output.logits[:, 0].argmax(-1).astype(jnp.int32)

  def write(model, cache, token_b):
    def one(state, _):
      cache, token_b = step(model, *state)
      return (cache, token_b), token_b

    return jax.lax.scan(one, (cache, token_b), None, length=max(LENGTHS))[1]

  def read(cache, token_b):
    is_same = write(run.model, cache, token_b) == write(drafter, cache, token_b)
    return step(run.model, cache, token_b)[0], is_same.cumprod(0).sum(0)

  cache = run.model.init_cache(len(rows))
  return jax.jit(lambda rows: jax.lax.scan(read, cache, rows.T)[1].T)(rows)


def costs(right, segment, outer, middle):
  """Layers read per token: greedily, and with drafts of each length.

  Args:
    right: by the length of drafts, the tokens that are right on average.
    segment: S.
    outer: layers around the middle.
    middle: layers.
  """
  drafts = {k: ((k + 1) * outer + middle) / (x + 1) for k, x in right.items()}
  return {"greedy": outer + middle / segment, "drafts": drafts}


@style.applied()
def draw(found, path):
  """Cost over greedy decoding's, and what it would be if each token were right."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(6, 3.4), layout="constrained")
  axis = figure.subplots()
  for i, (name, label) in enumerate((("cost", "measured"), ("if_all_right", "if all were right"))):
    over = [found[name]["drafts"][str(k)] / found[name]["greedy"] for k in LENGTHS]
    axis.plot(LENGTHS, over, marker="o", label=label, **style.line(i))
  axis.axhline(1.0, color="0.3", linewidth=1)
  axis.set_xscale("log", base=2)
  axis.set_xticks(LENGTHS, [str(k) for k in LENGTHS])
  axis.set(xlabel="tokens of a draft", ylabel="cost per token, over greedy", ylim=(0, None))
  axis.legend(fontsize=8)
  style.finish(figure)
  figure.savefig(path, dpi=130)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("run", help="its folder")
  parser.add_argument("--out", default="results/speculation", help="path, no suffix")
  given = parser.parse_args()

  import numpy as np

  import dpjax

  run = dpjax.load(given.run)
  model = run.config.model
  if model.boundaries.name != "whitespace" or model.middle is not None:
    parser.error("RUN: expected one stage of whitespace boundaries")
  tokens = run.tokens("test")
  begins = np.random.default_rng(SEED).integers(len(tokens) - PLACES, size=ROWS)
  rows = np.stack([tokens[x : x + PLACES] for x in begins]).astype(np.int32)
  is_end = np.isin(rows, model.boundaries.space_ids)
  is_end[:, : PLACES // 8] = False  # the first segments have no context
  right = np.asarray(right_tokens(run, rows))[is_end]
  layers = (model.first.num_layers + model.last.num_layers, model.num_layers)
  segment = 1 / is_end[:, PLACES // 8 :].mean()
  means = {k: float(np.minimum(right, k).mean()) for k in LENGTHS}
  report = {
    "machine": timing.describe_machine(),
    "boundaries": int(is_end.sum()),
    "tokens_a_segment": segment,
    "right": means,
    "layers": layers,
    "cost": costs(means, segment, *layers),
    "if_all_right": costs({k: k for k in LENGTHS}, segment, *layers),
  }
  report = json.loads(json.dumps(report))
  for k, right in report["right"].items():
    over, best = (
      report[name]["drafts"][k] / report[name]["greedy"] for name in ("cost", "if_all_right")
    )
    print(f"drafts of {k}: {right:.2f} right, cost {over:.2f}; if all were {best:.2f}")
  path = pathlib.Path(given.out)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
  draw(report, path.with_suffix(".png"))


if __name__ == "__main__":
  main()
