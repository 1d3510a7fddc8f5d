"""Tensors that are counted while they are alive, and pools of tensors that are lent."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import TPUMemoryPoolError
from ..plain_data import JsonMapping

if TYPE_CHECKING:
    import torch

MOST_RECORDS = 100_000
"""The most records, independent of their age."""


class AllocationRecord(NamedTuple):
    """One allocation or release.

    Attributes:
        at_s: Time, by the manager's clock.
        event: "allocate" or "free".
        size_bytes: Size of the tensor.
        allocated_bytes: Bytes allocated after the event.
    """

    at_s: float
    event: Literal["allocate", "free"]
    size_bytes: int
    allocated_bytes: int


class AllocationLedger:
    """Counts the bytes of torch storages until torch frees them.

    A storage lives as long as any tensor, view or numpy array uses it. The garbage collector's
    thread only queues a release, and the next query books it, because booking in that thread could
    interrupt another booking.
    """

    def __init__(self, *, retention_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._retention_s, self._clock = retention_s, clock
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._released: deque[tuple[int, float]] = deque()
        self._history: deque[AllocationRecord] = deque(maxlen=MOST_RECORDS)
        self._lock = threading.RLock()
        self._allocated = self._peak = self._count = 0
        released = self._released  # not `self`: tensors may outlive the ledger
        self._on_release: Callable[[weakref.ref[Any]], None] = lambda reference: released.append(
            (id(reference), clock())
        )

    def add(self, storage: Any, size_bytes: int) -> None:
        """Count a new storage until it is freed."""
        reference = weakref.ref(storage, self._on_release)
        with self._lock:
            self._settle()
            self._alive[id(reference)] = reference, size_bytes
            self._allocated += size_bytes
            self._peak = max(self._peak, self._allocated)
            self._count += 1
            self._record("allocate", size_bytes, self._clock())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all live storages."""
        with self._lock:
            self._settle()
            return self._allocated

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were allocated at once."""
        with self._lock:
            return self._peak

    @property
    def allocations(self) -> int:
        """Number of storages that were allocated."""
        return self._count

    @property
    def alive(self) -> int:
        """Number of live storages."""
        with self._lock:
            self._settle()
            return len(self._alive)

    def history(self) -> list[AllocationRecord]:
        """Return the events of the retention time, oldest first."""
        with self._lock:
            self._settle()
            self._forget(self._clock())
            return list(self._history)

    def _settle(self) -> None:
        while self._released:
            number, when = self._released.popleft()
            _, size_bytes = self._alive.pop(number)
            self._allocated -= size_bytes
            self._record("free", size_bytes, when)

    def _record(self, event: Literal["allocate", "free"], size_bytes: int, when: float) -> None:
        self._history.append(AllocationRecord(when, event, size_bytes, self._allocated))
        self._forget(when)

    def _forget(self, now: float) -> None:
        while self._history and now - self._history[0].at_s > self._retention_s:
            self._history.popleft()


class TensorPool:
    """Tensors of one shape and dtype, allocated once and lent to callers."""

    def __init__(self, name: str, make: Callable[[], Any], size: int) -> None:
        self.name = name
        self._tensors = [make() for _ in range(size)]
        self._addresses = {id(tensor): tensor.data_ptr() for tensor in self._tensors}
        # The last returned tensor is lent first, because it is still in the processor's caches.
        self._free = list(self._tensors)
        self._lent: set[int] = set()
        self._lock = threading.Lock()
        self._gets = self._most_lent = self._refusals = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def get(self) -> Any:
        """Lend a tensor, with the values that its last user left.

        Raises:
            TPUMemoryPoolError: All tensors are in use.
        """
        with self._lock:
            if not self._free:
                self._refusals += 1
                raise TPUMemoryPoolError(
                    f"all {len(self._tensors)} tensors of {self.name} are in use; return one with "
                    "return_tensor_to_pool, or create a pool with a larger pool_size."
                )
            tensor = self._free.pop()
            self._lent.add(id(tensor))
            self._gets += 1
            if len(self._lent) > self._most_lent:
                self._most_lent = len(self._lent)
            return tensor

    def give_back(self, tensor: "torch.Tensor") -> None:
        """Take a lent tensor back.

        Raises:
            TPUMemoryPoolError: It is not of this pool, was returned already, or has other memory.
        """
        with self._lock:
            number = id(tensor)
            if number not in self._lent:
                self._refuse(tensor)
            if tensor.data_ptr() != self._addresses[number]:
                raise TPUMemoryPoolError(
                    f"the tensor of {self.name} has other memory now (by resize_, set_ or `.data "
                    "=`); "
                    "write to it in place, e.g. tensor.copy_(…)."
                )
            self._lent.remove(number)
            self._free.append(tensor)

    def stats(self) -> JsonMapping:
        """Return counts, and the share of the pool that is in use."""
        with self._lock:
            size, lent = len(self._tensors), len(self._lent)
            first = self._tensors[0]
            return {
                "pool_size": size,
                "tensor_size": tuple(first.shape),
                "dtype": str(first.dtype).removeprefix("torch."),
                "in_use": lent,
                "available": size - lent,
                "utilization": lent / size,
                "most_in_use": self._most_lent,
                "gets": self._gets,
                "refusals": self._refusals,
                "size_bytes": self.size_bytes,
            }

    def _refuse(self, tensor: "torch.Tensor") -> None:
        if id(tensor) in self._addresses:
            raise TPUMemoryPoolError(
                f"this tensor was returned to {self.name} already; return each tensor once."
            )
        raise TPUMemoryPoolError(
            f"a {type(tensor).__name__} that is not of {self.name} was returned to it; return the "
            "tensor of get_tensor_from_pool itself, not a copy or a view of it."
        )
