"""Flash attention against a float64 reference: every mask, both passes, on the TPU interpreter."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels.ops.flash_attention import reference
from tpukit.kernels.ops.flash_attention.api import OP, case, flash_attention
from tpukit.kernels.ops.flash_attention.problem import FlashBlocks
from tpukit.kernels.ops.flash_attention.spec import BlockMask, SegmentIds
from tpukit.kernels.ops.rope import RopeTables

SMALL = FlashBlocks(128, 128, 128, 1, 128, 128, 128)
STAIRS = FlashBlocks(256, 256, 128, 2, 256, 128, 256)
HELD = FlashBlocks(256, 1024, 128, 1, 256, 128, 256)
TOLERANCE = {"float32": 5e-6, "bfloat16": 1.2e-2}
CAUSAL = {"causal": True}
SPARSE = BlockMask.from_array([[1, 0, 0], [0, 1, 0], [1, 1, 1]], block_size=128)

# name: batch, q_len, kv_len, heads, kv_heads, width, dtype, blocks, options
CASES: dict[str, tuple[Any, ...]] = {
    "causal_stairs_gqa_bf16": (1, 400, 400, 2, 1, 128, "bfloat16", STAIRS, CAUSAL),
    "causal_streamed": (1, 300, 300, 1, 1, 128, "float32", SMALL, CAUSAL),
    "full_soft_cap": (2, 130, 200, 1, 1, 128, "float32", SMALL, {"soft_cap": 2.0}),
    "window_segments": (
        1, 384, 384, 2, 1, 128, "float32", STAIRS, CAUSAL | {"window": 150, "ids": True},
    ),
    "window_held": (1, 768, 768, 1, 1, 128, "float32", HELD, CAUSAL | {"window": 300}),
    "symmetric_window": (1, 640, 500, 2, 1, 128, "float32", STAIRS, {"window": 140}),
    "mla_sinks_gqa": (
        1, 300, 300, 2, 1, 192, "float32", STAIRS, CAUSAL | {"v_width": 128, "sinks": True},
    ),
    "narrow_window_sinks": (
        1, 400, 400, 2, 1, 64, "float32", STAIRS, CAUSAL | {"window": 128, "sinks": True},
    ),
    "block_mask_causal": (1, 300, 300, 1, 1, 128, "float32", SMALL, CAUSAL | {"mask": SPARSE}),
}  # fmt: skip
SLOW_CASES: dict[str, tuple[Any, ...]] = {
    "mla_bf16": (1, 400, 400, 2, 2, 192, "bfloat16", STAIRS, CAUSAL | {"v_width": 128}),
    "wider_values": (1, 200, 300, 2, 1, 64, "float32", SMALL, {"v_width": 192, "sinks": True}),
    "widest_heads_bf16": (1, 300, 300, 2, 1, 512, "bfloat16", STAIRS, CAUSAL | {"sinks": True}),
    "sinks_and_rows_without_keys": (
        1, 256, 128, 1, 1, 128, "float32", SMALL, {"window": 60, "sinks": True, "ids": True},
    ),
    "sinks_soft_cap_segments_bf16": (
        1, 384, 384, 2, 1, 128, "bfloat16", STAIRS,
        CAUSAL | {"sinks": True, "soft_cap": 3.0, "ids": True},
    ),
    "more_queries_than_keys": (1, 300, 140, 1, 1, 128, "float32", SMALL, CAUSAL),
    "rope_narrow_heads": (1, 200, 200, 2, 1, 64, "float32", SMALL, CAUSAL | {"rope": True}),
    "full_bf16": (1, 200, 330, 2, 1, 128, "bfloat16", SMALL, {}),
    "window_bf16": (1, 640, 640, 2, 2, 128, "bfloat16", HELD, CAUSAL | {"window": 200}),
    "symmetric_window_held_bf16": (1, 500, 640, 2, 2, 128, "bfloat16", HELD, {"window": 200}),
    "symmetric_window_mask": (
        1, 384, 300, 1, 1, 128, "float32", SMALL, {"window": 100, "mask": SPARSE},
    ),
    "segments_bf16": (2, 256, 256, 2, 1, 128, "bfloat16", SMALL, CAUSAL | {"ids": True}),
    "soft_cap_bf16": (1, 256, 256, 2, 2, 128, "bfloat16", STAIRS, CAUSAL | {"soft_cap": 3.0}),
    "rope_bf16": (1, 384, 384, 2, 1, 128, "bfloat16", STAIRS, CAUSAL | {"rope": True}),
    "mask_full_bf16": (1, 384, 300, 2, 1, 128, "bfloat16", SMALL, {"mask": SPARSE}),
    "wide_heads": (1, 200, 200, 1, 1, 192, "float32", SMALL, CAUSAL | {"window": 60}),
}  # fmt: skip


def make(case: tuple[Any, ...]) -> tuple[list[jax.Array], list[Any], dict[str, Any]]:
    batch, q_len, kv_len, heads, kv_heads, width, dtype, _, options = case
    random = np.random.default_rng(0)
    options = dict(options)
    v_width = options.pop("v_width", width)
    shapes = [
        (batch, q_len, heads, width),
        (batch, kv_len, kv_heads, width),
        (batch, kv_len, kv_heads, v_width),
        (batch, q_len, heads, v_width),
    ]
    arrays = [jnp.asarray(random.standard_normal(s), dtype) for s in shapes]
    if options.pop("sinks", False):
        arrays.insert(3, jnp.linspace(-1.0, 4.0, heads))
    ids = rope = None
    if options.pop("ids", False):
        ids = SegmentIds(
            *(
                jnp.asarray(np.sort(random.integers(0, 3, (batch, n)), axis=1), jnp.int32)
                for n in (q_len, kv_len)
            )
        )
    if options.pop("rope", False):
        angles = np.outer(np.arange(max(q_len, kv_len)), 100.0 ** -np.linspace(0, 1, width // 2))
        rope = RopeTables(*(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)))
    return arrays, [ids, rope], options


def passes(function: Any, arrays: list[jax.Array]) -> list[np.ndarray]:
    """The result and the gradients for the cotangent that comes last."""
    *inputs, cotangent = arrays
    out, pull = jax.vjp(function, *inputs)
    return [np.asarray(x, np.float64) for x in (out, *pull(cotangent))]


def truth(arrays: list[jax.Array], extra: list[Any], options: dict[str, Any]) -> list[np.ndarray]:
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        ids, rope = extra
        rope = (
            None if rope is None else RopeTables(*(jnp.asarray(np.asarray(x, float)) for x in rope))
        )

        def whole(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
            return reference.attention(q, k, v, ids, rope, None, sinks, **options)

        return passes(whole, exact)


def agree(seen: list[np.ndarray], wanted: list[np.ndarray], dtype: str) -> None:
    assert len(seen) == len(wanted)
    for name, a, b in zip(("out", "dq", "dk", "dv", "dsinks"), seen, wanted, strict=False):
        assert a.shape == b.shape, name
        assert np.isfinite(a).all(), name
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < TOLERANCE[dtype], (name, error)


def run_kernel(case: tuple[Any, ...], interpret: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    arrays, extra, options = make(case)

    def kernel(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return OP.implementations["pallas_tpu"](
            q, k, v, *extra, None, sinks, blocks=case[7], interpret=interpret, **options
        )

    return passes(kernel, arrays), truth(arrays, extra, options)


STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait"
)


@pytest.mark.parametrize("name", CASES)
def test_kernel_agrees_with_float64(name: str, no_races: Any) -> None:
    with no_races():
        seen, wanted = run_kernel(CASES[name], STRICT)
    agree(seen, wanted, CASES[name][6])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_kernel_agrees_with_float64_at_the_rest(name: str, no_races: Any) -> None:
    with no_races():
        seen, wanted = run_kernel(SLOW_CASES[name], STRICT)
    agree(seen, wanted, SLOW_CASES[name][6])


@pytest.mark.parametrize(
    "name",
    [
        # Streamed and held keys are the kernel's own matter: rows in turn know no blocks.
        *(name for name in CASES if name not in ("causal_streamed", "window_held")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES),
    ],
)
def test_rows_in_turn_agree_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpukit.kernels.ops.flash_attention import xla

    monkeypatch.setattr(xla, "LONGEST_AT_ONCE", 128)
    monkeypatch.setattr(xla, "ROWS", 96)
    case = {**CASES, **SLOW_CASES}[name]
    arrays, extra, options = make(case)

    def rows(q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        return OP.implementations["xla"](q, k, v, *extra, None, sinks, **options)

    seen = passes(rows, arrays)
    agree(seen, truth(arrays, extra, options), case[6])


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    q_len=st.integers(1, 270),
    kv_len=st.integers(1, 270),
    width=st.sampled_from([8, 40, 128]),
    causal=st.booleans(),
)
def test_any_lengths_and_widths(q_len: int, kv_len: int, width: int, causal: bool) -> None:
    case = (1, q_len, kv_len, 1, 1, width, "float32", SMALL, {"causal": causal})
    arrays, extra, options = make(case)
    out = OP.implementations["pallas_tpu"](*arrays[:3], blocks=SMALL, interpret=True, causal=causal)
    wanted = truth(arrays, extra, options)[0]
    assert out.shape == arrays[0].shape
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "options"),
    [
        (300, 280, {"causal": True, "window": 140}),
        (420, 400, {"window": 140}),
        (384, 384, {"window": 100, "mask": SPARSE}),
    ],
)
def test_long_keys_are_taken_in_parts(
    q_len: int, kv_len: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpukit.kernels.ops.flash_attention import pallas_tpu

    monkeypatch.setattr(pallas_tpu, "keys_at_a_time", lambda *_: 128)
    seen, wanted = run_kernel((1, q_len, kv_len, 1, 1, 128, "float32", SMALL, options), True)
    agree(seen, wanted, "float32")


@pytest.mark.parametrize(
    "options", [{}, {"ids": True}, {"rope": True, "sinks": True, "window": 90}]
)
def test_chunks_are_attended_to_alone(options: dict[str, Any]) -> None:
    arrays, (ids, rope), options = make((1, 300, 300, 2, 1, 64, "float32", SMALL, options))
    sinks = arrays[3] if len(arrays) == 5 else None
    given = options | {"rope": rope, "segment_ids": None if ids is None else ids.q, "sinks": sinks}
    seen = flash_attention(*arrays[:3], causal=True, chunk=128, **given)
    chunks = np.arange(300) // 128
    same = jnp.asarray(chunks[:, None] == chunks)
    wanted = flash_attention(*arrays[:3], causal=True, mask=same, **given)
    np.testing.assert_allclose(seen, wanted, atol=2e-5)


def test_a_program_for_tpu_holds_the_kernel_and_one_for_cpu_does_not() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, causal=True).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x)
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert on_tpu.count("tpu_custom_call") == 2  # one kernel for each pass
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_nothing_as_large_as_the_scores_is_kept_for_the_gradient() -> None:
    x = jax.ShapeDtypeStruct((1, 2048, 2, 128), jnp.bfloat16)
    _, pull = jax.eval_shape(lambda *a: jax.vjp(flash_attention, *a), x, x, x)
    kept = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert sorted(kept) == sorted([x.shape] * 4 + [(1, 2, 2048)])


def test_the_public_function_takes_what_the_documents_show() -> None:
    arrays, _, _ = make((1, 256, 256, 2, 1, 64, "float32", SMALL, {}))
    q, k, v, _ = arrays
    wanted = flash_attention(q, k, v, implementation="reference")
    for options in ({}, {"block_size": 128}, {"use_flash": False}, {"mask": np.ones((2, 2), bool)}):
        seen = flash_attention(q, k, v, **options)
        np.testing.assert_allclose(seen, wanted, atol=2e-5)
    ids = jnp.repeat(jnp.arange(2), 128)[None]
    seen = flash_attention(q, k, v, segment_ids=ids)
    np.testing.assert_allclose(
        seen[:, 128:], flash_attention(q[:, 128:], k[:, 128:], v[:, 128:]), atol=2e-5
    )


X = jnp.zeros((1, 256, 4, 64))


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((X, X[0], X[0]), {}, r"takes q \(B, S, H, D\)"),
        ((X, X[:, :, :3], X[:, :, :3]), {}, "do not match"),
        ((X, X, X.astype(jnp.bfloat16)), {}, "cast them to one dtype"),
        ((X, X, X), {"sinks": jnp.zeros(3)}, r"there are 4 query heads; give \(4,\)"),
        ((X, X, X), {"chunk": 0, "causal": True}, "chunk=0 must be at least 1"),
        ((X, X, X), {"chunk": 64}, "chunk=64 is for causal attention .* instead"),
        ((X, X, X), {"window": 0}, "window=0 must be at least 1"),
        ((X, X, X), {"mask": np.ones((3, 2), bool), "block_size": 128}, r"each of \(2, 2\) blocks"),
        (
            (X, X, X),
            {"mask": np.ones((4, 4), bool)},
            "for each block of tokens, in multiples of 128",
        ),
        ((X, X, X), {"mask": np.ones(4, bool)}, r"has shape \(4,\)"),
        ((X, X, X), {"mask": SPARSE}, r"\(3, 3\) blocks of 128 .* expected \(2, 2\) blocks"),
        ((X, X, X), {"segment_ids": jnp.zeros((1, 9), int)}, "segment ids are"),
        ((X, X, X), {"rope": (X[0, :9, 0, :32],) * 2}, r"need \(256, 32\)"),
        ((X, X, X), {"implementation": "cudnn"}, "cannot run as 'cudnn' here: cuDNN computes in"),
        ((X, X, X), {"implementation": "palas_tpu"}, "cudnn, xla.* Did you mean 'pallas_tpu'"),
        ((X, X, X), {"implementation": "pallas_tpu"}, "does not run on the cpu here; leave"),
        ((X, X, X), {"soft_cap": 0.0}, "must be positive; None switches it off"),
        ((X, X, X), {"block_size": 0}, "must be positive; None takes the tuned blocks"),
        ((X, X, X), {"rope": X[0, :, 0, :32]}, "takes a pair"),
        ((X, X, X), {"implementation": "xla", "use_flash": False}, "give only one of them"),
        ((X.astype(jnp.float16),) * 3, {"implementation": "pallas_tpu"}, "float32 or bfloat16"),
    ],
)
def test_refusals_teach(arrays: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TPUKernelError, match=message):
        flash_attention(*arrays, **options)


def test_a_traced_block_mask_is_refused() -> None:
    with pytest.raises(TPUKernelError, match="known while tracing"):
        jax.eval_shape(lambda m: flash_attention(X, X, X, mask=m), jnp.ones((2, 2), bool))


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "7x"])
def test_the_working_set_is_that_of_blocks_however_long_the_sequence(chip: str) -> None:
    cases = [case(tokens) for tokens in (32768, 131072, 1048576)]
    used = {OP.vmem_bytes(one, OP.default_blocks(one, chip)) for one in cases}
    assert len(used) == 1


def test_blocks_that_do_not_fit_are_refused_with_the_largest_that_do() -> None:
    x = jax.ShapeDtypeStruct((1, 65536, 1, 128), jnp.float32)
    blocks = FlashBlocks(block_q=8192, block_kv=65536, block_kv_compute=2048)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, implementation="pallas_tpu", blocks=blocks)

    with (
        target_chip("v5p"),
        pytest.raises(TPUKernelError, match=r"v5p has 63\.9 MiB; the largest that fit are block_q"),
    ):
        jax.eval_shape(attend, x, x, x)
