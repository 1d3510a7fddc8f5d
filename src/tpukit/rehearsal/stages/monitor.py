"""What watching the run showed: where its time went across restarts, and how its host fared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...hardware.figure import bytes_text
from ...observe.runs.goodput import RunGoodput, label_of
from ...observe.runs.run import Run
from ...observe.runs.summary import RunSummary
from ..beside import Beside
from ..scene import Scene
from .preempt import Preempt

_HOST = ("host_cpu_utilization", "host_memory_used")


@dataclass(frozen=True)
class Monitor:
    """What the monitor beside each attempt wrote, and what the run's own books say.

    Attributes:
        readings: Rounds of readings of the host, over all attempts.
        busiest: The host's processors at their busiest; None where nobody read them.
        fullest_bytes: The host's memory at its fullest.
        hosts: That left records.
        stragglers: The verdict on slow ones.
    """

    summary: RunSummary
    goodput: RunGoodput
    readings: int
    busiest: float | None
    fullest_bytes: float | None
    hosts: int
    stragglers: str

    @property
    def is_good(self) -> bool:
        """Whether there is something to watch."""
        return self.readings > 0

    @property
    def sentence(self) -> str:
        """Where the time went, and what the host did."""
        cause, seconds = next(iter(self.goodput.badput_s.items()), ("other", 0.0))
        share = self.goodput.share or 0.0
        host = "no reading of the host"
        if self.busiest is not None and self.fullest_bytes is not None:
            host = (
                f"{self.readings} readings of the host, processors up to {self.busiest:.0%}, "
                f"memory up to {bytes_text(self.fullest_bytes)}"
            )
        return (
            f"goodput {share:.1%} over {self.goodput.attempts} attempts, most of the rest is "
            f"{label_of(cause)} ({seconds:.1f} s); {host} (measured)"
        )

    def beside(self) -> Sequence[Beside]:
        """Goodput stands beside its prediction where the run was preempted."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "summary": self.summary.to_dict(),
            "goodput": self.goodput.to_dict(),
            "readings": self.readings,
            "host_cpu_at_most": self.busiest,
            "host_memory_bytes_at_most": self.fullest_bytes,
            "hosts": self.hosts,
            "stragglers": self.stragglers,
        }


class MonitorStage:
    """Reads what `tpukit train` keeps of every run."""

    name: ClassVar[str] = "monitor"
    question: ClassVar[str] = "What does watching it show?"

    def run(self, scene: Scene) -> Monitor:
        """Read the preempted run's directory."""
        run = Run(scene.find(Preempt).run.folder)
        busy, used = (_most(run, metric) for metric in _HOST)
        return Monitor(
            summary=run.summary(),
            goodput=run.goodput(),
            readings=used[1],
            busiest=busy[0],
            fullest_bytes=used[0],
            hosts=len(run.processes()),
            stragglers=str(run.stragglers()),
        )


def _most(run: Run, metric: str) -> tuple[float | None, int]:
    """Return the greatest value of a metric of the first host, and how often it was read."""
    if metric not in run.metrics():
        return None, 0
    values = run.series(metric, by="time").y
    values = values[values == values]  # gaps
    return (float(values.max()), len(values)) if len(values) else (None, 0)
