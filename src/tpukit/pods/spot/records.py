"""What became of earlier pods, by type, zone and tier: how often they are lost, how long they take.

Only a sliding window counts, and refusals fade within minutes, so that no zone is left out for
good: one bad quarter of an hour says little about the next.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ...hardware import Figure
from ...planner.cost.spot import SECONDS_PER_DAY, Preemption
from ..causes import Kind
from ..pod import Tier
from .life import PodLife, PodLives

WINDOW_S = 7 * SECONDS_PER_DAY
# A refusal counts half after this long. Fixed pauses of 5 to 15 min were seen to lock good zones
# out (marin-community/marin, pull request 5699).
REFUSAL_HALF_LIFE_S = 900.0
# The public record weighs as much as this much of one's own.
PRIOR_DAYS = 1.0
BETWEEN_REQUESTS_S = 60.0
_DAY = "1/day"


@dataclass(frozen=True)
class ZoneRecord:
    """What is known of one type of slice in one zone, on one tier.

    Attributes:
        lost_per_day: How often one pod of it is taken away in a day, recoveries included.
        wait_s: From asking to a pod that is ready, refusals included.
        recent_refusals: How many times it was just refused, each fading.
    """

    lost_per_day: Figure
    wait_s: Figure
    recent_refusals: float


def read_zone(
    history: PodLives,
    *,
    slice_name: str,
    zone: str,
    tier: Tier,
    now: float,
    expected: Preemption,
    restart_s: float,
    window_s: float = WINDOW_S,
) -> ZoneRecord:
    """Return what earlier pods say of a zone, with the public record where they say little.

    Args:
        history: The store that remembers pods.
        slice_name: The type, as `str(Slice)` writes it.
        zone: The zone.
        tier: On which terms.
        now: Seconds since the epoch.
        expected: What is assumed of a zone nobody has used.
        restart_s: The part of a recovery that comes after the pod is ready.
        window_s: How far back to look.
    """
    since = now - window_s
    lives = [
        life
        for life in history.lives(since=since)
        if (life.slice, life.zone, life.tier) == (slice_name, zone, tier)
    ]
    refused = [life for life in lives if _is_refusal(life)]
    faded = sum(_faded(now - (life.ended_at or life.asked_at)) for life in refused)
    return ZoneRecord(
        lost_per_day=_lost_per_day(lives, since, now, expected),
        wait_s=_wait_s(lives, refused, faded, max(0.0, expected.recovery_s - restart_s), expected),
        recent_refusals=faded,
    )


def _lost_per_day(
    lives: Iterable[PodLife], since: float, now: float, expected: Preemption
) -> Figure:
    wanted_days = lost = 0.0
    for life in lives:
        if life.ready_at is not None:
            up_s = min(life.ended_at or now, now) - max(life.ready_at, since)
            wanted_days += max(0.0, up_s) / SECONDS_PER_DAY
            lost += life.cause is not None and life.cause.kind is Kind.EVICTION
    record = Figure(expected.per_slice_day, _DAY, "third-party", expected.source)
    if not wanted_days:
        return record
    own = f"{lost:.0f} lost in {wanted_days:.2f} days of pods here"
    seen = Figure(lost / wanted_days, _DAY, "measured", own)
    weighted = (lost + expected.per_slice_day * PRIOR_DAYS) / (wanted_days + PRIOR_DAYS)
    return Figure.derived(weighted, _DAY, inputs=(seen, record))


def _wait_s(
    lives: Iterable[PodLife],
    refused: list[PodLife],
    faded: float,
    usual_s: float,
    expected: Preemption,
) -> Figure:
    granted = [life.ready_at - life.asked_at for life in lives if life.ready_at is not None]
    record = Figure(usual_s, "s", "third-party", expected.source)
    wait = record
    if granted:
        own = f"mean of {len(granted)} pods here"
        seen = Figure(statistics.fmean(granted), "s", "measured", own)
        mean = (sum(granted) + usual_s) / (len(granted) + 1)
        wait = Figure.derived(mean, "s", inputs=(seen, record))
    if not faded:
        return wait
    # Each recent refusal is another request that may be refused as those were.
    took = statistics.fmean((life.ended_at or life.asked_at) - life.asked_at for life in refused)
    each = Figure(
        took + BETWEEN_REQUESTS_S, "s", "measured", f"{len(refused)} refusals here, fading"
    )
    return wait + each * faded


def _is_refusal(life: PodLife) -> bool:
    return life.ready_at is None and life.cause is not None and (life.cause.kind is Kind.CAPACITY)


def _faded(age_s: float) -> float:
    return 0.5 ** (max(0.0, age_s) / REFUSAL_HALF_LIFE_S)
