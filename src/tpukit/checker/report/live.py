"""Live HBM over the time of a step: the compiler's curve on the simulation's clock."""

from collections.abc import Sequence

from ...compiler.memory.liveness import Schedule
from ...compiler.timeline import Span


def live_memory(
    curve: Sequence[tuple[int, int]], schedule: Schedule, spans: Sequence[Span]
) -> list[list[float]]:
    """(seconds, bytes) for each point of a memory curve; a loop's body is in its first iteration.

    Args:
        curve: Position in the schedule and bytes.
        schedule: The order that the positions count in.
        spans: When what stands in that order runs.
    """
    starts = {span.name: span.start_s for span in spans if span.track == "core"}
    clock: list[float] = []
    now = 0.0
    for name in schedule.instructions:
        # A loop's own entry may stand behind its body; time does not run backwards.
        now = max(now, starts.get(name, now))
        clock.append(now)
    if not clock:
        return []
    return [[clock[min(position, len(clock) - 1)], float(amount)] for position, amount in curve]
