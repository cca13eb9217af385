"""How fast text becomes tokens and batches, beside the libraries alone and beside a model.

  python benchmarks/preparation.py --out results/preparation

writes results/preparation.json and .png (about 9 minutes on 2 cores; --quick: half a
minute, 20 MB of text). The text is 1 GB of words at random, with frequencies by Zipf's law.

"alone" reads the text and encodes it with the library, all its threads, 1 MiB of whole
lines a call, and throws the ids away. "prepare" is `dpjax.data.prepared.prepare`: it
reads, counts, hashes and encodes the text, and writes the tokens to disk; the vocabulary is
given. "characters" has no library. Each is a process of its own; memory
is the most that it and its processes held at once, mapped files not counted.

"read": the tokens as `prepare` maps them, summed up, beside the same bytes read by NumPy.

"batches": tokens a second of the three orders of training batches, at the quickstart's
size; "model": of a training step of the quickstart's model with the fastest mixer.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import timing

from dpjax.analysis import style

GIGABYTE = 10**9
QUICK_BYTES = 2 * 10**7
PART = 2**20
KINDS = ("characters", "sentencepiece_unigram", "bpe")
VOCAB_SIZE = 8000
LEARN_BYTES = 10**7
SEED = 0


def write_text(path: pathlib.Path, size: int) -> None:
  """Lines of 12 words, of 30,000 that are drawn by Zipf's law."""
  import numpy as np

  draw = np.random.default_rng(SEED)
  letters = np.array(list("etaoinshrdlucmfwypvbgk"))
  words = np.array(
    ["".join(draw.choice(letters, size=length)) for length in draw.integers(2, 11, 30_000)]
  )
  odds = 1 / np.arange(1, len(words) + 1)
  written = 0
  with path.open("w", encoding="utf-8") as file:
    while written < size:
      lines = words[draw.choice(len(words), size=(50_000, 12), p=odds / odds.sum())]
      text = "\n".join(" ".join(line) for line in lines.tolist()) + "\n"
      file.write(text[: size - written])
      written += len(text)


def read_parts(path: pathlib.Path):
  """Whole lines, about 1 MiB at a time."""
  with path.open(encoding="utf-8") as file:
    while lines := file.readlines(PART):
      yield lines


def encode_alone(kind: str, text: pathlib.Path, folder: pathlib.Path) -> int:
  """How many ids the library gives."""
  from dpjax.text.tokens import tokenizer_from_json

  tokenizer = tokenizer_from_json((folder / f"{kind}.json").read_text())
  if kind == "bpe":
    encode = tokenizer._raw.encode_batch_fast
    return sum(len(x.ids) for lines in read_parts(text) for x in encode(lines))
  encode = tokenizer._processor.encode
  return sum(len(ids) for lines in read_parts(text) for ids in encode(lines))


def prepare(kind: str, text: pathlib.Path, folder: pathlib.Path) -> int:
  """How many tokens the train split has."""
  from unittest import mock

  from dpjax.data import corpora, prepared
  from dpjax.text.tokens import tokenizer_from_json

  tokenizer = tokenizer_from_json((folder / f"{kind}.json").read_text())
  with mock.patch.object(prepared, "train_tokenizer", lambda *_, **__: tokenizer):
    data = prepared.prepare(corpora.load_corpus(path=text), folder / f"data_{kind}", kind)
  return sum(counts["tokens"] for counts in data.counts.values())


def watch_memory(done: threading.Event, peak: list[float]) -> None:
  """Writes into `peak` the most MiB that this process and its own have held at once."""
  while not done.wait(0.05):
    kib = 0
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for name in ("self", *children):
      with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{name}/status").read_text()
        kib += int(status.partition("RssAnon:")[2].split()[0])
    peak[0] = max(peak[0], kib / 2**10)


