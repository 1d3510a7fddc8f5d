"""The gated delta rule as TPU kernels: the state stays in VMEM from the first token to the last.

One grid step is a chunk of some heads, as long as the lanes are wide. The forward pass leaves
nothing but its results; for the gradients it is run again, and keeps the state before each chunk
and the inverse of its system.
"""

from typing import Any

import jax

from ..gemm.tile import Interpret
from .backward import run_backward
from .blocks import DeltaBlocks
from .forward import run_forward
from .operands import Operands
from .xla import DeltaResiduals


def forward(
    *arrays: Any,
    chunk: int | None = None,
    blocks: DeltaBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[tuple[jax.Array, jax.Array], DeltaResiduals]:
    """The result and the last state (see `reference.gated_delta`), and the arguments."""
    del chunk
    given = DeltaResiduals(*arrays)
    return run_forward(Operands.of(given, blocks, interpret), given), given


def backward(
    residuals: DeltaResiduals,
    cotangent: tuple[jax.Array, jax.Array],
    *,
    chunk: int | None = None,
    blocks: DeltaBlocks | None = None,
    interpret: Interpret = False,
) -> tuple[jax.Array | None, ...]:
    """Gradients of all arguments but the starts."""
    del chunk
    operands = Operands.of(residuals, blocks, interpret)
    return *run_backward(operands, residuals, *cotangent), None
