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

SPEC = importlib.util.find_spec("lm_eval")
HAS_HARNESS = SPEC is not None and SPEC.origin is not None  # no folder of that name
pytestmark = [pytest.mark.usefixtures("standard_promotion"), pytest.mark.filterwarnings("default")]

TASK = """\
task: pairs
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: 0
doc_to_choice: "{{{{[good, bad]}}}}"
metric_list:
  - metric: acc
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


@pytest.fixture(scope="module")
def score(model):
  """(before, after) -> the log-likelihood of tokens after others, and whether they are greedy."""
  run = model.run

  @jax.jit
  def apply(tokens):
    return jax.nn.log_softmax(run.model.apply({"params": run.params}, tokens).logits[0])

  def score(before, after):
    ids = np.concatenate([before, after])[-run.window - 1 : -1]
    padded = np.pad(ids, (0, run.window - len(ids))).astype(np.int32)
    logs = np.asarray(apply(padded[None]))[len(ids) - len(after) : len(ids)]
    return logs[np.arange(len(after)), after].sum(), (logs.argmax(1) == after).all()

  return score


def test_each_token_of_a_text_is_scored_after_the_one_before_it(model, score):
  run, window = model.run, model.run.window
  # One window but a token, one, one and a token, and more.
  texts = [("the cat sat on a mat " * window)[: window + more] for more in (-1, 0, 1, 2 * window)]
  for text, found in zip(texts, model.loglikelihood_rolling(requests(*zip(texts))), strict=True):
    ids, nats = np.array([run.tokenizer.start_id, *run.tokenizer.encode(text)]), 0.0
    for begin in range(1, len(ids), window):
      end = min(begin + window, len(ids))
      nats += score(ids[max(0, end - 1 - window) : begin], ids[begin:end])[0]
    assert found == pytest.approx(nats, rel=1e-5)


def test_log_likelihoods_are_those_of_the_model(model, score):
  tokenizer = model.run.tokenizer
  pairs = [("the cat", " sat on"), ("", "a mat"), ("a dog and the cat sat on ", "a"), ("a", " cat")]
  for pair, (nats, is_greedy) in zip(pairs, model.loglikelihood(requests(*pairs)), strict=True):
    before, after = tokenizer.encode_pair(*pair)
    expected, greedy = score([tokenizer.start_id, *before], after)
    assert nats == pytest.approx(expected, rel=1e-5) and is_greedy == greedy


def test_a_continuation_beyond_the_window_is_refused(model):
  with pytest.raises(ValueError, match="continuation: expected 1 to"):
    model.loglikelihood(requests(("a", " cat" * 400)))


def test_texts_end_before_a_stop(model):
  window, settings = model.run.window, {"max_gen_toks": 8}
  # What the vocabulary has not is left out, as is the beginning of a long context.
  long = "the cat" * window
  contexts = "the cat", "\u2603" + long, long[-window:]
  whole, other, same = model.generate_until(requests(*((x, settings) for x in contexts)))
  assert whole == model.run.generate("the cat", length=8, temperature=0.0)[0] and other == same
  stop = whole[5:7]
  (text,) = model.generate_until(requests(("the cat", settings | {"until": [stop]})))
  assert text == whole[: whole.index(stop)]


@pytest.mark.skipif(not HAS_HARNESS, reason="lm-eval is no dependency")
def test_a_task_of_a_local_file_is_evaluated(dpjax_lm, finished, tmp_path, capsys):
  file, keys = tmp_path / "pairs.jsonl", ("context", "good", "bad")
  # An odd number: the wrong order of two sentences gives another share.
  rows = [("the cat", " sat", " dog"), ("a", " mat", " on"), ("in its", " hat", " no")]
  file.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
  (tmp_path / "pairs.yaml").write_text(TASK.format(file=file))
  folder, run, _ = finished
  dpjax_lm.main([str(folder), "--tasks=pairs", f"--include_path={tmp_path}"])
  printed = capsys.readouterr().out
  found = json.loads(printed[printed.index("{") :])
  pairs = [(context, end) for context, *ends in rows for end in ends]
  nats = [x for x, _ in dpjax_lm.DpjaxLM(run).loglikelihood(requests(*pairs))]
  assert found["pairs"]["acc,none"] == np.mean(np.greater(nats[::2], nats[1::2]))
