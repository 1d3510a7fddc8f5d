"""The events of a host's threads by what they are: compiling, launching, copies, calls, ops."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ...records.hooks import PROFILE_MARK
from .recording import DeviceTrack, HostActivity, HostEvent, Interval, OpEvent

# What jax, PjRt and XLA call what they do on the host.
_COMPILING = re.compile(
    r"backend_compile|trace_to_jaxpr|lower_\w*computation|XlaCompile|\w+Client::Compile|\w+Compiler::"
)
_LAUNCHING = re.compile(
    r"PjitFunction\(|.*Execut(e\b|eReplicated|able::)|.*Launch(Kernel|OnDevice)"
)
_TRANSFER = re.compile(
    r".*(DevicePut|device_put|Transfer(To|From)|BufferFromHost|CopyToDevice\b|ToLiteral"
    r"|CopyRawToHost|np\.asarray\(jax\.Array\)|TransferLiteral)"
)


_CALL, _OTHER = "$", "other"
_IGNORED = ("end: ", "Threadpool")


@lru_cache(maxsize=1 << 16)  # a trace has a million events and a thousand names
def _kind_of(name: str) -> str:
    """The field of `HostActivity` an event belongs to, "other", or "" for one of no interest."""
    if name.startswith(_CALL):
        return "calls"
    if _COMPILING.match(name):
        return "compiling"
    if _TRANSFER.match(name):
        return "transfers"
    if _LAUNCHING.match(name):
        return "launching"
    return "" if name.startswith(_IGNORED) else _OTHER


@dataclass
class HostReader:
    """Sorts the events of the host's threads by what they are.

    Attributes:
        wants_ops: Whether ops run on those threads too, as those of the CPU backend do.
        block: The block that `TPUProfiler` marked.
        steps: What `jax.profiler.StepTraceAnnotation` marked.
    """

    wants_ops: bool
    block: Interval | None = None
    steps: list[Interval] = field(default_factory=list[Interval])
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    _kinds: dict[str, list[HostEvent]] = field(default_factory=lambda: defaultdict(list[HostEvent]))
    _ops: dict[int, list[OpEvent]] = field(default_factory=lambda: defaultdict(list[OpEvent]))
    _runs: dict[tuple[int, int], Interval] = field(default_factory=dict[tuple[int, int], Interval])

    def read(self, lines: Iterable[Any]) -> None:
        """Take in every event of every thread."""
        for line in lines:
            for event in line.events:
                kind = _kind_of(event.name)
                if kind == _OTHER:
                    self._other(event, line.name)
                elif kind:
                    self._add(kind, event, line.name)

    def _add(self, kind: str, event: Any, thread: str) -> None:
        name = event.name.removeprefix(_CALL)
        self._kinds[kind].append(HostEvent(name, event.start_ns, event.end_ns, thread))

    def _other(self, event: Any, thread: str) -> None:
        stats = {key: value for key, value in event.stats if key and not key.startswith("_")}
        span = event.start_ns, event.end_ns
        if event.name == PROFILE_MARK:
            # The longest, should a program of the user's mark blocks by the same name.
            if self.block is None or span[1] - span[0] > self.block[1] - self.block[0]:
                self.block = span
                self.annotations = {key: str(value) for key, value in stats.items()}
        elif "step_num" in stats:
            self.steps.append(span)
        elif self.wants_ops and "hlo_op" in stats:
            ordinal = _whole(stats.get("device_ordinal"))
            self._ops[ordinal].append(
                OpEvent(
                    name=str(stats["hlo_op"]),
                    kernel=event.name,
                    start=span[0],
                    end=span[1],
                    program=str(stats.get("hlo_module", "")),
                    program_id=_whole(stats.get("program_id")),
                    line=thread,
                )
            )
            run = ordinal, _whole(stats.get("run_id"))
            known = self._runs.get(run, span)
            self._runs[run] = min(known[0], span[0]), max(known[1], span[1])

    def devices(self) -> list[DeviceTrack]:
        """The CPU devices that ran ops on these threads."""
        return [
            DeviceTrack(
                f"CPU:{ordinal}",
                sorted(ops, key=lambda op: (op.start, -op.end)),
                [span for (device, _), span in self._runs.items() if device == ordinal],
            )
            for ordinal, ops in self._ops.items()
        ]

    def activity(self) -> HostActivity:
        """What else the host did."""
        return HostActivity(**{kind: tuple(events) for kind, events in self._kinds.items()})


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
