"""An estimate as a person reads it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimating import KernelEstimate


def format_time(seconds: float | None) -> str:
    """Microseconds or milliseconds with three digits that count."""
    if seconds is None:
        return "—"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def estimate_panel(estimate: "KernelEstimate") -> Any:
    """The time in one line, then the kernels."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = f"{estimate.name} on {estimate.chip}: {format_time(estimate.time_s)}"
    if estimate.reason:
        return Text(f"{head}  ({estimate.reason})")
    head += (
        f"  [model, {estimate.band}]: kernels {format_time(estimate.kernel_s)}, "
        f"the rest {format_time(estimate.surrounding_s)}"
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("kernel", "times", "each", "cycles", "stalled", "turns", "bound", "used"):
        table.add_column(heading)
    for name, call in estimate.calls.items():
        used = sorted(call.utilisation.items(), key=lambda item: -item[1])[:4]
        table.add_row(
            name,
            str(estimate.times[name]),
            format_time(call.time_s),
            f"{call.cycles:,.0f}",
            f"{call.stall_cycles / call.cycles:.0%}",
            str(call.loop_turns),
            call.bound,
            ", ".join(f"{unit} {share:.0%}" for unit, share in used),
        )
    notes = [Text(f"note: {caveat}", style="yellow") for caveat in estimate.caveats]
    return Group(Text(head, style="bold"), table, *notes)
