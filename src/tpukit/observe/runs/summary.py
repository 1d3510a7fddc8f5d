"""The state of a run in a few figures, read from the ends of its files."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from ...hardware.missing import Measured, Missing, plain
from ...plain_data import JsonMapping, JsonObject, parse_json
from ...records.attempts import RunAttempt
from ...records.events import Event, good_saves
from ...records.lines import is_number, is_time, parse_lines, try_read_end
from ...records.mirror import address_of
from ...records.names import (
    EXAMPLES_RATE,
    IDENTITY_FILE,
    LOSS,
    METRICS_FILE,
    MFU,
    NOT_FINITE,
    STEP,
    STEP_TIME,
    TIME,
    TOKENS_RATE,
)
from ...runtime.plain_files import read_plain
from ...shown import Shown
from .goodput import RunGoodput
from .series import as_number

State = Literal["running", "ended", "silent"]
MOST = 2**63  # largest count
LARGEST_IDENTITY = 1 << 20  # bytes of run.json
TAIL = 256 << 10  # bytes of metrics.jsonl, about a thousand steps
SILENT_AFTER_S = 60.0
# Nothing is written before the first step, and a large model takes long to restore and compile.
STARTING_S = 3600.0
SLOW_STEPS = 10  # usual steps without a line, before a run counts as silent


@dataclass(frozen=True, kw_only=True)
class RunSummary(Shown):
    """The state and figures of a run; a missing figure has a reason.

    Attributes:
        state: "running"; "ended", with `reason`; or "silent", if it stopped writing without an end
            event.
        reason: Why it ended: "done", "preempted", "data ended", "failed", "killed"; or "".
        last_seen: Unix seconds of the newest line in its files; None without any.
        step: The newest completed step.
        total_steps: Steps of the complete run.
        step_time_p50_s: Median of the newest steps, about a thousand at most.
        predicted_step_s: From `tpukit check` of the same job (origin: model).
        goodput: Productive over wall time, across all attempts.
        checkpoint_age_s: Seconds since the newest save.
        attempts: Number of starts.
        problem: A file that could not be read, or "".
    """

    name: str
    path: str
    state: State
    reason: str
    last_seen: float | None
    step: int
    total_steps: int | None
    loss: Measured
    step_time_p50_s: Measured
    step_time_p99_s: Measured
    tokens_per_s_per_chip: Measured
    examples_per_s_per_chip: Measured
    mfu: Measured
    mfu_convention: str
    predicted_step_s: Measured
    goodput: Measured
    checkpoint_step: int | None
    checkpoint_age_s: Measured
    device_kind: str
    devices: int | None
    chips: int | None
    slice: str | None
    attempts: int
    problem: str = ""

    def to_dict(self) -> JsonObject:
        """Return plain data; `missing` has the reasons of null values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        missing = {
            name: value.reason for name, value in values.items() if isinstance(value, Missing)
        }
        return {**{name: plain(value) for name, value in values.items()}, "missing": missing}

    @property
    def state_in_words(self) -> str:
        """The state as text."""
        if self.state == "ended":
            return f"ended: {self.reason}"
        if self.state == "silent" and self.last_seen is not None:
            then, today = time.localtime(self.last_seen), time.localtime()
            form = "%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M"
            return f"silent since {time.strftime(form, then)}"
        return self.state

    def __str__(self) -> str:
        of = "" if self.total_steps is None else f" of {self.total_steps:,}"
        return (
            f"{self.name}: {self.state_in_words}, step {self.step:,}{of}, loss {self.loss:.4f}, "
            f"{self.step_time_p50_s:.4g} s/step, goodput {self.goodput:.1%}"
        )

    @property
    def speed_in_words(self) -> str:
        """Tokens per second and chip; examples where they are not made of tokens."""
        if not isinstance(self.examples_per_s_per_chip, Missing):
            return f"{self.examples_per_s_per_chip:,.0f} examples/s/chip"
        return f"{self.tokens_per_s_per_chip:,.0f} tokens/s/chip"

    def __rich__(self) -> Table:
        table = Table(title=f"{self.name}: {self.state_in_words}", show_header=False)
        table.title_justify = "left"
        of = "" if self.total_steps is None else f" of {self.total_steps:,}"
        table.add_row("step", f"{self.step:,}{of}")
        table.add_row("loss", f"{self.loss:.4f}")
        times = f"{self.step_time_p50_s:.4g} s (p50), {self.step_time_p99_s:.4g} s (p99)"
        table.add_row("step time", f"{times}; predicted {self.predicted_step_s:.4g} s")
        table.add_row("speed", self.speed_in_words)
        table.add_row("MFU", f"{self.mfu:.1%} {self.mfu_convention}")
        table.add_row("goodput", f"{self.goodput:.1%} over {self.attempts} attempts")
        return table


