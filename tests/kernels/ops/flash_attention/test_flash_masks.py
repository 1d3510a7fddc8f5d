"""A boolean for every score, in every shape and implementation, against attention in numpy."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from tpukit.hardware.target import target_chip
from tpukit.kernels.ops.flash_attention import pallas_tpu, xla
from tpukit.kernels.ops.flash_attention.api import OP, flash_attention
from tpukit.kernels.ops.flash_attention.arguments import read_mask
from tpukit.kernels.ops.flash_attention.problem import FlashBlocks
from tpukit.kernels.ops.flash_attention.spec import SegmentIds
from tpukit.kernels.registry.op import KernelCase

KINDS = ("all", "no_heads", "scores", "heads", "keys", "keys_of_heads", "queries")
SMALL = FlashBlocks(128, 128, 128, 1, 128, 128, 128)
STAIRS = FlashBlocks(256, 256, 128, 2, 256, 128, 256)
HELD = FlashBlocks(256, 1024, 128, 1, 512, 128, 256)
TOLERANCE = {"float32": 5e-6, "bfloat16": 1.2e-2}
STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait"
)
# kind of mask, batch, q_len, kv_len, heads, kv_heads, width, dtype, blocks, options
CASES: dict[str, tuple[Any, ...]] = {
    "all_gqa": ("all", 2, 140, 200, 2, 1, 64, "float32", SMALL, {}),
    "scores_causal_stairs": ("scores", 1, 300, 300, 2, 1, 128, "float32", STAIRS, {"causal": True}),
    "keys_of_heads": ("keys_of_heads", 2, 130, 260, 2, 1, 128, "float32", SMALL, {}),
}
SLOW_CASES: dict[str, tuple[Any, ...]] = {
    "no_heads_held_bf16": ("no_heads", 2, 500, 640, 2, 2, 128, "bfloat16", HELD, {}),
    "keys_causal_bf16": ("keys", 2, 400, 400, 4, 2, 128, "bfloat16", STAIRS, {"causal": True}),
    "heads_window_cap": (
        "heads", 1, 300, 300, 2, 2, 128, "float32", STAIRS, {"window": 90, "soft_cap": 2.0},
    ),
    "scores_causal_window_held": (
        "scores", 1, 768, 768, 1, 1, 128, "float32", HELD, {"window": 300, "causal": True},
    ),
}  # fmt: skip


def kernel_agrees(judge: Any, case: tuple[Any, ...], interpret: Any) -> None:
    kind, batch, q_len, kv_len, heads, _, _, dtype, blocks, options = case
    arrays = judge.arrays(*case[1:8])
    mask = judge.mask(kind, (batch, heads, q_len, kv_len))
    stream = read_mask(mask, *arrays[:2], block_size=None).scores
    soft_cap = options.get("soft_cap")

    def kernel(*inputs: jax.Array) -> Any:
        return OP.implementations["pallas_tpu"](
            *inputs, None, None, stream, blocks=blocks, interpret=interpret, **options
        )

    near = {name: value for name, value in options.items() if name != "soft_cap"}
    wanted = judge.truth(arrays, mask & judge.near(q_len, kv_len, **near), soft_cap)
    judge.agree(judge.passes(kernel, arrays), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_numpy(name: str, judge: Any, no_races: Any) -> None:
    with no_races():
        kernel_agrees(judge, CASES[name], STRICT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_the_kernel_agrees_with_numpy_at_the_rest(name: str, judge: Any, no_races: Any) -> None:
    with no_races():
        kernel_agrees(judge, SLOW_CASES[name], STRICT)


@pytest.mark.parametrize("kind", ["scores", pytest.param("keys", marks=pytest.mark.slow)])
def test_keys_taken_in_parts_have_their_part_of_the_mask(
    kind: str, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pallas_tpu, "keys_at_a_time", lambda *_: 128)
    # Of 129 queries one alone attends to the second part.
    case = (kind, 1, 129, 200, 1, 1, 128, "float32", SMALL, {"causal": True})
    kernel_agrees(judge, case, True)


def test_the_kernel_takes_segments_and_a_mask(judge: Any) -> None:
    arrays = judge.arrays(1, 200, 200, 1, 1, 128, "float32")
    ids = jnp.arange(200)[None] // 60
    mask = judge.mask("scores", (1, 1, 200, 200))

    def kernel(*inputs: jax.Array) -> Any:
        return OP.implementations["pallas_tpu"](
            *inputs, SegmentIds(ids, ids), None, jnp.asarray(mask), blocks=SMALL, interpret=True
        )

    allowed = mask & np.equal.outer(np.asarray(ids[0]), np.asarray(ids[0]))
    judge.agree(judge.passes(kernel, arrays), judge.truth(arrays, allowed), 5e-6)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    lengths=st.tuples(st.integers(1, 270), st.integers(1, 270)),
    kind=st.sampled_from(["all", "scores", "keys_of_heads"]),
    share=st.floats(0, 1),
)
def test_the_kernel_takes_any_mask(
    judge: Any, lengths: tuple[int, int], kind: str, share: float
) -> None:
    arrays = judge.arrays(2, *lengths, 2, 1, 32, "float32")
    mask = judge.mask(kind, (2, 2, *lengths), share)
    stream = read_mask(mask, *arrays[:2], block_size=None).scores
    kernel = OP.implementations["pallas_tpu"]
    out = kernel(*arrays[:3], None, None, stream, blocks=SMALL, interpret=True)
    np.testing.assert_allclose(out, judge.truth(arrays, mask)[0], atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_agrees_with_numpy(
    kind: str, implementation: str, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of scores in turn, as for long sequences.
    monkeypatch.setattr(xla, "LONGEST_AT_ONCE", 64)
    monkeypatch.setattr(xla, "ROWS", 48)
    arrays = judge.arrays(2, 100, 130, 4, 2, 16, "float32")
    mask = judge.mask(kind, (2, 4, 100, 130))

    def attend(*inputs: Any) -> Any:
        return flash_attention(*inputs, mask=mask, implementation=implementation)

    judge.agree(judge.passes(attend, arrays), judge.truth(arrays, mask), 1e-5)


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    kind=st.sampled_from(KINDS),
    share=st.floats(0, 1),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 20),
    segments=st.booleans(),
)
def test_any_mask_with_anything_else_agrees_with_numpy(
    judge: Any,
    lengths: tuple[int, int],
    heads: tuple[int, int],
    kind: str,
    share: float,
    causal: bool,
    window: int | None,
    segments: bool,
) -> None:
    arrays = judge.arrays(2, *lengths, *heads, 8, "float32")
    mask = judge.mask(kind, (2, heads[0], *lengths), share)
    allowed = mask & judge.near(*lengths, causal=causal, window=window)
    ids = None
    if segments:
        of_q, of_k = (np.arange(2 * n).reshape(2, n) // 7 % 3 for n in lengths)
        allowed = allowed & (of_q[:, None, :, None] == of_k[:, None, None, :])
        ids = (jnp.asarray(of_q), jnp.asarray(of_k))

    def attend(*inputs: Any) -> Any:
        return flash_attention(*inputs, mask=mask, causal=causal, window=window, segment_ids=ids)

    judge.agree(judge.passes(attend, arrays), judge.truth(arrays, allowed), 2e-5)


def test_a_traced_mask_means_what_a_known_one_means(judge: Any) -> None:
    arrays = judge.arrays(2, 40, 40, 2, 2, 16, "float32")
    mask = judge.mask("no_heads", (2, 2, 40, 40))

    def loss(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return (flash_attention(q, k, v, mask=mask, causal=True) ** 2).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays[:3], mask)
    known = jax.grad(lambda *a: loss(*a, mask), (0, 1, 2))(*arrays[:3])
    for a, b in zip(traced, known, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1, 4096), (1, 1, 4096, 4096), (1, 1, 4096, 1)])
@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_nothing_larger_than_the_mask_is_made_of_it(shape: tuple[int, ...], platform: str) -> None:
    x = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct(shape, jnp.bool_)

    def loss(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return flash_attention(q, k, v, mask=mask).astype(jnp.float32).sum()

    with target_chip("v6e"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x, mask)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("tpu_custom_call") == (2 if platform == "tpu" else 0)
    made = [dims.rstrip("x").split("x") for dims in re.findall(r"tensor<((?:\d+x)+)[a-z]", text)]
    largest = max(math.prod(map(int, dims)) for dims in made)
    # Where there is no kernel, 512 rows of scores of the four heads at a time.
    rows = 4 * 512 * 4096 if platform == "cpu" else 0
    assert largest <= max(mask.size, x.size, rows)


def test_kernels_that_read_a_mask_have_blocks_of_their_own() -> None:
    case = OP.case("causal_4096x128_bfloat16")
    masked = KernelCase("masked", case.arguments, {**case.options, "mask_rows": 4096})
    assert OP.bucket(masked) == "bfloat16_causal_mask_q4096_kv4096_d128"
    extra = OP.vmem_bytes(masked, STAIRS) - OP.vmem_bytes(case, STAIRS)
    assert extra >= 2 * STAIRS.block_q * STAIRS.block_kv
