"""Progress for the user: a bar on a terminal, a line every few seconds elsewhere."""

import time
from collections import deque
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text

from ..plain_data import JsonMapping, JsonObject
from ..terminal import open_console, text_column
from .names import EXAMPLES_RATE, LOSS, MFU, STEP, STEP_TIME, TOKENS_RATE

LINE_EVERY_S = 5.0
# The bar's figures are the mean of this many steps, because a single step's time is noisy.
BAR_STEPS = 20


class ProgressView:
    """Shows the progress of a run; this base class shows nothing."""

    def start(self, *, done: int, total: int) -> None:
        """Begin; the first step comes after `done`."""

    def update(self, record: JsonMapping, *, goodput: float | None) -> None:
        """Show a completed step."""

    def note(self, text: str) -> None:
        """Show a message."""

    def close(self) -> None:
        """End the progress."""


def make_progress(enabled: bool = True) -> ProgressView:
    """Return a bar for a terminal, plain lines for other outputs, nothing if not `enabled`."""
    console = open_console(stderr=True)
    if not enabled:
        return ProgressView()
    return Bar(console) if console.is_terminal else Lines(console)


def describe(record: JsonMapping, *, goodput: float | None) -> str:
    """Return the figures of a step in one line."""
    parts = [f"loss {_number(record.get(LOSS), '.4f')}"]
    parts.append(f"{_number(record.get(STEP_TIME), '.3f')} s/step")
    if record.get(TOKENS_RATE) is not None:
        parts.append(f"{record[TOKENS_RATE]:,.0f} tokens/s/chip")
    elif record.get(EXAMPLES_RATE) is not None:
        parts.append(f"{record[EXAMPLES_RATE]:,.0f} examples/s/chip")
    if record.get(MFU) is not None:
        parts.append(f"MFU {record[MFU]:.1%}")
    parts.append(f"goodput {_number(goodput, '.0%')}")
    return "  ".join(parts)


def averaged(records: Iterable[JsonMapping]) -> JsonObject:
    """Return the last record, with the mean step time of all records and the rates for it."""
    seen = list(records)
    last = dict(seen[-1])
    mean = sum(record[STEP_TIME] for record in seen) / len(seen)
    for rate in (TOKENS_RATE, EXAMPLES_RATE, MFU):
        if last.get(rate) is not None and mean > 0:
            last[rate] *= last[STEP_TIME] / mean
    return {**last, STEP_TIME: mean}


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


class Lines(ProgressView):
    """One line every few seconds, and for the first and the last step."""

    def __init__(self, console: Console, *, every_s: float = LINE_EVERY_S) -> None:
        self._console, self._every_s = console, every_s
        self._total = self._first = 0
        self._began = 0.0
        self._last_line = float("-inf")
        self._since: list[JsonMapping] = []

    def start(self, *, done: int, total: int) -> None:
        """Store the start, to estimate the time left."""
        self._first, self._total, self._began = done, total, time.monotonic()

    def update(self, record: JsonMapping, *, goodput: float | None) -> None:
        """Write a line every few seconds."""
        now, step = time.monotonic(), record[STEP]
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

    def _write(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


class Bar(ProgressView):
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
        self._recent: deque[JsonMapping] = deque(maxlen=BAR_STEPS)

    def start(self, *, done: int, total: int) -> None:
        """Draw the bar."""
        self._bar.reset(self._task, total=total, completed=done)
        self._bar.start()

    def update(self, record: JsonMapping, *, goodput: float | None) -> None:
        """Move the bar."""
        self._recent.append(record)
        self._bar.figures = describe(averaged(self._recent), goodput=goodput)
        self._bar.update(self._task, completed=record[STEP])

    def note(self, text: str) -> None:
        """Write a line above the bar."""
        self._bar.console.print(text, highlight=False)

    def close(self) -> None:
        """Stop updating the bar."""
        self._bar.stop()


class _BarAndFigures(Progress):
    """The bar and the figures below it, because both in one line would not fit 80 columns."""

    figures = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the lines from top to bottom."""
        yield from super().get_renderables()
        if self.figures:
            yield Text(self.figures, no_wrap=True, overflow="ellipsis", style="dim")


def _clock(seconds: float) -> str:
    total = round(seconds)
    hours, rest = divmod(total, 3600)
    minutes, last = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{last:02d}" if hours else f"{minutes}:{last:02d}"
