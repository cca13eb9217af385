"""The adapter for lm-evaluation-harness in examples/lm_eval; lm-eval is no dependency."""

import importlib
import importlib.util
import json
import sys
import types

import jax
import numpy as np
import pytest

from tests import helpers

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.filterwarnings("default")]

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_text: {text}
doc_to_target: {target}
{more}
metric_list:
  - metric: {metric}
"""


def rolling_windows(token_list, prefix_token, max_seq_len, context_len):
  """As the harness's: inputs and targets; all but the first have as many inputs as fit."""
  assert context_len == 1
  ids = [prefix_token, *token_list]
  for begin in range(0, len(token_list), max_seq_len):
    end = min(begin + max_seq_len, len(token_list))
    yield ids[max(0, end - max_seq_len) : end], ids[begin + 1 : end + 1]


def disjoint(pair):
  return pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]


def harness():
  """What the example takes of lm-eval, where that is not installed."""
  parts = {
    "lm_eval": dict(evaluator=None, tasks=None),
    "lm_eval.api": {},
    "lm_eval.api.instance": dict(Instance=object),
    "lm_eval.api.model": dict(LM=object),
    "lm_eval.utils": dict(get_rolling_token_windows=rolling_windows, make_disjoint_window=disjoint),
  }
  modules = {name: types.ModuleType(name) for name in parts}
  for name, module in modules.items():
    vars(module).update(parts[name])
  return modules


@pytest.fixture(scope="module")
def dpjax_lm():
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(helpers.ROOT / "examples/lm_eval")
    for name, module in ({} if HAS_HARNESS else harness()).items():
      patch.setitem(sys.modules, name, module)
    yield importlib.import_module("dpjax_lm")
    del sys.modules["dpjax_lm"]


@pytest.fixture(scope="module")
def model(dpjax_lm, finished):
  return dpjax_lm.DpjaxLM(str(finished[0]), batch_size=3)


def requests(*pairs):
  return [types.SimpleNamespace(args=pair) for pair in pairs]


@pytest.mark.parametrize("times, more", [(1, -1), (1, 0), (1, 1), (3, 5)])
def test_each_token_of_a_text_is_scored_after_the_one_before_it(model, times, more):
  run, window = model.run, model.run.window
  text = ("the cat sat on a mat " * window)[: times * window + more]
  ids = np.array([run.tokenizer.start_id, *run.tokenizer.encode(text)], np.int32)
  nats = 0.0
  for begin in range(1, len(ids), window):
    end = min(begin + window, len(ids))
    before = ids[max(0, end - 1 - window) : end - 1]
    logits = run.model.apply({"params": run.params}, before[None]).logits[0]
    logs = np.asarray(jax.nn.log_softmax(logits.astype(np.float32)))[begin - end :]
    nats += logs[np.arange(end - begin), ids[begin:end]].sum()
  assert model.loglikelihood_rolling(requests((text,))) == [pytest.approx(nats, rel=1e-5)]


def test_log_likelihoods_are_those_of_the_model(model):
  run = model.run
  pairs = [("the cat", " sat on"), ("", "a mat"), ("a dog and the cat sat on ", "a"), ("a", " cat")]
  found = model.loglikelihood(requests(*pairs))
  for (context, continuation), (nats, is_greedy) in zip(pairs, found, strict=True):
    before, after = run.tokenizer.encode_pair(context, continuation)
    ids = np.concatenate([[run.tokenizer.start_id], before, after]).astype(np.int32)
    ids = ids[-run.window - 1 :]
    logits = run.model.apply({"params": run.params}, ids[None, :-1]).logits[0]
    logs = np.asarray(jax.nn.log_softmax(logits.astype(np.float32)))[-len(after) :]
    assert nats == pytest.approx(logs[np.arange(len(after)), after].sum(), rel=1e-5)
    assert is_greedy == (logs.argmax(1) == after).all()


def test_a_continuation_beyond_the_window_is_refused(model):
  with pytest.raises(ValueError, match="continuation: expected 1 to"):
    model.loglikelihood(requests(("a", " cat" * 400)))


def test_texts_end_before_a_stop(model):
  (whole,) = model.generate_until(requests(("the cat", {"max_gen_toks": 20})))
  assert whole == model.run.generate("the cat", length=20, temperature=0.0)[0]
  # What the vocabulary has not is left out, as is the beginning of a long context.
  window = model.run.window
  (text,) = model.generate_until(requests(("\u2603" + "the cat" * window, {"max_gen_toks": 4})))
  context = ("the cat" * window)[-window:]
  assert text == model.run.generate(context, length=4, temperature=0.0)[0]
  stop = whole[5:7]
  (text,) = model.generate_until(requests(("the cat", {"max_gen_toks": 20, "until": [stop]})))
  assert text == whole[: whole.index(stop)]


@pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is no dependency")
def test_tasks_of_a_local_file_are_evaluated(dpjax_lm, finished, tmp_path, capsys):
  file = tmp_path / "pairs.jsonl"
  # An odd number: the wrong order of two sentences gives another share.
  rows = [("the cat", " sat", " dog"), ("a", " mat", " on"), ("in its", " hat", " no")]
  # Whole sentences, too, as BLiMP has them.
  names = "context", "good", "bad", "sentence_good", "sentence_bad"
  rows = [(context, *ends, *(context + end for end in ends)) for context, *ends in rows]
  lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
  file.write_text("\n".join(lines) + "\n")
  keys = "name kind text target more metric".split()
  choices = 'doc_to_choice: "{{[good, bad]}}"'
  sentences = 'doc_to_choice: "{{[sentence_good, sentence_bad]}}"'
  for row in (
    ("pairs", "multiple_choice", '"{{context}}"', "0", choices, "acc"),
    ("minimal", "multiple_choice", '""', "0", sentences, "acc"),
    ("rolling", "loglikelihood_rolling", '""', '"{{context}}"', "", "bits_per_byte"),
  ):
    task = TASK.format(file=file, **dict(zip(keys, row, strict=True)))
    (tmp_path / f"{row[0]}.yaml").write_text(task)
  folder, run, _ = finished
  dpjax_lm.main([str(folder), "--tasks=pairs,minimal,rolling", f"--include_path={tmp_path}"])
  printed = capsys.readouterr().out
  found = json.loads(printed[printed.index("{") :])
  for name, pairs in (
    ("pairs", [(row[0], end) for row in rows for end in row[1:3]]),
    ("minimal", [("", sentence) for row in rows for sentence in row[3:]]),
  ):
    nats = [x for x, _ in dpjax_lm.DpjaxLM(run).loglikelihood(requests(*pairs))]
    assert found[name]["acc,none"] == np.mean(np.greater(nats[::2], nats[1::2]))
  contexts = [context for context, *_ in rows]
  nats = [run.score(x)["nats_per_token"] * len(run.tokenizer.encode(x)) for x in contexts]
  bits = sum(nats) / sum(map(len, contexts)) / np.log(2)
  assert found["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
