"""`embedding_rows`: a lookup whose gradient is a kernel on an NVIDIA GPU."""

import jax

from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient
from ...registry.op import REFERENCE, TRITON
from . import reference, triton_gpu

OP_NAME = "embedding_rows"
PASSES = {
    TRITON: Passes(reference.forward, triton_gpu.backward),
    REFERENCE: Passes(reference.forward, reference.backward),
}
# Each device may have some tokens or some columns; of tokens, their gradients are added up.
SPLITS = Splits(
    free="... width",
    arguments=("rows width", "..."),
    result="... width",
    residuals=("...", "rows none"),
)


def embedding_rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """`table[ids]`: (rows, width) by (…) gives (…, width).

    Args:
        table: The rows.
        ids: Their numbers, integers; they have no gradient.
    """
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        table,
        ids,
        splits=SPLITS,
        on_tpu=REFERENCE,
        on_gpu=TRITON if triton_gpu.fits(table) else REFERENCE,
    )
