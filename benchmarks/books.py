"""Trains mixers in today's Transformer on children's books, and documents apart or joined.

  python benchmarks/books.py --books=FOLDER --work=runs/books --out=results --models=models

FOLDER has train.txt, valid.txt and test.txt, with the line <|endofbook|> between two books (the
children's books of docs/reproduce.md). Each run takes 2,000 updates of 16 rows of 128 tokens,
the same rows for all runs. The results so far go to

  OUT/books_mixers.json, .png   "modern": configs/modern_transformer.py:small with attention and
                                the papers' mixers. "equal": attention in the frame of the
                                Extractors paper (configs/extractors_childrens_books.py, 4
                                layers), with modern attention's number of parameters.
                                "pooled": the modern frame on characters, windows of 512, with
                                1 + 4 + 1 layers of attention. "peak": attention at half and
                                double its frame's learning rate
  OUT/books_documents.json      the modern frame with isolated and with joined documents, scored
                                by document, each as if it stood alone
  MODELS                        exports of `MODELS`, without the paths of this machine

Finished runs in --work are not trained again, and interrupted ones resume. --only selects runs
whose name contains a text, --steps makes a shorter trial.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import timing

from dpjax.analysis import style

sys.path.append(str(Path(__file__).parents[1]))  # configs, beside an installed dpjax

STEPS, ROWS, WINDOW = 2_000, 16, 128
# The best of 1, 2, 4 and 8e-3 for each frame's attention, by validation; for all of its mixers.
PEAK = {"modern": 4e-3, "equal": 2e-3, "pooled": 4e-3}
DOCUMENTS_PEAK = 1e-3
MODERN = ("attention", "dispatcher", "he", "we", "me")
POOLED = ("whitespace", "routing")
DASHES = {"modern": "-", "equal": ":", "pooled": "-."}
DOCUMENTS = ("attention", "dispatcher")
MODELS = {
  "dispatcher-books": "modern-dispatcher",
  "we-books": "modern-we",
  "whitespace-books": "pooled-whitespace",
  "routing-books": "pooled-routing",
}


def modern(mixer: str) -> Any:
  """Today's frame."""
  from configs import modern_transformer
  from dpjax import config as config_lib

  config = modern_transformer.get_config("small")
  if mixer != "attention":
    config.model.mixer = config_lib.mixer(mixer)
  return config


def equal() -> Any:
  """The frame of the Extractors paper, with the modern one's layers, batches and dropout."""
  from configs import extractors_childrens_books

  config = extractors_childrens_books.get_config("attention_4")
  config.model.update(dict(num_layers=4, max_length=WINDOW, dropout=0.0, width=96))
  config.model.feed_forward_width = 4 * 96
  config.train.batch_size = ROWS
  return config


def pooled(kind: str) -> Any:
  """Today's frame on characters, its middle layers on segments: about as much text a row."""
  from dpjax import config as config_lib

  config = modern("attention")
  settings = dict(factor=5.0, weight=0.1) if kind == "routing" else {}
  config.model.boundaries = config_lib.boundaries(kind, **settings)
  config.model.first.num_layers = config.model.last.num_layers = 1
  config.model.max_length = 4 * WINDOW
  config.data.tokenizer = "characters"
  return config


def runs() -> dict[str, Callable[[], Any]]:
  """Every run's configuration, without its text."""
  found: dict[str, Callable[[], Any]] = {}
  for mixer in MODERN:
    found[f"modern-{mixer}"] = lambda mixer=mixer: modern(mixer)
  found["equal-attention"] = equal
  for kind in POOLED:
    found[f"pooled-{kind}"] = lambda kind=kind: pooled(kind)
  for factor in (0.5, 2):
    found[f"peak-modern-{factor * PEAK['modern']}"] = lambda: modern("attention")
    found[f"peak-equal-{factor * PEAK['equal']}"] = equal
  for mixer in DOCUMENTS:
    for documents in ("joined", "isolated"):
      found[f"books-{mixer}-{documents}"] = lambda mixer=mixer: modern(mixer)
  return found


