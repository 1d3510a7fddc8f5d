"""A memory report for a terminal: verdict, a bar by purpose, the curve, the largest buffers."""

import re

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...hardware.figure import format_quantity
from .attribution import CATEGORIES
from .report import OFFLOADED_COMPUTATION, MemoryReport

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
    """FITS or DOES NOT FIT, and by how much."""
    word, style = ("FITS", "bold green") if report.fits else ("DOES NOT FIT", "bold red")
    return Text.assemble((f"{word} ", style), report.verdict)


def memory_view(report: MemoryReport) -> Group:
    """The whole report."""
    return Group(verdict_line(report), memory_details(report))


def memory_details(report: MemoryReport) -> Group:
    """Everything but the verdict."""
    parts: list[RenderableType] = [
        _bar(report),
        _purposes(report),
        _curve(report),
        _buffers(report),
    ]
    for one in report.findings:
        size = format_quantity(one.size_bytes, "B")
        parts.append(Text.assemble((f"{one.kind} ", "yellow"), f"{one.what}, {size}: {one.advice}"))
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
    """What host memory is for, beside the HBM."""
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
    """An argument's path without its punctuation: "[0].params['w']" is "params.w"."""
    plain = _KEY.sub(r".\1", name)
    return _ROOT.sub("", plain) or name


def _buffers(report: MemoryReport) -> Table:
    shown = [one for one in report.buffers if one.at_peak or one.purpose == OFFLOADED_COMPUTATION][
        :BUFFERS_SHOWN
    ]
    padded = any(one.padding_bytes for one in shown)
    table = Table(box=None, pad_edge=False)
    for heading in ("size", "purpose", "shape", *(["padding"] if padded else []), "what"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("size", "shape"))
    for one in shown:
        padding = f"{one.padding_bytes / one.size_bytes:.0%}" if one.padding_bytes else ""
        purpose = one.purpose + (" (host)" if one.space == "host" else "")
        # Of an op only the last word; keys of an argument may have slashes of their own.
        named = one.name if "['" in one.name else one.name.split("/")[-1]
        what = readable_path(named) + (f" {one.source}" if one.source else "")
        row = [format_quantity(one.size_bytes, "B"), purpose, one.shape, padding, what]
        table.add_row(*(Text(cell) for cell in (row if padded else row[:3] + row[4:])))
    return table
