"""Memory that the hosts of a slice need to train, checkpoint, restore and export a job."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..compiler.compiled import CompiledStep
from ..hardware import Figure, Slice
from ..hardware.figure import bytes_text
from ..hardware.rates import MemoryRates
from ..plain_data import JsonObject
from ..shown import Shown
from ..step.host_memory import EXPORT_FILE_BYTES, HostShare, StoredArray

if TYPE_CHECKING:
    from rich.table import Table

    from ..capturing.captured import Captured, CapturedProgram
    from ..job.job import Job

STATE, PARAMETERS, BATCH = "[0]", "[0].params", "[1]"  # of a training step's arguments
BATCHES_HELD = 2  # the one that is put on the devices, and the next
SIZES = "sizes of the step's arguments, by the rules of step/host_memory.py"
USES = {
    "offloaded": "activations and whatever else the step keeps on the host",
    "input": "batches that wait and examples that are read ahead",
    "saving": "the state on its way to a checkpoint, while training goes on",
    "restoring": "pieces of a checkpoint on their way to the devices",
    "exporting": "one parameter and one file of `tpukit export`, on any one machine",
    "process": "the captured program up to its first step: imports, data, small arrays",
}


@dataclass(frozen=True)
class HostMemory(Shown):
    """Memory of one host by use; `need` is the largest amount that is in use at one time.

    Attributes:
        slice: The slice.
        offloaded: Arrays that the compiled step keeps on the host.
        input: Batches and examples that are read ahead.
        saving: A copy of the host's part of a checkpoint.
        restoring: Parts of a checkpoint that are read at the same time at the start.
        exporting: Memory of an export, which is a separate process.
        process: Memory of a captured program's process; None for a job.
    """

    slice: Slice
    offloaded: Figure
    input: Figure
    saving: Figure
    restoring: Figure
    exporting: Figure
    process: Figure | None = None

    @property
    def training(self) -> Figure:
        """Memory during a step while a checkpoint is written, without uses whose size is unknown.

        A captured program's process already contains its batch, so it is not added again.
        """
        own = self.process is not None and self.process.value is not None
        parts = (self.offloaded, self.process if own else self.input, self.saving)
        known = [one for one in parts if one is not None and one.value is not None]
        return sum(known[1:], start=known[0]) if known else self.offloaded

    @property
    def unknown(self) -> tuple[str, ...]:
        """The uses whose size is unknown."""
        return tuple(name for name, figure in self.uses().items() if figure.value is None)

    @property
    def need(self) -> Figure:
        """The largest amount that is in use at one time."""
        return max(
            (self.training, self.restoring, self.exporting), key=lambda figure: figure.value or 0.0
        )

    @property
    def room(self) -> Figure:
        """The host's memory without the share left to the system and the program."""
        return self.slice.host_ram_bytes.scaled(1 - MemoryRates.of().host_headroom)

    @property
    def fits(self) -> bool | None:
        """Whether the need fits; None if the host's memory or a use is unknown."""
        need, room = self.need.value, self.room.value
        if need is None or room is None or (need <= room and self.unknown):
            return None
        return need <= room

    @property
    def verdict(self) -> str:
        """One sentence on the need and the memory of a host."""
        need = f"{self.need.text} needed on each host of {self.slice}"
        if self.unknown:
            need = f"at least {need} ({', '.join(self.unknown)} not counted)"
        if self.room.value is None:
            return f"{need}, whose memory is not known: {self.room.reason}"
        room = f"{self.room.text} of {self.slice.host_ram_bytes.text}"
        if self.fits is not False:
            return f"{need}, which has room for {room}"
        return (
            f"{need}, which has room for {room}: it would be killed. Use more hosts, offload "
            "less, or smaller moments"
        )

    def uses(self) -> dict[str, Figure]:
        """Return each use by name."""
        figures = {name: getattr(self, name) for name in USES}
        return {name: figure for name, figure in figures.items() if figure is not None}

    def to_dict(self) -> JsonObject:
        """Return every use, the need and the available memory, with their origins."""
        return {
            "uses": {name: figure.to_dict() for name, figure in self.uses().items()},
            "need": self.need.to_dict(),
            "room": self.room.to_dict(),
            "fits": self.fits,
            "verdict": self.verdict,
        }

    def __rich__(self) -> "Table":
        from rich.table import Table
        from rich.text import Text

        table = Table(title="memory of one host", title_justify="left", box=None, show_header=False)
        for name, figure in self.uses().items():
            origin, what = str(figure.origin or "–"), figure.reason or USES[name]
            table.add_row(name, Text(figure.text, justify="right"), origin, Text(what))
        style = "bold red" if self.fits is False else ""
        table.add_row("", Text(self.need.text, justify="right"), "", Text(self.verdict, style))
        return table


def captured_host_memory(
    captured: "Captured", program: "CapturedProgram", compiled: CompiledStep
) -> HostMemory:
    """Return the host memory of a captured program; its checkpoints are unknown."""
    facts, on = program.program.facts, captured.slice
    arguments = list(
        zip(facts.argument_purposes, facts.argument_bytes, facts.argument_copies, strict=True)
    )
    share = on.devices_per_host / max(program.devices, 1)
    batch = sum(
        min(float(size), size * copies * share)
        for purpose, size, copies in arguments
        if purpose == "batch inputs"
    )
    state = tuple(
        StoredArray(size, copies, purpose == "parameters")
        for purpose, size, copies in arguments
        if purpose in ("parameters", "optimizer state")
    )
    copied = bytes_text(HostShare(state, max(program.devices, 1), on.hosts).saved_bytes)
    own = "the program's own code does it, which the capture does not run"
    return HostMemory(
        slice=on,
        offloaded=Figure(
            compiled.memory.host_bytes * on.devices_per_host, "B", "compiler", "its own report"
        ),
        input=Figure(round(batch), "B", "model", "one batch, by the sizes of the step's arguments")
        if batch
        else Figure.missing("B", "the data flow does not tell the batch from other arguments"),
        saving=Figure.missing("B", f"{own}; a copy of a host's share of the state is {copied}"),
        restoring=Figure.missing("B", own),
        exporting=Figure.missing("B", own),
        process=Figure(captured.peak_bytes, "B", "measured", "the largest process of the capture")
        if captured.peak_bytes
        else Figure.missing("B", "it was captured within this process, beside everything else"),
    )


def host_memory(job: "Job", compiled: CompiledStep) -> HostMemory | None:
    """Return the host memory of a job; None for an old cached compile without argument sizes."""
    facts, on = compiled.facts, compiled.slice
    if not facts.argument_bytes:
        return None
    arguments = list(
        zip(facts.argument_names, facts.argument_bytes, facts.argument_copies, strict=True)
    )
    state = tuple(
        StoredArray(size, copies, name.startswith(PARAMETERS))
        for name, size, copies in arguments
        if name.startswith(STATE)
    )
    share = HostShare(state, on.devices, on.hosts)
    batch = sum(size for name, size, _ in arguments if name.startswith(BATCH)) / on.hosts
    example = batch * on.hosts / job.examples
    ahead = BATCHES_HELD * batch + job.train.prefetch * example
    return HostMemory(
        slice=on,
        offloaded=Figure(
            compiled.memory.host_bytes * on.devices_per_host, "B", "compiler", "its own report"
        ),
        input=Figure(round(ahead), "B", "model", SIZES),
        saving=Figure(share.saved_bytes, "B", "model", SIZES),
        restoring=Figure(share.restoring_bytes, "B", "model", SIZES),
        exporting=Figure(share.exporting_bytes(EXPORT_FILE_BYTES), "B", "model", SIZES),
    )
