r"""Records results that a refactoring must not change, and compares two records.

  git worktree add ../before COMMIT
  python ../before/benchmarks/unchanged.py record before.json
  python benchmarks/unchanged.py record after.json
  python benchmarks/unchanged.py compare before.json after.json

A record has the SHA-256 of the losses of 20 updates of five models, with and without products in
bfloat16; of the initial parameters of each configuration at the size "tiny"; of the tokens of each
type of text file with each tokenizer; and the greedy continuation of each of models/. Both records
must come from one machine: losses differ between processors. --parts=losses,tokens records some.
"""

import argparse
import bz2
import gzip
import hashlib
import importlib
import json
import os
import pathlib
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)

TRAINED = (
  "quickstart:tiny",
  "dispatcher_ptb:tiny",
  "pooling_text8:gumbel,tiny",
  "modern_transformer:tiny",
  "hnet:tiny",
)
TRAIN = (
  "--config.train.num_steps=20",
  "--config.train.num_epochs=0",
  "--config.train.log_every_steps=20",
  "--config.train.eval_every_steps=20",
  "--config.train.eval_every_epochs=0",
  "--config.sample.prompt=",
)
CHARACTERS = ("--config.data.tokenizer=characters",)
BFLOAT16 = ("--config.train.matmul_dtype=bfloat16",)
ISOLATED = ("--config.data.isolate_documents", "--config.data.separator=--")
TOKENIZERS = {
  "characters": (),
  "bytes": (),
  "bpe": ("--config.data.tokenizer.vocab_size=400",),
  "sentencepiece_bpe": ("--config.data.tokenizer.vocab_size=500",),
  "sentencepiece_unigram": ("--config.data.tokenizer.vocab_size=500",),
}
MODELS = {  # and how each prompt begins
  "dispatcher-books": "Once upon a time",
  "routing-books": "Once upon a time",
  "we-books": "Once upon a time",
  "whitespace-books": "once upon a time",
}


def main() -> None:
  """Records or compares, as the command line specifies."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("action", choices=("record", "compare"))
  parser.add_argument("files", nargs="+", type=pathlib.Path)
  parser.add_argument("--parts", default=",".join(PARTS))
  options = parser.parse_args()
  if options.action == "compare":
    before, after = (json.loads(path.read_text()) for path in options.files)
    keys = sorted(before.keys() & after.keys())
    different = [key for key in keys if before[key] != after[key]]
    for key in different:
      print(f"{key}\n  before  {before[key]}\n  after   {after[key]}")
    for key in sorted(before.keys() ^ after.keys()):
      print(f"{key} is in one of the records only")
    sys.exit(f"{len(different)} of {len(keys)} differ" if different else 0)
  (path,) = options.files
  record: dict[str, Any] = {}
  with tempfile.TemporaryDirectory() as folder:
    for part in options.parts.split(","):
      for key, value in PARTS[part](pathlib.Path(folder)):
        record[key] = value
        print(key, str(value)[:60].replace("\n", " "), flush=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def losses(folder: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """SHA-256 of the losses of 20 updates."""
  text = write_documents(folder / "documents.txt", 300_000)
  for name in TRAINED:
    variants = {"": (), "bfloat16 products": BFLOAT16}
    if name.startswith(("modern", "quickstart")):
      variants["isolated documents"] = ISOLATED
    for variant, flags in variants.items():
      workdir = folder / re.sub(r"\W+", "_", f"{name} {variant}")
      run(
        "train",
        f"--config={name}",
        *TRAIN,
        f"--config.data.path={text}",
        *CHARACTERS,
        f"--config.data.data_dir={folder / 'data'}",
        *flags,
        f"--workdir={workdir}",
      )
      content = (workdir / "losses.f32").read_bytes()
      yield f"losses {name} {variant}".strip(), [len(content) // 4, digest(content)]


def parameters(folder: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """Names, shapes and SHA-256 of the initial parameters of every configuration."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from dpjax.models.build import build_model

  for path in sorted((ROOT / "configs").glob("*.py")):
    get_config = importlib.import_module(f"configs.{path.stem}").get_config
    variants = ["tiny"]
    if path.stem == "pooling_text8":
      variants += [f"{x},tiny" for x in ("none", "fixed4", "unigram", "entropy", "gumbel")]
    if path.stem == "hnet":
      variants.append("two,tiny")
    if path.stem == "extractors_childrens_books":
      variants += [f"{x},tiny" for x in ("she", "he", "me", "he_extraction", "attention_32")]
    for variant in variants:
      if path.stem == "__init__":
        continue
      config = get_config(variant)
      config.model.vocab_size = 101
      boundaries = config.model.boundaries
      if "space_ids" in boundaries:
        boundaries.space_ids = (0,)
      tokens = jnp.zeros((2, config.model.max_length), jnp.int32)
      tree = jax.jit(build_model(config.model).init)(jax.random.key(0), tokens)["params"]
      leaves = [
        (jax.tree_util.keystr(name), x.shape, digest(np.asarray(x).tobytes()))
        for name, x in jax.tree_util.tree_leaves_with_path(tree)
      ]
      yield f"parameters {path.stem} {variant}", [len(leaves), digest(repr(leaves).encode())]


