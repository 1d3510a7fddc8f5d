"""`rope`: positions as rotations of channel pairs, fused on TPU, XLA's own elsewhere."""

import jax
import numpy as np

from ....errors import TPUKernelError
from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE
from . import pallas_tpu, reference
from .blocks import RopeBlocks

OP_NAME = "rope"
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    REFERENCE: Passes(reference.forward, reference.backward),
}
# Every token and head is rotated alone.
SPLITS = Splits(
    free="b s h",
    arguments=("b s h d", "b s half", "b s half"),
    result="b s h d",
    residuals=("b s half", "b s half"),
)


def rope(
    x: jax.Array,
    cos: jax.Array | np.ndarray,
    sin: jax.Array | np.ndarray,
    *,
    implementation: str | None = None,
    blocks: RopeBlocks | None = None,
) -> jax.Array:
    """Turn channel pairs (i, i + D / 2) of x by the angles of `rope_tables`.

    Args:
        x: (B, S, H, D) queries or keys.
        cos: (S, D / 2), or (B, S, D / 2) where each row has its own positions.
        sin: The same. Tables have no gradient.
        implementation: "pallas_tpu" or "reference"; None takes the kernel on TPU where the heads
            fill whole lanes.
        blocks: Tokens of a grid step; None takes the tuned ones.

    Raises:
        TPUKernelError: The tables do not belong to x, or the kernel asked for does not take it.
    """
    wanted = (x.shape[1], x.shape[-1] // 2)
    if x.ndim != 4 or any(
        table.shape not in (wanted, (x.shape[0], *wanted)) for table in (cos, sin)
    ):
        raise TPUKernelError(
            f"rope of x {x.shape} takes tables of the shape {wanted} or {(x.shape[0], *wanted)} "
            f"and got {cos.shape} and {sin.shape}; x is (B, S, H, D)."
        )
    whole_lanes = pallas_tpu.supported(x)
    if implementation == PALLAS_TPU and not whole_lanes:
        raise TPUKernelError(
            f"The kernel of rope takes {' or '.join(pallas_tpu.DTYPES)} and heads that fill whole "
            f"groups of 128 lanes, and x is {x.dtype.name}{list(x.shape)}; use "
            "implementation='reference'."
        )
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        x,
        cos,
        sin,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if whole_lanes else REFERENCE,
        pallas_options={"blocks": blocks},
    )
