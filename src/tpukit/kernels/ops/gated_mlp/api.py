"""`gated_mlp`: the gated feed-forward block as one op."""

import math

import jax

from ....errors import TPUKernelError
from ....hardware.target import current_target
from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient, recomputed
from ...registry.op import PALLAS_TPU, REFERENCE
from . import pallas_tpu, reference
from .blocks import GatedBlocks
from .reference import get_activation

OP_NAME = "gated_mlp"
DTYPES = ("float32", "bfloat16")
# Where static timing puts the kernel before XLA; the figures are in `specs.py`.
FEW_TOKENS = 128
FASTER_FOR_FEW = ("v5e",)
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    REFERENCE: recomputed(reference.gated_mlp),
}
# Each device may have some hidden channels: the results, and the gradients of x, are added up.
SPLITS = Splits(
    free="... hidden out",
    arguments=("... width", "width hidden", "width hidden", "hidden out"),
    result="... out",
    residuals=("... width", "width hidden", "width hidden", "hidden out"),
)


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: str = "silu",
    implementation: str | None = None,
    blocks: GatedBlocks | None = None,
) -> jax.Array:
    """`(act(x @ w_gate) * (x @ w_up)) @ w_down`; the gradient computes the projections again.

    Args:
        x: (…, width).
        w_gate: (width, hidden).
        w_up: (width, hidden).
        w_down: (hidden, width of the result).
        activation: "silu", "gelu" (the tanh form) or "relu".
        implementation: "pallas_tpu" or "reference"; None takes the kernel where it is the
            faster one, which is for few tokens on v5e, and XLA elsewhere. The kernel also saves
            the memory of one projection.
        blocks: Sizes of a grid step; None takes the tuned ones.

    Raises:
        TPUKernelError: Shapes that do not belong together, or what the kernel does not take.
    """
    get_activation(activation)
    width, hidden = x.shape[-1], w_gate.shape[-1]
    if (w_gate.shape, w_up.shape) != ((width, hidden),) * 2 or w_down.shape[0] != hidden:
        raise TPUKernelError(
            f"gated_mlp of x {x.shape} takes w_gate and w_up of ({width}, hidden) and w_down of "
            f"(hidden, …), and got {w_gate.shape}, {w_up.shape} and {w_down.shape}."
        )
    arrays = (x, w_gate, w_up, w_down)
    able = x.dtype in DTYPES and all(a.dtype == x.dtype and a.size for a in arrays)
    if implementation == PALLAS_TPU and not able:
        raise TPUKernelError(
            f"The kernel of gated_mlp takes four arrays of one dtype, {' or '.join(DTYPES)}, and "
            f"got {', '.join(a.dtype.name for a in arrays)}; cast them, or use "
            "implementation='reference'."
        )
    faster = math.prod(x.shape[:-1]) <= FEW_TOKENS and current_target() in FASTER_FOR_FEW
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        *arrays,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if able and faster else REFERENCE,
        options={"activation": activation},
        pallas_options={"blocks": blocks},
    )
