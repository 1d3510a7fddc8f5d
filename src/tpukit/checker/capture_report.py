"""Report a captured program: its utilization, programs and findings, on a terminal and as data."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..capturing.captured import CapturedProgram
from ..compiler.compiled import CompiledStep
from ..compiler.program_flops import kernels_of_model_flops
from ..exit_codes import ExitCode
from ..hardware import Figure, Slice, public_prices
from ..hardware.figure import bytes_text, flops_text, seconds_text
from ..plain_data import JsonObject
from ..shown import Renderable, Shown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..capturing.captured import Captured, ListedProgram
    from .result import CheckResult


COUNTED = (
    "FLOPs of the program's matmuls (masked attention counted whole, Pallas kernels as they run), "
    "without what jax.checkpoint recomputes,"
)
COUNTED_WITH_RECOMPUTATION = "FLOPs of the compiled program, recomputation included,"
_SHARE = "share of peak"


def count_model_flops(program: CapturedProgram, compiled: CompiledStep) -> Figure:
    """Return the FLOPs of one run over all devices, without recomputation.

    Matmuls are counted in the jaxpr of the user's call, in which jax marks the recomputation of
    `jax.checkpoint`. Pallas kernels are counted in the compiled program, because a jaxpr does not
    show which blocks they visit.
    """
    about = program.about
    if about.model_flops is None:
        return Figure.missing("FLOP", "an earlier version kept this capture; capture it again.")
    if about.open_flops:
        return Figure.missing(
            "FLOP", "matmuls run in loops without a constant length; use lax.scan or fori_loop."
        )
    matmuls = Figure(about.model_flops, "FLOP", "model", "matmuls of the program as jax traced it")
    if not about.kernels:
        return matmuls
    return matmuls + kernels_of_model_flops(compiled.module).scaled(program.devices)


def model_flops_per_step(result: "CheckResult") -> Figure:
    """Return the model FLOPs of all programs of one step, over all devices."""
    return _total(
        [
            count_model_flops(_program(one), one.compiled).scaled(one.calls)
            for one in (result, *result.parts)
        ]
    )


def hardware_flops_per_step(result: "CheckResult") -> Figure:
    """Return the FLOPs that all devices compute in one step, recomputation included."""
    return _total(
        [
            one.compiled.flops.scaled(one.calls * _program(one).devices)
            for one in (result, *result.parts)
        ]
    )


def share_of_peak(flops: Figure, result: "CheckResult") -> Figure:
    """Return the share of the slice's peak that FLOPs reach in the predicted step."""
    seconds, prediction = result.step_time_s, result.prediction
    if seconds is None or prediction is None:
        return Figure.missing(_SHARE, result.no_prediction or "a program has no predicted step.")
    target = result.compiled.slice
    peak = target.peak_tflops(prediction.mfu_peak)
    time = Figure(seconds, "s", "model", "the predicted step")
    reached = None
    if flops.value is not None and peak.value:
        reached = flops.value / seconds / (peak.value * 1e12)
    return Figure.derived(reached, _SHARE, inputs=(flops, time, peak))


def utilization_lines(result: "CheckResult") -> list[str]:
    """Return lines on the utilization of a captured step, for a terminal."""
    if result.prediction is None:
        return []
    model, hardware = model_flops_per_step(result), hardware_flops_per_step(result)
    mfu, reached = share_of_peak(model, result), share_of_peak(hardware, result)
    lines: list[str] = []
    if mfu.value is None:
        lines.append(f"MFU: – ({mfu.reason})")
    else:
        counted = flops_text(model.value or 0.0)
        lines.append(f"MFU {mfu.value:.1%} [{mfu.origin}]: {counted} per step, {COUNTED[:-1]}")
    if reached.value is None:
        lines.append(f"hardware utilization: – ({reached.reason})")
    else:
        lines.append(
            f"hardware utilization {reached.value:.1%} [{reached.origin}]: "
            f"{flops_text(hardware.value or 0.0)} per step, recomputation included"
        )
    return lines


def _program(result: "CheckResult") -> CapturedProgram:
    assert result.program is not None
    return result.program


def _total(figures: list[Figure]) -> Figure:
    total = figures[0]
    for one in figures[1:]:
        total = total + one
    return total


_MOST_LINES = 12


def capture_facts(result: "CheckResult") -> JsonObject:
    """Return the part of a report that describes a capture."""
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
    """Return the list price of a billion tokens or examples, from the predicted step."""
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


def _part(one: "CheckResult") -> JsonObject:
    prediction = one.prediction
    return {
        "name": one.compiled.name,
        "calls": one.calls,
        "fits": one.compiled.fits,
        "total_bytes": one.memory.total_bytes,
        "step_time_s": None if prediction is None else prediction.step_time_s,
    }


def captured_lines(result: "CheckResult") -> "list[RenderableType]":
    """Return lines on a capture for a terminal."""
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
    """A table of the programs of a capture."""

    def __init__(self, captured: "Captured") -> None:
        self.captured = captured

    def to_dict(self) -> JsonObject:
        """Return the table as plain data."""
        chosen = [one.name for one in self.captured.programs]
        return {
            "slice": str(self.captured.slice),
            "programs": [vars(one) for one in self.captured.listed],
            "step": chosen,
        }

    def __rich__(self) -> Renderable:
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
        """0 if the program fits on at least one of the slices, otherwise 3."""

        fits = any(not isinstance(found, str) and found.fits for _, found in self.rows)
        return ExitCode.DONE if fits else ExitCode.DOES_NOT_FIT

    def to_dict(self) -> JsonObject:
        """Return plain data: one report per slice, or the reason why there is none."""
        return {
            "slices": [
                {"slice": str(target), "reason": found}
                if isinstance(found, str)
                else {"slice": str(target), "report": found.to_dict()}
                for target, found in self.rows
            ]
        }

    def __rich__(self) -> Renderable:
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
