"""Notice a loss that is not a number or far above the recent ones, and say what to do."""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from ...errors import ConfigError, did_you_mean
from ...shown import Shown

Policy = Literal["rollback", "skip", "stop"]
Action = Literal["continue", "rollback", "skip", "stop"]

# Of independent normal noise, the standard deviation is this many median jumps from one value to
# the next. Jumps see the noise alone, where deviations from a median would see a falling loss too.
SIGMA_PER_JUMP = 1.4826 / math.sqrt(2)
# Below this share of the loss a deviation is never a spike, however smooth the curve was.
SMALLEST_SIGMA = 0.01
# The last so many good losses say where the loss is now; before there are as many, none is judged.
RECENT = 16


@dataclass(frozen=True)
class Decision(Shown):
    """What to do after a step.

    Attributes:
        action: "continue"; "skip": do not apply this step's update, and go on with the next
            batch; "rollback": restore the newest checkpoint and leave the data stream where it
            is, so that the batches since then are not seen again; "stop": end the run.
        step: The step that was judged.
        reason: Why, when the action is not "continue".
    """

    action: Action
    step: int
    reason: str | None = None

    @property
    def is_bad(self) -> bool:
        """Whether something has to be done."""
        return self.action != "continue"

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data."""
        return asdict(self)

    def __rich__(self) -> str:
        return f"step {self.step}: {self.action}" + (f", {self.reason}" if self.reason else "")


class LossGuard:
    """Judges each step by its loss and gradient norm.

    The loss is compared with the median of the last good ones, in units of the noise that their
    median jump shows: neither is moved by the very outliers they are there to find.

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
                f"The policy for bad losses is '{policy}'; it is one of "
                f"{', '.join(get_args(Policy))}.{did_you_mean(policy, get_args(Policy))}"
            )
        if spike_factor is not None and not spike_factor > 0:
            raise ConfigError(f"spike_factor is {spike_factor}; give a number above 0, or None.")
        if window < RECENT:
            raise ConfigError(f"window is {window}; compare with at least {RECENT} losses.")
        if max_interventions < 0:
            raise ConfigError(f"max_interventions is {max_interventions}; give 0 or more.")
        self._policy: Policy = policy
        self._spike_factor = spike_factor
        self._max_interventions = max_interventions
        self._good: deque[tuple[int, float]] = deque(maxlen=window)
        self._interventions = 0
        self._good_since = 0

    def observe(self, step: int, loss: float, grad_norm: float | None = None) -> Decision:
        """Judge one step; a step seen before, after a rollback, replaces what followed it."""
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
                f"{reason}; {self._max_interventions} times before, "
                f"{self._policy} did not help for long",
            )
        return Decision(self._policy, step, reason)

    def state(self) -> dict[str, Any]:
        """What it remembers, as plain data for a checkpoint."""
        return {
            "good": [list(seen) for seen in self._good],
            "interventions": self._interventions,
            "good_since": self._good_since,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state()` gave."""
        seen = cast("list[tuple[int, float]]", state["good"])
        self._good = deque(((step, loss) for step, loss in seen), maxlen=self._good.maxlen)
        self._interventions = state["interventions"]
        self._good_since = state["good_since"]

    def _problem(self, loss: float, grad_norm: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if grad_norm is not None and not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        if self._spike_factor is None or len(self._good) < RECENT:
            return None
        losses = [seen for _, seen in self._good]
        median = statistics.median(losses[-RECENT:])
        jump = statistics.median(abs(b - a) for a, b in itertools.pairwise(losses))
        sigma = max(SIGMA_PER_JUMP * jump, SMALLEST_SIGMA * abs(median))
        if sigma == 0 or loss <= median + self._spike_factor * sigma:
            return None
        return (
            f"the loss {loss:.4g} is {(loss - median) / sigma:.0f} deviations above the median "
            f"{median:.4g} of the last {RECENT} good steps"
        )
