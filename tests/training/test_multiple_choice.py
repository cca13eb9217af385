"""Likelihoods of choices behind their contexts, beside a loop in float64."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest

from dpjax.data import Question
from dpjax.models.build import build_model
from dpjax.text.tokens import Bytes, Tokenizer, train_tokenizer
from dpjax.training import multiple_choice, sharding
from dpjax.training.step import jit_row_step
from tests import helpers

QUESTIONS = [
  Question("the cat", ("sat on a mat", "saw", "rat"), 1),
  # Longer than the window of 19, and cut from the left.
  Question("the cat sat on a mat and saw no rat but", ("one bat", "hat the on"), 0),
  Question("", ("a mat", " its", "hat and no rat", "the"), 3),
  Question("no rat ", ("but one", "\nand"), 0),
  Question("as long as the win", ("cat sat on a mat b", "x" * 18), 1),
]


def plain(run, question):
  """The log-likelihood of each choice, one at a time, with no padding."""
  apply = jax.jit(lambda ids: run.model.apply({"params": run.params}, ids).logits)
  found = []
  for choice in question.choices:
    context = question.context.rstrip()
    between = question.context[len(context) :]
    if context and not between and not choice[0].isspace():
      between = " "
    # Characters are tokens here, so that the joint is plain.
    ids = [run.tokenizer.start_id, *run.tokenizer.encode(context + between + choice)]
    count = len(between + choice)
    ids = np.array(ids[-run.window - 1 :], np.int32)
    logits = np.asarray(apply(ids[None, :-1]), np.float64)[0]
    nats = 0.0
    for place in range(len(ids) - 1 - count, len(ids) - 1):
      exps = [math.exp(x) for x in logits[place]]
      nats += math.log(exps[ids[place + 1]] / sum(exps))
    found.append(nats)
  return found


def test_likelihoods_are_those_of_a_loop(finished):
  _, run, _ = finished
  scorer = run._scorer
  rows = multiple_choice.make_rows(run.tokenizer, QUESTIONS, run.window)
  expected = [nats for question in QUESTIONS for nats in plain(run, question)]
  size = dict(window=run.window, batch_size=8, pad_id=2)
  found = multiple_choice.log_likelihoods(scorer._row_step, run.params, rows, scorer._mesh, **size)
  np.testing.assert_allclose(found, expected, rtol=2e-6)
  scores = run.choose(QUESTIONS)
  assert scores == multiple_choice.accuracies(np.array(expected), QUESTIONS)


def test_few_lengths_are_compiled():
  rows = [multiple_choice.Row(np.arange(n), np.arange(n), 1) for n in range(19, 0, -1)]
  batches = [*multiple_choice._batches(rows, 19, 4)]
  assert {length for length, _ in batches} == {3, 5, 10, 19}
  assert sorted(i for _, numbers in batches for i in numbers) == [*range(len(rows))]
  assert all(len(rows[i].inputs) <= length for length, numbers in batches for i in numbers)
  assert max(len(numbers) for _, numbers in batches) == 4


@pytest.mark.slow
def test_a_pooled_model_too(text):
  """What is padded behind a row adds nothing to it."""
  config = helpers.pooled_config(text, "fixed").model
  config.vocab_size = 11
  config.dropout = 0.0
  model = build_model(config)
  ids = np.array([[3, 1, 4, 1, 5, 9, 2]], np.int32)
  params = model.init(jax.random.key(0), ids)["params"]
  mesh = sharding.make_mesh()
  rows = [multiple_choice.Row(ids[0, :n], ids[0, 1 : n + 1], n - 2) for n in (3, 6)]
  step = jit_row_step(model, mesh)
  found = multiple_choice.log_likelihoods(step, params, rows, mesh, window=13, batch_size=16)
  for row, nats in zip(rows, found, strict=True):
    logits = model.apply({"params": params}, row.inputs[None]).logits
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)[0]
    places = range(len(row.targets) - row.count, len(row.targets))
    assert nats == pytest.approx(sum(log_p[t, row.targets[t]] for t in places), rel=1e-5)


def test_rows():
  context, choice = np.array([3, 1, 4]), np.array([1, 5])
  for window, inputs, targets in (
    (7, [9, 3, 1, 4, 1], [3, 1, 4, 1, 5]),
    (5, [9, 3, 1, 4, 1], [3, 1, 4, 1, 5]),
    (3, [1, 4, 1], [4, 1, 5]),
    (2, [4, 1], [1, 5]),
  ):
    row = multiple_choice.make_row(context, choice, 9, window)
    assert [row.inputs.tolist(), row.targets.tolist(), row.count] == [inputs, targets, 2]
  row = multiple_choice.make_row(context[:0], choice, 9, 4)
  assert [row.inputs.tolist(), row.targets.tolist(), row.count] == [[9, 1], [1, 5], 2]


@pytest.mark.parametrize(
  "context, choice, whole",
  [
    ("a cat", "sat", ("a cat", " sat")),
    ("a cat ", "sat", ("a cat", " sat")),
    ("a cat", " sat", ("a cat", " sat")),
    ("a cat\n", "sat", ("a cat", "\nsat")),
    ("a cat ", " sat", ("a cat", "  sat")),
    ("", "sat", ("", "sat")),
    (" ", "sat", ("", " sat")),
    ("é", "é ", ("é", " é ")),
  ],
)
def test_the_joint(context, choice, whole):
  found = multiple_choice.encode_pair(Bytes(), context, choice)
  assert tuple(bytes(ids.tolist()).decode() for ids in found) == whole


class Pairs:
  """A token for every two characters, also across the joint."""

  encode_pair = Tokenizer.encode_pair

  def encode(self, text):
    pieces = [text[i : i + 2] for i in range(0, len(text), 2)]
    return np.array([int.from_bytes(piece.encode()) for piece in pieces], np.int32)


def test_tokens_across_the_joint_are_those_of_the_whole():
  """lm-evaluation-harness takes the difference, also where the context has other tokens alone."""
  text = ["low lower lowest slow slower newest wide wider widest\n"] * 9
  for tokenizer in (train_tokenizer("bpe", text, vocab_size=290), Pairs()):
    for context, choice in (("slow", "est"), ("the low", "\ner"), ("low low ", "wide")):
      ids, of_choice = multiple_choice.encode_pair(tokenizer, context, choice)
      space = " " if choice == "est" else ""
      whole = tokenizer.encode(context + space + choice)
      assert ids.tolist() == tokenizer.encode(context.rstrip())[: len(ids)].tolist()
      assert [*ids, *of_choice] == whole.tolist() and len(of_choice)


def test_accuracies_by_hand():
  questions = [
    Question("", ("ab", "abcdef"), 0),  # per byte the other one
    Question("", ("ab", "abcdef"), 1),
    Question("", ("a", "éé", "abc"), 1),  # per byte -0.75, per character it were -1.5
    Question("", ("b", "c"), 0),  # the first of equal ones
  ]
  likelihoods = np.array([-2.0, -3.0, -2.0, -3.0, -1.0, -3.0, -6.0, -1.5, -1.5])
  scores = multiple_choice.accuracies(likelihoods, questions)
  accuracy, per_byte = [1, 0, 0, 1], [0, 1, 1, 1]
  assert scores == pytest.approx(
    {
      "questions": 4,
      "chance": (3 / 2 + 1 / 3) / 4,
      "accuracy": 0.5,
      "accuracy_error": np.std(accuracy, ddof=1) / 2,
      "accuracy_per_byte": 0.75,
      "accuracy_per_byte_error": np.std(per_byte, ddof=1) / 2,
    }
  )
  one = multiple_choice.accuracies(likelihoods[:2], questions[:1])
  assert one["accuracy"] == 1 and math.isnan(one["accuracy_error"])


def test_choices_that_cannot_be_scored(finished):
  _, run, _ = finished
  long = QUESTIONS[2]._replace(context="a", choices=("a", "x" * 19))
  message = "choices: expected 1 to 19 tokens .* question 2, got 20 in 'x"
  with pytest.raises(ValueError, match=message):
    run.choose([QUESTIONS[0], long])
  with pytest.raises(ValueError, match="choices: expected at least one question, got none"):
    run.choose([])


def test_the_command_prints_and_writes(finished, tmp_path, capsys):
  workdir, run, _ = finished
  path = tmp_path / "pets.jsonl"
  rows = [{"ctx": q.context, "endings": q.choices, "label": q.answer} for q in QUESTIONS]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  copy = shutil.copytree(workdir, tmp_path / "run", symlinks=True)
  done = helpers.script("evaluate.py", f"--workdir={copy}", f"--choices={path}")
  assert done.returncode == 0, done.stderr
  scores = run.choose(path)
  assert f"5 questions of {path}, by step {run.step}:" in done.stdout
  shown = f"{scores['accuracy']:.4f} +- {scores['accuracy_error']:.4f}"
  assert ["accuracy", *shown.split()] in [line.split() for line in done.stdout.splitlines()]
  written = json.loads((copy / f"choices_pets_{run.step}.json").read_text())
  assert written["scores"] == pytest.approx(scores)
  assert dataclasses.replace(run, workdir=None).write_choices(path, scores) is None
