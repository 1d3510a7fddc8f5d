"""The screen: a header, chips by host or hosts rolled up, the run, and what is missing and why.

Names and reasons come from other machines, so everything is `Text` and nothing in it is markup.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ...hardware.figure import count_text
from ...hardware.missing import Missing
from ..readings import METRICS
from ..runs.goodput import label_of
from .columns import (
    CHIP_COLUMNS,
    EXPECTED,
    HOST_COLUMNS,
    MEMORY,
    Values,
    bar,
    gib,
    shown,
    sparkline,
)
from .fleet import ChipView, HostView, Snapshot, Training

PROGRESS, LOSSES = 20, 20
NAMED = 3  # causes of lost time shown


def training_lines(snapshot: Snapshot, *, ascii_only: bool = False) -> Iterator[Text]:
    """Yield the lines of the run's pane."""
    training = snapshot.training
    if training is None:
        yield _line("no run: `tpukit train` writes one to runs/, or name its folder", style="dim")
        return
    yield Text("")
    for line in _lines(training, ascii_only=ascii_only):
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line
    # These lines may wrap.
    for straggler in training.stragglers.found[:NAMED]:
        yield Text(f"! {straggler}", style="red")
    for reason, names in _missing(training).items():
        yield Text(f"– {', '.join(names)}: {reason}", style="dim")


def _lines(training: Training, *, ascii_only: bool) -> Iterator[Text]:
    now = training.summary
    dot = " | " if ascii_only else " · "
    style = {"running": "green", "ended": "cyan", "silent": "red"}[now.state]
    first = Text().append(now.name, style="bold").append("  ")
    first.append(now.state_in_words, style=style)
    first.append(f"{dot}step {now.step:,}")
    if now.total_steps:
        first.append(f" of {now.total_steps:,} ")
        first.append(bar_of(now.step / now.total_steps, ascii_only=ascii_only))
    yield first
    loss = Text(f"loss {now.loss:.4f}")
    drawn = sparkline(training.losses, LOSSES, ascii_only=ascii_only)
    loss.append(f" {drawn}" if drawn else "")
    loss.append(f"{dot}{now.speed_in_words}")
    yield loss.append(f"{dot}MFU {now.mfu:.1%}")
    if not isinstance(now.mfu, Missing) and now.mfu_convention:
        yield _line(f"MFU: {now.mfu_convention}", style="dim")
    yield _line(step_text(training, dot))
    saved = "none" if now.checkpoint_step is None else f"step {now.checkpoint_step:,}"
    ago = now.checkpoint_age_s
    age = "" if isinstance(ago, Missing) else f", {clock(ago)} ago"
    yield _line(goodput_text(training))
    yield _line(f"checkpoint {saved}{age}{dot}{training.goodput.lost_steps:,} steps lost so far")


def step_text(training: Training, dot: str) -> str:
    """Return measured and predicted step times as text."""
    now = training.summary
    measured, predicted = now.step_time_p50_s, now.predicted_step_s
    text = f"step {measured:.4g} s p50, {now.step_time_p99_s:.4g} s p99{dot}predicted "
    if isinstance(measured, Missing) or isinstance(predicted, Missing) or not predicted:
        return f"{text}{predicted:.4g}"
    return f"{text}{predicted:.4g} s (measured is {measured / predicted - 1:+.1%})"


def _missing(training: Training) -> dict[str, list[str]]:
    """Return the missing figures by reason."""
    now = training.summary
    examples = now.examples_per_s_per_chip
    by_reason: dict[str, list[str]] = {}
    for name, value in {
        "loss": now.loss,
        "tokens/s/chip": now.tokens_per_s_per_chip if isinstance(examples, Missing) else examples,
        "MFU": now.mfu,
        "step": now.step_time_p50_s,
        "prediction": now.predicted_step_s,
        "goodput": now.goodput,
    }.items():
        if isinstance(value, Missing):
            by_reason.setdefault(value.reason, []).append(name)
    return by_reason


def goodput_text(training: Training) -> str:
    """Return goodput and its largest losses as text."""
    goodput = training.goodput
    if goodput.share is None:
        return "goodput –"
    costs = [
        f"{label_of(cause)} {seconds / goodput.total.wall_s:.1%}"
        for cause, seconds in list(goodput.badput_s.items())[:NAMED]
        if seconds >= 0.001 * goodput.total.wall_s
    ]
    tries = "" if goodput.attempts < 2 else f" over {goodput.attempts} attempts"
    rest = f" ({', '.join(costs)})" if costs else ""
    return f"goodput {goodput.share:.1%}{tries}{rest}"


def bar_of(share: float, *, ascii_only: bool) -> Text:
    """Return a progress bar, without warning colors."""
    drawn = bar(0.0, PROGRESS, ascii_only=ascii_only).plain
    full = round(min(1.0, max(0.0, share)) * PROGRESS)
    filled = ("#" if ascii_only else "█") * full
    return Text(filled + drawn[full:]).append(f" {share:.0%}")


def clock(seconds: float) -> str:
    """Return a duration as text: 1:02:03, 4:05, 6 s."""
    total = round(max(0.0, seconds))
    hours, rest = divmod(total, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{last:02d}"
    return f"{minutes}:{last:02d}" if minutes else f"{last} s"


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


View = Literal["auto", "chips", "hosts", "rolled up"]
MOST_HOSTS = 16
SPARK, BAR, LONGEST_NAME = 10, 6, 11
HELP = "q quit   ? help   c chips   h hosts   r roll up   s sort by duty"


@dataclass(frozen=True)
class Screen:
    """A snapshot as a rich renderable.

    Attributes:
        snapshot: The content.
        view: Chips, hosts, or all hosts rolled up; "auto" takes the most detailed that fits.
        height: Lines available; None for no limit.
        by_duty: Whether the least busy chips come first.
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
        lines = sum(len(console.render_lines(line, options, pad=False)) for line in below)
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
            return Text("no host reports now")
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
    """Return a table with least, median and greatest of every figure, and the worst host."""
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
    """Return the mean of each figure over the chips of a host; for scores, the worst."""
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
    """Return the end of a long name, where hosts of one slice differ."""
    return name if len(name) <= LONGEST_NAME else "…" + name[1 - LONGEST_NAME :]
