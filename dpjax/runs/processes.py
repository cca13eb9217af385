"""What the processes of a run do together, so that all end where one cannot go on."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dpjax.errors import UserError

Result = TypeVar("Result")


def on_first_process(work: Callable[[], object]) -> None:
  """Runs a function on the first process; the others wait, and all raise if it fails."""
  if jax.process_count() == 1:
    work()
    return
  # The first broadcast has a short time limit, which long work would exceed.
  multihost_utils.broadcast_one_to_all(np.zeros(1, np.uint8))
  error = None
  if jax.process_index() == 0:
    try:
      work()
    except Exception as caught:  # of any type; otherwise the others would wait forever
      error = caught
  if multihost_utils.broadcast_one_to_all(np.uint8(error is not None)):
    raise error or UserError("process 0 cannot begin the run; see that process's log")


def on_every_process(work: Callable[[], Result]) -> Result:
  """Runs a function on every process; all raise if it fails on one."""
  if jax.process_count() == 1:
    return work()
  results = []
  error = None
  try:
    results.append(work())
  except Exception as caught:  # of any type; otherwise the others would wait forever
    error = caught
  failed = np.flatnonzero(multihost_utils.process_allgather(np.uint8(error is not None)))
  if len(failed):
    raise error or UserError(f"process {failed[0]} cannot begin the run; see that process's log")
  return results[0]


def first_then_all(work: Callable[[], Result]) -> Result:
  """Runs a function on the first process, and then on the others, which find what that made.

  Returns the process's own result; all raise if the function fails on one.
  """
  results: list[Result] = []
  on_first_process(lambda: results.append(work()))
  return on_every_process(lambda: results[0] if results else work())


def have_same(value: str) -> bool:
  """Whether all processes have the same value; all must call it."""
  digest = hashlib.sha256(value.encode()).hexdigest()
  return jax.process_count() == 1 or len({*_gather_texts(digest)}) == 1


def check_same(values: Mapping[str, str | None]) -> None:
  """Raises a `UserError` in every process, which names what differs, unless all have the same.

  Args:
    values: what to compare, by name; the message has these names and values. None: what this
      process does not have, and the others may.
  """
  if jax.process_count() == 1:
    return
  first, *others = (json.loads(text) for text in _gather_texts(json.dumps(dict(values))))
  for number, there in enumerate(others, start=1):
    pairs = {key: (first.get(key, "none"), there.get(key, "none")) for key in first | there}
    differing = [key for key, pair in pairs.items() if None not in pair and pair[0] != pair[1]]
    if differing:
      got = [
        f"{key} = {pairs[key][0]} in process 0 and {pairs[key][1]} in process {number}"
        for key in differing[:4]
      ]
      more = "; ..." if differing[4:] else ""
      raise UserError(f"processes: expected the same in all, got {'; '.join(got)}{more}")


def _gather_texts(text: str) -> list[str]:
  """The text of each process; all processes must call it."""
  content = np.frombuffer(text.encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(content.size))
  rows = multihost_utils.process_allgather(np.pad(content, (0, sizes.max() - content.size)))
  return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
