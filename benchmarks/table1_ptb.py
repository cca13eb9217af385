r"""Table 1 of the Dispatcher's paper on Penn Treebank, from runs at its size.

  python train.py --config=configs/dispatcher_ptb.py --config.data.path=ptb \
      --config.train.accumulate_steps=5 --config.train.patience=10 --workdir=runs/dispatcher_ptb
  python benchmarks/table1_ptb.py runs/dispatcher_ptb runs/msa_ptb

Writes what each run has reached so far, finished or not, into OUT/dispatcher.json and
OUT/msa.json: the validation curve of all its pieces, hours, and the test perplexity of its
best epoch, with every token counted once, and by the protocol of the authors' code: ten rows,
windows of 512 tokens without context, each row's first token no target. A picture has both
curves over the epochs. The runs go into the table's report in REPORTS, too, from which
`python -m reproduce report` makes its page. Rows whose folders are not given stay as they are.
A run of another seed than 0 goes to OUT/NAME_seedN.json and into the picture alone.

The committed runs had JAX_THREEFRY_PARTITIONABLE=0, the Dispatcher's with seed 0 from update 69
on: other random bits for dropout, which cost less on one CPU device.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

sys.path.append(str(Path(__file__).parents[1]))  # reproduce and configs
import dpjax
from dpjax import config as config_lib
from dpjax.analysis import style
from dpjax.data import batches
from reproduce import experiment, papers, report, scales

TABLE = papers.TABLES["dispatcher-table1"]
ROWS = {row.name.rpartition("/")[2]: row for row in TABLE.rows if row.group == "PTB"}
STOPPED = 5.0  # times the usual seconds between two reports: the run was not running
# A vocabulary's size is counted, and its file is a place.
_FREE = ("model.vocab_size", "data.tokenizer_file")


def hours_of(reports: list[dict]) -> float:
  """How long the pieces of a run took together, by the times of its reports."""
  times = [report["time"] for report in reports]
  gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
  longest = STOPPED * statistics.median(gaps or [0.0])
  return math.fsum(gap for gap in gaps if gap <= longest) / 3600


def has_lost_patience(curve: list[dict], patience: int) -> bool:
  """Whether the last `patience` evaluations gave no new best (`config.train.patience`)."""
  scores = [point["valid_perplexity"] for point in curve]
  return 0 < patience <= len(scores) - 1 - scores.index(min(scores))


def authors_perplexity(run, split: str) -> float:
  """Perplexity of all targets of B rows in windows of T, each without context."""
  rows, window = run.config.eval.batch_size, run.config.model.max_length
  text = batches.ContiguousRows(run.data.splits[split], rows, window)
  nats = count = 0.0
  for step in range(text.steps_per_epoch):
    sums = run._scorer.step(run.params, text.batch(step), step)
    nats, count = nats + float(sums["nats"]), count + float(sums["count"])
  return math.exp(nats / count)


def describe(name: str, folder: Path) -> tuple[dict, dict]:
  """What a run has reached, for OUT; and its record for `reproduce.report`."""
  lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
  hours = hours_of([json.loads(line) for line in lines])
  run = dpjax.load(folder)
  config = run.config
  changes = scales.differences(ROWS[name].config, config)
  changes = {key: change for key, change in changes.items() if key not in _FREE}
  flags = [f"--config={ROWS[name].config}", "--config.data.path=ptb"]
  flags += [f"--config.{key}={now}" for key, (_, now) in changes.items()]
  record = experiment.left_out(ROWS[name], config.seed, "paper", "")
  record |= experiment.describe(run, folder)
  text = batches.ContiguousRows(
    run.data.splits["train"], config.train.batch_size, config.model.max_length
  )
  curve = [
    {
      "epoch": point["step"] / text.steps_per_epoch,
      "step": point["step"],
      "valid_perplexity": point["perplexity"],
    }
    for point in record["validation"]
  ]
  steps = record["step"]
  num_steps = config_lib.steps_in(config.train, "num", steps_per_epoch=text.steps_per_epoch)
  is_finished = steps >= num_steps or has_lost_patience(curve, config.train.patience)
  scores = run.score_split("test")
  authors = authors_perplexity(run, "test")
  record |= {
    "status": "done" if is_finished else "partial",
    "reason": "" if is_finished else f"{steps:,} of {num_steps:,} updates are done",
    "changes": changes,
    "text": "penn_treebank",
    "num_steps": num_steps,
    "best_step": run.step,
    "scores": scores | {papers.AUTHORS: authors, "median_cost": record["costs"]["last"]},
    "minutes": round(60 * hours, 1),
    "command": " ".join(["python train.py", *flags]),
  }
  row = {
    "paper_test_perplexity": ROWS[name].paper[papers.PERPLEXITY],
    "is_finished": is_finished,
    "seed": config.seed,
    "test_perplexity": scores["perplexity"],
    "test_perplexity_authors_protocol": authors,
    "parameters": record["parameters"],
    "steps": steps,
    "num_steps": num_steps,
    "epochs": steps / text.steps_per_epoch,
    "best_epoch": run.step / text.steps_per_epoch,
    "best_valid_perplexity": min(point["valid_perplexity"] for point in curve),
    "hours": hours,
    "training_tokens": record["tokens"]["train"],
    "curve": curve,
    "machine": record["machine"],
  }
  return row, record


def _model(name: str) -> str:
  return name.partition("_")[0]


@style.applied()
def draw(rows: dict[str, dict], file: Path) -> None:
  """Validation perplexity over epochs, one curve a run."""
  figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
  for name, row in rows.items():
    points = [(point["epoch"], point["valid_perplexity"]) for point in row["curve"]]
    label = f"{ROWS[_model(name)].label}, seed {row['seed']}"
    axis.plot(*zip(*points, strict=True), marker=".", label=label)
  axis.set(
    xlabel="epoch",
    ylabel="validation perplexity",
    yscale="log",
    title="Penn Treebank, the paper's size",
  )
  axis.legend()
  style.finish(figure)
  figure.savefig(file, dpi=120)
  plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("folders", nargs="+", type=Path, help="NAME_ptb, trained or training")
  parser.add_argument("--out", type=Path, default=Path("results/table1_ptb"))
  parser.add_argument("--reports", type=Path, default=Path("results/reproduce"))
  given = parser.parse_args(arguments)
  if unknown := {_model(folder.name) for folder in given.folders} - ROWS.keys():
    parser.error(f"folders: expected names that begin with {', '.join(ROWS)}, got {unknown.pop()}")
  for folder in given.folders:
    reports = folder / "metrics.jsonl"
    if not (reports.is_file() and '"valid"' in reports.read_text(encoding="utf-8")):
      parser.error(f"folders: expected runs of at least one epoch, got {folder}")
  given.out.mkdir(parents=True, exist_ok=True)
  records = {}
  for content in report.read(given.reports, "paper"):
    if content["table"] == TABLE.name:
      runs = [run for row in content["rows"] for run in row["runs"]]
      records = {run["row"]: run for run in runs}
  for folder in given.folders:
    name = _model(folder.name)
    row, record = describe(name, folder)
    if row["seed"]:
      name += f"_seed{row['seed']}"
    else:
      records[record["row"]] = record
    path = given.out / f"{name}.json"
    path.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    print(
      "{}: {steps:,} of {num_steps:,} steps in {hours:.1f} hours, best validation "
      "{best_valid_perplexity:.2f}, test {test_perplexity:.2f}".format(name, **row)
    )
  paths = [path for path in sorted(given.out.glob("*.json")) if _model(path.stem) in ROWS]
  draw({path.stem: json.loads(path.read_text()) for path in paths}, given.out / "validation.png")
  report.write(report.summarise(TABLE, "paper", records.values()), given.reports)


if __name__ == "__main__":
  main()
