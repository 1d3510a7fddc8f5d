"""`gated_activation`: a kernel for the gradient on a GPU, XLA's own fusions elsewhere."""

import jax

from ..dispatch import Passes, dispatch_with_gradient
from ..op import REFERENCE
from . import gpu, reference

OP_NAME = "gated_activation"
TRITON = "triton"
PASSES = {
    TRITON: Passes(reference.forward, gpu.backward),
    REFERENCE: Passes(reference.forward, reference.backward),
}


def gated_activation(both: jax.Array, *, implementation: str | None = None) -> jax.Array:
    """silu(gate) * value.

    Args:
        both: (…, 2 * width): gate and value side by side, as one product with both matrices
            gives them.
        implementation: "triton" or "reference"; None takes the kernel on an NVIDIA GPU where it
            fits the width.

    Raises:
        TPUKernelError: There is no such implementation.
    """
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        both,
        implementation=implementation,
        on_tpu=REFERENCE,
        on_gpu=TRITON if gpu.fits(both) else REFERENCE,
    )
