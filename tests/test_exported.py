"""Runs that leave their place: moved without their data, exported, and loaded again."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import dpjax
from dpjax import files
from dpjax.commands import export
from dpjax.config import registry
from dpjax.models import build
from dpjax.runs import model_card, numpy_model, numpy_program, run_files
from tests import helpers

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def run(finished):
  return finished[1]


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory):
  """The folder of an export of it, which must not change."""
  run.save(folder := tmp_path_factory.mktemp("saved") / "out")
  return folder


@pytest.fixture
def out(saved, tmp_path):
  """A copy of it."""
  return Path(shutil.copytree(saved, tmp_path / "out"))


@pytest.fixture(scope="module")
def unigram(text, tmp_path_factory):
  """A run in shards, whose boundaries need a model of their own."""
  config = helpers.pooled_config(text, "unigram", num_steps=2, eval_every_steps=2)
  config.train.param_sharding = "fsdp"
  return dpjax.train(config, tmp_path_factory.mktemp("runs") / "run")[0]


@pytest.mark.parametrize("variant", ["run", pytest.param("unigram", marks=pytest.mark.slow)])
def test_an_exported_run_is_the_run_to_the_bit(variant, request, tmp_path, capsys, monkeypatch):
  run = request.getfixturevalue(variant)
  (tmp_path / "out").mkdir()
  before = (tmp_path / "out").stat().st_ino  # It may be somebody's current folder, or a mount.
  export.main([str(run.workdir), str(tmp_path / "out")])
  assert "MiB" in capsys.readouterr().out and (tmp_path / "out").stat().st_ino == before
  shutil.move(tmp_path / "out", tmp_path / "elsewhere")
  loaded = dpjax.load(tmp_path / "elsewhere")
  assert loaded.step == run.step and loaded.config == dpjax.load(run.workdir).config
  assert dpjax.config.load(str(tmp_path / "elsewhere")) == dpjax.config.load(str(run.workdir))
  chex.assert_trees_all_equal(loaded.params, run.params)
  # The tokens are found in data_dir.
  assert loaded.score_split("test") == run.score_split("test")
  flat = load_file(tmp_path / "elsewhere/model.safetensors")
  np.testing.assert_array_equal(flat["logits.kernel"], run.params["logits"]["kernel"])
  card = (tmp_path / "elsewhere/README.md").read_text()
  assert f"for {run.step} updates" in card and "| test | perplexity |" in card
  code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
  monkeypatch.chdir(tmp_path)
  exec(code.replace('"out"', '"elsewhere"').replace('"..."', '"the "').replace("100", "5"), {})
  modes = {path.stat().st_mode for path in (tmp_path / "elsewhere").iterdir() if path.is_file()}
  assert len(modes) == 1
  assert not [*(tmp_path / "elsewhere").rglob("*.bin"), *tmp_path.glob("*.partial")]


def test_scores_go_into_an_exported_folder_only_on_request(run, out, tmp_path, capsys):
  before = sorted(out.rglob("*"))
  for more in ([], [f"--out={tmp_path / 'scores'}"]):
    assert not helpers.command("evaluate", f"--workdir={out}", *more)
  assert sorted(out.rglob("*")) == before
  assert [x.name for x in (tmp_path / "scores").iterdir()] == [f"scores_test_{run.step}.json"]


def test_bfloat16_halves_it(run, saved, tmp_path):
  run.save(tmp_path / "half", dtype="bfloat16")
  sizes = [(x / "model.safetensors").stat().st_size for x in (saved, tmp_path / "half")]
  assert 0.5 < sizes[1] / sizes[0] < 0.7
  loaded = dpjax.load(tmp_path / "half")
  loaded.save(tmp_path / "again")
  copies = [(tmp_path / x / "model.safetensors").read_bytes() for x in ("half", "again")]
  assert copies[0] == copies[1]
  for x, y in zip(*(jax.tree.leaves(r.params) for r in (loaded, run)), strict=True):
    assert x.dtype == jnp.float32
    np.testing.assert_array_equal(x, y.astype(jnp.bfloat16).astype(jnp.float32))


def test_training_leaves_it_unchanged(run, out):
  before = {x: x.read_bytes() for x in out.rglob("*") if x.is_file()}
  wider = run.config.copy_and_resolve_references()
  wider.model.width = 24
  for config in (run.config, wider):
    with pytest.raises(dpjax.UserError, match="^workdir: .* exported one; .*init_from"):
      dpjax.train(config, out)
  assert {x: x.read_bytes() for x in out.rglob("*") if x.is_file()} == before


def test_what_is_wrong(run, out, tmp_path):
  with pytest.raises(dpjax.UserError, match="^dtype: expected one of float32, bfloat16"):
    run.save(tmp_path / "other", dtype="float16")
  with pytest.raises(dpjax.UserError, match="^folder: expected a new or an empty one"):
    run.save(out)
  with pytest.raises(dpjax.UserError, match="^step: expected None or .* got 77"):
    dpjax.load(out, 77)
  for words in ([tmp_path / "none", "--dtype="], [run.workdir, "--dtype=int8"]):
    with pytest.raises(SystemExit):
      export.main([str(words[0]), str(tmp_path / "new"), words[1]])
  assert not (tmp_path / "new").exists()


ENDED = """
import os, shutil, sys, types
from pathlib import Path
from dpjax.runs import export
saved, folder, run = map(Path, sys.argv[1:4])

