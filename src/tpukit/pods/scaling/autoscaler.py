"""`AutoScaler`: choose the slice size of a job, with few changes and a reason for each."""

import copy
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...errors import ConfigError
from ...hardware import PriceBook, public_prices
from ...planner.cost.money import Preemption
from ...runtime.calls import either_way
from ...runtime.ranges import COUNT, PART, SECONDS, SHARE, Range
from ...shown import Shown
from ..config import PodConfig
from ..spelling import SpelledEnum
from .metrics import Size, WorkloadMetrics, cores_of, legal_slices, predict_size

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WRITTEN = re.compile(
    r"\s*(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+)?"
    r"(?P<from>\d{1,2}:\d{2})-(?P<to>\d{1,2}:\d{2})\s*"
)


class ScalingPolicy(SpelledEnum):
    """How a size is chosen.

    Attributes:
        PERFORMANCE_BASED: The most cores that reach the target utilization.
        COST_BASED: The least money per step, within the deadline if there is one.
        SCHEDULE: The hour of the week.
    """

    PERFORMANCE_BASED = "performance_based"
    COST_BASED = "cost_based"
    SCHEDULE = "schedule"

    PerformanceBased = PERFORMANCE_BASED
    CostBased = COST_BASED
    Schedule = SCHEDULE


@dataclass(frozen=True)
class Hours:
    """Hours on some days of the week (UTC), and the number of cores for them.

    Attributes:
        days: Days of the week on which the hours begin, 0 for Monday.
        first: Start in minutes after midnight.
        last: End in minutes after midnight; before `first` if the hours pass midnight.
    """

    days: frozenset[int]
    first: int
    last: int
    cores: int

    def cover(self, when: datetime) -> bool:
        """Return whether the time is within these hours."""
        minute, day = when.hour * 60 + when.minute, when.weekday()
        if self.first < self.last:
            return day in self.days and self.first <= minute < self.last
        began_today = day in self.days and minute >= self.first
        return began_today or ((day - 1) % 7 in self.days and minute < self.last)


def read_schedule(schedule: Mapping[str, int]) -> tuple[Hours, ...]:
    """Parse hours and cores such as `{"mon-fri 08:00-20:00": 64, "22:00-06:00": 256}`, in UTC.

    Raises:
        ConfigError: An entry has another format.
    """
    return tuple(_hours(written, cores) for written, cores in schedule.items())


def cores_at(schedule: tuple[Hours, ...], at: float) -> int | None:
    """Return the cores of the first entry that covers a time, or None."""
    when = datetime.fromtimestamp(at, UTC)
    return next((hours.cores for hours in schedule if hours.cover(when)), None)


def _hours(written: str, cores: int) -> Hours:
    match = _WRITTEN.fullmatch(written.lower())
    days = _days(match["first"], match["last"]) if match else None
    first, last = (_minutes(match[end]) if match else None for end in ("from", "to"))
    if days is None or first is None or last is None or first == last:
        raise ConfigError(
            f"{written!r} names no hours; write e.g. 'mon-fri 08:00-20:00' or '22:00-06:00' (UTC)."
        )
    return Hours(days, first, last, COUNT.check_whole(f"cores of {written!r}", cores))


def _days(first: str | None, last: str | None) -> frozenset[int] | None:
    if first is None:
        return frozenset(range(7))
    if first not in _DAYS or (last or first) not in _DAYS:
        return None
    begin, end = _DAYS.index(first), _DAYS.index(last or first)
    return frozenset((begin + n) % 7 for n in range((end - begin) % 7 + 1))


def _minutes(clock: str) -> int | None:
    hours, minutes = map(int, clock.split(":"))
    return hours * 60 + minutes if hours * 60 + minutes <= 24 * 60 and minutes < 60 else None


@dataclass(frozen=True)
class Wanted:
    """The size that a policy chooses, which may be the present one.

    Attributes:
        is_ordered: Whether a schedule or a deadline requires it, so that the cost of the change
            does not matter.
    """

    size: Size
    reason: str
    is_ordered: bool = False


