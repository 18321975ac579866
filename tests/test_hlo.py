"""A compiled program's text read back: sizes, loops, what is alive, what moves, and what is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharded import mesh_of, on_mesh
from trainer.dryrun.analysis import read_overflow
from trainer.dryrun.buffers import largest, peak_of
from trainer.dryrun.collectives import collectives
from trainer.dryrun.cost import flops_of, roofline
from trainer.dryrun.hlo import leaves, parse, scope_of
from trainer.topology import find_slice

# In the form of libtpu's: tiles, memory spaces, a loop whose state is handed on in place, a stack frame table.
TEXT = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/somewhere/trainer/models/moe.py"
2 "/lib/jax/x.py"

FunctionNames
1 "experts"

FileLocations
1 {file_name_id=1 function_name_id=1 line=120 end_line=120 column=8 end_column=8}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=8 end_column=8}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%fused (p: bf16[8,128]) -> bf16[8,128] {
  ROOT %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
}, execution_thread="sparsecore"

%all-reduce-scatter.1 (q: bf16[12,100]) -> bf16[6,100] {
  %q = bf16[12,100]{1,0:T(8,128)(2,1)} parameter(0)
  %whole = bf16[12,100]{1,0:T(8,128)(2,1)} all-reduce(%q), replica_groups={{0,1},{2,3}}, to_apply=%fused
  %here = s32[]{:T(128)} constant(0)
  ROOT %cut = bf16[6,100]{1,0:T(8,128)(2,1)} dynamic-slice(%whole, %here, %here), dynamic_slice_sizes={6,100}
}

%body (s: (s32[], bf16[6,100])) -> (s32[], bf16[6,100]) {
  %s = (s32[]{:T(128)}, bf16[6,100]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %x = bf16[6,100]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %big = f32[64,256]{1,0:T(8,128)} fusion(%x), calls=%fused, metadata={op_name="transpose(f)/experts" stack_frame_id=2}
  %fast = f32[64,256]{1,0:T(8,128)S(1)} fusion(%big), frontend_attributes={kernel_metadata={
"block": 512
}}, kind=kLoop, calls=%fused
  %sum = bf16[6,100]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%fused
  %y = bf16[6,100]{1,0:T(8,128)(2,1)} fusion(%sum, %fast), kind=kLoop, calls=%fused
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %out = (s32[]{:T(128)}, bf16[6,100]{1,0:T(8,128)(2,1)}) tuple(%next, %y)
}

%condition (s: (s32[], bf16[6,100])) -> pred[] {
  %s.1 = (s32[]{:T(128)}, bf16[6,100]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%s.1), index=0
  %n = s32[]{:T(128)} constant(5)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %n), direction=LT
}

ENTRY %main (a: bf16[6,100]) -> bf16[6,100] {
  %a = bf16[6,100]{1,0:T(8,128)(2,1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %state = bf16[6,100]{1,0:T(8,128)(2,1)} copy(%a)
  %init = (s32[]{:T(128)}, bf16[6,100]{1,0:T(8,128)(2,1)}) tuple(%zero, %state)
  %loop = (s32[]{:T(128)}, bf16[6,100]{1,0:T(8,128)(2,1)}) while(%init), condition=%condition, body=%body
  %result = bf16[6,100]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
  %gathered = bf16[12,100]{1,0:T(8,128)(2,1)} all-gather(%result), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  ROOT %end = bf16[6,100]{1,0:T(8,128)(2,1)} fusion(%gathered), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


@pytest.mark.parametrize(
    ("shape", "num_bytes", "space"),
    [
        ("bf16[6,100]{1,0:T(8,128)(2,1)}", 8 * 128 * 2, 0),
        ("f32[3,5,130]{2,0,1:T(4,128)S(1)}", 5 * 4 * 256 * 4, 1),
        ("s32[100]{0:T(128)}", 128 * 4, 0),
        ("f32[2,3]{1,0}", 24, 0),
        ("pred[]", 1, 0),
    ],
)
def test_arrays_have_the_layouts_padding(shape, num_bytes, space):
    (array,) = leaves(shape)
    assert (array.num_bytes, array.space) == (num_bytes, space)


def test_what_is_alive_at_the_peak_is_named():
    program = parse(TEXT)
    peak = peak_of(program)
    padded = 8 * 128 * 2
    big = 64 * 256 * 4
    # In the loop: its state, kept in place, and the big one; what is in fast memory does not count.
    assert peak.num_bytes == big + padded
    first = largest(peak)[0]
    assert (first.shape, first.num_bytes) == ("f32[64,256]", big)
    assert first.source == "trainer/models/moe.py:120 (experts backward)"
    assert program.donated == {0: 0}


def test_collectives_are_counted_with_their_loops_and_named_by_axes():
    padded = 8 * 128 * 2
    rows = {(r.kind, r.axes): (r.count, r.num_bytes) for r in collectives(parse(TEXT), {"expert": 2, "tensor": 2})}
    assert rows == {
        ("all-reduce", "tensor"): (5, 5 * padded),
        ("all-gather", "expert"): (1, 16 * 128 * 2 // 2),
        ("reduce-scatter", "tensor"): (1, 16 * 128 * 2 // 2),
    }


def test_a_real_programs_peak_and_collectives():
    """On the CPU: ten turns of a loop over tensor, and what the loop stacks up."""
    mesh = mesh_of(expert=2, tensor=4)

    def local(x):
        def turn(c, _):
            c = lax.psum(jnp.tanh(c @ c.T @ c), "tensor")
            return lax.pcast(c, "tensor", to="varying"), c

        return lax.scan(turn, x, length=10)[1].sum(0)

    with jax.set_mesh(mesh):
        run = jax.jit(on_mesh(mesh, local, (P("expert", "tensor"),), P("expert", None)))
        traced = run.trace(jnp.ones((256, 64)))
        compiled = traced.lower().compile()
    program = parse(compiled.as_text())
    (row,) = [r for r in collectives(program, dict(mesh.shape)) if r.kind == "all-reduce"]
    assert (row.axes, row.count, row.num_bytes) == ("tensor", 10, 10 * 2 * 3 * 128 * 16 * 4 // 4)
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert 0.5 * temporaries < peak_of(program).num_bytes < 1.5 * temporaries
    assert flops_of(traced.jaxpr.jaxpr).total == 10 * 2 * (2.0 * 128 * 128 * 16)


def test_flops_are_told_apart_by_scope_and_by_what_is_done_again():
    def layer(x, w):
        with jax.named_scope("experts"):
            return jnp.sin(x @ w)

    def f(x, w):
        def turn(c, _):
            return jax.checkpoint(layer)(c, w), None

        return lax.scan(turn, x, length=3)[0].sum()

    jaxpr = jax.jit(jax.grad(f, argnums=(0, 1))).trace(np.ones((4, 8), np.float32), np.ones((8, 8), np.float32)).jaxpr
    found = flops_of(jaxpr.jaxpr)
    one = 2.0 * 4 * 8 * 8 * 3
    assert found.by_scope == {"experts": 4 * one}
    assert (found.total, found.recompute) == (4 * one, one)


def test_grouped_products_count_every_row_once_and_frozen_weights_have_no_gradient():
    def f(x, w):
        return lax.ragged_dot(x, w, jnp.array([3, 5])).sum()

    args = (np.ones((8, 4), np.float32), np.ones((2, 4, 6), np.float32))
    one = 2.0 * 8 * 4 * 6
    assert flops_of(jax.jit(jax.grad(f)).trace(*args).jaxpr.jaxpr).total == pytest.approx(2 * one, rel=0.01)
    assert flops_of(jax.jit(jax.grad(f, argnums=(0, 1))).trace(*args).jaxpr.jaxpr).total == pytest.approx(
        3 * one, rel=0.01
    )


def test_scopes_are_words_of_ours():
    name = "jit(step)/transpose(jvp())/shard_map/while/body/closed_call/checkpoint/rematted_computation/moe/experts/mul"
    assert scope_of(name) == "moe experts mul backward recompute"


@pytest.mark.parametrize(
    ("text", "needed", "limit", "temporaries"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (35.20G) exceeds "
         "available HBM (31.25G).", 35.2, 31.25, 35.2),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 94.07G of 31.24G hbm. Exceeded hbm capacity "
         "by 62.83G.", 94.07, 31.24, None),
    ],
)  # fmt: skip
def test_a_compilers_refusal_is_read_as_numbers(text, needed, limit, temporaries):
    found = read_overflow(text)
    assert found is not None
    assert found.needed_bytes / 2**30 == pytest.approx(needed)
    assert found.limit_bytes / 2**30 == pytest.approx(limit)
    assert (found.temporary_bytes is None) == (temporaries is None)


def test_another_error_is_no_refusal():
    assert read_overflow("INVALID_ARGUMENT: hbm") is None


def test_the_least_time_is_the_slowest_parts():
    chip = find_slice("v6e-128").chip
    found = roofline(chip.bf16_flops_per_s, 3 * chip.hbm_bytes_per_s, chip.link_bytes_per_s, chip)
    assert (found.compute_s, found.hbm_s, found.ici_s, found.bound) == (1.0, 3.0, 0.5, "HBM")
