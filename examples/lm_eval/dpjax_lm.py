"""Wraps a dpjax run as a model for lm-evaluation-harness.

  pip install lm-eval
  python examples/lm_eval/dpjax_lm.py models/we-books --tasks=my_task --include_path=tasks

In Python:

  import lm_eval
  lm_eval.simple_evaluate(model=DpjaxLM("runs/mine"), tasks=["my_task"])

Scores are sums of log-likelihoods in nats. A start token precedes each context, if the window has
room for it, as in all scores of dpjax. Longer contexts lose their first tokens. Whole texts
use the harness's windows: later ones begin with the token before them, the last with as many as
fit.
"""

import argparse
import functools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval import evaluator, tasks
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import dpjax


class DpjaxLM(LM):
  """Answers the harness's requests with a run, or a run's folder."""

  def __init__(self, run: "dpjax.runs.Run | str", batch_size: int = 16):
    super().__init__()
    self.run = run if isinstance(run, dpjax.runs.Run) else dpjax.load(run)
    self.batch_size = batch_size

  def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation, and whether greedy decoding gives it."""
    pairs = [self.run.tokenizer.encode_pair(*request.args) for request in requests]
    for (_, continuation), request in zip(pairs, requests, strict=True):
      if not 1 <= len(continuation) <= self.run.window:
        raise ValueError(
          f"continuation: expected 1 to {self.run.window} tokens, got {len(continuation)} in "
          f"{request.args[1]!r}"
        )
    start = [self.run.tokenizer.start_id]
    return self._score([(np.append(start, context), end) for context, end in pairs])

  def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
    """The log-likelihood of each text, in the harness's windows, each token once."""
    sums = []
    for request in requests:
      ids = self.run.tokenizer.encode(request.args[0]).tolist()
      windows = get_rolling_token_windows(ids, self.run.tokenizer.start_id, self.run.window, 1)
      scores = self._score([*map(make_disjoint_window, windows)])
      sums.append(sum(nats for nats, _ in scores))
    return sums

  def generate_until(self, requests: Sequence[Instance]) -> list[str]:
    """Continues each context until a string in `until`, or for `max_gen_toks` tokens."""
    return [self._generate(*request.args) for request in requests]

  def _generate(self, context: str, settings: dict) -> str:
    temperature = settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0
    (text,) = self.run.generate(
      self._prompt(context),
      stop=settings.get("until") or (),
      length=settings.get("max_gen_toks", 256),
      temperature=temperature,
      top_k=settings.get("top_k", 0),
      top_p=settings.get("top_p", 1.0),
      overflow="slide",
    )
    return text

  def _prompt(self, context: str) -> str:
    """The end of a context that fits the window, without unknown tokens."""
    tokenizer, window = self.run.tokenizer, self.run.window
    ids = [i for i in tokenizer.encode(context).tolist() if i != tokenizer.unknown_id][-window:]
    while len(tokenizer.encode(tokenizer.decode(ids))) > window:
      ids = ids[1:]
    return tokenizer.decode(ids)

  def _score(self, pairs: Sequence[tuple[Sequence, Sequence]]) -> list[tuple[float, bool]]:
    """Log-likelihoods of non-empty continuations of contexts, in batches of one size."""
    window = self.run.window
    ids = [np.concatenate(pair).astype(np.int32)[-window - 1 :] for pair in pairs]
    counts, found = [len(continuation) for _, continuation in pairs], []
    for first in range(0, len(ids), self.batch_size):
      rows = ids[first : first + self.batch_size]
      tokens = np.zeros((self.batch_size, window + 1), np.int32)
      weights = np.zeros((self.batch_size, window), bool)
      for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        weights[number, len(row) - 1 - counts[first + number] : len(row) - 1] = True
      nats, is_greedy = self._step(self.run.params, tokens, weights, first)
      found += zip(nats.tolist(), is_greedy.tolist(), strict=True)
    return found[: len(ids)]

  @functools.cached_property
  def _step(self):
    """(parameters, tokens [B, T + 1], weights [B, T], index) -> log-likelihoods and greedy [B]."""

    @jax.jit
    def step(params, tokens, weights, index):
      # For boundaries that are also drawn in evaluation.
      rngs = {"dropout": jax.random.fold_in(jax.random.key(0), index)}
      variables = {"params": params}
      output = self.run.model.apply(variables, tokens[:, :-1], deterministic=True, rngs=rngs)
      logits = output.logits
      logits, targets = logits.astype(jnp.float32), tokens[:, 1:]
      logs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
      is_greedy = jnp.argmax(logits, axis=-1) == targets
      nats = jnp.sum(jnp.where(weights, logs, 0), axis=1)
      return nats, jnp.all(is_greedy | ~weights, axis=1)

    return step


def main(arguments: Sequence[str] | None = None) -> None:
  """Evaluates a run on tasks, and prints the results as JSON."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("run", help="a run's folder")
  parser.add_argument("--tasks", required=True, help="comma-separated names")
  parser.add_argument("--include_path", help="a folder with tasks of your own")
  parser.add_argument("--batch_size", type=int, default=16)
  parser.add_argument("--limit", type=int, help="questions of each task")
  given = parser.parse_args(arguments)
  try:
    model = DpjaxLM(given.run, given.batch_size)
  except dpjax.UserError as error:
    parser.error(str(error))
  results = evaluator.simple_evaluate(
    model=model,
    tasks=given.tasks.split(","),
    task_manager=tasks.TaskManager(include_path=given.include_path),
    limit=given.limit,
  )
  print(json.dumps(results["results"], indent=2, default=str))


if __name__ == "__main__":
  main()
