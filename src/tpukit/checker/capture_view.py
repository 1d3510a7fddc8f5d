"""What a report shows of a captured program, on a terminal and as data."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..hardware import Figure, Slice, public_prices
from ..hardware.figure import bytes_text, seconds_text
from ..shown import Shown
from .captured_flops import (
    COUNTED,
    hardware_flops_per_step,
    model_flops_per_step,
    share_of_peak,
    utilization_lines,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..capturing.captured import Captured, ListedProgram
    from .result import CheckResult

_MOST_LINES = 12


def capture_facts(result: "CheckResult") -> dict[str, Any]:
    """Return what a report keeps of a capture."""
    captured = result.captured
    assert captured is not None
    model, hardware = model_flops_per_step(result), hardware_flops_per_step(result)
    return {
        "command": list(captured.command),
        "versions": dict(captured.versions),
        "processes": captured.processes,
        "libtpu_init_args": captured.libtpu_init_args,
        "step_time_s": {"value": result.step_time_s, "origin": "model"},
        "mfu": share_of_peak(model, result).to_dict(),
        "mfu_counted": COUNTED,
        "hardware_utilization": share_of_peak(hardware, result).to_dict(),
        "model_flops": model.to_dict(),
        "hardware_flops": hardware.to_dict(),
        "programs": [_part(one) for one in (result, *result.parts)],
        "listed": [vars(one) for one in captured.listed],
        "findings": [finding.to_dict() for finding in all_findings(result)],
        "reads": [dict(one) for one in captured.reads],
        "written": list(captured.written),
        "written_count": captured.written_count,
        "refused": list(captured.refused),
        "notes": list(captured.notes),
        "capture_s": {"value": round(captured.seconds, 3), "origin": "measured"},
        "peak_bytes": {"value": captured.peak_bytes or None, "origin": "measured"},
        "usd_per_billion": usd_per_billion(result).to_dict(),
    }


def all_findings(result: "CheckResult") -> list[Any]:
    """Return the findings of every program of the step, the most expensive first."""
    found = [finding for one in (result, *result.parts) for finding in one.findings]
    return sorted(dict.fromkeys(found), key=lambda one: -(one.seconds or 0.0))


def usd_per_billion(result: "CheckResult") -> Figure:
    """Return the list price of a billion tokens or examples, by the predicted step."""
    unit = "USD per billion"
    prediction, seconds = result.prediction, result.step_time_s
    if seconds is None or prediction is None:
        return Figure.missing(unit, result.no_prediction or "no predicted step")
    if prediction.tokens_per_step is None:
        return Figure.missing(unit, "tokens or examples per step are not known; give --per-step.")
    price = public_prices().cost_per_hour(result.compiled.slice)
    if price.value is None:
        return Figure.missing(unit, price.reason)
    hours = Figure(seconds / 3600, "h", "model", "the predicted step")
    per_step = (price * hours).value or 0.0
    return Figure.derived(per_step / prediction.tokens_per_step * 1e9, unit, inputs=(price, hours))


def _part(one: "CheckResult") -> dict[str, Any]:
    prediction = one.prediction
    return {
        "name": one.compiled.name,
        "calls": one.calls,
        "fits": one.compiled.fits,
        "total_bytes": one.memory.total_bytes,
        "step_time_s": None if prediction is None else prediction.step_time_s,
    }


def captured_lines(result: "CheckResult") -> "list[RenderableType]":
    """Return what a terminal shows of a capture, below memory and time."""
    from rich.text import Text

    captured = result.captured
    assert captured is not None
    lines: list[RenderableType] = []
    if result.parts:
        total = result.step_time_s
        lines.append(Text("one step runs", style="bold"))
        for one in (result, *result.parts):
            row = _part(one)
            took = "–" if row["step_time_s"] is None else seconds_text(row["step_time_s"])
            size = bytes_text(row["total_bytes"]) + (" [compiler]" if row["fits"] else ", TOO MUCH")
            lines.append(Text(f"  {row['calls']} × {row['name']}: {took} [model], {size}"))
        if total is not None:
            lines.append(Text(f"  together {seconds_text(total)} per step [model]", style="bold"))
    lines += [Text(line) for line in utilization_lines(result)]
    findings = all_findings(result)
    if findings:
        lines.append(Text("what the program does", style="bold"))
        lines += [Text(f"  {finding.text}") for finding in findings[:_MOST_LINES]]
    price = usd_per_billion(result)
    if price.value is not None:
        lines.append(Text(f"USD per billion: {price.value:,.2f} [{price.origin}]"))
    lines.append(Text(capture_line(captured), style="dim"))
    lines += [Text(f"note: {note}", style="yellow") for note in captured.notes[:_MOST_LINES]]
    if captured.written_count:
        shown = ", ".join(captured.written[:3])
        more = captured.written_count - len(captured.written[:3])
        lines.append(
            Text(f"the program wrote {shown}" + (f" and {more} more files" if more > 0 else ""))
        )
    if captured.refused:
        lines.append(
            Text(
                f"kept offline, the program asked for {', '.join(captured.refused[:3])}; "
                "--network allows that"
            )
        )
    return lines


def capture_line(captured: "Captured") -> str:
    """Return one sentence on how the program was run."""
    peak = f", {bytes_text(captured.peak_bytes)} of host memory" if captured.peak_bytes else ""
    hosts = f" of {captured.processes}" if captured.processes > 1 else ""
    return (
        f"captured from {shlex.join(captured.command)} as process 0{hosts} with jax "
        f"{captured.versions['jax']} in {captured.seconds:.1f} s{peak} [measured]; "
        "nothing large was run"
    )


class ProgramTable(Shown):
    """The programs of a capture as a list."""

    def __init__(self, captured: "Captured") -> None:
        self.captured = captured

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        chosen = [one.name for one in self.captured.programs]
        return {
            "slice": str(self.captured.slice),
            "programs": [vars(one) for one in self.captured.listed],
            "step": chosen,
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(
            *("program", "kind", "FLOPs", "in", "out", "calls", "donated", "first called at"),
            box=None,
            pad_edge=False,
        )
        for one in sorted(self.captured.listed, key=_by_flops, reverse=True):
            table.add_row(
                *(one.name, one.kind, f"{one.flops:.3g}"),
                *(bytes_text(one.bytes_in), bytes_text(one.bytes_out), str(one.calls)),
                *(f"{one.donated} of {one.arguments}", one.line),
            )
        return table


def _by_flops(one: "ListedProgram") -> float:
    return one.flops


class SliceComparison(Shown):
    """One captured program on several slices."""

    def __init__(self, rows: "Sequence[tuple[Slice, CheckResult | str]]") -> None:
        self.rows = rows

    @property
    def exit_code(self) -> int:
        """0 when it fits on one of the slices at least, 3 when on none."""
        from .result import DOES_NOT_FIT, FITS

        fits = any(not isinstance(found, str) and found.fits for _, found in self.rows)
        return FITS if fits else DOES_NOT_FIT

    def to_dict(self) -> dict[str, Any]:
        """Plain data: one report per slice, or the reason there is none."""
        return {
            "slices": [
                {"slice": str(target), "reason": found}
                if isinstance(found, str)
                else {"slice": str(target), "report": found.to_dict()}
                for target, found in self.rows
            ]
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table(
            *(
                "slice",
                "chips",
                "verdict",
                "HBM per device",
                "step",
                "MFU",
                "per s and chip",
                "USD per billion",
            ),
            box=None,
            pad_edge=False,
        )
        for target, found in self.rows:
            if isinstance(found, str):
                table.add_row(str(target), str(target.chips), "could not tell", found)
                continue
            step, price = found.step_time_s, usd_per_billion(found)
            rate = None if found.prediction is None else found.prediction.tokens_per_s_per_chip
            mfu = share_of_peak(model_flops_per_step(found), found).value
            table.add_row(
                str(target),
                str(target.chips),
                "fits" if found.fits else "does not fit",
                f"{bytes_text(found.memory.total_bytes)} [compiler]",
                "–" if step is None else f"{seconds_text(step)} [model]",
                "–" if mfu is None else f"{mfu:.1%} [model]",
                "–" if rate is None else f"{rate:,.0f} [model]",
                "–" if price.value is None else f"{price.value:,.2f} [{price.origin}]",
            )
        return table
