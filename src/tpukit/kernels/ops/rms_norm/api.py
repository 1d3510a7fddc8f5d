"""`rms_norm`: fused on TPU, XLA's own elsewhere."""

import jax

from ....hardware.target import current_target
from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient, recomputed
from ...registry.op import PALLAS_TPU, REFERENCE
from . import pallas_tpu, reference
from .blocks import RowBlocks, check_arguments, fits

OP_NAME = "rms_norm"
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    REFERENCE: recomputed(reference.rms_norm),
}
# Rows are normalised one by one: any of the leading dimensions may be split.
SPLITS = Splits(
    free="...",
    arguments=("... d", "d"),
    result="... d",
    residuals=("... d", "d"),
)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    use_fused_ops: bool = True,
    implementation: str | None = None,
    blocks: RowBlocks | None = None,
) -> jax.Array:
    """Normalise the last axis of `x` to mean square 1, computed in float32.

    Args:
        x: (…, width), any leading shape.
        scale: (width,), or None.
        eps: Added to the mean square.
        use_fused_ops: False leaves it to XLA on every platform.
        implementation: "pallas_tpu" or "reference"; None takes the kernel on TPU where rows of
            this width and dtype fit it.
        blocks: Rows of a grid step; None takes the tuned ones.

    Raises:
        TPUKernelError: Scale is not (width,), or the implementation asked for cannot.
    """
    check_arguments(OP_NAME, x, (scale,), implementation, use_fused_ops=use_fused_ops)
    fused = use_fused_ops and fits(x, current_target())
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        x,
        scale,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if fused else REFERENCE,
        options={"eps": eps},
        pallas_options={"blocks": blocks},
    )
