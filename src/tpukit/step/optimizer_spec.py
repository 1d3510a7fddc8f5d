"""Optimizer settings, learning-rate schedules and optimizer-state bytes. Loads no jax."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..errors import ConfigError, did_you_mean
from ..hardware.formats import FLOAT32
from ..hardware.stored_formats import MOMENT_FORMATS
from ..plain_data import JsonObject
from ..shown import Shown

if TYPE_CHECKING:
    import jax
    import numpy as np

OptimizerName = Literal["adamw", "lion", "adafactor", "sgd"]
MomentDtype = Literal["float32", "bfloat16", "int8"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
MOMENT_DTYPES: tuple[str, ...] = get_args(MomentDtype)
DEFAULT_LEARNING_RATE = 3e-4
# Parameters without weight decay. A norm's scale belongs near 1, not 0, and the embedding of a rare
# token would shrink because it has few gradients.
NO_DECAY: tuple[str, ...] = ("norm", "bias", "scale", "embed")
ScheduleName = Literal["constant", "cosine", "linear", "wsd"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
# Adafactor factors the second moment where two dimensions have at least this size.
SMALLEST_FACTORED = 128
_A_MATRIX = (1024, 1024)

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(Shown):
    """The settings of `build_optimizer`.

    Attributes:
        weight_decay: Decoupled from the gradient, times the learning rate (all four optimizers).
        no_decay: Regular expressions. A parameter with a matching path, or with fewer than two
            dimensions, is not decayed.
        clip_norm: Gradients are scaled down to this global norm; None never clips.
        moment_dtype: Format of the first moment (AdamW, Lion) or the momentum (SGD). The second
            moment stays in float32, whose range it needs. "int8" (AdamW) keeps both moments in
            int8 with a scale per block.
        skip_nonfinite: Leave parameters and moments as they are when a gradient is not finite.
    """

    name: OptimizerName = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = NO_DECAY
    clip_norm: float | None = 1.0
    moment_dtype: MomentDtype = "float32"
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer '{self.name}' is unknown; use {', '.join(OPTIMIZERS)}, or pass an "
                f"optax transformation.{did_you_mean(self.name, OPTIMIZERS)}"
            )
        if self.moment_dtype not in MOMENT_DTYPES:
            raise ConfigError(
                f"moment_dtype '{self.moment_dtype}' is not one of {', '.join(MOMENT_DTYPES)}."
                + did_you_mean(self.moment_dtype, MOMENT_DTYPES)
            )
        if self.name == "adafactor" and self.moment_dtype != "float32":
            raise ConfigError(
                f"moment_dtype='{self.moment_dtype}' sets the format of the first moment, but "
                "adafactor has none; leave it out."
            )
        if self.moment_dtype == "int8" and self.name != "adamw":
            raise ConfigError(
                f"moment_dtype='int8' works with adamw, but the optimizer is {self.name}; use "
                "'bfloat16', or adamw."
            )

    def to_dict(self) -> JsonObject:
        """Plain data."""
        return {**asdict(self), "no_decay": list(self.no_decay)}


def state_bytes(spec: OptimizerSpec, shape: Shape, *, param_bytes: int = FLOAT32.itemsize) -> int:
    """Return the optimizer-state bytes of one parameter, without step counters.

    Args:
        spec: The optimizer.
        shape: The parameter's shape, including the axis of stacked layers.
        param_bytes: Bytes per number of the parameter, which second moments share.
    """
    if spec.name == "adafactor":
        return _factored_size(shape) * param_bytes
    size, last = math.prod(shape), shape[-1] if shape else 1
    first, second = (one.nbytes(last, size // last) for one in MOMENT_FORMATS[spec.moment_dtype])
    if spec.moment_dtype == "int8":
        return first + second
    return first + (size * param_bytes if spec.name == "adamw" else 0)


def state_bytes_per_parameter(
    spec: OptimizerSpec,
    shapes: Iterable[Shape] = (_A_MATRIX,),
    *,
    param_bytes: int = FLOAT32.itemsize,
) -> float:
    """Return mean optimizer-state bytes per number, over parameters of these shapes."""
    known = list(shapes)
    kept = sum(state_bytes(spec, shape, param_bytes=param_bytes) for shape in known)
    return kept / sum(math.prod(shape) for shape in known)


def _factored_size(shape: Shape) -> int:
    """Return the numbers adafactor keeps; optax keeps one number in place of an unused array."""
    size = math.prod(shape)
    *_, second, largest = (0, 0, *sorted(shape))
    if second < SMALLEST_FACTORED:
        return size + 2
    return size // largest + size // second + 1


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A learning-rate schedule, usable inside a traced step and on the host.

    Step 0 is the first update. During warm-up, step i has the rate `peak * (i + 1) / warmup_steps`,
    so that the first update is not wasted on a rate of zero. Then `constant` stays at the peak,
    `cosine` and `linear` fall to `final_fraction` of it at the last step, and `wsd`
    (warmup-stable-decay) falls linearly during the last `decay_fraction` of all steps.
    """

    peak: float
    schedule: ScheduleName = "cosine"
    total_steps: int
    warmup_steps: int = 0
    final_fraction: float = 0.1
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"schedule '{self.schedule}' is unknown; use {', '.join(SCHEDULES)}."
                + did_you_mean(self.schedule, SCHEDULES)
            )
        if self.warmup_steps > self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is longer than the {self.total_steps} steps of "
                "the run; shorten it."
            )

    def __call__(self, step: "jax.Array | np.ndarray | float") -> "jax.Array | np.ndarray":
        """Return the rate of update number `step`, counted from 0; traced or a plain number."""
        xp: Any = _library_of(step)
        start = self.warmup_steps
        if self.schedule == "wsd":
            start = max(start, self.total_steps - round(self.decay_fraction * self.total_steps))
        length = max(1, self.total_steps - start)
        done = xp.clip((step - start) / length, 0.0, 1.0)
        if self.schedule == "constant":
            share = xp.ones_like(done)
        elif self.schedule == "cosine":
            share = 0.5 * (1 + xp.cos(math.pi * done))
        else:
            share = 1 - done
        falling = self.final_fraction + (1 - self.final_fraction) * share
        warming = (step + 1) / max(1, self.warmup_steps)
        return self.peak * xp.where(step < self.warmup_steps, warming, falling)


def _library_of(step: Any) -> Any:
    """Return jax.numpy for a traced step and numpy for a plain number; both are imported late."""
    import numpy as np

    if isinstance(step, int | float | np.ndarray | np.generic):
        return np
    import jax.numpy as jnp

    return jnp
