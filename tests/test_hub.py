"""Models that go to a stand-in for the Hugging Face Hub, and come back."""

import json
import re

import chex
import numpy as np
import optax
import pytest

import dpjax
from tests import helpers, hub

pytestmark = pytest.mark.usefixtures("standard_promotion")
ADDRESS, NAME = "hf://me/small", "models/me/small"


@pytest.fixture(scope="module")
def server():
  with hub.running() as server:
    yield server


@pytest.fixture
def site(server, tmp_path, monkeypatch):
  server.clear()
  hub.use(monkeypatch, server.url, tmp_path / "cache", hub.TOKEN)
  return server


@pytest.fixture
def run(finished):
  return finished[1]


def exported(run, *words):
  return helpers.command("export", str(run.workdir), *words)


def test_a_model_comes_back_to_the_bit_with_a_card_that_the_hub_searches(run, site, capsys):
  from huggingface_hub import ModelCard

  assert not exported(run, ADDRESS, "--license=cc-by-4.0", "--private")
  assert f"{ADDRESS}: uploaded" in capsys.readouterr().out
  assert site.repositories[NAME]["private"]
  loaded = dpjax.load(ADDRESS)
  chex.assert_trees_all_equal(loaded.params, run.params)
  assert loaded.step == run.step and loaded.config == dpjax.load(run.workdir).config
  assert loaded.tokenizer.to_json() == run.tokenizer.to_json()
  card = ModelCard(site.files(NAME)[0]["README.md"].decode())
  about = card.data.to_dict()
  assert about["library_name"] == "dpjax" and about["license"] == "cc-by-4.0"
  assert {"jax", "dispatcher"} <= {*about["tags"]} and "datasets" not in about
  scores = json.loads((run.workdir / f"scores_test_{run.step}.json").read_text())["scores"]
  result = {x.metric_type: x.metric_value for x in card.data.eval_results}
  assert result == {name: x for name, x in scores.items() if x is not None}
  assert {x.dataset_split for x in card.data.eval_results} == {"test"}
  assert f'dpjax.load("{ADDRESS}")' in card.text and "# small\n" in card.text


def test_revisions(run, site):
  for words in ([ADDRESS], [ADDRESS, "--dtype=bfloat16"], [f"{ADDRESS}@draft", "--dtype=bfloat16"]):
    assert not exported(run, *words)
  commits = site.repositories[NAME]["branches"]
  assert [len(commits[branch]) for branch in ("main", "draft")] == [3, 4]
  first = {**commits["main"][1], "frozen.json": b"{}", "mine.txt": b"mine"}
  site.publish(NAME, first)
  commit = site.files(NAME)[1]
  chex.assert_trees_all_equal(dpjax.load(f"{ADDRESS}@{commit}").params, run.params)
  half = dpjax.load(f"{ADDRESS}@draft").params["logits"]["kernel"]
  assert (half != run.params["logits"]["kernel"]).any()
  # What another model needed goes, and what is not dpjax's stays.
  assert not exported(run, ADDRESS, "--dtype=bfloat16")
  assert {"mine.txt"} == {*site.files(NAME)[0]} - {*commits["main"][1]}


def test_loading_runs_no_code(run, site, tmp_path, monkeypatch):
  run.save(ADDRESS)
  config = json.loads(site.files(NAME)[0]["config.json"]) | {"plugins": ["of_the_author"]}
  del config["checksums"]
  own = {"of_the_author.py": b"raise SystemExit(7)", "data/__init__.py": b"1 / 0"}
  own |= {"weights.pkl": b"cbuiltins\nexit\n(i7\ntR.", "config.json": json.dumps(config).encode()}
  site.publish(NAME, own)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "of_the_author.py").write_text("raise SystemExit(7)")
  monkeypatch.setattr("pickle.load", lambda *_, **__: 1 / 0)
  loaded = dpjax.load(ADDRESS)
  chex.assert_trees_all_equal(loaded.params, run.params)
  asked = {x.rpartition("/")[2] for x in site.asked if "GET /me/small/resolve" in x}
  assert asked == {"config.json", "model.safetensors", "data.json", "tokenizer.json", "README.md"}


def test_without_a_network(run, site, monkeypatch, tmp_path):
  from huggingface_hub import constants, hf_hub_download

  run.save(ADDRESS)
  hf_hub_download("me/small", "config.json")
  with monkeypatch.context() as patch:
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    lacks = "the cache .* without model.safetensors, data/data.json.*; `hf download me/small` fetch"
    with pytest.raises(dpjax.UserError, match=lacks):
      dpjax.load(ADDRESS)
  dpjax.load(ADDRESS)
  site.asked.clear()
  with monkeypatch.context() as patch:
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    chex.assert_trees_all_equal(dpjax.load(ADDRESS).params, run.params)
  hub.use(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
  chex.assert_trees_all_equal(dpjax.load(ADDRESS).params, run.params)
  assert site.asked == []


ERRORS = helpers.cases("""
  hf://me/none      | -        | expected a repository that can be read, got .* Repository Not Found
  hf://me/small@v9  | -        | expected a repository that can be read, got .* Revision Not Found
  hf://me/small     | hf_wrong | got .*401.* Invalid credentials
  hf://me/small     | hf_narrow | got 403 Forbidden.* your token
  hf://me/hidden    | -        | got .* make sure you are authenticated
  hf://me/other     | -        | expected a model that dpjax exported, got .* without data/data.json
  hf://small        | -        | expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION, got neither
""")


@pytest.mark.parametrize("path, token, message", ERRORS)
def test_errors_are_one_line(run, site, monkeypatch, tmp_path, path, token, message):
  run.save(ADDRESS)
  files = site.files(NAME)[0]
  site.publish("models/me/hidden", files, private=True)
  site.publish("models/me/other", {x: files[x] for x in ("config.json", "model.safetensors")})
  hub.use(monkeypatch, site.url, tmp_path / "cache", token.strip("-"))
  said = helpers.command("generate", f"--workdir={path}")
  assert re.match(f"{path}: .*{message}", said) and "\n" not in said


def test_errors_without_a_network_and_of_uploads(run, site, monkeypatch, tmp_path):
  site.publish(NAME, {})
  said = exported(run, ADDRESS, "--private")
  assert said == f"--private: expected a private repository, got {ADDRESS}, which is public"
  assert site.files(NAME)[0] == {}
  said = exported(run, str(tmp_path / "out"), "--private")
  assert said.startswith("--private: expected a folder hf://OWNER/NAME with it, got")
  assert exported(run, ADDRESS, "--license=my own").endswith("in README.md. - no such licence")
  hub.use(monkeypatch, site.url, tmp_path / "cache")
  said = exported(run, ADDRESS)
  assert said.startswith(f"{ADDRESS}: expected a repository that can be written, got ")
  hub.use(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
  for said in (exported(run, ADDRESS), helpers.command("evaluate", f"--workdir={ADDRESS}")):
    assert said.startswith(f"{ADDRESS}: expected a repository") and "\n" not in said


@pytest.mark.slow
def test_training_begins_with_a_model_of_the_hub(run, site, tmp_path):
  run.save(ADDRESS)
  config = dpjax.load(run.workdir).config
  config.train.update(num_steps=1, eval_every_steps=1, init_from=ADDRESS)
  config.data.tokenizer.file = ADDRESS
  new, _ = dpjax.train(config, tmp_path / "new", optimizer=optax.set_to_zero())
  chex.assert_trees_all_equal(new.params, run.params)
  assert np.array_equal(new.tokens("train"), run.tokens("train"))