def configure(name: str, make: Callable[[], Any], books: Path, steps: int) -> Any:
  """A run's configuration."""
  config = make()
  config.data.path, config.data.separator = str(books), "<|endofbook|>"
  if name.endswith("isolated"):
    config.data.documents = "isolated"
  frame, _, rest = name.partition("-")
  is_peak = frame == "peak"
  train = config.train
  train.learning_rate = float(rest.split("-")[1]) if is_peak else PEAK.get(frame, DOCUMENTS_PEAK)
  train.num_steps = steps
  # A trial may be shorter than the warm-up.
  train.schedule.warmup_steps = min(train.schedule.warmup_steps, steps // 2)
  train.eval_every_steps = train.checkpoint_every_steps = max(1, steps // 8)
  train.eval_every_epochs = 0.0
  config.sample.prompt = ""
  return config


def train(name: str, config: Any, workdir: Path) -> dict[str, Any]:
  """A run's scores."""
  import jax

  import dpjax

  run, scores = dpjax.train(config, workdir)
  lines = map(json.loads, (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
  found = {
    "name": name,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
    "test": scores,
    "valid": [
      {key: line[key] for key in ("step", "bits_per_character")}
      for line in lines
      if line["split"] == "valid"
    ],
  }
  if name.endswith(("joined", "isolated")):
    found["by_document"] = run.score_split("test", documents="isolated")
  return found


def report(done: Sequence[dict[str, Any]], out: Path) -> None:
  """Writes and prints what is done."""
  machine = timing.describe_machine()
  for file in ("books_mixers", "books_documents"):
    is_mixers = file == "books_mixers"
    rows = [x for x in done if is_mixers != ("by_document" in x)]
    if not rows:
      continue
    result = {
      "command": "python benchmarks/books.py",
      "machine": {key: machine[key] for key in ("device", "processor", "cores", "jax")},
      "updates": rows[0]["steps"],
      "tokens_an_update": ROWS * WINDOW,
      "runs": rows,
    }
    text = json.dumps(result, indent=1) + "\n"
    (out / f"{file}.json").write_text(text, encoding="utf-8")
    for row in rows:
      scores = row["test" if is_mixers else "by_document"]
      print(
        f"{row['name']:28s}{row['parameters']:>10,}  perplexity {scores['perplexity']:7.2f}"
        f"  bits per character {scores['bits_per_character']:.4f}"
      )
    if is_mixers:
      draw(rows, out / f"{file}.png")


@style.applied()
def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
  """Validation over updates: colours are mixers, dashes frames."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
  mixers = (*MODERN, *POOLED)
  for row in rows:
    frame, mixer, *rate = row["name"].split("-")
    if rate:
      continue
    points = [[point["step"], point["bits_per_character"]] for point in row["valid"]]
    color = style.line(mixers.index(mixer))["color"]
    label = f"{mixer}, {frame} ({row['parameters'] / 1e6:.1f}M)"
    axis.plot(*zip(*points, strict=True), DASHES[frame], color=color, label=label)
  axis.set(xlabel="updates", ylabel="bits per character, validation")
  axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
  style.finish(figure)
  figure.savefig(file, dpi=130)
  plt.close(figure)


def publish(work: Path, models: Path) -> None:
  """Exports `MODELS` as a reader of the books has them: without the paths of this machine."""
  import dpjax
  from dpjax.data import making

  for name, run in MODELS.items():
    folder = models / name
    dpjax.load(work / run).save(folder, dtype="bfloat16")
    config, data = (making.read_json(folder / x) for x in ("config.json", "data/data.json"))
    config["data"] |= {"path": "", "separator": "", "data_dir": "data"}
    data["name"] = config["data"]["name"]
    del data["tokens"]
    making.write_json(folder / "config.json", config)
    making.write_json(folder / "data/data.json", data)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8").replace("on text (", "on 100 children's books (")
    card.write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name in ("books", "work", "out"):
    parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve(), required=True)
  parser.add_argument("--models", type=Path, help="a folder for exports; by default none")
  parser.add_argument("--only", default="", help="the runs whose name has this")
  parser.add_argument("--steps", type=int, default=STEPS, help="updates of each")
  given = parser.parse_args(arguments)
  done = []
  for name, make in runs().items():
    file = given.work / f"{name}.json"
    if given.only in name and not file.exists():
      config = configure(name, make, given.books, given.steps)
      config.data.data_dir = str(given.work / "data")
      found = {**train(name, config, given.work / name), "steps": given.steps}
      file.write_text(json.dumps(found), encoding="utf-8")
    if file.exists():
      done.append(json.loads(file.read_text(encoding="utf-8")))
  report(done, given.out)
  if given.models:
    publish(given.work, given.models)


if __name__ == "__main__":
  main()
