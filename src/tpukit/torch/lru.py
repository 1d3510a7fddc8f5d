"""A cache of so many entries, each for so long; what was not used for longest leaves first."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ..errors import TPUValidationError
from ..shown import Shown

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Departure = Literal["evicted", "expired"]
DEFAULT_MAX_SIZE = 100
"""Entries kept where a configuration's `cache_max_size` says nothing."""


@dataclass(frozen=True, kw_only=True)
class CacheStats(Shown):
    """How a cache has served so far; `clear` leaves the counts as they are.

    Attributes:
        size: Entries held now.
        evictions: Entries that left because the cache was full.
        expirations: Entries that left because they were too old.
    """

    hits: int
    misses: int
    size: int
    max_size: int
    evictions: int
    expirations: int

    @property
    def hit_rate(self) -> float:
        """Hits of all look-ups, 0 before the first one."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data under document 002's names."""
        return {**vars(self), "hit_rate": self.hit_rate}


class LRUCache(Generic[Key, Value]):
    """A bounded cache that several threads may use at once.

    Example:
        >>> cache = LRUCache(max_size=2)
        >>> cache.get_or_make("a", lambda: 1)
        1
        >>> cache.stats.misses
        1
    """

    def __init__(
        self,
        max_size: "int | Callable[[], int | None] | None" = None,
        *,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_departure: Callable[[Key, Value, Departure], None] | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            max_size: Entries held at most, or a function that returns it, for a limit that may be
                changed later; None: `DEFAULT_MAX_SIZE`.
            max_age_s: How long an entry is good after it was put; None: for ever.
            clock: What tells the time, in seconds.
            on_departure: Called after an entry was evicted or has expired.

        Raises:
            TPUValidationError: A limit is not positive.
        """
        self._limit = max_size if callable(max_size) else lambda: max_size
        if self.max_size < 1:
            raise TPUValidationError(f"a cache holds at least one entry; max_size={max_size}.")
        if max_age_s is not None and max_age_s <= 0:
            raise TPUValidationError(
                f"max_age_s={max_age_s:g} would let nothing be found again; give seconds above 0, "
                "or None for no limit."
            )
        self._max_age_s = max_age_s
        self._clock, self._on_departure = clock, on_departure
        self._entries: OrderedDict[Key, tuple[Value, float]] = OrderedDict()
        self._lock = threading.RLock()
        self._making: dict[Key, threading.Lock] = {}
        self._hits = self._misses = self._evictions = self._expirations = 0

    @property
    def max_size(self) -> int:
        """Entries held at most; a limit that was lowered holds from the next `put` on."""
        limit = self._limit()
        return DEFAULT_MAX_SIZE if limit is None else limit

    def get(self, key: Key) -> Value | None:
        """Return what is kept under a key, which counts as a use of it; None where nothing is."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not self._is_old(entry):
                self._entries.move_to_end(key)
                self._hits += 1
                return entry[0]
            self._misses += 1
            if entry is None:
                return None
            del self._entries[key]
            self._expirations += 1
        self._tell([(key, entry[0])], "expired")
        return None

    def put(self, key: Key, value: Value) -> None:
        """Keep a value, in place of what was under its key; the oldest uses make room for it."""
        left: list[tuple[Key, Value]] = []
        with self._lock:
            self._entries[key] = (value, self._now())
            self._entries.move_to_end(key)
            while len(self._entries) > self.max_size:
                oldest, (old, _) = self._entries.popitem(last=False)
                left.append((oldest, old))
            self._evictions += len(left)
        self._tell(left, "evicted")

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return what is kept under a key, made first where nothing is.

        Threads that ask for one key at the same time wait for the first of them; nothing is kept
        of a `make` that raises. `make` may use the cache, but not for the same key.
        """
        found = self.get(key)
        if found is not None:
            return found
        with self._lock:
            turn = self._making.setdefault(key, threading.Lock())
        with turn:
            # Not `get`: this was counted as a miss already, and another thread made it meanwhile.
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None and not self._is_old(entry):
                    return entry[0]
            try:
                value = make()
                self.put(key, value)
            finally:
                with self._lock:
                    self._making.pop(key, None)
            return value

    def drop_old(self) -> int:
        """Drop every entry past its age, and return how many those were."""
        with self._lock:
            old = [(key, one[0]) for key, one in self._entries.items() if self._is_old(one)]
            for key, _ in old:
                del self._entries[key]
            self._expirations += len(old)
        self._tell(old, "expired")
        return len(old)

    def discard(self, key: Key) -> None:
        """Drop one entry, where it is there; no count changes."""
        with self._lock:
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Drop every entry; the counts stay."""
        with self._lock:
            self._entries.clear()

    @property
    def stats(self) -> CacheStats:
        """The counts so far."""
        with self._lock:
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                size=len(self._entries),
                max_size=self.max_size,
                evictions=self._evictions,
                expirations=self._expirations,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        """Whether a good entry is there; it does not count as a use."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and not self._is_old(entry)

    def __iter__(self) -> Iterator[Key]:
        """The keys, that which leaves first before the others."""
        with self._lock:
            return iter(list(self._entries))

    def _now(self) -> float:
        # Without a limit nobody asks how old an entry is, and a look-up takes half the time.
        return 0.0 if self._max_age_s is None else self._clock()

    def _is_old(self, entry: tuple[Value, float]) -> bool:
        return self._max_age_s is not None and self._clock() - entry[1] > self._max_age_s

    def _tell(self, left: list[tuple[Key, Value]], how: Departure) -> None:
        # Outside the lock, so that whoever is told may use the cache.
        if self._on_departure is not None:
            for key, value in left:
                self._on_departure(key, value, how)
