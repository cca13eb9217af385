"""How a model reads a text: where segments end, surprisals, and the weights of each position.

All numbers are those of an evaluation, `dpjax.runs.Run.score`, before summation.
T token, H head.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from dpjax import ops
from dpjax.errors import UserError
from dpjax.layers.attention import RelativeAttention, SelfAttention
from dpjax.layers.boundaries import Boundaries
from dpjax.layers.common import Params
from dpjax.layers.extractors import ME
from dpjax.layers.mixer import Context, Mixer
from dpjax.layers.short_convolution import ShortConvolution
from dpjax.models.language_model import LanguageModel, LanguageModelOutput
from dpjax.models.stack import Stack
from dpjax.text.tokenizer import TextStream, Tokenizer
from dpjax.training import evaluation, losses

if TYPE_CHECKING:
  from dpjax.runs import Run

MAX_TOKENS = 10_000
_log = logging.getLogger(__name__)


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

  def truncate(self, length: int) -> "Segmentation":
    """The first tokens, up to `length`, with the scores of the whole text."""
    stages = (
      Stage(
        stage.begins[:length],
        None if stage.probabilities is None else stage.probabilities[:length],
      )
      for stage in self.stages
    )
    return self._replace(
      pieces=self.pieces[:length],
      surprisals=self.surprisals[:length],
      entropies=self.entropies[:length],
      stages=tuple(stages),
      targets=None if self.targets is None else self.targets[:length],
    )

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
  """An objective whose sums also have numbers of each token, [B, T], with names "read/...".

  Those of stage i are "ends_i" and "probabilities_i", [B, S], by the stage's own positions.
  """

  def sums(
    self,
    output: LanguageModelOutput,
    batch: Mapping[str, jax.Array],
    output_layer: tuple[jax.Array, jax.Array | None] | None = None,
    counts: Mapping[str, jax.Array] | None = None,
    scores_starts: bool = False,
  ) -> dict[str, jax.Array]:
    sums = super().sums(output, batch, output_layer, counts, scores_starts)
    if any(module.reads_logits for module in self.boundaries):
      output_layer = None
    sums["read/nats"] = _nats(output, batch["targets"], output_layer)
    sums["read/entropies"] = ops.conditional_entropy(output.logits)
    if not self.boundaries:
      return sums
    inputs = {**batch, "boundary_share": jnp.float32(0)}
    _, targets = self.boundaries[0].loss(output.stages[0], inputs, output.logits)
    if targets is not None:
      sums["read/targets"] = targets
    for i, stage in enumerate(output.stages):
      probabilities = stage.probabilities
      if stage.logits is not None:
        probabilities = jax.nn.sigmoid(stage.logits.astype(jnp.float32))
      if probabilities is not None:
        sums[f"read/probabilities_{i}"] = probabilities
      sums[f"read/ends_{i}"] = stage.boundaries.astype(jnp.float32) > 0.5
    return sums


def _nats(
  output: LanguageModelOutput,
  targets_bt: jax.Array,
  output_layer: tuple[jax.Array, jax.Array | None] | None,
) -> jax.Array:
  """[B, T], the nats of each target, rounded as in the sums of an objective."""
  one = jnp.ones((1, 1), jnp.float32)

  def nats(x_d, target):
    x_btd = x_d[None, None]
    target_bt = target[None, None]
    if output_layer is None:
      return losses.cross_entropy(x_btd, target_bt, one)[0]
    kernel, bias = output_layer
    return losses.output_nats(x_btd, kernel, bias, target_bt, one)

  rows = output.logits if output_layer is None else output.hidden
  return jax.lax.map(lambda row: jax.vmap(nats)(*row), (rows, targets_bt))


@dataclasses.dataclass(frozen=True)
class _Scorer(evaluation.Scorer):
  """A scorer that also keeps the numbers of each token, by row."""

  rows: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)

  @cached_property
  def step(self) -> Callable[..., dict[str, jax.Array]]:
    modules = self.objective.boundaries
    step = evaluation.jit_eval_step(self.model, self.mesh, _Objective(modules))

    def read(params, batch, index, capacity=None) -> dict[str, jax.Array]:
      sums = step(params, batch, index, capacity=capacity)
      reads = {name: sums.pop(name) for name in list(sums) if name.startswith("read/")}
      weights_bt, reads = jax.device_get((batch["weights"], reads))
      for b, weights in enumerate(weights_bt):
        row = _by_position({name.removeprefix("read/"): x[b] for name, x in reads.items()}, modules)
        self.rows.append({name: x[weights > 0] for name, x in row.items()})
      return sums

    return read


def segment(run: "Run", text: str) -> Segmentation:
  """Reads a text as an evaluation does: after a start token, in windows of `eval.window`.

    the model's softmax for a token is (0.5, 0.5)  ->  its entropy is ln 2 = 0.693

  Raises:
    ValueError: the text has no tokens, or more than 10,000.
  """
  tokens = run.tokenizer.encode(text)
  if not 1 <= len(tokens) <= MAX_TOKENS:
    raise UserError(f"text: expected 1 to {MAX_TOKENS:,} tokens, got {len(tokens):,}")
  base = run.scorer
  modules = base.objective.boundaries
  settings = base.settings
  if not any(module.samples_in_eval for module in modules):
    settings = dataclasses.replace(settings, batch_size=1)  # Draws depend on the rows of a batch.
  scorer = _Scorer(
    base.model, base.objective, base.tokenizer, settings, base.max_length, base.pad_id
  )
  run = dataclasses.replace(run)
  run.scorer = scorer
  scores = run.score(text)
  rows = scorer.rows
  reads = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
  return Segmentation(
    pieces=split(run.tokenizer, tokens),
    surprisals=reads["nats"],
    entropies=reads["entropies"],
    stages=tuple(
      Stage(reads[f"ends_{i}"], reads.get(f"probabilities_{i}")) for i in range(len(modules))
    ),
    targets=reads["targets"] > 0.5 if "targets" in reads else None,
    scores=scores,
  )


def _by_position(
  row: Mapping[str, np.ndarray], modules: Sequence[Boundaries]
) -> dict[str, np.ndarray]:
  """The numbers of a row, with those of inner stages moved to the row's positions."""
  result = dict(row)
  if not modules:
    return result
  length = len(row["ends_0"])
  last = np.flatnonzero(row["ends_0"])  # each segment's last token
  for i, outer in enumerate(modules[:-1], 1):
    if outer.reader.num_null:
      last = np.append(-1, last)  # -1: before the text
    if f"probabilities_{i}" in row:
      is_inside = last >= 0
      probabilities = np.full(length, np.nan, np.float32)
      probabilities[last[is_inside]] = row[f"probabilities_{i}"][: len(last)][is_inside]
      result[f"probabilities_{i}"] = probabilities
    last = last[row[f"ends_{i}"][: len(last)]]
    result[f"ends_{i}"] = np.isin(np.arange(length), last)
  return result


