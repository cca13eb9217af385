"""Counts what a compiled program moves, in XLA's text of it (`compiled.as_text()`).

Every operation outside of a fusion reads its operands from the device's memory and writes its
result there; what happens within a fusion stays on the chip:

  bytes of a computation = sum over its operations of (operands + result)
  while: iterations x body; conditional: its largest branch; call: what is called

A slice reads and an update in place writes only the part that it touches, within fusions too, so a
loop over stacked layers counts one layer an iteration. Arrays take whole tiles where the compiler
lays them out in such, as a TPU's. What XLA placed in the chip's own memory (S(1) in a TPU's text)
counts nothing. Caches are not modelled: what a program reads twice counts twice.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

# Bytes of an element, but for those named by their bits, as f32 and u8.
_BYTES = {"pred": 1, "token": 0, "opaque": 0, "c64": 8, "c128": 16}
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id "
  "opt-barrier add-dependency while conditional call".split()
)
_COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "reduce-scatter",
  "all-to-all",
  "ragged-all-to-all",
  "collective-permute",
  "collective-broadcast",
)
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What one run of a program moves on each device.

  Attributes:
    bytes: read from and written to the device's memory.
    collectives: {kind: (number, bytes)}; bytes are those of the operands, of a gather its result's.
    custom_calls: {target: number}, as of cuDNN, cuBLAS, Triton and Mosaic.
    unknown_loops: loops whose number of iterations XLA does not tell, which count once.
  """

  bytes: int = 0
  collectives: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
  custom_calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
  unknown_loops: int = 0

  def __add__(self, other: "Traffic") -> "Traffic":
    collectives, calls = dict(self.collectives), dict(self.custom_calls)
    for kind, (number, size) in other.collectives.items():
      had = collectives.get(kind, (0, 0))
      collectives[kind] = had[0] + number, had[1] + size
    for target, number in other.custom_calls.items():
      calls[target] = calls.get(target, 0) + number
    unknown = self.unknown_loops + other.unknown_loops
    return Traffic(self.bytes + other.bytes, collectives, calls, unknown)

  def __mul__(self, times: int) -> "Traffic":
    collectives = {kind: (n * times, size * times) for kind, (n, size) in self.collectives.items()}
    calls = {target: number * times for target, number in self.custom_calls.items()}
    return Traffic(self.bytes * times, collectives, calls, self.unknown_loops)


def count(text: str) -> Traffic:
  """Counts the traffic of a compiled program; a `ValueError` if it has no entry computation."""
  program = _Program(text)
  return program.traffic(program.entry)


@dataclasses.dataclass(frozen=True)
class _Operation:
  name: str
  shape: str
  kind: str
  operands: Sequence[str]
  rest: str

  @property
  def size(self) -> int:
    return _size(self.shape)

  def called(self, *names: str) -> list[str]:
    """The computations that these attributes name."""
    found = []
    for name in names:
      for group in re.findall(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest):
        found += re.findall(r"%?([\w.\-]+)", group)
    return found


class _Program:
  def __init__(self, text: str):
    self._computations: dict[str, dict[str, _Operation]] = {}
    self.entry = ""
    current: dict[str, _Operation] = {}
    for line in text.splitlines():
      if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
        current = self._computations.setdefault(head[2], {})
        self.entry = head[2] if head[1] else self.entry
      elif operation := _parse(line):
        current[operation.name] = operation
    if not self.entry:
      raise ValueError("text: expected that of a compiled program, got one without ENTRY")
    self.traffic = functools.cache(self._traffic)
    self._read = functools.cache(self._count_read)

  def _traffic(self, name: str) -> Traffic:
    inside = self._computations[name]
    return sum((self._of_operation(one, inside) for one in inside.values()), Traffic())

  def _of_operation(self, one: _Operation, inside: Mapping[str, _Operation]) -> Traffic:
    if one.kind == "while":
      body = sum(map(self.traffic, one.called("body", "condition")), Traffic())
      trips = self._trips(one)
      return body + Traffic(unknown_loops=1) if trips is None else body * trips
    if one.kind == "conditional":
      names = one.called("branch_computations", "true_computation", "false_computation")
      return max(map(self.traffic, names), key=lambda x: x.bytes)
    if one.kind in ("call", "async-start"):
      return sum(map(self.traffic, one.called("to_apply", "calls")), Traffic())
    if one.kind in _FREE or one.kind.endswith(("-done", "-update")):
      return Traffic()
    sizes = {name: inside[name].size if name in inside else 0 for name in one.operands}
    return Traffic(self._moved(one, sizes), *_named(one, inside))

  def _trips(self, loop: _Operation) -> int | None:
    """The iterations of a loop: as XLA tells, or the n of its condition i < n, from 0 by 1."""
    if told := re.search(r'"?known_trip_count"?:?=?\{"?n"?:"?(\d+)', loop.rest):
      return int(told[1])
    inside = self._computations[loop.called("condition")[0]]
    root = [*inside.values()][-1]
    if root.kind == "compare" and "direction=LT" in root.rest:
      last = inside[root.operands[1]]
      return int(last.rest.partition(")")[0]) if last.kind == "constant" else None
    return None

  def _moved(self, one: _Operation, sizes: Mapping[str, int]) -> int:
    if one.kind in _SLICES:
      return 2 * one.size
    if one.kind in ("dynamic-update-slice", "scatter"):
      return 2 * sizes[one.operands[1 if one.kind == "dynamic-update-slice" else 2]]
    if 'custom_call_target="AllocateBuffer"' in one.rest or "ConcatBitcast" in one.rest:
      return 0
    document_starts = one.kind.endswith("-start")
    if document_starts and one.kind != "fusion-start":
      return _moved_by_start(one, sum(sizes.values()))
    if not document_starts and one.kind != "fusion":
      return sum(sizes.values()) + one.size
    result = one.size - document_starts * sum(map(sizes.__getitem__, one.operands))
    called, read = one.called("calls")[0], dict.fromkeys(one.operands, 0)
    for index, name in enumerate(one.operands):
      read[name] = max(read[name], min(sizes[name], self._read(called, index)))
    return sum(read.values()) + _written(self._computations[called], result)

  def _count_read(self, name: str, index: int) -> int:
    """The bytes that a fused computation reads of a parameter."""
    inner = self._computations[name]
    parameter = next(
      (x for x in inner.values() if x.kind == "parameter" and x.rest.startswith(f"{index})")), None
    )
    return self._read_of(inner, parameter) if parameter else 0

  def _read_of(self, inner: Mapping[str, _Operation], array: _Operation) -> int:
    whole, total = _size(array.shape, everywhere=True), 0
    for user in inner.values():
      if array.name not in user.operands:
        continue
      if user.kind in _SLICES and user.operands[0] == array.name:
        total += _size(user.shape, everywhere=True)
      elif user.kind == "dynamic-update-slice" and user.operands[0] == array.name:
        continue  # It stays where it is.
      elif user.kind == "bitcast":
        total += self._read_of(inner, user)
      elif user.kind == "fusion":
        places = [i for i, operand in enumerate(user.operands) if operand == array.name]
        total += sum(self._read(user.called("calls")[0], i) for i in places)
      else:
        return whole
    return min(whole, total)


