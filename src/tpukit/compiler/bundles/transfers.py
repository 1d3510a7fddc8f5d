"""How long a core waits for its transfers: one queue to HBM, a latency, and semaphores."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import XLACompilationError
from .core_run import GRANULE_BYTES, Transfer


@dataclass(frozen=True)
class TransferRates:
    """What transfers cost, in cycles of the core.

    Attributes:
        bytes_per_cycle: HBM traffic of this core in both directions together.
        latency_cycles: From the last byte on its way to the semaphore seen by the core.
        issue_cycles: What starting one takes on the core.
    """

    bytes_per_cycle: float
    latency_cycles: float
    issue_cycles: float


@dataclass(frozen=True)
class Traffic:
    """What the transfers of one core came to."""

    stall_cycles: float
    issue_cycles: float
    bytes_in: int
    bytes_out: int


def replay(
    transfers: Sequence[Transfer], rates: TransferRates, *, compute_factor: float = 1.0
) -> Traffic:
    """Play a core's transfers against the time it computes between them.

    Args:
        transfers: What the machine wrote down.
        rates: What transfers cost.
        compute_factor: How much longer computing takes than the cycles written down.

    Raises:
        XLACompilationError: A wait is for more than was ever started.
    """
    behind = stalled = issuing = queue_free = 0.0
    moved = {"in": 0, "out": 0}
    under_way: defaultdict[int, deque[tuple[int, float]]] = defaultdict(deque)
    for one in transfers:
        now = one.cycle * compute_factor + behind
        if one.direction == "signal":
            under_way[one.flag].append((one.granules, now))
            continue
        if one.direction != "wait":
            finished = now
            if one.direction != "local":
                size = one.granules * GRANULE_BYTES
                moved[one.direction] += size
                queue_free = max(now, queue_free) + size / rates.bytes_per_cycle
                finished = queue_free
            under_way[one.flag].append((one.granules, finished + rates.latency_cycles))
            issuing += rates.issue_cycles
            behind += rates.issue_cycles
            continue
        arrived = _await(under_way[one.flag], one.granules)
        if arrived > now:
            stalled += arrived - now
            behind += arrived - now
    return Traffic(stalled, issuing, moved["in"], moved["out"])


def _await(queue: deque[tuple[int, float]], granules: int) -> float:
    """When `granules` have arrived; they are taken off the semaphore."""
    arrived = 0.0
    while granules > 0:
        if not queue:
            raise XLACompilationError(
                "the kernel waits for a transfer that was never started: its program was not "
                "followed rightly, so no time is told."
            )
        size, at = queue.popleft()
        arrived = max(arrived, at)
        if size > granules:
            queue.appendleft((size - granules, at))
        granules -= size
    return arrived
