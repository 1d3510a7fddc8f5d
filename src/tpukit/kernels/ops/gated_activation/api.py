"""`gated_activation`: a kernel for each pass on a GPU, XLA's own fusions elsewhere."""

import jax

from ....errors import TPUKernelError
from ....hardware.target import current_target
from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, TRITON
from ..rms_norm.blocks import RowBlocks
from . import pallas_tpu, reference, triton_gpu

OP_NAME = pallas_tpu.OP_NAME
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    TRITON: Passes(triton_gpu.forward, triton_gpu.backward),
    REFERENCE: Passes(reference.forward, reference.backward),
}
# A piece of the last dimension would hold gates without their values.
SPLITS = Splits(free="...", arguments=("... both",), result="... width", residuals="... both")


def gated_activation(
    both: jax.Array, *, implementation: str | None = None, blocks: RowBlocks | None = None
) -> jax.Array:
    """silu(gate) * value.

    Args:
        both: (…, 2 * width): gate and value side by side, as one product with both matrices
            gives them.
        implementation: "pallas_tpu", "triton" or "reference"; None takes the kernel on an NVIDIA
            GPU where it fits the width, and XLA on a TPU, where it is as fast as the kernel.
        blocks: Rows of a grid step on a TPU; None takes the tuned ones.

    Raises:
        TPUKernelError: There is no such implementation, or it cannot take this width or dtype.
    """
    if implementation == PALLAS_TPU and not pallas_tpu.fits(both, current_target()):
        raise TPUKernelError(
            f"The TPU kernel of {OP_NAME} takes float32 or bfloat16 with halves of whole 128 "
            f"lanes that fit in VMEM, and got {both.dtype.name}{list(both.shape)}; pad the width, "
            "or use implementation='reference'."
        )
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        both,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=REFERENCE,
        on_gpu=TRITON if triton_gpu.fits(both) else REFERENCE,
        pallas_options={"blocks": blocks},
    )
