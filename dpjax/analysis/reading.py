"""How a model reads a text: where segments end, surprisals, and the weights of each position.

All numbers are those of an evaluation, `dpjax.runs.Run.score`, before summation.
T token, H head.
"""

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers.attention import RelativeAttention, SelfAttention
from dpjax.layers.extractors import ME
from dpjax.layers.short_convolution import ShortConvolution
from dpjax.models.language_model import LanguageModel
from dpjax.models.stack import Stack
from dpjax.text.tokenizer import TextStream
from dpjax.training import evaluation, losses

if TYPE_CHECKING:
  from dpjax.runs import Run

MAX_TOKENS = 10_000


class Stage(NamedTuple):
  """A pooling of segments.

  Attributes:
    begins: [T], bool; True where a segment ends before the token.
    probabilities: [T], float32, that a segment ends before the token; nan where none can end;
      None for rules.
  """

  begins: np.ndarray
  probabilities: np.ndarray | None

  @property
  def boundaries(self) -> np.ndarray:
    """[T], bool; True where a segment ends with the token. The last segment stays open."""
    return np.append(self.begins[1:], False)


class Segmentation(NamedTuple):
  """A text of T tokens, as a model reads it.

  Attributes:
    pieces: the text that each token adds; "" for a part of a character.
    surprisals: [T], float32, nats of each token, given those before it in its window.
    entropies: [T], float32, nats, of the model's prediction of each token.
    stages: the poolings, the outermost first; () without pooling.
    targets: [T], bool; where a segment should have ended before the token, for boundaries that
      have a reference.
    scores: those of `Run.score`.
  """

  pieces: list[str]
  surprisals: np.ndarray
  entropies: np.ndarray
  stages: tuple[Stage, ...]
  targets: np.ndarray | None
  scores: Mapping[str, float]

  def enrichment(self, seed: int | None = None) -> float:
    """The mean surprisal of tokens that begin a segment, relative to that of all tokens.

    With a seed, that of as many random tokens: chance level. nan if no token follows a boundary,
    or if the model gives one zero probability.
    """
    begins = self.stages[0].begins
    if seed is not None:
      begins = np.random.default_rng(seed).permutation(begins)
    if not (begins.any() and np.isfinite(self.surprisals).all()):
      return float("nan")
    return float(self.surprisals[begins].mean() / self.surprisals.mean())


class Layer(NamedTuple):
  """What each position reads in one layer: weights, [H, T, T], row t for positions s <= t."""

  name: str
  weights: np.ndarray


class _Objective(losses.Objective):
  """An objective that also keeps the numbers of each token."""

  def sums(self, output, batch, output_layer: Any = None, *args, **kwargs) -> Any:
    sums = super().sums(output, batch, output_layer, *args, **kwargs)
    layer: Any = None if any(module.reads_logits for module in self.boundaries) else output_layer
    one = jnp.ones((1, 1), jnp.float32)

    def nats(x_d, target):
      x_btd, target_bt = x_d[None, None], target[None, None]
      if layer is None:
        return losses.cross_entropy(x_btd, target_bt, one)[0]
      kernel, bias = layer
      return losses.output_nats(x_btd, kernel, bias, target_bt, one)

    rows = output.logits if layer is None else output.hidden, batch["targets"]
    reads = {"nats": jax.lax.map(lambda row: jax.vmap(nats)(*row), rows)}
    targets = None
    if self.boundaries:
      _, targets = self.boundaries[0].loss(output, {**batch, "boundary_share": jnp.float32(0)})
    reads |= {"entropies": ops.conditional_entropy(output.logits), "targets": targets}
    reads["stages"], stage = [], output
    while self.boundaries and stage is not None:
      chances, logits = stage.boundary_probabilities, stage.boundary_logits
      chances = chances if logits is None else jax.nn.sigmoid(logits.astype(jnp.float32))
      reads["stages"].append((stage.boundaries.astype(jnp.float32) > 0.5, chances))
      stage = stage.inner
    return {"sums": sums, "reads": reads}


class _Scorer(evaluation.Scorer):
  """A scorer that keeps what it reads, window by window."""

  @cached_property
  def windows(self) -> list[tuple[Any, Any]]:
    return []

  @cached_property
  def step(self):
    step = evaluation.jit_eval_step(self.model, self.mesh, _Objective(self.objective.boundaries))

    def run(params, batch, index, **options) -> Any:
      result = step(params, batch, index, **options)
      self.windows.append(jax.device_get((batch["weights"], result["reads"])))
      return result["sums"]

    return run


