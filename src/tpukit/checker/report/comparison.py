"""One job checked with several toolchains, side by side: what an upgrade would do to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...shown import Shown
from ..result import COULD_NOT_TELL, DOES_NOT_FIT, FITS
from .changes import Change, compare_reports
from .schema import Report
from .side_by_side import Row, SideBySide, versions_text

SCHEMA = "tpukit.comparison/1"
"""Raise the number when a key changes its meaning; a new key is no such change."""
_NONE = "–"


@dataclass(frozen=True)
class ToolchainCheck:
    """What one toolchain said of the job.

    Attributes:
        toolchain: Its name.
        python: The minor version of Python.
        report: What the check found; None where there was nothing to find.
        refusal: Why there is no report.
        rejected_flags: Flags the job asks for that this compiler does not take; the check was made
            without them.
    """

    toolchain: str
    python: str
    report: Report | None
    refusal: str = ""
    rejected_flags: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Whether it fits, in words."""
        return "could not tell" if self.report is None else self.report.get("verdict", "unknown")

    @property
    def made_with(self) -> str:
        """The versions, or why there is no report."""
        said = self.refusal if self.report is None else versions_text(self.report)
        return f"Python {self.python}: {said}"


@dataclass(frozen=True)
class Comparison(Shown):
    """The same job with several toolchains; the first that has a report is what others change."""

    checks: tuple[ToolchainCheck, ...]
    asked_flags: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """3 where it does not fit with one of them, else 4 where one could not tell, else 0."""
        if any(one.verdict == "does not fit" for one in self.checks):
            return DOES_NOT_FIT
        return COULD_NOT_TELL if any(one.report is None for one in self.checks) else FITS

    @property
    def program(self) -> str:
        """What was checked, and for which slice."""
        report = self._first.report if self._first else None
        if report is None:
            return "nothing"
        target = (report.get("slice") or {}).get("name", "an unnamed slice")
        return f"{report.get('program', 'program')} on {target}"

    @property
    def side_by_side(self) -> SideBySide:
        """Every figure of every toolchain in words, and by how much others differ from the first.

        Figures that are nothing everywhere are left out, and so is what was asked of all alike.
        """
        headings = [self.checks[0].toolchain] if self.checks else []
        for one in self.checks[1:]:
            headings += [one.toolchain, "change"]
        rows = [self._row("verdict", "verdict", [one.verdict for one in self.checks])]
        if self.asked_flags:
            said = [", ".join(one.rejected_flags) or "none" for one in self.checks]
            rows.append(self._row("verdict", "flags rejected", said))
        rows += self._figures()
        made_with = [(one.toolchain, one.made_with) for one in self.checks]
        if self._traced_by:
            made_with.append(("captured", self._traced_by))
        return SideBySide(tuple(made_with), tuple(headings), tuple(rows))

    def changes_from_first(self, check: ToolchainCheck) -> list[Change]:
        """Every figure of a check beside that of the first one."""
        if self._first is None or self._first.report is None or check.report is None:
            return []
        return compare_reports(self._first.report, check.report)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: each check whole, and what it changes."""
        return {
            "schema": SCHEMA,
            "checks": [
                {
                    **vars(one),
                    "rejected_flags": list(one.rejected_flags),
                    "changes": [
                        change.to_dict()
                        for change in self.changes_from_first(one)
                        if change.is_change
                    ],
                }
                for one in self.checks
            ],
        }

    def __rich__(self) -> Any:
        return self.side_by_side

    @property
    def _first(self) -> ToolchainCheck | None:
        return next((one for one in self.checks if one.report is not None), None)

    @property
    def _traced_by(self) -> str:
        """Which jax traced a captured program; "" for a job, which each toolchain traces itself."""
        report = self._first.report if self._first else None
        seen = ((report or {}).get("capture") or {}).get("versions")
        if not seen:
            return ""
        return f"jax {seen['jax']} traced the program, once for all; only the compiler differs"

    def _row(self, section: str, name: str, said: Sequence[str]) -> Row:
        cells = [said[0]]
        for one in said[1:]:
            cells += [one, ""]
        return Row(section, name, tuple(cells), "compiler")

    def _figures(self) -> list[Row]:
        found = [self.changes_from_first(one) for one in self.checks]
        by_key = [{(one.section, one.name, one.is_part): one for one in all_} for all_ in found]
        rows: list[Row] = []
        # Parts of a sum stand in the order of what the last toolchain changes most.
        for key in dict.fromkeys(key for one in reversed(by_key) for key in one):
            there = [one[key] for one in by_key if key in one]
            section, name, is_part = key
            if section in ("verdict", "versions") or not _is_worth_a_row(there):
                continue
            cells: list[str] = []
            for number, one in enumerate(by_key):
                _, here, change = one[key].words if key in one else ("", _NONE, "")
                cells += [here, change] if number else [here]
            rows.append(Row(section, name, tuple(cells), there[0].origin, is_part))
        return rows


def _is_worth_a_row(figures: Sequence[Change]) -> bool:
    if figures[0].section in ("program", "options"):
        return any(one.is_change for one in figures)
    return any(one.before or one.after for one in figures)
