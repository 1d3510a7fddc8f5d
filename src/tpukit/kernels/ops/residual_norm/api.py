"""`residual_norm`: one pass over the rows on TPU and GPU, XLA's own fusions elsewhere."""

import jax

from ....errors import TPUKernelError
from ....hardware.target import current_target
from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, TRITON
from ..rms_norm.blocks import RowBlocks, check_arguments, fits
from . import pallas_tpu, reference, triton_gpu

OP_NAME = pallas_tpu.OP_NAME
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    TRITON: Passes(triton_gpu.forward, triton_gpu.backward),
    REFERENCE: Passes(reference.forward, reference.backward),
}
# Rows are normalised one by one: any of the leading dimensions may be split.
SPLITS = Splits(
    free="...",
    arguments=("... d", "... d", "d"),
    result=("... d", "... d"),
    residuals=("... d", "d"),
)


def residual_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
    blocks: RowBlocks | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add `delta` to the residual stream `x`; return the stream and its RMS norm.

    The stream comes out too because the gradient that flows back along it is added in the same
    pass as the gradient of the norm.

    Args:
        x: (…, width), the residual stream.
        delta: What a block adds to it, of its shape and dtype; None where there is nothing to add.
        scale: (width,).
        eps: Added to the mean square.
        implementation: "pallas_tpu", "triton" or "reference"; None takes the kernel of a TPU or
            an NVIDIA GPU where rows of this shape fit it.
        blocks: Rows of a grid step on a TPU; None takes the tuned ones.

    Raises:
        TPUKernelError: Shapes or dtypes that do not belong together, or the implementation asked
            for cannot take them.
    """
    check_arguments(OP_NAME, x, (scale,), implementation, use_fused_ops=True)
    if delta is not None and (delta.shape, delta.dtype) != (x.shape, x.dtype):
        raise TPUKernelError(
            f"{OP_NAME} adds delta to x {x.dtype.name}{list(x.shape)} and got "
            f"{delta.dtype.name}{list(delta.shape)}; reshape or cast it."
        )
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        x,
        delta,
        scale,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if fits(x, current_target(), residual=True) else REFERENCE,
        on_gpu=TRITON if triton_gpu.fits(x) else REFERENCE,
        options={"eps": eps},
        pallas_options={"blocks": blocks},
    )
