"""The HLO reader against programs whose shapes, loops, products and groups are known."""

from contextlib import suppress

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler import compile_for
from tpukit.compiler.hlo import (
    count_collectives,
    count_operations,
    find_collective,
    matrix_flops,
    nested_matrix_flops,
    parse_hlo,
    parse_shapes,
    trip_count,
)
from tpukit.compiler.hlo.collectives import parse_groups
from tpukit.errors import XLACompilationError

LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=4

%body (p: (s32[], bf16[8,256])) -> (s32[], bf16[8,256]) {
  %p = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[8,256]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %w = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} constant({...})
  %dot = bf16[8,256]{1,0:T(8,128)(2,1)} dot(%x, %w), lhs_contracting_dims={1},
    rhs_contracting_dims={0},
    metadata={op_name="jit(f)/while/body/dot_general" stack_frame_id=7}
  ROOT %out = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) tuple(%next, %dot)
}

%condition (p.1: (s32[], bf16[8,256])) -> pred[] {
  %p.1 = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (a: bf16[8,256]) -> bf16[8,256] {
  %a = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="text with ) and \\" in it"}
  %zero = s32[]{:T(128)} constant(2)
  %state = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) tuple(%zero, %a)
  %loop = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)}) while(%state), condition=%condition,
    body=%body
  %y = bf16[8,256]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
  ROOT %sum = bf16[8,256]{1,0:T(8,128)(2,1)} all-reduce(%y), channel_id=1,
    replica_groups=[2,2]<=[4],
    to_apply=%add
}
"""


def test_a_program_with_a_loop():
    module = parse_hlo(LOOP)
    assert (module.name, module.entry_name, module.num_partitions) == ("jit_f", "main", 4)
    assert [i.opcode for i in module.entry] == [
        *("parameter", "constant", "tuple", "while", "get-tuple-element", "all-reduce")
    ]
    loop = module.entry.by_name["loop"]
    assert trip_count(loop, module.entry, module) == 10  # from 2 to 12
    body = module.computations["body"]
    dot = body.by_name["dot"]
    assert matrix_flops(dot, body) == 2 * 8 * 256 * 256
    assert nested_matrix_flops(loop, module) == 2 * 8 * 256 * 256
    assert (dot.op_name, dot.stack_frame) == ("jit(f)/while/body/dot_general", 7)
    assert body.by_name["w"].shapes[0].memory_space == 1
    reduced = find_collective(module.entry.root, module.entry, module)
    assert reduced is not None
    assert (reduced.kind, reduced.bytes, reduced.groups) == (
        *("all-reduce", 8 * 256 * 2),
        ((0, 1), (2, 3)),
    )
    assert count_collectives(module) == {"all-reduce": 1}


# The same loop as libtpu 0.0.50 prints it: elements of tuples are marked where they are used.
MARKED_LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=4

%body (p: (s32[], (bf16[8,256], f32[8]))) -> (s32[], (bf16[8,256], f32[8])) {
  %one = s32[]{:T(128)} constant(1)
  %p = (s32[]{:T(128)}, (bf16[8,256]{1,0:T(8,128)(2,1)}, /*index=1*/f32[8]{0:T(8)})) parameter(0)
  %copy = s32[]{:T(128)S(6)} copy(%p#0), backend_config={"aliasing_operands":{"lists":[]}}
  %next = s32[]{:T(128)} add(%copy, %one)
  %twice = f32[8]{0:T(8)} fusion(%p#1#1, %p#1#1), kind=kLoop, calls=%add
  %pair = (bf16[8,256]{1,0:T(8,128)(2,1)}, f32[8]{0:T(8)}) tuple(%p#1#0, %twice)
  ROOT %out = (s32[], (bf16[8,256], f32[8])) tuple(%next, %pair)
}

%condition (p.1: (s32[], (bf16[8,256], f32[8]))) -> pred[] {
  %p.1 = (s32[]{:T(128)}, (bf16[8,256]{1,0}, f32[8]{0})) parameter(0)
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[]{:T(512)} compare(%p.1#0, %limit), direction=LT
}

ENTRY %main (a: bf16[8,256], b: f32[8]) -> f32[8] {
  %a = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[8]{0:T(8)} parameter(1)
  %zero = s32[]{:T(128)} constant(2)
  %arrays = (bf16[8,256]{1,0:T(8,128)(2,1)}, f32[8]{0:T(8)}) tuple(%a, %b)
  %state = (s32[], (bf16[8,256], f32[8])) tuple(%zero, %arrays)
  %loop = (s32[], (bf16[8,256], f32[8]{0:T(8)})) while(%state), condition=%condition, body=%body
  ROOT %sum = f32[8]{0:T(8)} all-reduce(%loop#1#1), replica_groups=[2,2]<=[4], to_apply=%add
}
"""