def end_after(count, folder):
  def step(work, *paths):
    nonlocal count
    count -= 1
    if count < 0:  # as by SIGKILL, unless the process is to live on
      print(os.getpid(), flush=True)
      os._exit(9) if folder.name != "living" else sys.stdin.read()
    return work(*paths)

  def write(_, partial, *rest):
    for path in saved.iterdir():
      step(shutil.copytree if path.is_dir() else shutil.copy, path, partial / path.name)

  export._write, move = write, os.replace
  os.replace = lambda *paths: step(move, *paths)  # into a folder that exists
  export.save(types.SimpleNamespace(workdir=run), folder, "float32")

for name in sys.argv[4:]:
  if not os.fork():
    exists = name.startswith("empty")
    exists and (folder / name).mkdir()
    end_after(int(name[-1]), folder / name)
    os._exit(0)
  os.wait()
print("living", flush=True)
end_after(2, folder / "living")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system that cannot copy a process")
def test_the_next_export_removes_what_a_killed_one_left_but_not_of_a_living_one(
  run, saved, tmp_path
):
  # After some copies, or before some of the five moves into the empty folder.
  names = "new0 new2 new5 empty0 empty3 empty6 empty8 empty9".split()
  words = [sys.executable, "-c", ENDED, saved, tmp_path, run.workdir, *names]
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  with subprocess.Popen(words, env=helpers.environment(), **pipes) as process:
    while (line := process.stdout.readline()) != "living\n":
      assert line, "the process has failed"
    process.stdout.readline()
    (living,) = tmp_path.glob("living.*.partial")
    for path in map(tmp_path.joinpath, names):
      run.save(path)
      inside = [{x.relative_to(y) for x in y.rglob("*")} for y in (saved, path)]
      assert inside[0] == inside[1], path
    assert {*tmp_path.glob("*.partial")} == {living} and len([*tmp_path.glob("*.tmp")]) == 1
    process.kill()


def test_a_model_made_in_python_is_not_in_numpy(run, tmp_path):
  other = build.build_model({**run.config.model, "activation": "gelu"})
  dataclasses.replace(run, model=other).save(tmp_path / "out")
  card = (tmp_path / "out/README.md").read_text()
  assert "lacks the code of its class" in card and "no program of the model in NumPy" in card
  assert not (tmp_path / "out/numpy_model.py").exists()


def test_a_component_without_a_function_in_numpy_is_exported_without_the_program(
  run, tmp_path, monkeypatch, caplog
):
  name = run.config.model.mixer.name
  monkeypatch.delitem(numpy_model.MIXERS, name)
  run.save(tmp_path / "out")
  assert f"out: exported without numpy_model.py, which does not support {name}" in caplog.text
  card = (tmp_path / "out/README.md").read_text()
  assert "no program of the model in NumPy" in card and "lacks the code" not in card
  assert "numpy_model.py" not in card and not (tmp_path / "out/numpy_model.py").exists()
  chex.assert_trees_all_equal(dpjax.load(tmp_path / "out").params, run.params)


def test_a_component_is_not_taken_for_another_of_the_same_name(run):
  mine = run.config.model.copy_and_resolve_references()
  for name in ("mine", "fixed"):  # "fixed": boundaries of dpjax
    mine.mixer.name = name
    for models in ([mine], [run.config.model, mine]):  # as the model, or that of its boundaries
      assert model_card.foreign_components(models) == [name]
      assert numpy_program.missing(models) == [name]
  assert numpy_program.missing([run.config.model]) == []


