"""Progress for a person: a bar on a terminal, a line now and then elsewhere."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from ..terminal import open_console, text_column

LINE_EVERY_S = 5.0
# Steps that the bar's figures are the mean of: one alone jumps, as its completion is seen late.
BAR_STEPS = 20


class ProgressView(Protocol):
    """Shows how far a run is."""

    def start(self, *, done: int, total: int) -> None:
        """The first step comes after `done`."""
        ...

    def update(self, record: Mapping[str, Any], *, goodput: float | None) -> None:
        """A step has completed."""
        ...

    def note(self, text: str) -> None:
        """Something a person wants to know happened."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


def make_progress(enabled: bool = True) -> ProgressView:
    """A bar where standard error is a terminal, plain lines elsewhere, nothing if not `enabled`."""
    console = open_console(stderr=True)
    if not enabled:
        return NoProgress()
    return Bar(console) if console.is_terminal else Lines(console)


def describe(record: Mapping[str, Any], *, goodput: float | None) -> str:
    """The figures of a step in one line."""
    parts = [f"loss {_number(record.get('loss'), '.4f')}"]
    parts.append(f"{_number(record.get('step_time_s'), '.3f')} s/step")
    if record.get("tokens_per_s_per_chip") is not None:
        parts.append(f"{record['tokens_per_s_per_chip']:,.0f} tokens/s/chip")
    elif record.get("examples_per_s_per_chip") is not None:
        parts.append(f"{record['examples_per_s_per_chip']:,.0f} examples/s/chip")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(f"goodput {_number(goodput, '.0%')}")
    return "  ".join(parts)


def averaged(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The last record, with the mean step time of all of them and the rates that follow from it."""
    seen = list(records)
    last = dict(seen[-1])
    mean = sum(record["step_time_s"] for record in seen) / len(seen)
    for rate in ("tokens_per_s_per_chip", "examples_per_s_per_chip", "mfu"):
        if last.get(rate) is not None and mean > 0:
            last[rate] *= last["step_time_s"] / mean
    return {**last, "step_time_s": mean}


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


class NoProgress:
    """Says nothing: for processes other than the first, and for tests."""

    def start(self, *, done: int, total: int) -> None:
        """Nothing."""

    def update(self, record: Mapping[str, Any], *, goodput: float | None) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """One line every few seconds, and for the first and the last step."""

    def __init__(self, console: Console, *, every_s: float = LINE_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._total = self._first = 0
        self._began = 0.0
        self._last_line = float("-inf")
        self._since: list[Mapping[str, Any]] = []

    def start(self, *, done: int, total: int) -> None:
        """Remember where it begins, for the time left."""
        self._first, self._total, self._began = done, total, time.monotonic()

    def update(self, record: Mapping[str, Any], *, goodput: float | None) -> None:
        """Write a line if it is time."""
        now, step = time.monotonic(), record["step"]
        self._since.append(record)
        if now - self._last_line < self._every_s and step != self._total:
            return
        self._last_line = now
        left = (now - self._began) / max(1, step - self._first) * (self._total - step)
        text = describe(averaged(self._since), goodput=goodput)
        self._since.clear()
        self._write(f"step {step}/{self._total}  {text}  {_clock(left)} left")

    def note(self, text: str) -> None:
        """Write a line now."""
        self._write(text)

    def close(self) -> None:
        """Nothing to close."""

    def _write(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class Bar:
    """A bar that stays at the bottom of the terminal, and the figures of the last steps below."""

    def __init__(self, console: Console) -> None:
        self._bar = _BarAndFigures(
            text_column("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._bar.add_task("training")
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=BAR_STEPS)

    def start(self, *, done: int, total: int) -> None:
        """Draw the bar."""
        self._bar.reset(self._task, total=total, completed=done)
        self._bar.start()

    def update(self, record: Mapping[str, Any], *, goodput: float | None) -> None:
        """Move the bar."""
        self._recent.append(record)
        self._bar.figures = describe(averaged(self._recent), goodput=goodput)
        self._bar.update(self._task, completed=record["step"])

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(text, highlight=False)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.stop()


class _BarAndFigures(Progress):
    """Two lines: beside each other they would not fit a terminal of 80 columns."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn, from top to bottom."""
        yield from super().get_renderables()
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis", style="dim")


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, last = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{last:02d}" if hours else f"{minutes}:{last:02d}"