def run_alone(arguments) -> None:
  """What a process of its own does: prints seconds, tokens and MiB."""
  kind, text, folder = arguments.kind, arguments.text, arguments.folder
  done, peak = threading.Event(), [0.0]
  watcher = threading.Thread(target=watch_memory, args=(done, peak))
  watcher.start()
  start = time.perf_counter()
  count = {"alone": encode_alone, "prepare": prepare}[arguments.way](kind, text, folder)
  seconds = time.perf_counter() - start
  done.set()
  watcher.join()
  print(json.dumps({"seconds": seconds, "tokens": count, "peak_mib": peak[0]}))


def compare(kind: str, text: pathlib.Path, folder: pathlib.Path) -> dict:
  """The ways of a kind of tokenizer, one after the other."""
  from dpjax.data import corpora
  from dpjax.text.tokens import train_tokenizer

  size = text.stat().st_size
  parts = []
  for part in corpora.load_corpus(path=text).splits["train"]:
    parts.append(part)
    if sum(map(len, parts)) > LEARN_BYTES:
      break
  tokenizer = train_tokenizer(kind, parts, vocab_size=VOCAB_SIZE)
  (folder / f"{kind}.json").write_text(tokenizer.to_json())
  rows = {}
  for way in ("prepare",) if kind == "characters" else ("alone", "prepare"):
    command = [sys.executable, __file__, "--way", way, "--kind", kind]
    command += ["--text", str(text), "--folder", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows[way] = json.loads(done.stdout.splitlines()[-1])
    rows[way]["mb_per_second"] = size / 1e6 / rows[way]["seconds"]
    print(
      f"{kind:22} {way:8} {rows[way]['mb_per_second']:7.1f} MB/s {rows[way]['peak_mib']:7.0f} MiB",
      flush=True,
    )
  if "alone" in rows:
    rows["ratio"] = rows["prepare"]["mb_per_second"] / rows["alone"]["mb_per_second"]
  return rows


def read_back(folder: pathlib.Path, repetitions: int) -> dict:
  """Seconds of reading the tokens as a map, and as bytes."""
  import numpy as np

  from dpjax.data.prepared import open_prepared

  def mapped():
    return int(open_prepared(folder).splits["train"].sum(dtype=np.int64))

  def as_bytes():
    return int(np.fromfile(folder / "train.bin", np.uint16).sum(dtype=np.int64))

  seconds = timing.measure({"bytes": as_bytes, "mapped": mapped}, repetitions)
  rows = {x: timing.summarize(seconds[x], seconds["bytes"]) for x in ("bytes", "mapped")}
  size = (folder / "train.bin").stat().st_size
  return {
    name: row | {"gb_per_second": size / 1e6 / row["milliseconds"]} for name, row in rows.items()
  }


def time_batches(folder: pathlib.Path, batch_size: int, window: int, number: int) -> dict:
  """Tokens a second of each order of batches."""
  from dpjax.data import batches
  from dpjax.data.prepared import open_prepared

  tokens = open_prepared(folder).splits["train"]
  makers = {
    "contiguous": batches.ContiguousRows,
    "shuffled_windows": functools.partial(batches.ShuffledWindows, seed=SEED),
    "random_windows": functools.partial(batches.RandomWindows, seed=SEED),
  }
  found = {}
  for name, make in makers.items():
    made = make(tokens, batch_size, window)
    made.batch(0)
    start = time.perf_counter()
    for step in range(number):
      made.batch(step)
    found[name] = number * batch_size * window / (time.perf_counter() - start)
  return found


def time_models(repetitions: int) -> dict:
  """Tokens a second of a training step of the quickstart's model, by mixer."""
  import jax
  import jax.numpy as jnp

  from configs import quickstart
  from dpjax import registry
  from dpjax.models.build import build_model
  from dpjax.training import step as step_lib
  from dpjax.training.optimizer import make_optimizer

  config = quickstart.get_config()
  shape = config.train.batch_size, config.model.max_length
  batch = {
    "tokens": jnp.zeros(shape, jnp.int32),
    "targets": jnp.zeros(shape, jnp.int32),
    "weights": jnp.ones(shape, jnp.float32),
  }
  optimizer = make_optimizer("adam", 1e-3)
  calls = {}
  config.model.vocab_size = 28
  heads = config.model.mixer.num_heads
  for mixer in registry.mixers.names():
    has_heads = "num_heads" in registry.mixers.settings(mixer)
    own = {"num_heads": heads} if has_heads else {}
    config.model.mixer = registry.mixers.section(mixer, **own)
    model = build_model(config.model)
    state = jax.jit(lambda model=model: step_lib.init_state(model, optimizer, SEED))()
    step = functools.partial(step_lib.train_step, model, optimizer, 1)
    compiled, _ = timing.compile_timed(step, state, batch)
    calls[mixer] = functools.partial(compiled, state, batch)
  seconds = timing.measure(calls, repetitions)
  size = shape[0] * shape[1]
  return {
    mixer: size / (timing.summarize(seconds[mixer], seconds[mixer])["milliseconds"] / 1e3)
    for mixer in calls
  }


@style.applied()
def draw_figure(report: dict, path: pathlib.Path) -> None:
  """MB/s of every kind and way, and tokens a second of batches and models."""
  import matplotlib

  matplotlib.use("agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(1, 2, figsize=(12, 4))
  speeds = {
    f"{kind}\n{way}": rows[way]["mb_per_second"]
    for kind, rows in report["encoding"].items()
    for way in ("alone", "prepare")
    if way in rows
  }
  axes[0].bar(list(speeds), list(speeds.values()))
  axes[0].set_title("text to tokens, MB/s")
  rates = report["batches"] | report["model"]
  colors = ["C0"] * len(report["batches"]) + ["C1"] * len(report["model"])
  axes[1].bar(list(rates), list(rates.values()), color=colors)
  axes[1].set_yscale("log")
  axes[1].set_title("tokens/s: batches, and training steps of the quickstart's size")
  for axis in axes:
    axis.tick_params(axis="x", labelrotation=45, labelsize=8)
  style.finish(figure)
  figure.tight_layout()
  figure.savefig(path, dpi=100)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--out", help="path, no suffix; results/preparation, nothing is written if --quick"
  )
  parser.add_argument("--quick", action="store_true", help="20 MB of text")
  parser.add_argument("--scratch", help="a folder with room for 5 GB", default=None)
  for name in ("way", "kind"):
    parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
  for name in ("text", "folder"):
    parser.add_argument(f"--{name}", type=pathlib.Path, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.way:
    return run_alone(arguments)
  sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
  quick = arguments.quick
  size = QUICK_BYTES if quick else GIGABYTE
  report = {
    "command": "python benchmarks/preparation.py" + " --quick" * quick,
    "machine": timing.describe_machine(),
    "seed": SEED,
    "bytes": size,
    "vocab_size": VOCAB_SIZE,
  }
  with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
    folder = pathlib.Path(scratch)
    text = folder / "text.txt"
    write_text(text, size)
    report["encoding"] = {kind: compare(kind, text, folder) for kind in KINDS}
    data = folder / "data_characters"
    report["read"] = read_back(data, 3 if quick else 7)
    batch_size, window = 16, 128
    report["batches"] = time_batches(data, batch_size, window, 200 if quick else 5_000)
  report["model"] = time_models(3 if quick else 9)
  report["batches_over_model"] = min(report["batches"].values()) / max(report["model"].values())
  for name in ("read", "batches", "model", "batches_over_model"):
    print(f"{name}: {json.dumps(report[name], indent=1)}")
  if arguments.out or not quick:
    out = pathlib.Path(arguments.out or "results/preparation")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw_figure(report, out.with_suffix(".png"))


if __name__ == "__main__":
  main()
