"""`rope_apart`: a kernel for each pass on a GPU, XLA's own fusions elsewhere."""

import jax

from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient
from ...registry.op import REFERENCE, TRITON
from ..rope.reference import Table
from . import reference, triton_gpu
from .reference import Heads

OP_NAME = "rope_apart"
PASSES = {
    TRITON: Passes(triton_gpu.forward, triton_gpu.backward),
    REFERENCE: Passes(reference.forward, reference.backward),
}
# A piece of the joined heads would hold queries without their keys.
SPLITS = Splits(
    free="b s",
    arguments=("b s joined", "b s half", "b s half"),
    result=("b s q d", "b s k d"),
    residuals=("b s half", "b s half"),
)


def rope_apart(
    joined: jax.Array, cos: Table, sin: Table, *, heads: Heads
) -> tuple[jax.Array, jax.Array]:
    """Queries (B, S, H, D) and keys (B, S, KV, D), rotated as `rope` does.

    Args:
        joined: (B, S, (H + KV) * D), queries first.
        cos: (B, S, D / 2); tables have no gradient.
        sin: The same.
        heads: H and KV.
    """
    tokens = joined.shape[0] * joined.shape[1]
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        joined,
        cos,
        sin,
        splits=SPLITS,
        on_tpu=REFERENCE,
        on_gpu=TRITON if triton_gpu.fits(tokens, 2 * cos.shape[-1]) else REFERENCE,
        options={"heads": heads},
    )
