"""What a `TpuOptimizer` was told."""

from dataclasses import dataclass
from datetime import timedelta

import optax

from ...annotations import Device
from ..multipod.member import Watch
from .program import LossFunction

LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The choices of a `TpuOptimizer`.

    Attributes:
        optimizer: Any optax transformation; Adam at 0.001 by default, as in document 004.
        loss: (parameters, batch) -> loss, for gradients of a dataset.
        xla_level: Flags of a whole compiled step: 0 to 3; None runs operation by operation.
        timeout: For each step.
        watch: Which pods are lost, by name, each with why.
        devices: Instead of all that this job has.
    """

    optimizer: optax.GradientTransformation
    loss: LossFunction | None = None
    xla_level: int | None = 1
    timeout: float | timedelta | None = None
    watch: Watch | None = None
    devices: tuple[Device, ...] | None = None
