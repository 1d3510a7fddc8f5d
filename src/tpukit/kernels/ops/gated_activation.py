"""`gated_activation`: silu(gate) * value, with a Triton kernel for each pass on an NVIDIA GPU.

Of all elementwise work in a transformer this moves the most bytes. On a GPU, XLA computes the
halves of the gradient one by one, reading gate and cotangent twice, and then copies them side by
side. Its forward pass is limited by the chip's power (H200: 427 us, here 375). On a TPU, XLA is as
fast as a kernel.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..blocks.tiling import Ref, dividing_columns
from ..partition.splits import Splits
from ..registry.dispatch import Passes, dispatch_with_gradient
from ..registry.op import REFERENCE, TRITON

WIDEST = 8192  # columns of one program
_WARPS = 8


def gated_activation(both: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """Return silu(gate) * value.

    Args:
        both: (…, 2 * width): gate and value side by side, as one matmul with both matrices
            gives them.
        implementation: "triton" or "reference"; None takes the kernel on an NVIDIA GPU where it
            supports the width, and XLA elsewhere.

    Raises:
        TPUKernelError: There is no such implementation.
    """
    return dispatch_with_gradient(
        "gated_activation",
        PASSES,
        both,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=REFERENCE,
        on_gpu=TRITON if has_kernel(both) else REFERENCE,
    )


def forward(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the result and the residual, which is the argument, in plain jnp."""
    gate, value = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * value, both


def backward(both: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    """Return the gradient of gate and value side by side, computed in float32."""
    gate, value = jnp.split(both, 2, axis=-1)
    return (jnp.concatenate(_gradients(gate, value, cotangent), axis=-1).astype(both.dtype),)


def has_kernel(both: jax.Array) -> bool:
    """Whether the Triton kernels support rows of this width."""
    return dividing_columns(both.shape[-1] // 2, most=WIDEST) >= 256


def triton_forward(both: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return the result and the residual, in one pass."""
    width = both.shape[-1] // 2
    rows, columns = both.size // (2 * width), dividing_columns(width, most=WIDEST)
    call: Any = pl.pallas_call(
        _forward_kernel,
        grid=(rows, width // columns),
        in_specs=[pl.BlockSpec((1, 2, columns), lambda i, j: (i, 0, j))],
        out_specs=pl.BlockSpec((1, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, width), both.dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="gated_activation_forward",
    )
    return call(both.reshape(rows, 2, width)).reshape(*both.shape[:-1], width), both


def triton_backward(
    both: jax.Array, cotangent: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array]:
    """Return the gradient of gate and value side by side, in one pass."""
    width = cotangent.shape[-1]
    rows, columns = cotangent.size // width, dividing_columns(width, most=WIDEST)
    pair = pl.BlockSpec((1, 2, columns), lambda i, j: (i, 0, j))
    call: Any = pl.pallas_call(
        _backward_kernel,
        grid=(rows, width // columns),
        in_specs=[pair, pl.BlockSpec((1, columns), lambda i, j: (i, j))],
        out_specs=pair,
        out_shape=jax.ShapeDtypeStruct((rows, 2, width), both.dtype),
        input_output_aliases={0: 0},  # the largest activation is not needed any more
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="gated_activation_backward",
    )
    d_both = call(both.reshape(rows, 2, width), cotangent.reshape(rows, width))
    return (d_both.reshape(both.shape),)


PASSES = {
    TRITON: Passes(triton_forward, triton_backward),
    REFERENCE: Passes(forward, backward),
}
# A shard of the last dimension would have gates without their values.
SPLITS = Splits(free="...", arguments=("... both",), result="... width", residuals="... both")


def _forward_kernel(both_ref: Ref, out_ref: Ref) -> None:
    gate, value = (both_ref[0, half, :].astype(jnp.float32) for half in range(2))
    out_ref[0, :] = (jax.nn.silu(gate) * value).astype(out_ref.dtype)


def _backward_kernel(both_ref: Ref, d_ref: Ref, d_both_ref: Ref) -> None:
    d_gate, d_value = _gradients(both_ref[0, 0, :], both_ref[0, 1, :], d_ref[0, :])
    d_both_ref[0, 0, :] = d_gate.astype(d_both_ref.dtype)
    d_both_ref[0, 1, :] = d_value.astype(d_both_ref.dtype)


def _gradients(
    gate: jax.Array, value: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of gate and value, in float32 or wider."""
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    gate, value, cotangent = (x.astype(wide) for x in (gate, value, cotangent))
    share = jax.nn.sigmoid(gate)
    d_value = cotangent * gate * share
    return cotangent * value * share * (1 + gate * (1 - share)), d_value