def test_elements_that_are_marked_where_they_are_used_are_instructions():
    module = parse_hlo(MARKED_LOOP)
    body = module.computations["body"].by_name
    assert body["copy"].operands == ("p#0",)
    assert (body["p#0"].opcode, body["p#0"].attribute("index")) == ("get-tuple-element", "0")
    assert [str(shape) for shape in body["p#1"].shapes] == ["bf16[8,256]", "f32[8]"]
    assert [str(shape) for shape in body["p#1#1"].shapes] == ["f32[8]"]
    assert [one.name for one in module.computations["body"]].count("p#1#1") == 1
    (loop,) = (one for one in module.entry if one.opcode == "while")
    assert trip_count(loop, module.entry, module) == 10
    assert count_collectives(module) == {"all-reduce": 1}


def test_an_element_that_is_not_there_is_a_clear_error():
    for seen in ("%p#2", "%q#0", "%p#0#1"):
        with pytest.raises(XLACompilationError, match=f"uses {seen[1:]}"):
            parse_hlo(MARKED_LOOP.replace("copy(%p#0)", f"copy({seen})"))


def test_operations_are_counted_with_a_loop_once_and_a_fusion_as_one():
    inside = {"fusions": 1, "kernels": 0, "loops": 1, "copies": 1}
    assert count_operations(parse_hlo(MARKED_LOOP)) == inside
    assert count_operations(parse_hlo(LOOP)) == {**dict.fromkeys(inside, 0), "loops": 1}


@pytest.mark.parametrize(("sent", "received"), [(64, 512), (512, 64)])
def test_a_ragged_exchange_moves_what_a_device_holds(sent, received):
    text = (
        "HloModule jit_f, is_scheduled=true, num_partitions=8\n\n"
        f"ENTRY %main (a: bf16[{sent},8], b: bf16[{received},8]) -> bf16[{received},8] {{\n"
        f"  %a = bf16[{sent},8]{{1,0}} parameter(0)\n"
        f"  %b = bf16[{received},8]{{1,0}} parameter(1)\n"
        f"  ROOT %out = bf16[{received},8]{{1,0}} ragged-all-to-all(%a, %b), channel_id=1, "
        "replica_groups=[2,4]<=[8]\n}\n"
    )
    module = parse_hlo(text)
    found = find_collective(module.entry.root, module.entry, module)
    assert found is not None
    assert (found.kind, found.bytes, found.group_size) == ("all-to-all", 64 * 8 * 2, 4)


def test_shapes_with_tiles_and_memory_spaces():
    (shape,) = parse_shapes("bf16[3,100]{1,0:T(8,128)(2,1)S(1)}")
    assert (shape.bytes, shape.padded_bytes, shape.memory_space) == (600, 8 * 128 * 2, 1)
    (transposed,) = parse_shapes("f32[200,3]{0,1:T(8,128)}")
    assert transposed.padded_bytes == 8 * 256 * 4  # 200 is the fast dimension here
    (vector,) = parse_shapes("f32[130]{0:T(128)}")
    assert vector.padded_bytes == 256 * 4
    parts = parse_shapes("(s4[16]{0}, (pred[], token[]), f8e4m3fn[2,2]{1,0})")
    assert [part.bytes for part in parts] == [8, 1, 0, 4]
    assert str(parts[3]) == "f8e4m3fn[2,2]"


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("channel_id=3", ((0, 1, 2, 3),)),
    ],
)
def test_groups_of_devices(text, groups):
    assert parse_groups(text, 4) == groups


def test_text_that_is_not_a_program():
    with pytest.raises(XLACompilationError, match="no ENTRY computation"):
        parse_hlo("hello")


@given(st.text(alphabet='%= ()[]{},:"\\\nENTRYROOTabf16-> '))
def test_garbage_gives_only_clear_errors(text):
    with suppress(XLACompilationError):
        parse_hlo(text)


@given(st.integers(0, len(LOOP)))
def test_a_cut_program_gives_only_clear_errors(length):
    with suppress(XLACompilationError):
        count_collectives(parse_hlo(LOOP[:length]))


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_products_of_a_real_program_are_counted_exactly():
    """Plain, batched and transposed products in a scan: the compiler makes convolutions of all."""
    layers, batch, heads, tokens, width, head = 3, 2, 4, 256, 256, 128

    def layer(x, w):
        q = (x @ w["q"]).reshape(batch, tokens, heads, head)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, q)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, q).reshape(batch, tokens, heads * head)
        return x + mixed @ w["o"], None

    def model(weights, x):
        return jax.lax.scan(layer, x, weights)[0]

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, "bfloat16")  # noqa: E731
    weights = {"q": shape(layers, width, heads * head), "o": shape(layers, heads * head, width)}
    compiled = compile_for(model, "v6e-1", weights, shape(batch, tokens, width))
    module = compiled.module
    counted = 0.0
    for instruction in module.entry:
        times = 1
        if instruction.opcode == "while":
            times = trip_count(instruction, module.entry, module)
            assert times is not None
        counted += times * nested_matrix_flops(instruction, module)
    projections = 2 * batch * tokens * width * heads * head * 2
    attention = 2 * batch * heads * tokens * tokens * head * 2
    assert counted == layers * (projections + attention)
