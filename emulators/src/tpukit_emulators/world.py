"""A made-up cloud in no API's words: capacity, quota, and capacity that is taken away again.

Someone asks for an amount of a kind in a zone and gets a `Holding`, which goes through stages by
the clock. Who has too little quota is refused at once; who finds no capacity waits in a queue.
A holding that was lost gives its capacity back and keeps its quota until it is released.

Everything random follows from the seed and the holding's name, so threads cannot change it.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from .clock import Clock, Later, RealClock
from .holding import Holding, Maintenance, NotOffered, OverQuota, Pace, Stage, Zone


class World:
    """Zones and who holds what in them. All methods may be called from any thread."""

    def __init__(
        self,
        zones: Mapping[str, Zone],
        *,
        clock: Clock | None = None,
        pace: Pace | None = None,
        seed: int = 0,
    ) -> None:
        self.zones = dict(zones)
        self.clock: Clock = clock or RealClock()
        self.pace = pace or Pace()
        self.seed = seed
        # Held while anything changes and while listeners hear of it; APIs may hold it to see
        # several holdings as of one moment.
        self.lock = threading.RLock()
        self._holdings: dict[str, Holding] = {}
        self._stepping: dict[str, Later] = {}
        self._queue: dict[str, None] = {}  # names of those who wait, in the order they came
        self._free: Counter[tuple[str, str, str | None]] = Counter()
        for zone, has in self.zones.items():
            for kind, amount in has.capacity.items():
                self._free[zone, kind, None] = amount
            for name, set_apart in has.reservations.items():
                self._free[zone, set_apart.kind, name] = set_apart.amount
        self._sold_out: set[tuple[str, str]] = set()
        self._listeners: list[Callable[[Holding], None]] = []

    def watch(self, listener: Callable[[Holding], None]) -> None:
        """Call `listener` with every holding that changed; it may not wait for anything."""
        self._listeners.append(listener)

    def holdings(self) -> list[Holding]:
        """Return all holdings, oldest first."""
        with self.lock:
            return list(self._holdings.values())

    def get(self, name: str) -> Holding | None:
        """Return a holding as it stands, or None."""
        return self._holdings.get(name)

    def free(self, zone: str, kind: str, reservation: str | None = None) -> int:
        """Return how much of a kind can be had now."""
        sold_out = reservation is None and (zone, kind) in self._sold_out
        return 0 if sold_out else self._free[zone, kind, reservation]

    # What owners do.

    def ask(self, wanted: Holding) -> Holding:
        """Begin a holding.

        Raises:
            NotOffered: There is no such zone, kind or reservation.
            OverQuota: The quota does not allow it.
            KeyError: The name is taken.
        """
        with self.lock:
            if wanted.name in self._holdings:
                raise KeyError(wanted.name)
            self._check_offer(wanted)
            self._check_quota(wanted)
            now = self.clock.now()
            held = replace(wanted, stage=Stage.NEW, since=now, created_at=now)
            self._holdings[held.name] = held
            self._tell(held)
            self._next(held.name, self.pace.decide_s, lambda: self._wait(held.name))
            if held.expires_at is not None:
                self.clock.call_later(
                    max(0.0, held.expires_at - now), lambda: self._expire(held.name, now)
                )
            return held

    def release(self, name: str) -> None:
        """Give a holding back, in whatever stage it is; one that is not there is no error."""
        with self.lock:
            held = self._holdings.get(name)
            if held is None or held.stage is Stage.ENDING:
                return
            self._move(name, Stage.ENDING)
            self._next(name, self.pace.release_s, lambda: self._remove(name))

    def requeue(self, name: str) -> None:
        """Ask again for what a holding had, whatever became of it."""
        with self.lock:
            if name in self._holdings:
                self._move(name, Stage.WAITING)
                self._serve()

    # What happens to them.

    def preempt(
        self, name: str, *, notice_s: float | None = None, reason: str = "preempted"
    ) -> bool:
        """Take a running holding away after a notice; tell whether there was one to take."""
        with self.lock:
            held = self._holdings.get(name)
            if held is None or held.stage not in (Stage.STARTING, Stage.RUNNING):
                return False
            self._move(name, Stage.LEAVING, reason)
            wait_s = self.pace.notice_s if notice_s is None else notice_s
            self._next(name, wait_s, lambda: self._lose(name))
            return True

    def announce_maintenance(self, name: str, *, in_s: float, lasts_s: float = 3600.0) -> bool:
        """Take a running holding away in so many seconds, and say so now."""
        with self.lock:
            held = self._holdings.get(name)
            if held is None or held.stage is not Stage.RUNNING:
                return False
            starts_at = self.clock.now() + in_s
            window = Maintenance(starts_at, starts_at + lasts_s)
            self._holdings[name] = replace(held, maintenance=window)
            self._tell(self._holdings[name])

            def begin() -> None:
                now_held = self._holdings.get(name)
                if now_held is not None and now_held.maintenance == window:
                    self.preempt(name, reason="maintenance")

            self.clock.call_later(in_s, begin)
            return True

    def fail_start(self, name: str, reason: str) -> bool:
        """Let a holding that is not running yet fail for good."""
        with self.lock:
            held = self._holdings.get(name)
            if held is None or held.stage not in (Stage.NEW, Stage.WAITING, Stage.STARTING):
                return False
            self._move(name, Stage.REFUSED, reason)
            return True

    def sell_out(self, zone: str, kind: str, *, for_s: float | None = None) -> None:
        """Give nobody more of a kind, for some time or until `restock`; holders keep theirs."""
        with self.lock:
            self._sold_out.add((zone, kind))
            if for_s is not None:
                self.clock.call_later(for_s, lambda: self.restock(zone, kind))

    def restock(self, zone: str, kind: str) -> None:
        """End a stock-out, and serve those who waited."""
        with self.lock:
            self._sold_out.discard((zone, kind))
            self._serve()

    # Stages.

    def _wait(self, name: str) -> None:
        with self.lock:
            if self._is_in(name, Stage.NEW):
                self._move(name, Stage.WAITING)
                self._serve()

    def _serve(self) -> None:
        """Give capacity to those who wait, in the order they came; small ones may overtake."""
        for held in [self._holdings[name] for name in self._queue]:
            if held.amount > self.free(*held.pool):
                continue
            self._move(held.name, Stage.STARTING)
            spread = self._luck(held.name, "start").uniform(-1, 1) * self.pace.start_spread
            wait_s = max(0.0, self.pace.start_s * (1 + spread))
            self._next(held.name, wait_s, lambda name=held.name: self._run(name))

    def _run(self, name: str) -> None:
        with self.lock:
            if not self._is_in(name, Stage.STARTING):
                return
            self._move(name, Stage.RUNNING)
            held = self._holdings[name]
            if held.spot and self.pace.spot_life_s is not None:
                life_s = self._luck(name, "life").expovariate(1 / self.pace.spot_life_s)
                self._next(name, life_s, lambda: self.preempt(name))

    def _lose(self, name: str) -> None:
        with self.lock:
            if self._is_in(name, Stage.LEAVING):
                self._move(name, Stage.LOST, self._holdings[name].reason)
                self._serve()

    def _expire(self, name: str, created_at: float) -> None:
        with self.lock:
            held = self._holdings.get(name)
            waiting = held is not None and held.stage in (Stage.NEW, Stage.WAITING)
            if held is not None and waiting and held.created_at == created_at:
                self._move(name, Stage.REFUSED, "expired")

    def _remove(self, name: str) -> None:
        with self.lock:
            if self._is_in(name, Stage.ENDING):
                self._move(name, Stage.GONE)
                del self._holdings[name]
                self._serve()

    def _is_in(self, name: str, stage: Stage) -> bool:
        held = self._holdings.get(name)
        return held is not None and held.stage is stage

    def _move(self, name: str, stage: Stage, reason: str = "") -> None:
        held = self._holdings[name]
        if later := self._stepping.pop(name, None):
            later.cancel()
        had, has = held.stage.has_capacity, stage.has_capacity
        self._free[held.pool] += (had - has) * held.amount
        self._holdings[name] = replace(held, stage=stage, reason=reason, since=self.clock.now())
        self._queue.pop(name, None)
        if stage is Stage.WAITING:
            self._queue[name] = None
        self._tell(self._holdings[name])

    def _next(self, name: str, wait_s: float, action: Callable[[], object]) -> None:
        self._stepping[name] = self.clock.call_later(wait_s, action)

    def _tell(self, held: Holding) -> None:
        for listener in self._listeners:
            listener(held)

    def _luck(self, name: str, what: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}/{what}")

    # What is allowed.

    def _check_offer(self, wanted: Holding) -> None:
        zone = self.zones.get(wanted.zone)
        if zone is None:
            raise NotOffered(f"no zone {wanted.zone}")
        if wanted.reservation is not None:
            set_apart = zone.reservations.get(wanted.reservation)
            if set_apart is None or set_apart.kind != wanted.kind:
                raise NotOffered(f"no reservation {wanted.reservation} of {wanted.kind}")
        elif wanted.kind not in zone.capacity:
            raise NotOffered(f"no {wanted.kind} in {wanted.zone}")

    def _check_quota(self, wanted: Holding) -> None:
        zone = self.zones[wanted.zone]
        limit = (zone.spot_quota if wanted.spot else zone.quota).get(wanted.kind)
        if limit is None or wanted.reservation is not None:
            return
        held = sum(
            one.amount
            for one in self._holdings.values()
            if (one.zone, one.kind, one.spot) == (wanted.zone, wanted.kind, wanted.spot)
            and one.reservation is None
        )
        if held + wanted.amount > limit:
            raise OverQuota(wanted.amount, held, limit)