def segment(run: "Run", text: str) -> Segmentation:
  """Reads a text as an evaluation does: after a start token, in windows of `eval.window`.

    the model's softmax for a token is (0.5, 0.5)  ->  its entropy is ln 2 = 0.693

  Raises:
    ValueError: the text has no tokens, or more than 10,000.
  """
  tokens = run.tokenizer.encode(text)
  if not 1 <= len(tokens) <= MAX_TOKENS:
    raise UserError(f"text: expected 1 to {MAX_TOKENS:,} tokens, got {len(tokens):,}")
  scorer = run.scorer
  fields: Any = {field.name: getattr(scorer, field.name) for field in dataclasses.fields(scorer)}
  # Random draws depend on the rows of a batch.
  draws = any(module.samples_in_eval for module in scorer.objective.boundaries)
  if not draws:
    fields["settings"] = dataclasses.replace(scorer.settings, batch_size=1)
  scorer = _Scorer(**fields)
  run = dataclasses.replace(run)
  run.scorer = scorer
  scores, rows = run.score(text), []
  for weights_bt, reads in scorer.windows:
    for b, weights in enumerate(weights_bt):
      row = jax.tree.map(lambda x, b=b: x[b], reads)
      row["stages"] = _stages(row["stages"], scorer.objective.boundaries)
      rows.append(jax.tree.map(lambda x, is_scored=weights > 0: x[is_scored], row))
  reads = jax.tree.map(lambda *parts: np.concatenate(parts), *rows)
  targets = None if reads["targets"] is None else reads["targets"] > 0.5
  stages = tuple(Stage(*stage) for stage in reads["stages"])
  pieces = split(run.tokenizer, tokens)
  return Segmentation(pieces, reads["nats"], reads["entropies"], stages, targets, scores)


def _stages(stages: list[tuple], modules: Any) -> list[tuple]:
  """The stages of a row, each by the row's positions."""
  result = stages[:1]
  last = np.flatnonzero(stages[0][0]) if stages else np.zeros(0, int)  # each segment's last token
  for outer, (ends, chances) in zip(modules, stages[1:], strict=False):
    last = np.append([-1] * outer.has_null_group, last).astype(int)  # -1: before the text
    by_position = None
    if chances is not None:
      by_position = np.full(len(stages[0][0]), np.nan, np.float32)
      by_position[last[last >= 0]] = chances[: len(last)][last >= 0]
    last = last[ends[: len(last)]]
    result.append((np.isin(np.arange(len(stages[0][0])), last), by_position))
  return result


def split(tokenizer, tokens: np.ndarray) -> list[str]:
  """The text that each token adds; "" for all but the last token of a character."""
  stream = TextStream(tokenizer)
  pieces = [stream.push([i]) for i in tokens]
  return [*pieces[:-1], pieces[-1] + stream.finish()]


def render(segmentation: Segmentation) -> str:
  """Writes the text with a | after each closed segment, one for each stage.

    pieces "a", " ", "b", boundaries 0, 1, 0  ->  "a␣|b"

  A · separates the tokens of a segment if some are longer than a character.
  """
  join = "·" if any(len(piece) > 1 for piece in segmentation.pieces) else ""
  depths = sum(
    (stage.boundaries for stage in segmentation.stages), np.zeros(len(segmentation.pieces), int)
  )
  pairs = zip(segmentation.pieces, depths, strict=True)
  return "".join(visible(piece) + (depth * "|" or join) for piece, depth in pairs).removesuffix(
    join
  )


def visible(piece: str) -> str:
  r"""Makes every character of a text visible and unambiguous.

  Unprintable characters are escaped as in a Python string; the marks get a backslash.

    >>> print(visible("a b|c\n"))
    a␣b\|c\n
  """
  marked = re.sub(r"[|·␣\\]", r"\\\g<0>", piece).replace(" ", "␣")
  return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in marked)


