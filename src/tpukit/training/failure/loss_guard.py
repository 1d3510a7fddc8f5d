"""Detection of bad losses: NaN, infinity, or far above the recent ones."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from ...errors import ConfigError, did_you_mean
from ...shown import Shown

Policy = Literal["rollback", "skip", "stop"]
Action = Literal["continue", "rollback", "skip", "stop"]

# The standard deviation of independent normal noise, in median jumps from one value to the next.
# Jumps measure the noise alone; deviations from a median would also measure a falling loss.
SIGMA_PER_JUMP = 1.4826 / math.sqrt(2)
# A lower bound of the standard deviation, as a share of the loss, for very smooth curves.
SMALLEST_SIGMA = 0.01
# Good losses whose median is the present loss; before there are as many, none is judged.
RECENT = 16


@dataclass(frozen=True)
class Decision(Shown):
    """The action to take after a step.

    Attributes:
        action: "continue"; "skip": do not apply this step's update, and take the next batch;
            "rollback": restore the newest checkpoint but not the position of the data, so that
            no batch is repeated; "stop": end the run.
        step: The step that was judged.
        reason: Why the action is not "continue".
    """

    action: Action
    step: int
    reason: str | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the action is not "continue"."""
        return self.action != "continue"

    def __rich__(self) -> str:
        return f"step {self.step}: {self.action}" + (f", {self.reason}" if self.reason else "")


class LossGuard:
    """Judges each step by its loss and gradient norm.

    The loss is compared with the median of recent good losses, in units of their noise, which is
    estimated from the median jump. Outliers move neither median.

    Args:
        policy: What to do about a bad step.
        spike_factor: How many robust standard deviations above the median is a spike; None looks
            only for NaN and infinity.
        window: How many good losses to estimate the noise from.
        max_interventions: How many bad steps to act upon before giving up; a full window of
            good steps forgives them.
    """

    def __init__(
        self,
        policy: Policy = "rollback",
        *,
        spike_factor: float | None = 10.0,
        window: int = 128,
        max_interventions: int = 5,
    ) -> None:
        if policy not in get_args(Policy):
            raise ConfigError(
                f"The policy for bad losses is '{policy}'; expected one of "
                f"{', '.join(get_args(Policy))}.{did_you_mean(policy, get_args(Policy))}"
            )
        if spike_factor is not None and not spike_factor > 0:
            raise ConfigError(f"spike_factor is {spike_factor}; give a number above 0, or None.")
        if window < RECENT:
            raise ConfigError(f"window is {window}; give at least {RECENT} losses.")
        if max_interventions < 0:
            raise ConfigError(f"max_interventions is {max_interventions}; give 0 or more.")
        self._policy: Policy = policy
        self._spike_factor = spike_factor
        self._max_interventions = max_interventions
        self._good: deque[tuple[int, float]] = deque(maxlen=window)
        self._interventions = 0
        self._good_since = 0

    def observe(self, step: int, loss: float, grad_norm: float | None = None) -> Decision:
        """Judge one step; a step that repeats after a rollback replaces the later ones."""
        while self._good and self._good[-1][0] >= step:
            self._good.pop()
        reason = self._problem(loss, grad_norm)
        if reason is None:
            self._good.append((step, loss))
            self._good_since += 1
            if self._good_since >= (self._good.maxlen or 0):
                self._interventions = 0
            return Decision("continue", step)
        self._good_since = 0
        self._interventions += 1
        if self._policy != "stop" and self._interventions > self._max_interventions:
            return Decision(
                "stop",
                step,
                f"{reason}; {self._policy} was tried {self._max_interventions} times and did not "
                "help for long",
            )
        return Decision(self._policy, step, reason)

    def state(self) -> dict[str, Any]:
        """Return its memory as plain data, for a checkpoint."""
        return {
            "good": [list(pair) for pair in self._good],
            "interventions": self._interventions,
            "good_since": self._good_since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the output of `state()`."""
        pairs = cast("list[tuple[int, float]]", state["good"])
        self._good = deque(((step, loss) for step, loss in pairs), maxlen=self._good.maxlen)
        self._interventions = state["interventions"]
        self._good_since = state["good_since"]

    def _problem(self, loss: float, grad_norm: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if self._spike_factor is None or len(self._good) < RECENT:
            return None
        losses = [good for _, good in self._good]
        median = statistics.median(losses[-RECENT:])
        jump = statistics.median(abs(b - a) for a, b in itertools.pairwise(losses))
        sigma = max(SIGMA_PER_JUMP * jump, SMALLEST_SIGMA * abs(median))
        if sigma == 0 or loss <= median + self._spike_factor * sigma:
            return None
        return (
            f"the loss {loss:.4g} is {(loss - median) / sigma:.0f} deviations above the median "
            f"{median:.4g} of the last {RECENT} good steps"
        )
