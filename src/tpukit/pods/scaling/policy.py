"""`ScalingPolicy`, and hours of the week for the one that goes by the clock."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ...errors import ConfigError
from ...runtime.ranges import COUNT
from ..spelling import SpelledEnum

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_WRITTEN = re.compile(
    r"\s*(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+)?"
    r"(?P<from>\d{1,2}:\d{2})-(?P<to>\d{1,2}:\d{2})\s*"
)


class ScalingPolicy(SpelledEnum):
    """What a size is chosen by.

    Attributes:
        PERFORMANCE_BASED: The most cores that are still used to the target.
        COST_BASED: The least money for a step, within the deadline where there is one.
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
    """Some hours of some days of the week (UTC), and how many cores to have then.

    Attributes:
        days: Of the week on which they begin, 0 for Monday.
        first: Minutes after midnight.
        last: The same of their end; before `first` where they go past midnight.
    """

    days: frozenset[int]
    first: int
    last: int
    cores: int

    def cover(self, when: datetime) -> bool:
        """Whether it is one of these hours."""
        minute, day = when.hour * 60 + when.minute, when.weekday()
        if self.first < self.last:
            return day in self.days and self.first <= minute < self.last
        began_today = day in self.days and minute >= self.first
        return began_today or ((day - 1) % 7 in self.days and minute < self.last)


def read_schedule(schedule: Mapping[str, int]) -> tuple[Hours, ...]:
    """Read hours and cores such as `{"mon-fri 08:00-20:00": 64, "22:00-06:00": 256}`, in UTC.

    Raises:
        ConfigError: An entry is written in another way.
    """
    return tuple(_hours(written, cores) for written, cores in schedule.items())


def cores_at(schedule: tuple[Hours, ...], at: float) -> int | None:
    """Return how many cores the first entry that covers a time asks for; None: no entry does."""
    when = datetime.fromtimestamp(at, UTC)
    return next((hours.cores for hours in schedule if hours.cover(when)), None)


def _hours(written: str, cores: int) -> Hours:
    found = _WRITTEN.fullmatch(written.lower())
    days = _days(found["first"], found["last"]) if found else None
    first, last = (_minutes(found[end]) if found else None for end in ("from", "to"))
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
