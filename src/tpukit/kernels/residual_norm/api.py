"""`residual_norm`: one pass over the rows on a GPU, XLA's own fusions elsewhere."""

import jax

from ..dispatch import Passes, dispatch_with_gradient
from ..op import REFERENCE
from . import gpu, reference

OP_NAME = "residual_norm"
TRITON = "triton"
PASSES = {
    TRITON: Passes(gpu.forward, gpu.backward),
    REFERENCE: Passes(reference.forward, reference.backward),
}


def residual_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add `delta` to the residual stream `x`; return the stream and its RMS norm.

    The stream comes out too because the gradient that flows back along it is added in the same
    pass as the gradient of the norm.

    Args:
        x: (…, width), the residual stream.
        delta: What a block adds to it; None where there is nothing to add.
        scale: (width,).
        eps: Added to the mean square.
        implementation: "triton" or "reference"; None takes the kernel on an NVIDIA GPU where
            rows of this shape fit it.

    Raises:
        TPUKernelError: There is no such implementation.
    """
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        x,
        delta,
        scale,
        implementation=implementation,
        on_tpu=REFERENCE,
        on_gpu=TRITON if gpu.fits(x) else REFERENCE,
        options={"eps": eps},
    )
