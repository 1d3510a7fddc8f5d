"""`AutoScaler`: which size of slice a job should have, decided rarely and with a reason."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from ...errors import ConfigError
from ...hardware import PriceBook, public_prices
from ...planner.cost.spot import Preemption
from ...runtime.calls import either_way
from ...runtime.ranges import COUNT, PART, SECONDS, SHARE, Range
from .choosing import Wanted, by_cost, by_performance, by_schedule
from .decision import ScalingDecision
from .metrics import WorkloadMetrics
from .policy import Hours, ScalingPolicy, cores_at, read_schedule
from .sizes import Size, cores_of, legal_slices, predict_size

MAX_CORES = 2**20
_DURATION = Range(0, SECONDS.high)


@dataclass(frozen=True, kw_only=True)
class AutoScaler:
    """Decides on the size of a pod, in keywords or step by step.

    ```python
    scaler = AutoScaler().with_policy("performance-based").with_max_cores(256).build()
    decision = scaler.evaluate_scaling(WorkloadMetrics.from_current_training(optimizer))
    if decision:
        optimizer.scale_to_config(decision.config)
    ```

    Attributes:
        min_cores: Never fewer.
        max_cores: Never more.
        target_utilization: Share of a step in which devices compute, to be kept.
        hysteresis: How far from it (or by which share of the cost) before anything is done.
        minimum_lifetime_s: A pod is not changed before it has served this long: longer than it
            takes to get one.
        resize_s: What a change costs: checkpoint, another pod, restore.
        horizon_s: How long a new size is expected to serve, where the end is not known.
        least_goodput: A job that loses more time than this is left alone: its trouble is not its
            size, and a change would cost still more.
        deadline_s: For policy cost-based: all remaining steps within this time.
        schedule: For policy schedule.
        prices: By default the public list.
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
        """Choose sizes by this."""
        return self._draft(policy=ScalingPolicy(policy))

    def with_min_cores(self, cores: int) -> Self:
        """Never have fewer."""
        return self._draft(min_cores=COUNT.check_whole("min_cores", cores))

    def with_max_cores(self, cores: int) -> Self:
        """Never have more."""
        return self._draft(max_cores=COUNT.check_whole("max_cores", cores))

    def with_target_utilization(self, share: float) -> Self:
        """Keep devices computing for this share of a step."""
        return self._draft(target_utilization=SHARE.check("target_utilization", share))

    def with_hysteresis(self, share: float) -> Self:
        """Do nothing as long as it is no further from the target than this."""
        return self._draft(hysteresis=SHARE.check("hysteresis", share))

    def with_minimum_lifetime(self, seconds: float) -> Self:
        """Leave a pod alone for this long."""
        return self._draft(minimum_lifetime_s=SECONDS.check("minimum_lifetime", seconds))

    def with_resize_cost(self, seconds: float) -> Self:
        """State how long a change takes, from the last step before it to the first after it."""
        return self._draft(resize_s=SECONDS.check("resize_cost", seconds))

    def with_deadline(self, seconds: float) -> Self:
        """Take all remaining steps within this time, at the least cost."""
        return self._draft(deadline_s=SECONDS.check("deadline", seconds))

    def with_schedule(self, schedule: Mapping[str, int]) -> Self:
        """Have these cores in these hours (UTC), else the least: `{"mon-fri 08:00-20:00": 64}`."""
        return self._draft(policy=ScalingPolicy.SCHEDULE, schedule=read_schedule(schedule))

    def with_prices(self, prices: PriceBook) -> Self:
        """Count with these prices."""
        return self._draft(prices=prices)

    def build(self) -> Self:
        """Check it as a whole, and return it.

        Raises:
            ConfigError: A limit is out of range, the limits exclude each other, the target leaves
                no room for hysteresis, or the schedule is missing.
        """
        self._check()
        return self

    def _draft(self, **changes: object) -> Self:
        """Return a changed copy that is not checked as a whole before `build`."""
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
        """Decide: the result is false where nothing is to be done, and says why either way.

        Raises:
            ConfigError: No slice of the generation has as many cores as the bounds allow.
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
        # Cores that were stated for the slice before are not those of the new one.
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
        """Say why a change that would be right is not made now; None: nothing speaks against it."""
        if wanted.size.slice == here.slice:
            return None
        if metrics.age_s < self.minimum_lifetime_s:
            return (
                f"{wanted.reason}, but the pod has served {metrics.age_s:.0f} s and is left alone "
                f"for {self.minimum_lifetime_s:.0f} s"
            )
        goodput = metrics.goodput.value
        if goodput is not None and goodput < self.least_goodput:
            return (
                f"{wanted.reason}, but only {goodput:.0%} of the time counts now (least "
                f"{self.least_goodput:.0%}): that is not a matter of size"
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
            f"{left_s:.0f} s would not win that back ({saved:.0f} {what})"
        )
