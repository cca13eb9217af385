"""Rows of the probes against loops that read them as a person would."""

import numpy as np
import pytest

from dpjax.probes import tasks

CONTENTS = tasks.num_contents(96)


def rows(task, length=40, count=23, **settings):
  return tasks.TaskBatches(task, count, length, CONTENTS, seed=5, **settings)


def answers(drawn):
  """Each answer as (row, position, target, distance)."""
  for row, position in np.argwhere(drawn.distances > 0):
    yield row, position, drawn.targets[row, position], drawn.distances[row, position]


def test_every_query_of_recall_has_one_pair_as_far_back_as_it_says():
  drawn, keys = rows("recall").draw(3), tasks.NUM_KEYS
  assert (drawn.distances[:, 20:] > 0).all() and not drawn.distances[:, :20].any()
  for row, position, target, distance in answers(drawn):
    found = {}
    for place, token in enumerate(drawn.tokens[row, :20]):
      if token:
        key, value = divmod(token - 3 - 2 * keys, keys)
        assert key not in found and 0 <= value
        found[key] = place, 3 + keys + value
    assert sorted(found) == list(range(keys))
    place, value = found[drawn.tokens[row, position] - 3]
    assert (target, distance) == (value, position - place)


def test_a_copy_is_complete_and_as_far_back_as_it_says():
  drawn, seen = rows("copying", count=200).draw(3), set()
  for row, tokens in enumerate(drawn.tokens):
    n = int(np.flatnonzero(tokens == tasks.SEPARATOR)[0])
    seen.add(n)
    assert len({*tokens[:n]}) == n and tokens[:n].min() >= tasks.FIRST_CONTENT
    assert tokens[n + 1 : 2 * n + 1].tolist() == tokens[:n].tolist()[: 40 - n - 1]
    assert not tokens[2 * n + 1 :].any()
    assert np.flatnonzero(drawn.distances[row]).tolist() == [*range(n, 2 * n)]
    assert drawn.targets[row, n : 2 * n].tolist() == tokens[:n].tolist()
  for row, position, target, distance in answers(drawn):
    assert target == drawn.tokens[row, position - distance]
  assert seen == {*range(1, 21)}


def test_the_trigger_was_there_once_and_its_answer_followed():
  drawn, seen = rows("induction", count=900).draw(3), set()
  for row, position, target, distance in answers(drawn):
    first, last = np.flatnonzero(drawn.tokens[row] == tasks.TRIGGER)
    assert last == position == 39
    assert target == drawn.tokens[row, first + 1] and distance == last - first - 1
    seen.add(distance)
  assert seen == {*range(1, 39)}


@pytest.mark.parametrize("task", tasks.TASKS)
def test_batches_are_functions_of_seed_stream_and_step(task):
  batches = rows(task)
  whole = batches.batch(4)
  for name, value in batches.batch(4, slice(3, 9)).items():
    np.testing.assert_array_equal(value, whole[name][3:9])
  assert whole["weights"].sum() == (batches.draw(4).distances > 0).sum()
  assert (whole["tokens"] < tasks.FIRST_CONTENT + CONTENTS).all()
  assert (whole["targets"] < tasks.FIRST_CONTENT + CONTENTS).all() and "is_start" not in whole
  others = [batches.draw(5), rows(task, stream=tasks.TEST).draw(4)]
  assert all((x.tokens != whole["tokens"]).any() for x in others)
  is_start = rows(task, has_documents=True).batch(4)["is_start"]
  assert is_start[:, 0].all() and not is_start[:, 1:].any()


@pytest.mark.parametrize("task", ["recall", "induction"])
def test_no_test_row_is_trained_on(task):
  training, test = (
    {row.tobytes() for step in range(20) for row in rows(task, stream=stream).draw(step).tokens}
    for stream in (tasks.TRAINING, tasks.TEST)
  )
  assert len(training) == 20 * 23 and not training & test


def test_a_guess_is_right_as_often_as_is_said():
  for task in tasks.TASKS:
    drawn = rows(task, count=400).draw(0)
    values = drawn.targets[drawn.distances > 0]
    assert len({*values}) == pytest.approx(1 / tasks.chance(task, CONTENTS))
