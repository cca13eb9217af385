"""The bytes of programs whose traffic is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax.analysis import traffic


def moved(function, *shapes, donate=()):
  arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
  lowered = jax.jit(function, donate_argnums=donate).lower(*arrays)
  return traffic.count(lowered.compile().as_text())


def test_a_fusion_reads_its_operands_and_writes_its_result():
  rows = (300, 70), jnp.float32
  assert moved(lambda x, y: jnp.tanh(x * y) + 1, rows, rows).bytes == 3 * 300 * 70 * 4
  assert moved(lambda x: x.astype(jnp.bfloat16), rows).bytes == 300 * 70 * 6


def test_a_product_reads_both_factors():
  found = moved(lambda x, w: x @ w, ((200, 300), jnp.float32), ((300, 500), jnp.float32))
  assert found.bytes == 4 * (200 * 300 + 300 * 500 + 200 * 500)


def test_a_loop_counts_each_iteration_and_of_stacked_arrays_one_layer():
  def function(x, layers):
    return jax.lax.scan(lambda x, w: (jnp.sin(x) * w, jnp.cos(x)), x, layers)

  found = {n: moved(function, ((3000,), jnp.float32), ((n, 3000), jnp.float32)) for n in (10, 30)}
  assert not found[10].unknown_loops
  # Each layer reads x and its own, and writes x and what it stacks; a CPU copies what goes round.
  least = 20 * 4 * 3000 * 4
  assert least <= found[30].bytes - found[10].bytes <= 2.1 * least


def test_a_loop_of_unknown_length_is_said():
  def function(x, n):
    return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] * 2, c[1] + 1), (x, 0))

  assert moved(function, ((50,), jnp.float32), ((), jnp.int32)).unknown_loops == 1


def test_of_branches_the_largest_counts():
  def function(i, x):
    return jax.lax.switch(i, [lambda x: x[:5], lambda x: jnp.sort(x)[:5], lambda x: x[5:10]], x)

  index, rows = ((), jnp.int32), ((4000,), jnp.float32)
  assert 2 * 4000 * 4 <= moved(function, index, rows).bytes < 4 * 4000 * 4


def test_an_update_in_place_writes_its_part_alone():
  def function(x, row, i):
    return jax.lax.dynamic_update_slice(x, row, (i, 0))

  shapes = ((1000, 40), jnp.float32), ((1, 40), jnp.float32), ((), jnp.int32)
  assert moved(function, *shapes, donate=0).bytes <= 3 * 40 * 4 + 100


_TEXT = """HloModule of_a_tpu
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
%body (carry: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {
  %carry = (s32[], f32[64,128]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[64,128]{1,0:T(8,128)S(1)} get-tuple-element(%carry), index=1
  %all-reduce.1 = f32[64,128]{1,0:T(8,128)} all-reduce(%x), replica_groups={}, to_apply=%add
  %call.1 = f32[64,128]{1,0:T(8,128)S(1)} custom-call(%all-reduce.1), custom_call_target="kernel"
  ROOT %out = (s32[], f32[64,128]{1,0:T(8,128)S(1)}) tuple(%i, %call.1)
}
ENTRY %main (p: f32[64,128]) -> f32[256,128] {
  %p = f32[64,128]{1,0:T(8,128)} parameter(0)
  %start = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]) copy-start(%p)
  %done = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %n = s32[] constant(0)
  %first = (s32[], f32[64,128]{1,0:T(8,128)S(1)}) tuple(%n, %done)
  %loop = (s32[], f32[64,128]{1,0:T(8,128)S(1)}) while(%first), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[64,128]{1,0:T(8,128)S(1)} get-tuple-element(%loop), index=1
  ROOT %gathered = f32[256,128]{1,0:T(8,128)} all-gather(%y), dimensions={0}
}
%less (carry: (s32[], f32[64,128])) -> pred[] {
  ROOT %yes = pred[] constant(true)
}
"""


def test_arrays_on_the_chip_count_nothing_and_collectives_count_each_iteration():
  found, rows = traffic.count(_TEXT), 64 * 128 * 4
  # The copy reads p; three times all-reduce writes and the kernel reads; the gather writes.
  assert found.bytes == rows + 3 * 2 * rows + 4 * rows
  assert found.collectives == {"all-reduce": (3, 3 * rows), "all-gather": (1, 4 * rows)}
  assert found.custom_calls == {"kernel": 3}


def test_refuses_what_is_no_program():
  with pytest.raises(ValueError, match="text: expected"):
    traffic.count("HloModule x\n")


def test_counts_a_sharded_program_by_device():
  mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4])
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
  x = jax.ShapeDtypeStruct((400, 30), np.float32, sharding=place)
  found = traffic.count(jax.jit(lambda x: jnp.sum(x, 0)).lower(x).compile().as_text())
  assert found.collectives["all-reduce"] == (1, 30 * 4)
  assert 100 * 30 * 4 <= found.bytes < 2 * 100 * 30 * 4
