"""The counts, against the paper's tables, and against mixers of numbers that count."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from dpjax import ops
from dpjax.layers import dispatcher, extractors
from dpjax.layers.attention import LocalAttention, SelfAttention
from dpjax.layers.mamba2 import Mamba2
from dpjax.layers.short_convolution import ShortConvolution
from dpjax_papers import complexity
from dpjax_papers.complexity import Counts, count_operations

BARE = dict(adjustment=False, output_projection=False)
# Table 7: multiplications, additions, divisions, exponentiations, parameters, operations.
TABLE_7 = [
  ("attention", 1, 10502144, 10420096, 16512, 8256, 65536, 20947008),
  ("attention", 32, 10502144, 10416128, 528384, 264192, 65536, 21710848),
  ("she", 1, 139476992, 139411456, 0, 0, 2129920, 278888448),
  ("he", 1, 7364608, 7282688, 0, 0, 65536, 14647296),
  ("we", 1, 5267456, 5201920, 0, 0, 49152, 10469376),
  ("me", 1, 1056768, 1040384, 0, 0, 128, 2097152),
]


@pytest.mark.parametrize("row", TABLE_7, ids=lambda row: f"{row[0]}-{row[1]}")
def test_table_7(row):
  mixer, heads, *fields, operations = row
  counts = count_operations(mixer, length=128, width=128, num_heads=heads)
  assert counts == Counts(*fields)
  assert counts.operations == operations


def table_5_and_6(mixer, t, d, n):
  """As simplified there, but for the additions of attention, which are wrong there."""
  linear = 2 * d**2
  return {
    "attention": (2 * t * d + 4 * d**2, 2 * t * d + 4 * d**2 - 5 * d - n, 2 * t * n, t * n),
    "she": (t * d**2 + linear + d, t * d**2 + linear - 3 * d, 0, 0),
    "he": (t * d + 3 * d**2 + d, t * d + 3 * d**2 - 4 * d, 0, 0),
    "we": (t * d + linear + d, t * d + linear - 3 * d, 0, 0),
    "me": (t * d, t * d - d, 0, 0),
  }[mixer]


PAPER = [("attention", heads) for heads in (1, 3, 12)]
PAPER += [(mixer, 1) for mixer in complexity.EXTRACTORS]


@pytest.mark.parametrize("mixer, heads", PAPER)
def test_tables_5_and_6(mixer, heads):
  sizes = dict(length=19, width=24, num_heads=heads)
  for position in range(1, 20):
    one = count_operations(mixer, position=position, **sizes)
    parameters = count_operations(mixer, **sizes).parameters
    assert one == Counts(*table_5_and_6(mixer, position, 24, heads), parameters)


@pytest.mark.parametrize(
  "mixer, switches",
  [(mixer, {}) for mixer in complexity.MIXERS] + [("she", BARE), ("he", BARE), ("we", BARE)],
)
@pytest.mark.parametrize("length", [1, 13])
def test_tokens_add_up_to_the_sequence(mixer, length, switches):
  heads = 1 if mixer in complexity.ONE_HEAD else 3
  sizes = dict(length=length, width=6, num_heads=heads, **switches)
  whole, total = count_operations(mixer, **sizes), Counts()
  for position in range(1, length + 1):
    one = count_operations(mixer, position=position, **sizes)
    assert one.parameters == whole.parameters
    total += dataclasses.replace(one, parameters=0)
  assert total == dataclasses.replace(whole, parameters=0)


@pytest.mark.parametrize("heads, multihead", [(1, False), (3, False), (3, True)])
def test_the_dispatcher_step_by_step(heads, multihead):
  """Counts Alg. 1 without what its mask takes away."""
  length, width, size = 7, 6, 6 // heads
  read = width if multihead else size
  dot = Counts(read, read - 1)
  steps = [dot] * (2 * length * width)  # values and outputs
  of_pair = [dot, Counts(size, size)] + [Counts(0, 1, 1, 1)] * (not multihead)
  for level in range(ops.num_levels(length)):
    steps += of_pair * (heads * (length - 2**level))
  mixer = "dispatcher_multihead" if multihead else "dispatcher"
  counts = count_operations(mixer, length=length, width=width, num_heads=heads)
  assert sum(steps, Counts(parameters=counts.parameters)) == counts


@pytest.mark.parametrize("mixer", ["she", "he", "we"])
def test_equations_24_and_25(mixer):
  def counts(**switches):
    return count_operations(mixer, length=7, width=6, **switches)

  linear = Counts(7 * 36, 7 * 30, parameters=36)
  assert counts(output_projection=False) + linear == counts()
  assert counts(adjustment=False) + linear + Counts(7 * 6) == counts()
  assert counts(**BARE) + linear + linear + Counts(7 * 6) == counts()


def test_what_reads_few_tokens():
  sizes = dict(length=7, width=6)
  whole = count_operations("attention", num_heads=3, **sizes)
  assert count_operations("local_attention", num_heads=3, reach=7, **sizes) == whole
  assert count_operations("local_attention", num_heads=3, **sizes) == whole  # of 256
  # Each of 28 - 10 pairs: a product of queries and keys, and a sum of values.
  local = count_operations("local_attention", num_heads=3, reach=3, **sizes)
  assert whole.multiplications - local.multiplications == 2 * 6 * 10
  assert whole.exponentiations - local.exponentiations == 3 * 10
  convolution = count_operations("short_convolution", reach=2, **sizes)
  # Four matrices, two gates, and taps for 7 + 6 pairs.
  assert convolution.multiplications == 7 * 4 * 36 + 7 * 2 * 6 + 13 * 6
  assert convolution.additions == 7 * 4 * 30 + 6 * 6


def test_mamba2_step_by_step():
  width, heads, inner, states = 6, 3, 12, complexity.STATE_WIDTH
  silu, steps = Counts(1, 1, 1, 1), []
  for taps in (1, 2, 2):
    steps += [Counts(width, width - 1)] * (2 * inner + 2 * states + heads)
    steps += [Counts(taps, taps), silu] * (inner + 2 * states)  # with a bias
    # log(1 + exp(dt + bias)) and exp(dt a)
    steps += [Counts(0, 2, 0, 2), Counts(1, 0, 0, 1)] * heads
    # dt x, decay s + (dt x) b, c, skip
    steps += [Counts(1), Counts(2 * states, states), Counts(states, states - 1)] * inner
    steps += [Counts(1, 1), silu] * inner
    # The gate, its square, the gain; the root of the mean square and epsilon.
    steps += [Counts(3, 0, 1)] * inner + [Counts(0, inner, 1, 1)]
    steps += [Counts(inner, inner - 1)] * width
  counts = count_operations("mamba2", length=3, width=width, num_heads=heads, reach=2)
  assert sum(steps, Counts(parameters=counts.parameters)) == counts


def test_mixers_in_turn_add_up(capsys):
  sizes = dict(length=7, width=6)
  one, other = count_operations("we", **sizes), count_operations("attention", num_heads=3, **sizes)
  pattern = complexity.count_pattern(["we", "attention"], 3, num_heads=3, **sizes)
  assert pattern == one + other + one
  flags = ["--length=7", "--width=6", "--num_heads=3"]
  complexity.main([*flags, "--pattern=we,attention", "--num_layers=3"])
  line = next(x for x in capsys.readouterr().out.splitlines() if "we, attention in 3 layers" in x)
  assert f"{pattern.operations:,}" in line
  for wrong in ("--pattern=we,attentoin", "--num_layers=3", "--pattern=we --num_layers=0"):
    with pytest.raises(SystemExit, match="^--(mixer|num_layers): expected"):
      complexity.main([*flags, *wrong.split()])
  # So many layers take no time.
  most = 2**31 - 1
  counts = complexity.count_pattern(["we", "attention"], most, num_heads=3, **sizes)
  assert counts.additions == one.additions * 2**30 + other.additions * (2**30 - 1)


LAYERS = {
  "attention": functools.partial(SelfAttention, num_heads=3, use_bias=False),
  "local_attention": functools.partial(LocalAttention, num_heads=3, use_bias=False),
  "short_convolution": ShortConvolution,
  "mamba2": functools.partial(Mamba2, head_width=8),  # 2 * 12 // 3
  "dispatcher": functools.partial(dispatcher.Dispatcher, num_heads=3),
  "dispatcher_multihead": functools.partial(dispatcher.MultiHeadDispatcher, num_heads=3),
} | {mixer: getattr(extractors, mixer.upper()) for mixer in complexity.EXTRACTORS}


@pytest.mark.parametrize("mixer", LAYERS)
def test_the_parameters_are_those_of_the_layer(mixer):
  module = LAYERS[mixer](max_length=11)
  shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((2, 11, 12)))
  heads = 1 if mixer in complexity.ONE_HEAD else 3
  counts = count_operations(mixer, length=11, width=12, num_heads=heads)
  assert counts.parameters == sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(mixer="rnn"), "mixer: expected one of attention, .*, me, .*, got rnn"),
    (dict(length=0), "length: expected an integer of at least 1 below 2\\*\\*31, got 0"),
    (dict(width=2.0), "width: expected an integer of at least 1 below 2.*, got 2.0"),
    (dict(num_heads=5), "num_heads: expected a divisor of the width 12, got 5"),
    (dict(mixer="he", num_heads=2), "num_heads: expected 1 with the mixer he, got 2"),
    (dict(adjustment=False), "adjustment: expected True with the mixer attention, got F"),
    (dict(reach=3), "reach: expected None with the mixer attention, got 3"),
    (dict(mixer="local_attention", reach=2**31), "reach: expected an integer of at least 1 below"),
    *((dict(position=x), "position: expected an integer from 1 to the l") for x in (0, 8, 1.0)),
  ],
)
def test_wrong_input(settings, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    count_operations(**dict(mixer="attention", length=7, width=12) | settings)


def test_the_command_prints_tables(capsys):
  complexity.main(["--inference=5", "--length=7", "--width=12", "--num_heads=3"])
  rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
  cells = {name: [int(x.replace(",", "")) for x in row] for name, *row in rows[3:]}
  known = complexity.table(length=7, width=12, num_heads=3, position=5)
  assert cells.keys() == known.keys() and len(cells) == 14
  for name, counts in known.items():
    *parts, parameters = dataclasses.astuple(counts)
    assert cells[name] == [*parts, counts.operations, parameters]
  he = count_operations("he", **BARE, position=5, length=7, width=12)
  assert known["HE, extraction alone"] == he