def _named(one: _Operation, inside: Mapping[str, _Operation]) -> tuple[dict, dict]:
  """The collectives and the custom calls that an operation is."""
  kind = one.kind.removesuffix("-start")
  if kind in _COLLECTIVES:
    given = [inside[name].shape for name in one.operands if name in inside]
    size = sum(_size(shape, everywhere=True) for shape in given)
    if kind == "all-gather":
      size = max(size, *_arrays(one.shape, everywhere=True))
    return {kind: (1, size)}, {}
  found = re.search(r'custom_call_target="([^"]+)"', one.rest)
  return {}, {found[1]: 1} if found else {}


def _moved_by_start(one: _Operation, read: int) -> int:
  """The bytes of an asynchronous operation, whose result is a tuple with its operands."""
  kind, parts = one.kind.removesuffix("-start"), _arrays(one.shape)
  if kind == "copy":  # (copy, operand, ...)
    return read + parts[0]
  if kind in _SLICES:  # ((operand), slice, ...)
    return _arrays(one.shape, everywhere=True)[1] + parts[1]
  return read + sum(parts) if kind == "all-reduce" else sum(parts)  # else (operand, result)


def _written(inner: Mapping[str, _Operation], size: int) -> int:
  """The bytes that a fused computation writes, of results of `size` bytes."""
  root = [*inner.values()][-1]
  results = root.operands if root.kind == "tuple" else [root.name]
  unchanged = 0
  for name in results:
    one = inner[name]
    while one.kind in ("bitcast", "convert", "copy") and one.operands[0] in inner:
      one = inner[one.operands[0]]
    if one.kind == "dynamic-update-slice":
      update = _size(inner[one.operands[1]].shape, everywhere=True)
      unchanged += _size(inner[name].shape, everywhere=True) - update
  return max(0, size - unchanged)


def _parse(line: str) -> _Operation | None:
  head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
  if not head:
    return None
  end = _end_of_shape(line, head.end())
  kind = re.match(r" ([\w\-]+)\(", line[end:])
  if not kind:
    return None
  rest = line[end + kind.end() :]
  depth, close = 1, 0
  for close, letter in enumerate(rest):  # noqa: B007
    depth += (letter in "({[") - (letter in ")}]")
    if not depth:
      break
  # An operand may stand with its shape: f32[2,3]{1,0} %name.
  parts = re.sub(r"\{[^{}]*\}|\[[^\]]*\]|/\*.*?\*/", "", rest[:close]).split(",")
  operands = [part.split()[-1].lstrip("%") for part in parts if part.split()]
  return _Operation(head[1], line[head.end() : end], kind[1], tuple(operands), rest)


def _end_of_shape(line: str, start: int) -> int:
  depth = 0
  for at in range(start, len(line)):
    depth += (line[at] in "({[") - (line[at] in ")}]")
    if not depth and line[at] == " ":
      return at
  return len(line)


def _arrays(shape: str, everywhere: bool = False) -> list[int]:
  """The bytes of each array of a shape; 0 for one that is not in the main memory, unless asked."""
  found = []
  for kind, sizes, layout in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?", shape):
    is_counted = everywhere or not re.search(r"S\([1-9]", layout)
    bits = re.match(r"[a-z]+(\d+)", kind)
    each = _BYTES[kind] if kind in _BYTES else int(bits[1]) / 8 if bits else 0
    axes = [int(size.lstrip("<=")) for size in sizes.split(",") if size]
    if tiles := re.match(r"\{([\d,]*):T\(([\d,]+)\)", layout):  # Whole tiles, as T(8,128).
      minor = [int(axis) for axis in tiles[1].split(",") if axis]
      for axis, tile in zip(minor, reversed(tiles[2].split(",")), strict=False):
        axes[axis] = -(-axes[axis] // int(tile)) * int(tile)
    found.append(math.ceil(each * math.prod(axes)) if is_counted else 0)
  return found


def _size(shape: str, everywhere: bool = False) -> int:
  return sum(_arrays(shape, everywhere))
