"""A score as a person reads it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import GroupScore, TimingsScore

LONGEST_REASON = 160
MOST_PROGRAMS = 4


def score_view(score: "TimingsScore") -> Any:
    """The scores by op and generation, which rows were in view, and what was left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sample = "" if score.sampled is None else f", at most {score.sampled} cases of each group"
    parts: list[Any] = [
        Text("Estimated (origin: model) against measured kernels", style="bold"),
        Text(
            f"{len(score.scored)} of {score.rows_in_file} rows of {score.source}{sample}; each "
            "compiled for its chip, which is not here, and timed as `tpukit kernel bench` does.\n"
        ),
    ]
    table = Table(box=None, pad_edge=False)
    for heading in ("op", "chip"):
        table.add_column(heading)
    for heading in ("rows", "in view", "Spearman", "median error", "mean error", "in band",
                    "faster named"):  # fmt: skip
        table.add_column(heading, justify="right")
    for group in (*score.groups, *score.totals):
        table.add_row(*(Text(cell) for cell in _cells(group)))
    parts += [table, Text(_in_view(score))]
    for reason, programs in score.reasons.items():
        shown = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}…"
        most = [name for name, _ in programs.most_common(MOST_PROGRAMS)]
        named = ", ".join([*most, "…"] if len(programs) > len(most) else most)
        parts.append(Text(f"left out {programs.total()}: {shown} ({named})", style="yellow"))
    return Group(*parts)


def _cells(group: "GroupScore") -> list[str]:
    return [
        group.op,
        group.chip,
        str(group.rows),
        str(group.in_view),
        "—" if group.spearman is None else f"{group.spearman:.3f}",
        f"{group.median_error:.1%}",
        f"{group.mean_error:.1%}",
        _share(group.in_band, group.banded),
        _share(group.named_right, group.compared),
    ]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "—"


def _in_view(score: "TimingsScore") -> str:
    """Which rows the constants were chosen by, and what is left without them."""
    seen = [row for row in score.scored if row.in_view]
    kernels = sum(row.row.is_pallas for row in seen)
    said = (
        f"\nIn view when constants were chosen: {kernels} Pallas rows (the rates of kernels, "
        f"calibration.toml) and {len(seen) - kernels} others (the rates of XLA's ops, "
        "fitted_on.toml)."
    )
    rest = score.total_unseen
    if rest is None:
        return f"{said} No row was left aside."
    return (
        f"{said} The other {rest.rows}: median error {rest.median_error:.1%}, mean "
        f"{rest.mean_error:.1%}, faster named {_share(rest.named_right, rest.compared)}.\n"
    )
