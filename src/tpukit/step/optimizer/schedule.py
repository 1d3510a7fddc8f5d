"""The learning rate of every step: warm-up, then constant, cosine, linear or stable-and-decay."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...errors import ConfigError, did_you_mean

ScheduleName = Literal["constant", "cosine", "linear", "wsd"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """A schedule that an optimizer traces and that the host can ask too, by the same formula.

    Step 0 is the first update. During warm-up step i gets `peak * (i + 1) / warmup_steps`, so the
    first update is not wasted on a rate of zero. Then `constant` stays at the peak, `cosine` and
    `linear` fall to `final_fraction` of it at the last step, and `wsd` (warmup-stable-decay)
    stays until the last `decay_fraction` of all steps and falls in a straight line there.
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
                f"schedule '{self.schedule}' is not known; use {', '.join(SCHEDULES)}."
                + did_you_mean(self.schedule, SCHEDULES)
            )
        if self.warmup_steps > self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} is longer than the {self.total_steps} steps of "
                "the run; shorten it."
            )

    def __call__(self, step: Any) -> Any:
        """The rate of update number `step`, counted from 0; traced or a plain number."""
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
    """jax.numpy for a traced step, numpy for a plain one; settings are read without either."""
    import numpy as np

    if isinstance(step, int | float | np.ndarray | np.generic):
        return np
    import jax.numpy as jnp

    return jnp
