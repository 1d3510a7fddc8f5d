"""FLOPs of whole programs: loops, branches and kernels, against counts made in another way."""

import json

import jax
import jax.numpy as jnp
import pytest
from mosaic_programs import PRODUCT as KERNEL
from mosaic_programs import multiply_where_listed, program_of, programs_of

from tpukit import Workload, get_preset
from tpukit.compiler import compile_for
from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.mosaic import kernel_flops
from tpukit.compiler.program_flops import program_flops
from tpukit.kernels import flash_attention
from tpukit.models.attention.tpu_kernels import splash_attention
from tpukit.parallel import abstract_mesh
from tpukit.step.traced_flops import traced_flops

# A loop of four turns that hands a table of constants to a kernel, which nothing else knows.
LOOP = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], s32[4])) -> (s32[], s32[4]) {{
  %p = (s32[], s32[4]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %table = s32[4]{{0}} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %kernel = f32[8]{{0}} custom-call(%table), custom_call_target="tpu_custom_call",
    backend_config={config}
  ROOT %out = (s32[], s32[4]{{0}}) tuple(%next, %table)
}}

%condition (p.1: (s32[], s32[4])) -> pred[] {{
  %p.1 = (s32[], s32[4]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}}

ENTRY %main (a: bf16[8,256]) -> s32[4] {{
  %a = bf16[8,256]{{1,0}} parameter(0)
  %product = bf16[8,8]{{1,0}} dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %visits = s32[4]{{0}} constant({{0, 7, 7, 0}})
  %copy = s32[4]{{0}} copy(%visits)
  %zero = s32[] constant(0)
  %state = (s32[], s32[4]{{0}}) tuple(%zero, %copy)
  %loop = (s32[], s32[4]{{0}}) while(%state), condition=%condition, body=%body
  ROOT %y = s32[4]{{0}} get-tuple-element(%loop), index=1
}}
"""
PRODUCT = 2 * 8 * 8 * 256


def encoded_kernel():
    return program_of(multiply_where_listed, grid=(4, 1), tables=1)


def module(*, limit="constant(4)", **config):
    return parse_hlo(LOOP.format(config=json.dumps({"custom_call_config": config}), limit=limit))


def test_a_kernel_in_a_loop_counts_by_the_table_that_the_loop_carries():
    flops = program_flops(module(body=encoded_kernel()))
    assert flops.value == PRODUCT + 4 * 2 * KERNEL
    assert flops.origin == "compiler"


def test_a_kernel_that_cannot_be_counted_leaves_a_reason():
    flops = program_flops(module(body="bm90IGEga2VybmVs"))
    assert flops.value is None
    assert "the kernel kernel cannot be counted" in flops.reason


def test_a_kernel_that_states_its_flops_is_taken_at_its_word_and_named():
    flops = program_flops(module(cost_estimate={"flops": "1000"}))
    assert flops.value == PRODUCT + 4 * 1000
    assert flops.note == "as they state them: kernel"


def test_a_loop_of_unknown_length_leaves_a_reason():
    flops = program_flops(module(body=encoded_kernel(), limit="parameter(1)"))
    assert flops.value is None
    assert "the loop loop has no constant length" in flops.reason


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_a_compiled_step_counts_its_attention_in_every_layer():
    """Products as traced with plain attention, and in its place the kernels lowered alone."""
    tokens, examples, heads, width, layers = 1024, 2, 2, 128, 3
    config = get_preset(
        "tiny", max_seq_len=tokens, n_layers=layers, d_model=heads * width, n_heads=heads,
        n_kv_heads=heads, head_dim=width,
    )  # fmt: skip

    def step(attention):
        return Workload(
            config, batch_size=examples, sequence_length=tokens, remat="none",
            attention=attention, loss_chunks=None,
        )  # fmt: skip

    plain, mesh = step("xla"), abstract_mesh(mesh_shape=(1,), axis_names=("fsdp",))
    traced = plain.jit_train_step(mesh).trace(*plain.abstract_args(mesh))
    # All scores: two products forward, four backward.
    scores = 6 * 2 * layers * examples * heads * tokens**2 * width
    array = jax.ShapeDtypeStruct((examples, tokens, heads, width), jnp.bfloat16)

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()

    kernels = programs_of(jax.grad(attend, argnums=(0, 1, 2)), array, array, array)
    compiled = compile_for(step("flash"), "v6e-1", mesh={"fsdp": 1}, until="schedule")
    expected = traced_flops(traced.jaxpr.jaxpr).value - scores
    assert compiled.flops.value == expected + layers * sum(map(kernel_flops, kernels))
    assert compiled.predict().hardware_flops == compiled.flops


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_splash_attention_counts_by_the_blocks_its_tables_list():
    array = jax.ShapeDtypeStruct((1, 8192, 1, 128), jnp.bfloat16)
    compiled = compile_for(splash_attention, "v6e-1", array, array, array, until="schedule")
    edge, cut = 2048, 4  # 10 of 16 blocks are on or under the diagonal
    assert compiled.flops.value == 2 * 2 * 128 * edge**2 * cut * (cut + 1) / 2
