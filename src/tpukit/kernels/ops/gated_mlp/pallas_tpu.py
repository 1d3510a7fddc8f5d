"""Gate and up projection in one Pallas kernel for TPU: neither of them ever lies in HBM.

The product with `w_down`, and those of the gradients, are plain ones, which XLA does at the roof.
The backward pass computes both projections again instead of keeping them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from ...registry.op import KernelCase
from .blocks import GatedBlocks, fitted, vmem_bytes
from .reference import activation_and_slope, get_activation

Weights = tuple[jax.Array, jax.Array, jax.Array]
Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# (gate, up, further blocks) -> what to write, all float32.
Epilogue = Callable[..., tuple[jax.Array, ...]]


def forward(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: str = "silu",
    blocks: GatedBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, Residuals]:
    """The result, and the arguments as residuals."""
    act = get_activation(activation)

    def hidden_of(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        return (act(gate) * up,)

    rows = x.reshape(-1, x.shape[-1])
    (hidden,) = project(rows, w_gate, w_up, epilogue=hidden_of, blocks=blocks, interpret=interpret)
    out = (hidden @ w_down).reshape(*x.shape[:-1], w_down.shape[1])
    return out, (x, w_gate, w_up, w_down)


def backward(
    residuals: Residuals,
    cotangent: jax.Array,
    *,
    activation: str = "silu",
    blocks: GatedBlocks | None = None,
    interpret: Any = False,
) -> Residuals:
    """Gradients of x and the three matrices."""
    x, w_gate, w_up, w_down = residuals

    def gradients_of(gate: jax.Array, up: jax.Array, d_hidden: jax.Array) -> tuple[jax.Array, ...]:
        act, slope = activation_and_slope(activation, gate)
        return d_hidden * up * slope, d_hidden * act, act * up

    rows = x.reshape(-1, x.shape[-1])
    given = cotangent.reshape(-1, cotangent.shape[-1])
    d_gate, d_up, hidden = project(
        rows,
        w_gate,
        w_up,
        given @ w_down.T,
        epilogue=gradients_of,
        results=3,
        blocks=blocks,
        interpret=interpret,
    )
    dx = d_gate @ w_gate.T + d_up @ w_up.T
    return dx.reshape(x.shape), rows.T @ d_gate, rows.T @ d_up, hidden.T @ given


def project(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *others: jax.Array,
    epilogue: Epilogue,
    results: int = 1,
    blocks: GatedBlocks | None,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """`epilogue(x @ w_gate, x @ w_up, *others)`, arrays of (rows, hidden) in x's dtype."""
    rows, width = x.shape
    hidden = w_gate.shape[1]
    case = KernelCase("traced", (x, w_gate))  # pyright: ignore[reportArgumentType]  has shape, dtype
    chosen = blocks_for("gated_mlp", case, blocks)
    sizes = fitted(chosen, rows, width, hidden)
    steps = width // sizes.block_width
    # One pass in bfloat16 would throw away most of what a float32 holds.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def kernel(x_ref: Any, gate_ref: Any, up_ref: Any, *refs: Any) -> None:
        other_refs, out_refs = refs[: len(others)], refs[len(others) : -2]
        sums = refs[-2:]

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            for total in sums:
                total[...] = jnp.zeros(total.shape, total.dtype)

        for total, matrix in zip(sums, (gate_ref, up_ref), strict=True):
            total[...] += jnp.dot(
                x_ref[...],
                matrix[...],
                preferred_element_type=jnp.float32,
                precision=precision,
            )

        @pl.when(pl.program_id(2) == steps - 1)
        def _() -> None:
            wide = (ref[...].astype(jnp.float32) for ref in other_refs)
            written = epilogue(sums[0][...], sums[1][...], *wide)
            for ref, value in zip(out_refs, written, strict=True):
                ref[...] = value.astype(ref.dtype)

    tile = pl.BlockSpec((sizes.block_rows, sizes.block_hidden), lambda i, j, k: (i, j))
    matrix = pl.BlockSpec((sizes.block_width, sizes.block_hidden), lambda i, j, k: (k, j))
    used = vmem_bytes(case, sizes)
    total = pltpu.VMEM((sizes.block_rows, sizes.block_hidden), jnp.float32)
    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct((rows, hidden), x.dtype),) * results,
        grid=(pl.cdiv(rows, sizes.block_rows), pl.cdiv(hidden, sizes.block_hidden), steps),
        in_specs=[
            pl.BlockSpec((sizes.block_rows, sizes.block_width), lambda i, j, k: (i, k)),
            matrix,
            matrix,
            *[tile for _ in others],
        ],
        out_specs=(tile,) * results,
        scratch_shapes=[total, total],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit_bytes(used, current_target()),
        ),
        interpret=interpret,
        name="gated_mlp" if results == 1 else "gated_mlp_backward",
    )(x, w_gate, w_up, *others)