def without_checksums(folder):
  """Makes an export like those of before there were any, for files that a test changes."""
  config = json.loads((folder / "config.json").read_text())
  config.pop("checksums", None)
  (folder / "config.json").write_text(json.dumps(config))


def with_infinity(content):
  arrays = safetensors.numpy.load(content)
  arrays["layers.blocks_0.mixer.out.kernel"][1, 2, 3] = np.inf
  return safetensors.numpy.save(arrays, {"step": "12"})


# A file, what it becomes, and what is said of it.
DAMAGED = [
  ("config.json", lambda _: b"[" * 100_000, "got: "),
  (
    "config.json",
    lambda content: content.replace(b'"width": 12', b'"width": 24'),
    r"is \(18, 12\), in the model \(18, 24\)",
  ),
  ("data/data.json", lambda _: b"[]", "data.json: expected "),
  ("data/tokenizer.json", lambda _: b"{", "tokenizer.json: expected "),
  ("model.safetensors", lambda _: b"x" * 500, "expected a complete file of safetensors"),
  ("model.safetensors", lambda content: content.replace(b'"12"', b'"-7"'), "got step -7"),
  (
    "model.safetensors",
    with_infinity,
    "expected finite .* infinity in layers.blocks_0.mixer.out.kernel",
  ),
]


@pytest.mark.parametrize("name, change, message", DAMAGED)
def test_a_damaged_file_without_checksum_is_named(out, name, change, message):
  without_checksums(out)
  (out / name).write_bytes(change((out / name).read_bytes()))
  with pytest.raises(dpjax.UserError, match=message):
    dpjax.load(out)


def test_a_file_of_another_model_is_refused_before_its_arrays_are_read(run, out, monkeypatch):
  arrays = load_file(out / "model.safetensors")
  arrays["logits.kernel"] = arrays["logits.kernel"][:, 1:]
  save_file(arrays, out / "model.safetensors", {"step": "12"})
  read = []
  checksum = files.checksum
  monkeypatch.setattr(files, "checksum", lambda path: read.append(path.name) or checksum(path))
  with pytest.raises(
    dpjax.UserError, match=r"logits.kernel is \(12, 17\), in the model \(12, 18\)"
  ):
    dpjax.load(out)
  with pytest.raises(dpjax.UserError, match="expected None or 12 of an exported run, got 7"):
    dpjax.load(out, 7)
  assert "model.safetensors" not in read


def flip_a_bit(content):
  i = len(content) * 2 // 5
  return content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :]


