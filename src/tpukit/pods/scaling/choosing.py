"""The policies themselves: from sizes with predictions to the one that is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

from .sizes import Size


@dataclass(frozen=True)
class Wanted:
    """The size that a policy wants, which may be the one that is there.

    Attributes:
        is_ordered: Whether it was asked for as such (a schedule, a deadline), so that it is no
            matter of winning back what the change costs.
    """

    size: Size
    reason: str
    is_ordered: bool = False


def by_performance(
    here: Size, sizes: Sequence[Size], *, target: float, hysteresis: float
) -> Wanted:
    """Want the most cores that are used to the target.

    Within the hysteresis around the target nothing changes. Beyond it, the measurement is given
    the benefit of the same doubt: a small error of what was measured on few cores is a large one
    of what it says of many. So errors up to the hysteresis never lead to and fro.
    """
    used = here.utilization.value or 0.0
    inside = here.slice in {size.slice for size in sizes}
    if inside and abs(used - target) <= hysteresis:
        return Wanted(here, f"{used:.0%} in use is the target of {target:.0%} ± {hysteresis:.0%}")
    doubted = max(0.0, used - hysteresis) if used > target else min(1.0, used + hysteresis)
    reaching = [size for size in sizes if _kept_busy(doubted, here, size) >= target]
    best = reaching[-1] if reaching else sizes[0]
    if inside and (best.cores - here.cores) * (used - target) <= 0:
        return Wanted(here, f"{used:.0%} in use, and no other size would be nearer {target:.0%}")
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
    """Want the least money for a step, in time for the deadline where there is one.

    A size that costs less by no more than the hysteresis is not worth a change.
    """
    late = False
    if deadline_s is not None and remaining_steps:
        most_s = deadline_s / remaining_steps
        in_time = [size for size in sizes if (size.step_s.value or 0.0) <= most_s]
        late = (here.step_s.value or 0.0) > most_s
        if not in_time:
            fastest = min(sizes, key=lambda size: size.step_s.value or 0.0)
            return Wanted(fastest, "no size is in time for the deadline; the fastest", late)
        sizes = in_time
    priced = all(size.usd_per_step.value is not None for size in (*sizes, here))

    def cost(size: Size) -> float:
        return (size.usd_per_step.value or 0.0) if priced else size.core_seconds

    best = min(sizes, key=lambda size: (cost(size), size.cores))
    unit = "USD" if priced else "core-seconds"
    words = f"{best.slice} costs {cost(best):.3g} {unit} a step, {here.slice} {cost(here):.3g}"
    allowed = here.slice in {size.slice for size in sizes}
    if allowed and cost(best) >= cost(here) * (1 - hysteresis):
        return Wanted(here, f"{words}: no change is worth more than {hysteresis:.0%}")
    return Wanted(best, f"{words}; too late where it is" if late else words, late)


def by_schedule(sizes: Sequence[Size], *, cores: int | None) -> Wanted:
    """Want what the hour asks for, or the least: the largest size that is not above it."""
    if cores is None:
        return Wanted(sizes[0], "no entry of the schedule holds now: the least", True)
    best = next((size for size in reversed(sizes) if size.cores <= cores), sizes[0])
    return Wanted(best, f"the schedule asks for {cores} cores now", True)


def _kept_busy(used: float, here: Size, there: Size) -> float:
    """Return the share in use on another size: computing is divided, waiting stays."""
    waiting = (1 - used) * there.cores / here.cores
    return used / (used + waiting) if used + waiting > 0 else 0.0
