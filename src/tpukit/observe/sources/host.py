"""CPUs and memory of this host, through psutil."""

import psutil

from ..readings import Reading, ReadingBuilder

WANTED = ("host_cpu_utilization", "host_memory_used", "host_memory_total")
SHORTEST_S = 0.05  # of CPU time to compare: the kernel counts in hundredths of a second


class HostSource:
    """How busy the CPUs were since the reading before, and how full memory is.

    Args:
        process: Index of the process of the run.
    """

    name = "psutil"

    def __init__(self, *, process: int = 0) -> None:
        self._process = process
        self._before: tuple[float, float] | None = None

    def read(self) -> Reading:
        """Ask the operating system."""
        found = ReadingBuilder(self.name, WANTED, process=self._process)
        try:
            memory = psutil.virtual_memory()
            # What is left may be given to programs at once, caches included.
            found.add("host_memory_used", memory.total - memory.available)
            found.add("host_memory_total", memory.total)
            self._add_cpu(found)
        except (OSError, psutil.Error) as error:
            return found.build(otherwise=f"the operating system does not say: {error}")
        return found.build()

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _add_cpu(self, found: ReadingBuilder) -> None:
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        before = self._before
        if before is None:
            self._before = (total, idle)
            found.lack("host_cpu_utilization", "two readings are needed to tell, this is the first")
            return
        passed = total - before[0]
        if passed < SHORTEST_S:
            found.lack("host_cpu_utilization", "too little time has passed since the last reading")
            return
        self._before = (total, idle)
        busy = 1.0 - (idle - before[1]) / passed
        found.add("host_cpu_utilization", min(1.0, max(0.0, busy)))
