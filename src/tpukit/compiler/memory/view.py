"""`MemoryReport`, and its terminal view: verdict, bars by purpose, curve, largest buffers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...errors import OUT_OF_MEMORY_ADVICE
from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...shown import Renderable, Shown
from .attribution import CATEGORIES

BYTES_ORIGIN = "compiler"
OFFLOADED_COMPUTATION = "offloaded computation"


@dataclass(frozen=True)
class Buffer:
    """One array in memory.

    Attributes:
        purpose: One of `attribution.CATEGORIES`; on the host also "offloaded", or "offloaded
            computation" for buffers of a computation on the host.
        shape: As the compiler writes it, e.g. "bf16[32,512,14336]".
        layout: Order and tiles of its dimensions.
        size_bytes: Its size, with padding.
        padding_bytes: Its padding to whole tiles.
        space: "HBM" or "host".
        name: The argument's path, or the operation of the user's program that computed it.
        source: The line of source, or None.
        at_peak: Whether it is alive at the HBM peak; False for an offloaded computation, whose
            buffers are alive only while it runs.
    """

    purpose: str
    shape: str
    layout: str
    size_bytes: int
    padding_bytes: int
    space: str
    name: str
    source: str | None
    at_peak: bool


@dataclass(frozen=True)
class Peak:
    """The moment of highest memory use."""

    position: int
    instruction: str
    op_name: str
    source: str | None


@dataclass(frozen=True)
class ArgumentFinding:
    """A property of the arguments that wastes memory.

    Attributes:
        kind: "not donated" or "replicated".
        size_bytes: Wasted bytes per device.
    """

    kind: str
    what: str
    size_bytes: int
    advice: str


@dataclass(frozen=True)
class MemoryReport(Shown):
    """How one device uses its HBM.

    Every figure is the compiler's own. The purposes add up to `total_bytes`.

    Attributes:
        fits: Whether the compiler accepted the program.
        total_bytes: HBM that the program uses: the figure the compiler tests.
        usable_bytes: HBM that it may use.
        host_bytes: Host memory: pinned buffers and `host_computation_bytes`.
        host_computation_bytes: Host memory of computations that run on the host.
        purposes: Bytes by purpose, at the peak.
        buffers: The largest arrays, largest first.
        peak: The moment of the peak; None if the compiler listed no schedule.
        curve: (position in the schedule, bytes), with the maximum of each interval.
        schedule_length: Positions in the schedule.
    """

    program: str
    slice: Slice
    fits: bool
    total_bytes: int
    usable_bytes: int | None
    host_bytes: int
    argument_bytes: int
    temp_bytes: int
    result_bytes: int
    alias_bytes: int
    purposes: Mapping[str, int]
    buffers: tuple[Buffer, ...] = field(repr=False)
    peak: Peak | None
    curve: tuple[tuple[int, int], ...] = field(repr=False)
    schedule_length: int
    findings: tuple[ArgumentFinding, ...]
    host_computation_bytes: int = 0
    origin = BYTES_ORIGIN
    _facts = (
        "program slice=slice.name fits origin total_bytes usable_bytes headroom_bytes "
        "host_bytes host_computation_bytes argument_bytes temp_bytes result_bytes alias_bytes "
        "purposes buffers peak schedule_length curve findings"
    )

    @property
    def headroom_bytes(self) -> int | None:
        """Free bytes; negative when the program does not fit."""
        return None if self.usable_bytes is None else self.usable_bytes - self.total_bytes

    @property
    def verdict(self) -> str:
        """One line: whether the program fits, and by how much."""
        need = format_quantity(self.total_bytes, "B")
        where = f"{self.program} on {self.slice}"
        if self.usable_bytes is None:
            return f"{where}: {need} of HBM per device"
        have = format_quantity(self.usable_bytes, "B")
        share = self.total_bytes / self.usable_bytes
        left = format_quantity(abs(self.usable_bytes - self.total_bytes), "B")
        rest = f"{left} free" if self.fits else f"{left} too much"
        return f"{where}: {need} of {have} HBM per device ({share:.1%}), {rest}"

    @property
    def refusal(self) -> str:
        """Two sentences: why the program does not fit, and which purposes use the most."""
        need = f"{self.total_bytes / 2**30:.2f}G"
        have = "?" if self.usable_bytes is None else f"{self.usable_bytes / 2**30:.2f}G"
        largest = "; ".join(
            f"{buffer.shape} ({format_quantity(buffer.size_bytes, 'B')}, {buffer.purpose})"
            for buffer in [
                buffer for buffer in self.buffers if buffer.space == "HBM" and buffer.at_peak
            ][:3]
        )
        return (
            f"{self.program} does not fit on {self.slice}: the compiler needs {need} of HBM per "
            f"device and has {have}. The largest buffers are {largest}; "
            f"{OUT_OF_MEMORY_ADVICE}."
        )

    def __rich__(self) -> Renderable:

        return memory_view(self)


BUFFERS_SHOWN = 10
BAR_WIDTH = 60
SMALLEST_SHOWN = 0.0005  # of the total; the rest is one line
_KEY = re.compile(r"\['([^']*)'\]")
_ROOT = re.compile(r"^\[\d+\]\.?")
_LEVELS = " ▁▂▃▄▅▆▇█"
_COLORS = {
    "parameters": "blue",
    "optimizer state": "cyan",
    "cache": "bright_magenta",
    "batch inputs": "white",
    "arguments": "bright_blue",
    "gradients": "magenta",
    "activations": "yellow",
    "weight copies": "green",
    "state copies": "bright_green",
    "temporaries": "bright_black",
    "results": "bright_cyan",
    "unattributed": "red",
    "constants and stack": "white",
    "padding": "bright_red",
    "gaps": "black",
}
# What a bar is drawn with: a letter a purpose, so that it can be read without colours.
_LETTERS = {
    "parameters": "P",
    "optimizer state": "O",
    "cache": "K",
    "batch inputs": "B",
    "arguments": "N",
    "gradients": "G",
    "activations": "A",
    "weight copies": "W",
    "state copies": "S",
    "temporaries": "T",
    "results": "R",
    "unattributed": "U",
    "constants and stack": "C",
    "padding": "x",
    "gaps": "-",
}


def verdict_line(report: MemoryReport) -> Text:
    """Return "FITS" or "DOES NOT FIT", and by how much."""
    word, style = ("FITS", "bold green") if report.fits else ("DOES NOT FIT", "bold red")
    return Text.assemble((f"{word} ", style), report.verdict)


def memory_view(report: MemoryReport) -> Group:
    """Return the whole report for a terminal."""
    return Group(verdict_line(report), memory_details(report))


def memory_details(report: MemoryReport) -> Group:
    """Return the report without the verdict."""
    parts: list[RenderableType] = [
        _bar(report),
        _purposes(report),
        _curve(report),
        _buffers(report),
    ]
    for finding in report.findings:
        size = format_quantity(finding.size_bytes, "B")
        parts.append(
            Text.assemble(
                (f"{finding.kind} ", "yellow"), f"{finding.what}, {size}: {finding.advice}"
            )
        )
    return Group(*parts)


def _bar(report: MemoryReport) -> Text:
    scale = max(report.total_bytes, report.usable_bytes or 0) or 1
    bar = Text()
    drawn = 0
    reached = 0
    for name, amount in report.purposes.items():
        reached += amount
        width = round(BAR_WIDTH * reached / scale) - drawn
        bar.append(_LETTERS[name] * width, style=f"{_COLORS[name]} reverse")
        drawn += width
    bar.append("░" * (BAR_WIDTH - drawn), style="dim")
    return bar


def _purposes(report: MemoryReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    least = SMALLEST_SHOWN * report.total_bytes
    for name, amount in report.purposes.items():
        if amount >= least:
            _add(table, name, amount, report.total_bytes, CATEGORIES[name])
    small = sum(amount for amount in report.purposes.values() if amount < least)
    if small:
        _add(table, "everything else", small, report.total_bytes, "all that is smaller")
    if report.host_bytes:
        host = format_quantity(report.host_bytes, "B")
        table.add_row(
            "  host memory",
            Text(host, justify="right"),
            "",
            host_memory_text(report.host_computation_bytes),
        )
    told = "whose figures these are: the TPU compiler's own memory report"
    table.add_row("  origin", "compiler", "", Text(told, "dim"))
    return table


def host_memory_text(computation_bytes: int) -> str:
    """Describe the use of host memory."""
    if not computation_bytes:
        return "beside the HBM"
    size = format_quantity(computation_bytes, "B")
    return f"beside the HBM; {size} for computations that run on the host"


def _add(table: Table, name: str, amount: int, total: int, what: str) -> None:
    color, letter = _COLORS.get(name), _LETTERS.get(name, " ")
    table.add_row(
        Text.assemble((letter, f"{color} reverse" if color else ""), " ", name),
        Text(format_quantity(amount, "B"), justify="right"),
        Text(f"{amount / total:.1%}", justify="right"),
        Text(what, style="dim"),
    )


def _curve(report: MemoryReport) -> RenderableType:
    if report.peak is None or not report.curve:
        return Text("the compiler listed no schedule, so there is no curve", style="dim")
    highest = max(amount for _, amount in report.curve)
    stretch = max(1, -(-len(report.curve) // BAR_WIDTH))
    groups = [report.curve[at : at + stretch] for at in range(0, len(report.curve), stretch)]
    marks = "".join(
        _LEVELS[round((len(_LEVELS) - 1) * max(a for _, a in group) / highest)] for group in groups
    )
    where = f" ({report.peak.source})" if report.peak.source else ""
    peak = report.peak.op_name or report.peak.instruction
    return Group(
        Text(marks, style="cyan"),
        Text(
            f"live HBM over the schedule, fullest at {report.peak.position} of "
            f"{report.schedule_length}: {peak}{where}",
            style="dim",
        ),
    )


def readable_path(name: str) -> str:
    """Return an argument's path without punctuation: "[0].params['w']" becomes "params.w"."""
    plain = _KEY.sub(r".\1", name)
    return _ROOT.sub("", plain) or name


def _buffers(report: MemoryReport) -> Table:
    shown = [
        buffer
        for buffer in report.buffers
        if buffer.at_peak or buffer.purpose == OFFLOADED_COMPUTATION
    ][:BUFFERS_SHOWN]
    padded = any(buffer.padding_bytes for buffer in shown)
    table = Table(box=None, pad_edge=False)
    for heading in ("size", "purpose", "shape", *(["padding"] if padded else []), "what"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("size", "shape"))
    for buffer in shown:
        padding = f"{buffer.padding_bytes / buffer.size_bytes:.0%}" if buffer.padding_bytes else ""
        purpose = buffer.purpose + (" (host)" if buffer.space == "host" else "")
        # Of an op only the last word; keys of an argument may have slashes of their own.
        named = buffer.name if "['" in buffer.name else buffer.name.split("/")[-1]
        what = readable_path(named) + (f" {buffer.source}" if buffer.source else "")
        row = [format_quantity(buffer.size_bytes, "B"), purpose, buffer.shape, padding, what]
        table.add_row(*(Text(cell) for cell in (row if padded else row[:3] + row[4:])))
    return table