def layers(run: "Run", text: str, max_tokens: int = 512) -> list[Layer]:
  """What each of a text's first tokens reads in each layer whose mixer reports it.

  Weights of attention; absolute values of a Dispatcher's `dpjax.ops.dispatch_matrix`; sizes of the
  taps of an Extractor and a short convolution (root mean square over features). A custom mixer
  reports by `self.sow("intermediates", "reads", weights)`, [B, H, T, T]; others are left out. A
  layer on segments reads, for every token, the segments closed so far; each token has its
  segment's weight.

  The tokens follow a start token, as in an evaluation; it is left out.
  """
  tokens, names = run.tokenizer.encode(text)[: min(max_tokens, run.window - 1)], []
  if not isinstance(run.model, LanguageModel) or not len(tokens):
    return []

  def unroll(call, args, kwargs, context):
    stack = context.module
    if not isinstance(stack, Stack) or context.method_name != "__call__":
      return call(*args, **kwargs)
    x_btd, blocks = stack.cast_residual(args[0]), stack.unbind()[0].blocks
    positions = kwargs.get("positions")
    for i, params in stack.unstack(stack.variables["params"]).items():
      block = blocks[int(i) % len(blocks)]
      shares = positions is not None and hasattr(block.mixer, "make_positions")
      options: Any = {"positions": positions} if shares else {}
      mixer_inputs = []

      def keep(call, args, kwargs, context, inputs=mixer_inputs):
        if context.module.name == "mixer" and context.method_name == "__call__":
          inputs.append(args[0])
        return call(*args, **kwargs)

      with nn.intercept_methods(keep):
        output: Any = block.apply({"params": params}, x_btd, mutable="intermediates", **options)
      x_btd, sown = output
      seen: Any = sown.get("intermediates", {}).get("mixer", {})
      weights = _weights(block.mixer, params.get("mixer", {}), mixer_inputs[0], seen, options)
      if weights is not None:
        path = [name for name in stack.path if name not in ("hourglass", "layers")]
        mixer = type(block.mixer).__name__
        names.append((" ".join([*path, str(int(i) + 1), mixer]), path.count("middle")))
        matrices.append(weights)
    return x_btd

  matrices: list[Any] = []

  def read(params, tokens_bt):
    matrices.clear()
    names.clear()
    with nn.intercept_methods(unroll):
      rngs = {"dropout": jax.random.key(0)}  # for boundaries that are drawn in evaluation
      output: Any = run.model.apply({"params": params}, tokens_bt, rngs=rngs)
    ends, stage = [], output if run.model.hourglass is not None else None
    while stage is not None:
      ends.append(stage.boundaries[0].astype(jnp.float32) > 0.5)
      stage = stage.inner
    return [*matrices], ends

  inputs = np.append(run.tokenizer.start_id, tokens).astype(np.int32)[None]
  weights, ends = jax.device_get(jax.jit(read)(run.params, inputs))
  position = np.arange(inputs.size)
  units = [(position, position)]  # the row and the column of a position in the matrices of a stage
  for end, module in zip(ends, run.scorer.objective.boundaries, strict=True):
    closed, num_null = np.cumsum(end), int(module.has_null_group)
    # The last segment that has ended at a position, and the one that it is in.
    maps = closed + num_null - 1, closed - end + num_null
    units.append((_take(maps[0], units[-1][0]), _take(maps[1], units[-1][1])))
  result = []
  for (name, depth), weights_hts in zip(names, weights, strict=True):
    rows, columns = units[depth]
    weights_hts = _take(_take(weights_hts.astype(np.float32), rows, 1), columns, 2)
    result.append(Layer(name, weights_hts[:, 1:, 1:]))
  return result


def _take(array: np.ndarray, index: np.ndarray, axis: int = 0) -> np.ndarray:
  """The entries at an index; out of range, 0 for floats and -1 for integers."""
  is_in = (index >= 0) & (index < array.shape[axis])
  entries = np.take(array, np.where(is_in, index, 0), axis)
  shape = [1] * array.ndim
  shape[axis] = -1
  return np.where(is_in.reshape(shape), entries, -1 if array.dtype.kind == "i" else 0)


def _weights(mixer, params, x_btd, seen, options) -> jax.Array | None:
  """[H, T, T], what a mixer reads; None if it does not report it."""
  length = x_btd.shape[1]
  if "reads" in seen:
    return seen["reads"][0][0]
  if "level_gates" in seen:
    return abs(ops.dispatch_matrix(seen["level_gates"][0])[0])
  if isinstance(mixer, (ME, ShortConvolution)):
    taps = params["taps"][:length].reshape(min(length, len(params["taps"])), -1)
    sizes = jnp.pad(jnp.sqrt(jnp.mean(taps**2, axis=1)), (0, length - len(taps)))
    lags = np.arange(length)[:, None] - np.arange(length)
    return jnp.where(lags >= 0, sizes[lags], 0)[None]
  if not isinstance(mixer, (SelfAttention, RelativeAttention)):
    return None
  # Attention to values that are rows of the identity gives its weights, E columns at a time.
  heads, size = mixer.num_heads, x_btd.shape[2] // mixer.num_heads
  count = -(-length // size)
  identity = np.eye(count * size, dtype=np.float32)[:length].reshape(length, count, size)
  values = np.repeat(identity.swapaxes(0, 1)[:, :, None], heads, axis=2)
  outputs = []

  def probe(call, args, kwargs, context):
    if context.module.name == "out":
      outputs.append(args[0])
    y = call(*args, **kwargs)
    if context.module.name == "queries_keys_values" and context.method_name == "__call__":
      y = y.at[:, :, 2].set(values.reshape(count, length, -1).astype(y.dtype))
    return y

  with nn.intercept_methods(probe):
    mixer.apply({"params": params}, jnp.repeat(x_btd, count, axis=0), **options)
  weights = outputs[0].reshape(count, length, heads, size).transpose(2, 1, 0, 3)
  return weights.reshape(heads, length, -1)[:, :, :length]
