"""Programs as a profile stores them, against what the compiler itself prints of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from jaxlib import _hlo

from tpukit.compiler.hlo import matrix_flops, parse_hlo
from tpukit.compiler.memory.sources import parse_sources
from tpukit.errors import TPUValidationError
from tpukit.observe.profiling.hlo_proto import FORMATS, read_program
from tpukit.observe.profiling.programs import ProfiledProgram


def products(x, y):
    return jnp.tanh(jnp.einsum("bij,bjk->bik", x, y)).sum(-1)


def images(x, y):
    return jax.lax.conv_general_dilated(x, y, (2, 1), [(1, 1), (0, 2)], rhs_dilation=(1, 2))


def loop(x):
    branch = jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)
    return jax.lax.fori_loop(0, 3, lambda _, y: jax.lax.sort(y @ y, dimension=1), branch)


def exchange(x):
    y = jax.lax.all_to_all(jax.lax.psum(x, "all"), "all", 0, 0, tiled=True)
    y = jax.lax.ppermute(y, "all", [(i, (i + 1) % 8) for i in range(8)])
    return jax.lax.psum_scatter(jax.lax.all_gather(y, "all", tiled=True), "all", tiled=True)


def exchanged(x):
    mesh = jax.sharding.Mesh(jax.devices(), ("all",))
    return jax.shard_map(exchange, mesh=mesh, in_specs=P("all"), out_specs=P("all"),
                         check_vma=False)(x)  # fmt: skip


def compiled(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile()


def module_of(program):
    (module,) = program.runtime_executable().hlo_modules()
    return module


PROGRAMS = {
    "products": (products, (3, 8, 16), (3, 16, 4)),
    "images": (images, (2, 3, 16, 16), (5, 3, 3, 3)),
    "loop": (loop, (8, 8)),
    "exchange": (exchanged, (64, 8)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_stored_program_reads_as_the_printed_one(name):
    module = module_of(compiled(*PROGRAMS[name]))
    printed = module.to_string()
    expected, lines = parse_hlo(printed), parse_sources(printed)
    read, sources = read_program(module.as_serialized_hlo_module_proto())
    assert (read.name, read.entry_name) == (expected.name, expected.entry_name)
    assert set(read.computations) == set(expected.computations)
    for computation in expected.computations.values():
        mine = read.computations[computation.name]
        assert set(mine.by_name) == set(computation.by_name)
        for theirs in computation:
            own = mine.by_name[theirs.name]
            assert (own.opcode, own.shapes, own.operands) == (
                theirs.opcode, theirs.shapes, theirs.operands,
            )  # fmt: skip
            assert own.is_root == theirs.is_root
            assert own.op_name == theirs.op_name
            assert dict(own.called) == dict(theirs.called)
            assert own.branches == theirs.branches
            assert own.custom_call_target == theirs.custom_call_target
            assert matrix_flops(own, mine) == matrix_flops(theirs, computation)
            assert sources.line_of(own.stack_frame) == lines.line_of(theirs.stack_frame)


def test_number_formats_have_the_numbers_of_the_compiler():
    values = {int(getattr(value, "value", value)): str(name).lower()
              for name, value in _hlo.PrimitiveType.__members__.items()}  # fmt: skip
    for number, name in values.items():
        if number in FORMATS:
            plain = name.replace("opaque_type", "opaque")
            assert FORMATS[number] == plain
    assert len(set(values) & set(FORMATS)) > 20


def test_flops_of_a_library_call_come_from_its_notes():
    """As XLA writes a product that cuBLAS does."""
    text = """HloModule m, is_scheduled=true
ENTRY %main (a: bf16[4,32,64], b: bf16[4,64,16]) -> (bf16[4,32,16], s8[128]) {
  %a = bf16[4,32,64]{2,1,0} parameter(0)
  %b = bf16[4,64,16]{2,1,0} parameter(1)
  ROOT %gemm = (bf16[4,32,16]{2,1,0}, s8[128]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
}
"""  # noqa: E501
    module = _hlo.hlo_module_from_text(text)
    facts = ProfiledProgram("m", module.as_serialized_hlo_module_proto()).facts("gemm")
    assert facts.matrix_flops == 2 * 4 * 32 * 64 * 16
    assert facts.is_product


def facts_of(function, *shapes):
    program = ProfiledProgram(
        "p", module_of(compiled(function, *shapes)).as_serialized_hlo_module_proto()
    )
    return [program.facts(name) for name in program.module.entry.by_name]


def test_a_lone_elementwise_op_is_unfused_and_a_chain_is_not():
    alone = facts_of(jnp.sin, (64, 64))
    chain = facts_of(lambda x: jnp.exp(x + 1) * 2, (64, 64))
    assert [one.opcode for one in alone if one.is_unfused]
    assert not [one for one in chain if one.is_unfused]
    line = next(one.source for one in alone if one.is_unfused)
    assert ":" in line


def test_elementwise_flops_count_each_element_once():
    (one,) = [fact for fact in facts_of(lambda x: x * 2 + x, (64, 64)) if fact.moved_bytes]
    assert one.vector_flops == 2 * 64 * 64
    assert one.matrix_flops == 0
    assert one.moved_bytes == 2 * 64 * 64 * 4


def test_collectives_are_told_with_their_ends():
    facts = facts_of(exchanged, (64, 8))
    kinds = {fact.collective for fact in facts} - {""}
    assert {"all-reduce", "all-to-all", "collective-permute"} <= kinds


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x0a\x05abc"])
def test_a_damaged_program_is_a_clear_error(content):
    with pytest.raises(TPUValidationError, match=r"damaged|entry computation"):
        read_program(content)
