"""What the made-up cloud is made of: zones, what someone holds in them, and how fast it moves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Stage(StrEnum):
    """Where a holding is in its life.

    Attributes:
        NEW: Asked for a moment ago.
        WAITING: In the queue of its zone and kind.
        STARTING: Its capacity is set apart; its machines start.
        RUNNING: All there.
        LEAVING: It was told that it will be taken away, and still runs.
        LOST: Taken away; it keeps its quota.
        REFUSED: Not granted in time, or its start failed; it keeps its quota.
        ENDING: Being released.
        GONE: Released; nothing of it is left.
    """

    NEW = "new"
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    LEAVING = "leaving"
    LOST = "lost"
    REFUSED = "refused"
    ENDING = "ending"
    GONE = "gone"

    @property
    def has_capacity(self) -> bool:
        """Whether machines are set apart for it."""
        return self in (Stage.STARTING, Stage.RUNNING, Stage.LEAVING)


@dataclass(frozen=True)
class Pace:
    """How long each stage takes, in seconds of the clock.

    Attributes:
        start_spread: Share by which starts differ from `start_s`, up and down.
        spot_life_s: Mean life of what may be taken away; None: until someone takes it.
    """

    decide_s: float = 0.02
    start_s: float = 0.1
    start_spread: float = 0.0
    notice_s: float = 30.0
    release_s: float = 0.02
    spot_life_s: float | None = None


@dataclass(frozen=True)
class Reservation:
    """Capacity set apart for those who name it; they take it from here and nowhere else."""

    kind: str
    amount: int


@dataclass(frozen=True)
class Zone:
    """What a zone has, by kind: a kind that `capacity` does not name is not offered there.

    Attributes:
        quota: Most that may be held, on demand; kinds that are not named have no limit.
        spot_quota: The same for what may be taken away.
    """

    capacity: Mapping[str, int]
    quota: Mapping[str, int] = field(default_factory=dict[str, int])
    spot_quota: Mapping[str, int] = field(default_factory=dict[str, int])
    reservations: Mapping[str, Reservation] = field(default_factory=dict[str, Reservation])


@dataclass(frozen=True)
class Maintenance:
    """When machines will be taken down, by the clock."""

    starts_at: float
    ends_at: float


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What someone asked for, as it stands."""

    name: str
    zone: str
    kind: str
    amount: int
    spot: bool = False
    reservation: str | None = None
    expires_at: float | None = None
    stage: Stage = Stage.NEW
    reason: str = ""
    since: float = 0.0
    created_at: float = 0.0
    maintenance: Maintenance | None = None

    @property
    def pool(self) -> tuple[str, str, str | None]:
        """What it takes its capacity from: zone, kind and reservation."""
        return self.zone, self.kind, self.reservation


class OverQuota(Exception):
    """More was asked for than the quota allows."""

    def __init__(self, asked: int, held: int, limit: int) -> None:
        self.asked, self.held, self.limit = asked, held, limit
        super().__init__(f"{asked} asked for, {held} of {limit} held")


class NotOffered(Exception):
    """The zone, the kind in the zone, or the reservation does not exist."""