def by_performance(
    here: Size, sizes: Sequence[Size], *, target: float, hysteresis: float
) -> Wanted:
    """Choose the most cores that reach the target utilization.

    Within the hysteresis around the target nothing changes. Beyond it, the prediction gets the same
    tolerance, because a small error measured on few cores grows when extrapolated to many. So
    errors up to the hysteresis never cause repeated changes.
    """
    used = here.utilization.value or 0.0
    inside = here.slice in {size.slice for size in sizes}
    if inside and abs(used - target) <= hysteresis:
        return Wanted(here, f"{used:.0%} in use is the target of {target:.0%} ± {hysteresis:.0%}")
    doubted = max(0.0, used - hysteresis) if used > target else min(1.0, used + hysteresis)
    reaching = [size for size in sizes if _utilization_at(doubted, here, size) >= target]
    best = reaching[-1] if reaching else sizes[0]
    if inside and (best.cores - here.cores) * (used - target) <= 0:
        return Wanted(here, f"{used:.0%} in use, and no other size would be closer to {target:.0%}")
    then = best.utilization.value or 0.0
    return Wanted(
        best,
        f"{used:.0%} of {here.slice} in use (target {target:.0%}); {best.slice} is expected at "
        f"{then:.0%}",
    )


def by_cost(
    here: Size,
    sizes: Sequence[Size],
    *,
    hysteresis: float,
    deadline_s: float | None = None,
    remaining_steps: int | None = None,
) -> Wanted:
    """Choose the least money per step, within the deadline if there is one.

    Savings up to the hysteresis do not justify a change.
    """
    late = False
    if deadline_s is not None and remaining_steps:
        most_s = deadline_s / remaining_steps
        in_time = [size for size in sizes if (size.step_s.value or 0.0) <= most_s]
        late = (here.step_s.value or 0.0) > most_s
        if not in_time:
            fastest = min(sizes, key=lambda size: size.step_s.value or 0.0)
            return Wanted(fastest, "no size meets the deadline; using the fastest", late)
        sizes = in_time
    priced = all(size.usd_per_step.value is not None for size in (*sizes, here))

    def cost(size: Size) -> float:
        return (size.usd_per_step.value or 0.0) if priced else size.core_seconds

    best = min(sizes, key=lambda size: (cost(size), size.cores))
    unit = "USD" if priced else "core-seconds"
    words = f"{best.slice} costs {cost(best):.3g} {unit} per step, {here.slice} {cost(here):.3g}"
    allowed = here.slice in {size.slice for size in sizes}
    if allowed and cost(best) >= cost(here) * (1 - hysteresis):
        return Wanted(here, f"{words}: no change is worth more than {hysteresis:.0%}")
    return Wanted(best, f"{words}; too late with the present size" if late else words, late)


def by_schedule(sizes: Sequence[Size], *, cores: int | None) -> Wanted:
    """Choose the largest size within the scheduled number of cores, or the smallest size."""
    if cores is None:
        return Wanted(sizes[0], "no entry of the schedule applies now: the smallest size", True)
    best = next((size for size in reversed(sizes) if size.cores <= cores), sizes[0])
    return Wanted(best, f"the schedule asks for {cores} cores now", True)


def _utilization_at(used: float, here: Size, there: Size) -> float:
    """Return the utilization of another size: compute time is divided, wait time stays."""
    waiting = (1 - used) * there.cores / here.cores
    return used / (used + waiting) if used + waiting > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class ScalingDecision(Shown):
    """The chosen change; false if there is none, so that `if decision:` works.

    Attributes:
        config: The pod to change to; None keeps the present one.
        reason: The reason, as a sentence.
        sizes: All sizes that were compared, smallest first.
    """

    now: Size
    config: PodConfig | None
    reason: str
    sizes: tuple[Size, ...]

    def __bool__(self) -> bool:
        return self.config is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "from": str(self.now.slice),
            "to": None if self.config is None else str(self.config.slice),
            "reason": self.reason,
            "sizes": [size.to_dict() for size in self.sizes],
        }

    def __rich__(self) -> RenderableType:
        to = "" if self.config is None else f" → {self.config.slice}"
        table = Table(box=None, pad_edge=False)
        for name in ("slice", "cores", "step", "in use", "USD/step", "from"):
            table.add_column(name, justify="left" if name in ("slice", "from") else "right")
        for size in self.sizes:
            usd = size.usd_per_step.value
            table.add_row(
                str(size.slice),
                str(size.cores),
                f"{size.step_s.value:.4g} s",
                f"{size.utilization.value:.1%}",
                "–" if usd is None else f"{usd:.3g}",
                size.step_s.origin,
            )
        return Group(Text(f"{self.now.slice}{to}: {self.reason}", style="bold"), table)


