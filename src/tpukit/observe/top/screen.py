"""The screen: a header, chips by host or hosts rolled up, the run, and what is missing and why.

Names and reasons come from other machines, so everything is `Text`: nothing in it is markup.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ...hardware.figure import count_text
from ..readings import METRICS
from .bars import bar, sparkline
from .columns import CHIP_COLUMNS, EXPECTED, HOST_COLUMNS, MEMORY, Values, gib, shown
from .fleet import ChipView, HostView
from .snapshot import Snapshot
from .training_pane import clock, training_lines

View = Literal["auto", "chips", "hosts", "rolled up"]
MOST_HOSTS = 16
SPARK, BAR, LONGEST_NAME = 10, 6, 11
HELP = "q quit   ? help   c chips   h hosts   r roll up   s sort by duty"


@dataclass(frozen=True)
class Screen:
    """A snapshot as it is drawn.

    Attributes:
        snapshot: What to draw.
        view: Chips, hosts, or all hosts rolled up; "auto" takes the most detailed that fits.
        height: Lines there are; None where there is no end of them.
        by_duty: Whether the least busy come first.
        help: Whether to explain keys and columns.
    """

    snapshot: Snapshot
    view: View = "auto"
    height: int | None = None
    by_duty: bool = False
    help: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = not options.encoding.lower().startswith("utf")
        below = list(training_lines(self.snapshot, ascii_only=ascii_only))
        below += self._footer()
        yield self._header()
        lines = sum(len(console.render_lines(one, options, pad=False)) for one in below)
        room = None if self.height is None else self.height - lines - 1
        yield self._fleet(room, ascii_only=ascii_only)
        yield from below

    def _header(self) -> Text:
        now = self.snapshot
        parts = [now.title]
        if now.training is not None and now.training.up_s is not None:
            parts.append(f"up {clock(now.training.up_s)}")
        if now.cost_per_hour is not None and now.cost_per_hour.value is not None:
            parts.append(f"${now.cost_per_hour.value:,.2f}/h list price")
        parts += [f"{name} {version}" for name, version in now.versions.items()]
        line = Text("tpukit top", style="bold", no_wrap=True, overflow="ellipsis")
        return line.append("  " + "  ".join(parts), style="not bold")

    def _fleet(self, room: int | None, *, ascii_only: bool) -> RenderableType:
        hosts = self.snapshot.hosts
        if not hosts:
            return Text("no host says anything now")
        view = self._chosen(room)
        if view == "rolled up":
            return rolled_up(hosts)
        table = _table()
        chips = [chip.values for host in hosts for chip in host.chips]
        columns = shown(CHIP_COLUMNS, chips)
        own = shown(HOST_COLUMNS, [host.values for host in hosts])
        table.add_column("host", no_wrap=True, overflow="ellipsis", ratio=1, min_width=LONGEST_NAME)
        table.add_column("chip" if view == "chips" else "chips", no_wrap=True)
        table.add_column("memory GiB" if chips else "host memory GiB", no_wrap=True)
        for column in (*columns, *own):
            table.add_column(column.title, justify="right", no_wrap=True)
        table.add_column("60 s", no_wrap=True, width=SPARK)
        rows = list(self._chip_rows() if view == "chips" else self._host_rows())
        if self.by_duty:
            rows.sort(key=lambda row: row.values.get("duty_cycle", 2.0))
        fitting = rows if room is None else rows[: max(1, room - 2)]
        for row in fitting:
            table.add_row(
                Text(short(row.host)),
                Text(row.chip),
                memory_cell(row, ascii_only=ascii_only),
                *(Text(column.cell(row.values)) for column in columns),
                *(Text(column.cell(row.host_values) if row.host else "") for column in own),
                Text(sparkline(row.history, SPARK, low=0.0, high=1.0, ascii_only=ascii_only)),
            )
        if len(fitting) < len(rows):
            table.caption = Text(f"and {len(rows) - len(fitting)} more", style="dim")
        return table

    def _chosen(self, room: int | None) -> View:
        hosts = self.snapshot.hosts
        chips = sum(max(1, len(host.chips)) for host in hosts)
        if self.view != "auto":
            return self.view
        if len(hosts) > MOST_HOSTS:
            return "rolled up"
        return "chips" if room is None or chips + 2 <= room or len(hosts) == 1 else "hosts"

    def _chip_rows(self) -> Iterator["_Row"]:
        for host in self.snapshot.hosts:
            if not host.chips:
                yield _Row(host.name, "", {}, host.values, host.history)
            for at, chip in enumerate(host.chips):
                name, own = (host.name, host.values) if at == 0 else ("", {})
                yield _Row(name, str(chip.chip), chip.values, own, chip.history)

    def _host_rows(self) -> Iterator["_Row"]:
        for host in self.snapshot.hosts:
            values = typical(host.chips)
            past = [chip.history for chip in host.chips] or [host.history]
            mean = [statistics.fmean(column) for column in zip(*past, strict=False)]
            yield _Row(host.name, str(len(host.chips)), values, host.values, mean)

    def _footer(self) -> list[RenderableType]:
        lines: list[RenderableType] = []
        missing = self.snapshot.missing()
        reasons: dict[str, list[str]] = {}
        for metric in EXPECTED:
            if metric in missing:
                reasons.setdefault(missing[metric], []).append(metric.replace("_", " "))
        for reason, metrics in reasons.items():
            lines.append(Text(f"– {', '.join(metrics)}: {reason}", style="dim"))
        lines += [Text(note, style="dim") for note in self.snapshot.notes]
        if self.help:
            lines.append(Text(HELP))
            lines += [
                Text(f"{column.title}: {METRICS[column.metric].meaning}", style="dim")
                for column in CHIP_COLUMNS
            ]
        return lines


@dataclass(frozen=True)
class _Row:
    """A line of the table."""

    host: str
    chip: str
    values: Values
    host_values: Values
    history: Sequence[float]


def rolled_up(hosts: Sequence[HostView]) -> Table:
    """Return least, median and greatest of every figure, and the host that is worst at it."""
    table = _table()
    for title in ("of all", "least", "median", "greatest", "worst host"):
        table.add_column(title, justify="left" if title in ("of all", "worst host") else "right")
    chips = sum(len(host.chips) for host in hosts)
    for column in (MEMORY, *CHIP_COLUMNS, *HOST_COLUMNS):
        found = {
            (host.name, chip.chip): chip.values[column.metric]
            for host in hosts
            for chip in host.chips
            if column.metric in chip.values
        } or {
            (host.name, None): host.values[column.metric]
            for host in hosts
            if column.metric in host.values
        }
        if not found:
            continue
        values = list(found.values())
        worst = column.worst(values)
        name, chip = next(key for key, value in found.items() if value == worst)
        where = "all alike" if min(values) == max(values) else name
        if chip is not None and where == name:
            where += f" chip {chip}"
        title = "memory GiB" if column is MEMORY else column.title
        middle = statistics.median(values)
        cells = (title, *(column.text(value) for value in (min(values), middle, max(values))))
        table.add_row(*(Text(cell) for cell in cells), Text(where, overflow="ellipsis"))
    counts = f"{count_text(len(hosts), 'host')}, {count_text(chips, 'chip')}"
    table.title = Text(counts, style="bold")
    table.title_justify = "left"
    return table


def typical(chips: Sequence[ChipView]) -> dict[str, float]:
    """Return the mean of each figure over the chips of a host; of scores the worst."""
    names = dict.fromkeys(name for chip in chips for name in chip.values)
    found: dict[str, float] = {}
    for name in names:
        values = [chip.values[name] for chip in chips if name in chip.values]
        is_score = name in ("throttle_score", "ici_link_health")
        found[name] = max(values) if is_score else statistics.fmean(values)
    return found


def memory_cell(row: "_Row", *, ascii_only: bool) -> Text:
    """Return a bar of the memory in use, with its figures."""
    values = row.values
    prefix = "" if "memory_used" in values else "host_"
    if prefix:
        values = row.host_values
    used, total = values.get(f"{prefix}memory_used"), values.get(f"{prefix}memory_total")
    if used is None:
        return Text("–")
    if not total:
        return Text(gib(used))
    return bar(used / total, BAR, ascii_only=ascii_only).append(f" {gib(used)}/{gib(total)}")


def _table() -> Table:
    return Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0))


def short(name: str) -> str:
    """Return the end of a long name: hosts of one slice differ there."""
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