@pytest.mark.parametrize(
  "name", ["config.json", "model.safetensors", "data/data.json", "data/tokenizer.json"]
)
def test_a_changed_file_is_never_read_as_if_nothing_were(name, out):
  before = (out / name).read_bytes()
  for after in (flip_a_bit(before), before[: len(before) // 2], before.replace(b"a", b"e"), None):
    (out / name).unlink()
    if after is not None:
      (out / name).write_bytes(after)
    with pytest.raises(dpjax.UserError, match=f"{name}|workdir: "):
      dpjax.load(out)
    if name.startswith("data"):
      with pytest.raises(dpjax.UserError, match=name):
        run_files.find(out)  # only for its tokenizer


def test_scores_that_are_not_finite_end_with_status_1(
  run, out, text, tmp_path, monkeypatch, capsys
):
  without_checksums(out)
  path = out / "model.safetensors"
  arrays = load_file(path)
  arrays["logits.kernel"] *= 1e38
  save_file(arrays, path, {"step": "12"})
  for name, more in (("test", "--split=test"), (text, f"--text={text}")):
    message = helpers.command("evaluate", f"--workdir={out}", more)
    assert re.match(f"{name}: expected finite scores, got (nan|inf) nats per token$", str(message))
    assert "bits per character" in capsys.readouterr().out
  scores = dict.fromkeys(run.score("a cat"), np.nan)
  monkeypatch.setattr("dpjax.runs.train", lambda *_, **__: (run, scores))
  message = helpers.command("train", "--config=quickstart", f"--workdir={tmp_path / 'new'}")
  assert message == "test: expected finite scores, got nan nats per token"


def test_a_file_that_holds_no_scores_is_none_of_the_cards(run, tmp_path):
  shutil.copytree(run.workdir, tmp_path / "run", symlinks=True)
  scores = [{"split": 3, "scores": {"a": 1.5}}, {"split": "test", "scores": [3]}, []]
  scores += [{"split": "test", "scores": {"b": 2.5, "c": "x", "d": float("nan")}}]
  for i, content in enumerate(scores):
    (tmp_path / f"run/scores_{i}_{run.step}.json").write_text(json.dumps(content))
  dataclasses.replace(run, workdir=tmp_path / "run").save(tmp_path / "out")
  card = (tmp_path / "out/README.md").read_text()
  assert "| test | b | 2.5 |" in card and not any(f"| {x} |" in card for x in "acd")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dispatcher", "we", "whitespace", "routing"])
def test_a_trained_model_of_the_clone_scores_and_generates(name, tmp_path):
  folder = helpers.ROOT / f"models/{name}-books"
  files = [path for path in folder.rglob("*") if path.is_file()]
  assert sum(path.stat().st_size for path in files) < 5_000_000
  for path in ("config.json", "data/data.json"):
    assert not re.search(r': "[^"]*[/\\\\][^"]*"', (folder / path).read_text()), (
      "a path of a machine"
    )
  run = dpjax.load(folder)
  text = "Once upon a time there was a little girl who lived with her mother in the wood. "
  assert run.score(text)["bits_per_character"] < 2.2
  assert run.score(text[::-1])["bits_per_character"] > 3
  (result,) = run.generate(text, length=20, temperature=0)
  assert len(result) >= 20
  tokens = run.tokenizer.encode(text)
  logits = run.model.apply({"params": run.params}, tokens[None]).logits[0]
  run.save(tmp_path / "out")  # by today's names of parameters
  np.testing.assert_allclose(numpy_model.load(tmp_path / "out")(tokens), logits, atol=1e-4)


TODAY = dict(
  norm_position="pre",
  norm_type="rms_norm",
  activation="swiglu",
  tie_embeddings=True,
  use_bias=False,
)
OTHER = dict(norm_position="pre", positions="learned", activation="gelu", norm_epsilon=0.3)
PAPER = dict(norm_position="post", positions="sinusoidal", activation="relu")


def described(settings, boundaries=None, middle=None, **mixer) -> dict:
  """A model's settings of small sizes that differ, for the model in NumPy."""
  model = dict(dpjax.config.default_model())
  model |= dict(vocab_size=11, width=6, feed_forward_width=10, num_layers=3, max_length=29)
  model |= dict(positions="none") | settings
  names = mixer.pop("name")
  several = [names] if isinstance(names, str) else names
  sections = tuple(helpers.component(registry.mixers, name, **mixer) for name in several)
  model["mixer"] = sections[0] if len(sections) == 1 else sections
  if boundaries:
    model["boundaries"] = dpjax.config.boundaries(**boundaries)
    model["first"] = {"num_layers": 2, "mixer": dpjax.config.mixer("attention")}
    model["last"], model["middle"] = {"num_layers": 1, "mixer": None}, middle
  return model


IDS = dict(space_ids=(2, 7, 9))
ROUTING = dict(name="routing")
IN_TURN = ("short_convolution", "relative_attention", "local_attention")
MODELS = {
  "attention": described(TODAY, name="attention", num_heads=3, rotary_base=100.0),
  "local": described(TODAY, name="local_attention", num_heads=3, window=5, rotary_base=100.0),
  "in turn": described(PAPER, name=IN_TURN, num_heads=3, window=5),
  "extractors": described(
    OTHER, name=("we", "she", "me"), output_projection=False, adjustment=False
  ),
  "fixed": described(
    PAPER, dict(name="fixed", shortening_factor=3), name="dispatcher_multihead", num_heads=2
  ),
  "sampled": described(TODAY, dict(name="fixed", offset=0, pooling="last"), name="he"),
  "whitespace": described(OTHER, dict(name="whitespace", **IDS), name="relative_attention"),
  "spacebyte": described(TODAY, dict(name="spacebyte", **IDS, end_ids=(2, 5)), name="dispatcher"),
  "unigram": described(PAPER, dict(name="unigram"), name="me"),
  "routing": described(TODAY, ROUTING, name="dispatcher", num_heads=3),
  "stages": described(
    OTHER, ROUTING, dpjax.config.middle(dpjax.config.boundaries("fixed"), width=4), name="we"
  ),
  "padded": described(
    TODAY | dict(stack_norms=True, middle_resize="padding", residual_dtype="float32"),
    ROUTING,
    dpjax.config.middle(dpjax.config.boundaries("fixed"), width=8, feed_forward_width=9),
    **dict(name=("attention", "mamba2"), num_heads=1, rotary_base=100.0, rotary_features=4),
    **dict(state_width=5, head_width=4, has_feed_forward=False),
  ),
  "entropy": described(
    PAPER, dict(name="entropy_threshold", run="a", rule="combined", theta=1.8), name="me"
  ),
}
BY_DEFAULT = ("in turn", "whitespace", "routing")


@pytest.mark.parametrize("name", [helpers.slow_unless(x in BY_DEFAULT, x) for x in MODELS])
def test_the_numpy_model_gives_the_logits(name, tmp_path):
  model, frozen = MODELS[name], None
  if model["boundaries"]["name"] == "entropy_threshold":
    frozen = MODELS["whitespace"]
    (tmp_path / "frozen.json").write_text(json.dumps(frozen, default=dict))
  inner = build.build_model(frozen) if frozen else None
  built = build.build_model(model, inner)
  params = helpers.draw_params(built, 4, 0.4)
  tokens = np.random.default_rng(1).integers(11, size=29)
  output = jax.jit(built.apply)({"params": params}, tokens[None])
  if output.stages:
    assert 3 < output.stages[0].boundaries.sum() < 29
  flat = {name: np.asarray(x) for name, x in flatten_dict(params, sep=".").items()}
  save_file(flat, tmp_path / "model.safetensors")
  settings = {**model, "boundaries": {**model["boundaries"], "space_ids": ()}}
  (tmp_path / "config.json").write_text(json.dumps({"model": settings}, default=dict))
  (tmp_path / "boundaries.json").write_text(json.dumps(dict(model["boundaries"])))
  logits = numpy_model.load(tmp_path)(tokens)
  np.testing.assert_allclose(logits, output.logits[0], rtol=1e-4, atol=1e-4)


def test_the_numpy_model_runs_alone(run, tmp_path):
  for dtype in ("float32", "bfloat16"):
    run.save(tmp_path / dtype, dtype=dtype)
    logits = numpy_model.load(tmp_path / dtype)([1, 2])
    loaded = dpjax.load(tmp_path / dtype)
    expected = jax.jit(loaded.model.apply)({"params": loaded.params}, np.array([[1, 2]])).logits
    np.testing.assert_allclose(logits, expected[0], atol=1e-4)
  size, window = run.tokenizer.vocab_size, run.window
  model = numpy_model.load(tmp_path / "float32")
  for tokens, message in (
    ([1, -1], f"tokens: expected ids in 0 .. {size - 1}, got -1"),
    ([size], f"tokens: expected ids in 0 .. {size - 1}, got {size}"),
    ([0.5], f"tokens: expected ids in 0 .. {size - 1}, got 0.5"),
    ([], rf"tokens: expected \[T\] with 1 <= T <= {window}, got the shape \(0,\)"),
    ([0] * (window + 1), rf"tokens: .* got the shape \({window + 1},\)"),
  ):
    with pytest.raises(ValueError, match=message):
      model(tokens)
  card = (tmp_path / "float32/README.md").read_text()
  assert "The id of a character is its place, from 0, in `characters`" in card
  assert f"; {size - 1} is every other character" in card
  # With NumPy, and without anything else that is installed.
  code = "import numpy, runpy, sys; sys.path = [x for x in sys.path if 'site-packages' not in x]"
  code += "; sys.argv = ['numpy_model.py', '.', '1', '2']"
  code += "; runpy.run_path('numpy_model.py', run_name='__main__')"
  words = [sys.executable, "-c", code]
  done = subprocess.run(words, cwd=tmp_path / "bfloat16", capture_output=True, text=True)
  assert done.stdout.split()[0] == str(logits[-1].argmax()), done.stderr
  words[-1] = words[-1].replace("'2'", "'-2'")
  done = subprocess.run(words, cwd=tmp_path / "bfloat16", capture_output=True, text=True)
  assert done.returncode == 1 and done.stderr.startswith("tokens: expected ids in 0 .. ")