def summarise(
    path: Path,
    events: Sequence[Event],
    attempts: Sequence[RunAttempt],
    goodput: RunGoodput,
    *,
    now: float,
    problem: str = "",
    steps: Sequence[JsonMapping] | None = None,
) -> RunSummary:
    """Return the summary of a run directory; its newest records are read without `steps`."""
    steps = newest_records(path) if steps is None else steps
    newest = steps[-1] if steps else {}
    last = attempts[-1] if attempts else None
    about = dict(last.about) if last else {}
    times = sorted(_numbers(steps, STEP_TIME))
    recorded, written = newest.get(STEP), newest.get(TIME)
    step = max(int(recorded) if is_number(recorded) else 0, last.step if last else 0)
    if last is not None and last.step < step and last.reason is None and not _began(last, newest):
        step = last.step  # the records are of an earlier attempt, whose steps are repeated
    seen = [at for at in (written, last.newest if last else None) if is_time(at)]
    last_seen = max(seen) if seen else None
    saved = good_saves(events)
    not_yet = Missing("no step has completed yet")
    return RunSummary(
        name=path.name,
        path=address_of(path),
        state=_state(last, last_seen, times, now),
        reason=(last.reason or "") if last else "",
        last_seen=last_seen,
        step=step,
        total_steps=_count(about.get("total_steps")) or _planned_steps(path),
        loss=_last(steps, LOSS),
        step_time_p50_s=statistics.median(times) if times else not_yet,
        step_time_p99_s=times[int(0.99 * (len(times) - 1))] if times else not_yet,
        tokens_per_s_per_chip=_mean(steps, TOKENS_RATE),
        examples_per_s_per_chip=_mean(steps, EXAMPLES_RATE),
        mfu=_mean(steps, MFU, why=str(about.get("no_mfu") or "")),
        mfu_convention=str(about.get("mfu_convention") or ""),
        predicted_step_s=_predicted(about),
        goodput=Missing("no attempt is recorded") if goodput.share is None else goodput.share,
        checkpoint_step=int(saved[-1].number("step") or 0) if saved else None,
        checkpoint_age_s=max(0.0, now - saved[-1].time) if saved else Missing("none was saved"),
        device_kind=str(about.get("device_kind") or ""),
        devices=_count(about.get("devices")),
        chips=_count(about.get("chips")),
        slice=str(about["slice"]) if about.get("slice") else None,
        attempts=len(attempts),
        problem=problem,
    )


def newest_records(run_dir: Path) -> list[JsonMapping]:
    """Return the last training records of a run, without those of evaluations."""
    lines, _ = try_read_end(run_dir / METRICS_FILE, TAIL, inside=run_dir)
    return [record for record in parse_lines(lines) if record and STEP_TIME in record]


def _began(attempt: RunAttempt, newest: JsonMapping) -> bool:
    return as_number(newest.get(TIME)) >= attempt.began


def _state(last: RunAttempt | None, seen: float | None, times: list[float], now: float) -> State:
    if last is not None and last.reason is not None:
        return "ended"
    usual = statistics.median(times) if times else 0.0
    patience = max(SILENT_AFTER_S, SLOW_STEPS * usual)
    if last is not None and last.step == last.first_step:
        patience = STARTING_S
    return "running" if seen is not None and now - seen <= patience else "silent"


def _numbers(records: Sequence[JsonMapping], name: str) -> list[float]:
    values = (record.get(name) for record in records)
    return [float(value) for value in values if is_number(value)]


def _last(records: Sequence[JsonMapping], name: str) -> Measured:
    if not records:
        return Missing("no step has completed yet")
    odd = records[-1].get(NOT_FINITE)
    if isinstance(odd, Mapping) and name in odd:
        return Missing(f"it is {odd[name]!s:.20}")
    value = as_number(records[-1].get(name))
    if math.isinf(value):
        return Missing(f"it is {value}")
    return value if value == value else Missing("the run does not record it")


def _mean(records: Sequence[JsonMapping], name: str, *, why: str = "") -> Measured:
    """Return the mean over the last steps, because a single step's time is noisy."""
    values = _numbers(records[-20:], name)
    if values:
        return statistics.fmean(values)
    why = why or "the run does not record it"
    return Missing(why if records else "no step has completed yet")


def _predicted(about: JsonMapping) -> Measured:
    value = about.get("predicted_step_s")
    if is_number(value):
        return float(value)
    return Missing(str(about.get("no_prediction") or "the job was not checked"))


def _count(value: Any) -> int | None:
    """Return a value as an int; None for anything else."""
    return value if type(value) is int and abs(value) < MOST else None


def _planned_steps(path: Path) -> int | None:
    try:
        text = read_plain(path / IDENTITY_FILE, inside=path, at_most=LARGEST_IDENTITY)
        document = parse_json(text)
        steps = document["settings"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _count(steps)
