"""What the hosts of a slice need of their own memory to train, save, restore and export a job."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compiler.compiled import CompiledStep
from ..hardware import Figure, Slice
from ..hardware.rates import MemoryRates
from ..shown import Shown
from ..step.host_memory import EXPORT_FILE_BYTES, HostShare, StoredArray

if TYPE_CHECKING:
    from rich.table import Table

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
}


@dataclass(frozen=True)
class HostMemory(Shown):
    """Memory of one host by use. Not all uses come together: `need` is the most that do.

    Attributes:
        slice: Whose hosts.
        offloaded: What the compiled step keeps there.
        input: Batches and examples read ahead.
        saving: A copy of what the host writes of a checkpoint.
        restoring: What is read at once at the start.
        exporting: What an export takes, which is a process of its own.
    """

    slice: Slice
    offloaded: Figure
    input: Figure
    saving: Figure
    restoring: Figure
    exporting: Figure

    @property
    def training(self) -> Figure:
        """While a checkpoint is written and the step goes on."""
        return self.offloaded + self.input + self.saving

    @property
    def need(self) -> Figure:
        """The most that is held at one time."""
        return max(
            (self.training, self.restoring, self.exporting), key=lambda figure: figure.value or 0.0
        )

    @property
    def room(self) -> Figure:
        """The host's memory, less what the system and the program themselves are left."""
        return self.slice.host_ram_bytes.scaled(1 - MemoryRates.of().host_headroom)

    @property
    def fits(self) -> bool | None:
        """Whether there is room; None where the host's memory is not known."""
        need, room = self.need.value, self.room.value
        return None if need is None or room is None else need <= room

    @property
    def verdict(self) -> str:
        """One sentence: what a host needs, of how much."""
        need = f"{self.need.text} needed on each host of {self.slice}"
        if self.room.value is None:
            return f"{need}, whose memory is not known: {self.room.reason}"
        room = f"{self.room.text} of {self.slice.host_ram_bytes.text}"
        if self.fits:
            return f"{need}, which has room for {room}"
        return (
            f"{need}, which has room for {room}: it would be killed. Use more hosts, offload "
            "less, or smaller moments"
        )

    def uses(self) -> dict[str, Figure]:
        """Each use by name."""
        return {name: getattr(self, name) for name in USES}

    def to_dict(self) -> dict[str, Any]:
        """Every use, the need and the room, with their provenance."""
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
            table.add_row(name, Text(figure.text, justify="right"), str(figure.origin), USES[name])
        style = "bold red" if self.fits is False else ""
        table.add_row("", Text(self.need.text, justify="right"), "", Text(self.verdict, style))
        return table


def host_memory(job: "Job", compiled: CompiledStep) -> HostMemory | None:
    """Count what a job's hosts hold; None where an older compile did not write the sizes down."""
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
