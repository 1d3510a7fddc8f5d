"""`gated_delta` and `gated_delta_step`: linear attention over sequences, and over one token."""

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...partition.splits import Splits
from ...registry.dispatch import Passes, dispatch_with_gradient, recomputed, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, KernelCase, Op
from . import pallas_tpu, reference, xla
from .operands import OP_NAME, DeltaBlocks, block_space, bucket, default_blocks, vmem_bytes

LARGEST_CHUNK = 256
DTYPES = ("float32", "bfloat16")
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    XLA: Passes(xla.forward, xla.backward),
    REFERENCE: recomputed(reference.gated_delta, constants=1),
}
# Heads and sequences are independent; along tokens the state is passed on.
ARGUMENTS = ("b s h d", "b s h d", "b s h e", "b s h", "b s h", "b h d e", "b s")
SPLITS = Splits(
    free="b h",
    arguments=ARGUMENTS,
    result=("b s h e", "b h d e"),
    residuals=ARGUMENTS,
    shared="h",
)


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk: int = 64,
    implementation: str | None = None,
    blocks: DeltaBlocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return linear attention by the gated delta rule, as in Qwen3-Next's layers.

    Queries and keys are normalised to length one, and queries divided by the root of their width. A
    head of keys serves HV / HK neighbouring heads of values.

    Args:
        q: (B, S, HK, DK).
        k: (B, S, HK, DK).
        v: (B, S, HV, DV).
        g: (B, S, HV) logarithms of the decay, at most zero; best in float32.
        beta: (B, S, HV) the share of a value that is written, between 0 and 1.
        initial_state: (B, HV, DK, DV) before the first token; None is zeros.
        segment_ids: (B, S) document numbers of packed sequences. The state is reset where a token's
            number differs from that of the token before. The first token continues from
            `initial_state`.
        chunk: Tokens that "xla" computes together, a power of two; results do not depend on it.
        implementation: "pallas_tpu", "xla" (chunks) or "reference" (token by token); None takes the
            kernel on TPU, chunks elsewhere.
        blocks: Heads of a grid step of the kernel; None takes the tuned ones.

    Returns:
        The result (B, S, HV, DV) in the dtype of q, and the state (B, HV, DK, DV) after the last
        token in float32 (float64 for such values).

    Raises:
        TPUKernelError: Shapes do not match, or the chunk is not supported.
    """
    _check_heads(q, k, v, g, beta, axes="(B, S, {}, {})")
    if chunk & (chunk - 1) or not 1 < chunk <= LARGEST_CHUNK:
        raise TPUKernelError(
            f"chunk={chunk} is not a power of two from 2 to {LARGEST_CHUNK}; 64 is usual."
        )
    _check_state(k, v, initial_state)
    able = v.dtype in DTYPES and q.dtype == k.dtype == v.dtype and q.size and v.size
    if implementation == PALLAS_TPU and not able:
        raise TPUKernelError(
            f"The kernel of gated_delta takes q, k and v of one dtype, {' or '.join(DTYPES)}, but "
            f"got {', '.join(x.dtype.name for x in (q, k, v))}; cast them, or leave "
            "implementation= out."
        )
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        *(q, k, v, g, beta, initial_state, document_starts(segment_ids, q)),
        splits=SPLITS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if able else XLA,
        on_gpu=XLA,
        elsewhere=XLA,
        options={"chunk": chunk},
        pallas_options={"blocks": blocks},
    )


def gated_delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return one token of `gated_delta`, for decoding.

    Args:
        q: (B, HK, DK).
        k: (B, HK, DK).
        v: (B, HV, DV).
        g: (B, HV).
        beta: (B, HV).
        state: (B, HV, DK, DV) after the previous token.

    Returns:
        The result (B, HV, DV) and the state after this token.

    Raises:
        TPUKernelError: Shapes do not match.
    """
    _check_heads(q, k, v, g, beta, axes="(B, {}, {})")
    _check_state(k, v, state)
    with jax.named_scope("gated_delta_step"):
        return reference.step(q, k, v, g, beta, state)


def document_starts(segment_ids: jax.Array | None, tokens: jax.Array) -> jax.Array | None:
    """Return (B, S) booleans, True where a token begins another document than the token before.

    Raises:
        TPUKernelError: There is not one id per token.
    """
    if segment_ids is None:
        return None
    if segment_ids.shape != tokens.shape[:2]:
        raise TPUKernelError(
            f"segment_ids are {segment_ids.shape}; expected one for each token, {tokens.shape[:2]}."
        )
    differs = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(differs, [(0, 0), (1, 0)])


def _check_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *, axes: str
) -> None:
    rank = axes.count(",") + 1
    ranks_fit = (q.ndim, v.ndim, g.ndim) == (rank, rank, rank - 1)
    together = ranks_fit and q.shape == k.shape and q.shape[:-2] == v.shape[:-2]
    if not together or (g.shape, beta.shape) != (v.shape[:-1],) * 2:
        raise TPUKernelError(
            f"gated_delta takes q and k {axes.format('HK', 'DK')}, v {axes.format('HV', 'DV')} and "
            f"g and beta of v's shape without its last axis, but got {q.shape}, {k.shape}, "
            f"{v.shape}, {g.shape} and {beta.shape}."
        )
    if v.shape[-2] % k.shape[-2]:
        raise TPUKernelError(
            f"{v.shape[-2]} heads of values cannot share {k.shape[-2]} heads of keys evenly; give "
            "a multiple."
        )


def _check_state(k: jax.Array, v: jax.Array, state: jax.Array | None) -> None:
    expected = (v.shape[0], v.shape[-2], k.shape[-1], v.shape[-1])
    if state is not None and state.shape != expected:
        raise TPUKernelError(
            f"the state is {state.shape}; expected (B, HV, DK, DV) = {expected} here."
        )


def case(
    batch: int,
    tokens: int,
    key_heads: int,
    heads: int,
    width: int = 128,
    *,
    dtype: str = "bfloat16",
) -> KernelCase:
    """Return a case of queries and keys, values of the same width, and rates in float32."""
    kind = jnp.dtype(dtype)
    keys = jax.ShapeDtypeStruct((batch, tokens, key_heads, width), kind)
    values = jax.ShapeDtypeStruct((batch, tokens, heads, width), kind)
    rates = jax.ShapeDtypeStruct((batch, tokens, heads), jnp.float32)
    name = f"{dtype}_{batch}x{tokens}_{key_heads}on{heads}x{width}"
    return KernelCase(name, (keys, keys, values, rates, rates))


OP = Op(
    name=OP_NAME,
    function=gated_delta,
    implementations={
        PALLAS_TPU: with_gradient(OP_NAME, PASSES, PALLAS_TPU, SPLITS),
        XLA: with_gradient(OP_NAME, PASSES, XLA, SPLITS),
        REFERENCE: reference.gated_delta,
    },
    cases=(
        case(1, 256, 2, 4),
        case(2, 200, 2, 2, 64, dtype="float32"),
        case(1, 4096, 16, 32),
        case(1, 8192, 16, 32),
        case(4, 4096, 16, 32),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    differentiable=(0, 1, 2, 3, 4),
    bucket=bucket,
    on_gpu=XLA,
    splits=SPLITS,
)