MAX_CORES = 2**20
_DURATION = Range(0, SECONDS.high)


@dataclass(frozen=True, kw_only=True)
class AutoScaler:
    """Chooses the size of a pod; set up with keyword arguments or step by step.

    ```python
    scaler = AutoScaler().with_policy("performance-based").with_max_cores(256).build()
    decision = scaler.evaluate_scaling(WorkloadMetrics.from_current_training(optimizer))
    if decision:
        optimizer.scale_to_config(decision.config)
    ```

    Attributes:
        min_cores: Smallest number of cores.
        max_cores: Largest number of cores.
        target_utilization: Target share of step time in which devices compute.
        hysteresis: Tolerated distance from the target, or share of the cost, before a change.
        minimum_lifetime_s: Shortest time between two changes; should exceed the time to allocate a
            pod.
        resize_s: Duration of a change: checkpoint, new pod, restore.
        horizon_s: Expected time until the next change, if the end of the job is not known.
        least_goodput: A job with less goodput is not changed, because its size is not the problem.
        deadline_s: Time limit for all remaining steps, for the cost-based policy.
        schedule: Hours for the schedule policy.
        prices: By default the public price list.
    """

    policy: ScalingPolicy = ScalingPolicy.PERFORMANCE_BASED
    min_cores: int = 1
    max_cores: int = MAX_CORES
    target_utilization: float = 0.85
    hysteresis: float = 0.05
    minimum_lifetime_s: float = 1800.0
    resize_s: float = Preemption.recovery_s
    horizon_s: float = 6 * 3600.0
    least_goodput: float = 0.5
    deadline_s: float | None = None
    schedule: tuple[Hours, ...] = ()
    prices: PriceBook = field(default_factory=public_prices, repr=False)
    now: Callable[[], float] = field(default=time.time, repr=False)

    def __post_init__(self) -> None:
        self._check()

    def with_policy(self, policy: ScalingPolicy | str) -> Self:
        """Set the policy."""
        return self._draft(policy=ScalingPolicy(policy))

    def with_min_cores(self, cores: int) -> Self:
        """Set the smallest number of cores."""
        return self._draft(min_cores=COUNT.check_whole("min_cores", cores))

    def with_max_cores(self, cores: int) -> Self:
        """Set the largest number of cores."""
        return self._draft(max_cores=COUNT.check_whole("max_cores", cores))

    def with_target_utilization(self, share: float) -> Self:
        """Set the target share of step time in which devices compute."""
        return self._draft(target_utilization=SHARE.check("target_utilization", share))

    def with_resize_cost(self, seconds: float) -> Self:
        """Set how long a change takes, from the last step before it to the first after it."""
        return self._draft(resize_s=SECONDS.check("resize_cost", seconds))

    def with_deadline(self, seconds: float) -> Self:
        """Finish all remaining steps within this time, at the least cost."""
        return self._draft(deadline_s=SECONDS.check("deadline", seconds))

    def with_schedule(self, schedule: Mapping[str, int]) -> Self:
        """Use these cores at these hours (UTC), else the fewest: `{"mon-fri 08:00-20:00": 64}`."""
        return self._draft(policy=ScalingPolicy.SCHEDULE, schedule=read_schedule(schedule))

    def with_prices(self, prices: PriceBook) -> Self:
        """Use these prices."""
        return self._draft(prices=prices)

    def build(self) -> Self:
        """Check all values together, and return the scaler.

        Raises:
            ConfigError: A limit is out of range, limits contradict each other, the target leaves no
                room for the hysteresis, or the schedule is missing.
        """
        self._check()
        return self

    def _draft(self, **changes: object) -> Self:
        """Return a changed copy that is checked only by `build`."""
        draft = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(draft, name, value)
        return draft

    def _check(self) -> None:
        COUNT.check_whole("min_cores", self.min_cores)
        COUNT.check_whole("max_cores", self.max_cores)
        SHARE.check("target_utilization", self.target_utilization)
        PART.check("hysteresis", self.hysteresis)
        PART.check("least_goodput", self.least_goodput)
        for name in ("minimum_lifetime_s", "resize_s", "horizon_s"):
            _DURATION.check(name, getattr(self, name), unit="seconds")
        if self.min_cores > self.max_cores:
            raise ConfigError(
                f"min_cores is {self.min_cores} and max_cores {self.max_cores}; swap them."
            )
        if self.target_utilization + self.hysteresis >= 1:
            raise ConfigError(
                f"target_utilization {self.target_utilization} and hysteresis {self.hysteresis} "
                "add up to 1 or more, so no utilization would ever be above them; lower one."
            )
        if self.policy is ScalingPolicy.SCHEDULE and not self.schedule:
            raise ConfigError(
                "The policy schedule needs hours: with_schedule({'mon-fri 08:00-20:00': 64})."
            )

    @either_way
    def evaluate_scaling(self, metrics: WorkloadMetrics) -> ScalingDecision:
        """Choose a size; the decision is false if nothing should change, and always has a reason.

        Raises:
            ConfigError: No slice of the generation has a number of cores within the bounds.
        """
        self._check()
        on = metrics.config.slice
        here = predict_size(metrics, on, self.prices)
        sizes = tuple(
            predict_size(metrics, other, self.prices)
            for other in legal_slices(on, min_cores=self.min_cores, max_cores=self.max_cores)
        )
        wanted = self._wanted(metrics, here, sizes)
        in_bounds = self.min_cores <= cores_of(on) <= self.max_cores
        refusal = self._refusal(metrics, here, wanted) if in_bounds else None
        if wanted.size.slice == on or refusal is not None:
            return ScalingDecision(
                now=here, config=None, reason=refusal or wanted.reason, sizes=sizes
            )
        # A number of cores that was given for the earlier slice does not apply.
        config = replace(metrics.config, tpu_type=str(wanted.size.slice), cores=None).build()
        return ScalingDecision(now=here, config=config, reason=wanted.reason, sizes=sizes)

    def _wanted(self, metrics: WorkloadMetrics, here: Size, sizes: tuple[Size, ...]) -> Wanted:
        match self.policy:
            case ScalingPolicy.PERFORMANCE_BASED:
                return by_performance(
                    here, sizes, target=self.target_utilization, hysteresis=self.hysteresis
                )
            case ScalingPolicy.COST_BASED:
                return by_cost(
                    here,
                    sizes,
                    hysteresis=self.hysteresis,
                    deadline_s=self.deadline_s,
                    remaining_steps=metrics.remaining_steps,
                )
            case ScalingPolicy.SCHEDULE:
                return by_schedule(sizes, cores=cores_at(self.schedule, self.now()))

    def _refusal(self, metrics: WorkloadMetrics, here: Size, wanted: Wanted) -> str | None:
        """Return why a chosen change is not made now, or None."""
        if wanted.size.slice == here.slice:
            return None
        if metrics.age_s < self.minimum_lifetime_s:
            return (
                f"{wanted.reason}, but the pod has run for {metrics.age_s:.0f} s, and is not "
                f"changed before {self.minimum_lifetime_s:.0f} s"
            )
        goodput = metrics.goodput.value
        if goodput is not None and goodput < self.least_goodput:
            return (
                f"{wanted.reason}, but only {goodput:.0%} of the time is productive now (least "
                f"{self.least_goodput:.0%}), which another size would not fix"
            )
        if wanted.is_ordered:
            return None
        return self._not_worth_it(metrics, here, wanted)

    def _not_worth_it(self, metrics: WorkloadMetrics, here: Size, wanted: Wanted) -> str | None:
        step_s, there_s = here.step_s.value or 0.0, wanted.size.step_s.value or 0.0
        left_s = self.horizon_s
        if metrics.remaining_steps is not None:
            left_s = min(left_s, metrics.remaining_steps * step_s)
        then_s = self.resize_s + left_s * there_s / step_s
        if wanted.size.cores > here.cores:
            saved, what = left_s - then_s, "s"
        else:
            saved, what = here.cores * left_s - wanted.size.cores * then_s, "core-seconds"
        if saved > 0:
            return None
        return (
            f"{wanted.reason}, but the change takes {self.resize_s:.0f} s and the next "
            f"{left_s:.0f} s would not recover that ({saved:.0f} {what})"
        )
