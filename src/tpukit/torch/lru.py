"""A cache with a maximum size and age that evicts the least recently used entry."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ..errors import TPUValidationError
from ..shown import Shown

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Departure = Literal["evicted", "expired"]
DEFAULT_MAX_SIZE = 100
"""Most entries, if a configuration's `cache_max_size` is None."""


@dataclass(frozen=True, kw_only=True)
class CacheStats(Shown):
    """Counts of a cache so far; `clear` does not reset them.

    Attributes:
        size: Entries now.
        evictions: Entries removed because the cache was full.
        expirations: Entries removed because they were too old.
    """

    hits: int
    misses: int
    size: int
    max_size: int
    evictions: int
    expirations: int
    # The names of document 002.
    _facts = (
        *("hits", "misses", "size", "max_size", "evictions", "expirations"),
        "hit_rate",
    )

    @property
    def hit_rate(self) -> float:
        """Share of look-ups that were hits; 0 before the first one."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0


class LRUCache(Generic[Key, Value]):
    """A bounded, thread-safe cache.

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
        """Create an empty cache.

        Args:
            max_size: The most entries, or a function that returns it, for a limit that may change
                later; None: `DEFAULT_MAX_SIZE`.
            max_age_s: How long an entry is valid; None: for ever.
            clock: Returns the time in seconds.
            on_departure: Called after an entry was evicted or has expired.

        Raises:
            TPUValidationError: A limit is not positive.
        """
        self._limit = max_size if callable(max_size) else lambda: max_size
        if self.max_size < 1:
            raise TPUValidationError(f"max_size={max_size}; a cache needs at least one entry.")
        if max_age_s is not None and max_age_s <= 0:
            raise TPUValidationError(
                f"max_age_s={max_age_s:g}; give seconds above 0, or None for no limit."
            )
        self._max_age_s = max_age_s
        self._clock, self._on_departure = clock, on_departure
        self._entries: OrderedDict[Key, tuple[Value, float]] = OrderedDict()
        self._lock = threading.RLock()
        self._making: dict[Key, threading.Lock] = {}
        self._hits = self._misses = self._evictions = self._expirations = 0

    @property
    def max_size(self) -> int:
        """The most entries; a lowered limit takes effect at the next `put`."""
        limit = self._limit()
        return DEFAULT_MAX_SIZE if limit is None else limit

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, which counts as a use; None if there is none."""
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
        self._notify([(key, entry[0])], "expired")
        return None

    def put(self, key: Key, value: Value) -> None:
        """Store a value under its key; the least recently used entries are evicted if needed."""
        evicted: list[tuple[Key, Value]] = []
        with self._lock:
            self._entries[key] = (value, self._now())
            self._entries.move_to_end(key)
            while len(self._entries) > self.max_size:
                oldest, (old, _) = self._entries.popitem(last=False)
                evicted.append((oldest, old))
            self._evictions += len(evicted)
        self._notify(evicted, "evicted")

    def get_or_make(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of a key; call `make` and store its result if there is none.

        Threads that request one key at the same time wait for the first of them. If `make` raises,
        nothing is stored. `make` may use the cache, but not for the same key.
        """
        value = self.get(key)
        if value is not None:
            return value
        with self._lock:
            turn = self._making.setdefault(key, threading.Lock())
        with turn:
            # Not `get`, because the miss is counted already; another thread may have made it.
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

    def discard(self, key: Key) -> None:
        """Remove an entry if it exists; no count changes."""
        with self._lock:
            self._entries.pop(key, None)

    def clear(self) -> None:
        """Remove every entry; the counts stay."""
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
        """Return whether a key has a valid entry; this does not count as a use."""
        with self._lock:
            entry = self._entries.get(key)
            return entry is not None and not self._is_old(entry)

    def __iter__(self) -> Iterator[Key]:
        """Return the keys, the least recently used first."""
        with self._lock:
            return iter(list(self._entries))

    def _now(self) -> float:
        # Without a maximum age the clock is not read, so a look-up takes half the time.
        return 0.0 if self._max_age_s is None else self._clock()

    def _is_old(self, entry: tuple[Value, float]) -> bool:
        return self._max_age_s is not None and self._clock() - entry[1] > self._max_age_s

    def _notify(self, entries: list[tuple[Key, Value]], how: Departure) -> None:
        # Outside the lock, so that the callback may use the cache.
        if self._on_departure is not None:
            for key, value in entries:
                self._on_departure(key, value, how)