def tokens(folder: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """SHA-256 of the tokens and document starts of every type of text."""
  for source, (path, flags) in write_sources(folder / "sources").items():
    for tokenizer, sizes in TOKENIZERS.items():
      if source != ".txt" and tokenizer not in ("bpe", "bytes"):
        continue
      data_dir = folder / re.sub(r"\W+", "_", f"tokens {source} {tokenizer}")
      run(
        "train",
        "--config=quickstart:tiny",
        "--tokenize_only",
        f"--config.data.path={path}",
        f"--config.data.tokenizer={tokenizer}",
        f"--config.data.data_dir={data_dir}",
        *sizes,
        *flags,
        f"--workdir={data_dir / 'run'}",
      )
      files = sorted([*data_dir.rglob("*.bin"), *data_dir.rglob("*documents*.npy")])
      hashes = {x.name: digest(x.read_bytes()) for x in files}
      assert {"train.bin", "valid.bin", "test.bin"} <= hashes.keys(), hashes
      yield f"tokens {source} {tokenizer}", hashes


def generation(folder: pathlib.Path) -> Iterator[tuple[str, Any]]:
  """The greedy continuation of the models that come with the repository."""
  for name, prompt in MODELS.items():
    flags = "--temperature=0", "--length=200", f"--prompt={prompt}", "--json"
    output = run("generate", f"--workdir={ROOT / 'models' / name}", *flags)
    yield f"generation {name}", json.loads(output)["samples"]


PARTS = {
  "losses": losses,
  "parameters": parameters,
  "tokens": tokens,
  "generation": generation,
}


def run(command: str, *arguments: str) -> str:
  """The output of a command of dpjax."""
  words = [sys.executable, "-m", "dpjax", command, *arguments]
  done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
  if done.returncode:
    sys.exit(f"{' '.join(words)}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
  return done.stdout


def digest(content: bytes) -> str:
  """The first half of a SHA-256."""
  return hashlib.sha256(content).hexdigest()[:32]


def documents(size: int) -> list[str]:
  """Texts of the Python manual, which comes with every Python."""
  topics, chosen, total = pydoc_data.topics.topics, [], 0
  for name in sorted(topics):
    text = re.sub(r"^--+$", "", topics[name], flags=re.MULTILINE).strip() + "\n"
    chosen.append(text)
    total += len(text)
    if total > size:
      break
  return chosen


def write_documents(path: pathlib.Path, size: int) -> pathlib.Path:
  """Writes a .txt whose documents are separated by a line `--`."""
  path.write_text("--\n".join(documents(size)), encoding="utf-8")
  return path


def write_sources(folder: pathlib.Path) -> dict[str, tuple[str, tuple[str, ...]]]:
  """A path of each type, and the settings to read it with."""
  import pyarrow as pa
  import pyarrow.parquet as pq

  folder.mkdir(parents=True)
  texts = documents(150_000)
  plain = folder / "plain.txt"
  plain.write_text("\n".join(texts), encoding="utf-8")
  records = "".join(json.dumps({"text": x, "n": i}) + "\n" for i, x in enumerate(texts))
  (folder / "records.jsonl").write_text(records, encoding="utf-8")
  (folder / "plain.txt.gz").write_bytes(gzip.compress(plain.read_bytes()))
  (folder / "plain.txt.bz2").write_bytes(bz2.compress(plain.read_bytes()))
  with pa.CompressedOutputStream(str(folder / "records.jsonl.zst"), "zstd") as out:
    out.write(records.encode())
  pq.write_table(pa.table({"text": texts}), folder / "table.parquet", row_group_size=7)
  splits, several = folder / "splits", folder / "several"
  splits.mkdir()
  several.mkdir()
  for name, part in (("train", texts[6:]), ("valid", texts[:3]), ("test", texts[3:6])):
    (splits / f"{name}.txt").write_text("\n".join(part), encoding="utf-8")
  for i in range(3):
    (several / f"{i}.txt").write_text("\n".join(texts[i::3]), encoding="utf-8")
  return {
    ".txt": (f"{plain}", ()),
    ".txt.gz": (f"{plain}.gz", ()),
    ".txt.bz2": (f"{plain}.bz2", ()),
    ".jsonl": (f"{folder / 'records.jsonl'}", ()),
    ".jsonl.zst": (f"{folder / 'records.jsonl.zst'}", ()),
    ".parquet": (f"{folder / 'table.parquet'}", ()),
    "folder of splits": (f"{splits}", ()),
    "folder of files": (f"{several}", ()),
    "pattern": (f"{several}/*.txt", ()),
    "separator": (f"{write_documents(folder / 'separated.txt', 150_000)}", ISOLATED),
  }


if __name__ == "__main__":
  main()