def split(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
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
  depths = np.zeros(len(segmentation.pieces), int)
  for stage in segmentation.stages:
    depths += stage.boundaries
  pairs = zip(segmentation.pieces, depths, strict=True)
  parts = [visible(piece) + (depth * "|" or join) for piece, depth in pairs]
  return "".join(parts).removesuffix(join)


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
  reports by `self.sow("intermediates", "reads", weights)`, [B, H, T, T]; others are left out, and
  a warning names them. A layer on segments reads, for every token, the segments closed so far; each
  token has its segment's weight.

  The tokens follow a start token, as in an evaluation; it is left out.
  """
  tokens = run.tokenizer.encode(text)[: min(max_tokens, run.window - 1)]
  if not isinstance(run.model, LanguageModel) or not len(tokens):
    return []

  def unroll(call, args, kwargs, context):
    stack = context.module
    if not isinstance(stack, Stack) or context.method_name != "__call__":
      return call(*args, **kwargs)
    x_btd = stack.cast_residual(args[0])
    shared = Context(positions=args[1].positions)
    unbound, variables = stack.unbind()
    by_layer, layer_params = unbound.unstack(dict(variables["params"]))
    depth, place = _place_of(stack.path, len(run.model.core.stages))
    for i, block in enumerate(by_layer.blocks):
      params = layer_params[f"blocks_{i}"]
      mixer_inputs = []

      def keep(call, args, kwargs, context, inputs=mixer_inputs):
        if context.module.name == "mixer" and context.method_name == "__call__":
          inputs.append(args[0])
        return call(*args, **kwargs)

      with nn.intercept_methods(keep):
        x_btd, sown = block.apply({"params": params}, x_btd, shared, mutable=["intermediates"])
      intermediates = sown.get("intermediates") or {}
      seen = dict(intermediates.get("mixer") or {})
      weights = _weights(block.mixer, params.get("mixer", {}), mixer_inputs[0], seen, shared)
      name = " ".join([*place, str(i + 1), type(block.mixer).__name__])
      if weights is None:
        silent.append(name)
      else:
        names.append(name)
        depths.append(depth)
        matrices.append(weights)
    return x_btd if stack.out_norm is None else stack.out_norm(x_btd)

  # Filled while `read` is traced.
  names: list[str] = []
  silent: list[str] = []  # layers that do not report what they read
  depths: list[int] = []  # of each layer, in how many stages of pooling it is
  matrices: list[jax.Array] = []

  def read(params, tokens_bt):
    names.clear()
    silent.clear()
    depths.clear()
    matrices.clear()
    with nn.intercept_methods(unroll):
      rngs = {"dropout": jax.random.key(0)}  # for boundaries that are drawn in evaluation
      output = run.model.apply({"params": params}, tokens_bt, rngs=rngs)
    ends = [stage.boundaries[0].astype(jnp.float32) > 0.5 for stage in output.stages]
    return [*matrices], ends

  inputs = np.append(run.tokenizer.start_id, tokens).astype(np.int32)[None]
  weights, ends = jax.device_get(jax.jit(read)(run.params, inputs))
  if silent:
    names_silent = ", ".join(silent)
    _log.warning("%s: no weights for layers that do not report them, %s", run.name, names_silent)
  position = np.arange(inputs.size)
  units = [(position, position)]  # the row and the column of a position in the matrices of a stage
  for end, module in zip(ends, run.scorer.objective.boundaries, strict=True):
    num_null = module.reader.num_null
    last_closed = np.cumsum(end) + num_null - 1  # the last segment that has ended at a position
    current = np.cumsum(end) - end + num_null  # the segment that a position is in
    rows, columns = units[-1]
    units.append((_take(last_closed, rows), _take(current, columns)))
  result = []
  for name, depth, weights_hts in zip(names, depths, weights, strict=True):
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


def _place_of(path: tuple[str, ...], num_stages: int) -> tuple[int, list[str]]:
  """In how many stages a stack of a model is, and the words for its place, from its path."""
  if path[-1] == "layers":
    return num_stages, ["middle"] * num_stages
  depth = int(path[-2].removeprefix("stages_"))
  return depth, [*["middle"] * depth, path[-1]]


def _weights(
  mixer: Mixer, params: Params, x_btd: jax.Array, seen: Mapping, shared: Context
) -> jax.Array | None:
  """[H, T, T], what a mixer reads; None if it does not report it.

  `seen` has what it sows for inputs [1, T, D].
  """
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
  heads = mixer.num_heads
  size = x_btd.shape[2] // heads
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
    mixer.apply({"params": params}, jnp.repeat(x_btd, count, axis=0), shared)
  weights = outputs[0].reshape(count, length, heads, size).transpose(2, 1, 0, 3)
  return weights.reshape(heads, length, -1)[:, :, :length]
