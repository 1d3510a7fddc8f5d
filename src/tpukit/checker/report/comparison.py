"""Reports side by side: two reports, several toolchains, or a check and its baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ConfigError
from ...exit_codes import ExitCode
from ...hardware.figure import bytes_text, seconds_text
from ...plain_data import JsonObject
from ...shown import Renderable, Shown
from ..result import CheckResult
from .changes import Change, compare_reports
from .schema import SCHEMA, Report, read_report, reads_report


@dataclass(frozen=True)
class Row:
    """One figure as text.

    Attributes:
        section: One of `changes.SECTIONS`.
        cells: One text per heading.
        is_part: Whether it is part of a sum in the same section.
    """

    section: str
    name: str
    cells: tuple[str, ...]
    origin: str
    is_part: bool = False


@dataclass(frozen=True)
class SideBySide(Shown):
    """A table of figures, by section.

    Attributes:
        made_with: Name and versions of each report.
        headings: Headings of the columns between a figure's name and its origin.
    """

    made_with: tuple[tuple[str, str], ...]
    headings: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def sections(self) -> dict[str, list[Row]]:
        """Rows by section, in order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.section, []).append(row)
        return found

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        header = Table(box=None, show_header=False, pad_edge=False)
        for name, versions in self.made_with:
            header.add_row(Text(name, style="bold"), Text(versions))
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for heading in self.headings:
            table.add_column(heading, justify="right", no_wrap=heading == "change")
        table.add_column("origin")
        for section, rows in self.sections.items():
            table.add_row(Text(section, style="bold"))
            for row in rows:
                indent = "    " if row.is_part else "  "
                table.add_row(Text(indent + row.name), *map(Text, row.cells), Text(row.origin))
        return Group(header, table)


def rows_of(changes: Sequence[Change]) -> tuple[Row, ...]:
    """Return changes as rows of text; versions are shown above the table."""
    return tuple(
        Row(one.section, one.name, one.words, one.origin, one.is_part)
        for one in changes
        if one.section != "versions"
    )


def versions_text(report: Report) -> str:
    """Return the versions of a report as one line."""
    found = report.get("versions") or {}
    return ", ".join(f"{name} {number}" for name, number in found.items()) or "unknown versions"


@dataclass(frozen=True)
class ReportDiff(Shown):
    """All differences between two reports, by section; parts of a sum are sorted by size.

    Attributes:
        changes: Figures that differ.
        made_with: Versions of the first and the second report.
    """

    changes: tuple[Change, ...] = field(default_factory=tuple[Change, ...])
    made_with: tuple[str, str] = ("", "")
    schema = SCHEMA
    _facts = "schema made_with changes"

    @property
    def side_by_side(self) -> SideBySide:
        """The changes as a table."""
        names = ("before", "after")
        made_with = tuple(zip(names, self.made_with, strict=True))
        return SideBySide(made_with, (*names, "change"), rows_of(self.changes))

    def __rich__(self) -> Renderable:
        from rich.text import Text

        return self.side_by_side if self.changes else Text("nothing changed")


@reads_report
def diff_reports(a: Report, b: Report) -> ReportDiff:
    """Return the differences between two reports."""
    found = tuple(change for change in compare_reports(a, b) if change.is_change)
    return ReportDiff(found, (versions_text(a), versions_text(b)))


SLOWER = 0.05
"""The share by which a step may be slower than before."""


def find_regressions(
    result: CheckResult, baseline: Path, *, slower: float = SLOWER
) -> Sequence[str]:
    """Return one sentence per regression against an earlier report; empty if there is none.

    Args:
        result: The new check.
        baseline: File with the output of an earlier `tpukit check … --json`.
        slower: Share by which the predicted step may be longer.

    Raises:
        ConfigError: The earlier report is for another slice.
        TPUValidationError: The file cannot be read, or is not a report.
    """
    before = read_report(baseline)
    name = (before.get("slice") or {}).get("name")
    if name != str(result.compiled.slice):
        raise ConfigError(
            f"{baseline} is a check on {name}, but this one is on {result.compiled.slice}; "
            "compare checks on one slice, or make a new baseline."
        )
    found: list[str] = []
    if before.get("verdict") == "fits" and not result.fits:
        need = bytes_text(result.memory.total_bytes)
        had = bytes_text((before.get("memory") or {}).get("total_bytes") or 0)
        found.append(f"it no longer fits: {need} of HBM per device, {had} before [compiler]")
    earlier, now = _step_time_s(before), result.step_time_s
    if earlier is not None and now is None and result.fits:
        found.append(f"it has no predicted step any more: {result.no_prediction}")
    elif earlier is not None and now is not None and now > (1 + slower) * earlier:
        found.append(
            f"the predicted step takes {seconds_text(now)}, {seconds_text(earlier)} before "
            f"({now / earlier - 1:+.1%}, {slower:.0%} allowed) [model against model]"
        )
    return found


def _step_time_s(report: Report) -> float | None:
    """Return the time of all programs of one step."""
    capture = report.get("capture")
    if capture is not None:
        return capture["step_time_s"]["value"]
    prediction = report.get("prediction")
    return None if prediction is None else prediction["step_time_s"]


COMPARISON_SCHEMA = "tpukit.comparison/1"
"""Raise the number when a key changes its meaning; a new key is no such change."""
_NONE = "–"


@dataclass(frozen=True)
class ToolchainCheck:
    """The check of one toolchain.

    Attributes:
        toolchain: Name of the toolchain.
        python: The minor version of Python.
        report: The report; None with a `refusal`.
        refusal: Why there is no report.
        rejected_flags: Flags of the job that this compiler does not accept; they were left out.
    """

    toolchain: str
    python: str
    report: Report | None
    refusal: str = ""
    rejected_flags: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict as text."""
        return "could not tell" if self.report is None else self.report.get("verdict", "unknown")

    @property
    def made_with(self) -> str:
        """The versions, or the reason why there is no report."""
        said = self.refusal if self.report is None else versions_text(self.report)
        return f"Python {self.python}: {said}"


@dataclass(frozen=True)
class Comparison(Shown):
    """The same job with several toolchains, compared with the first that has a report."""

    checks: tuple[ToolchainCheck, ...]
    asked_flags: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """Return 3 if the program does not fit, 4 if a named toolchain has no report, else 0.

        The first toolchain is the installed one, which others are compared with. It may be too old
        to read a program that was captured with a newer jax, which is no reason to fail.
        """
        if any(check.verdict == "does not fit" for check in self.checks):
            return ExitCode.DOES_NOT_FIT
        named = self.checks[1:] or self.checks
        no_answer = any(check.report is None for check in named)
        return ExitCode.COULD_NOT_TELL if no_answer else ExitCode.DONE

    @property
    def program(self) -> str:
        """Program and slice that were checked."""
        report = self._first.report if self._first else None
        if report is None:
            return "nothing"
        target = (report.get("slice") or {}).get("name", "an unnamed slice")
        return f"{report.get('program', 'program')} on {target}"

    @property
    def side_by_side(self) -> SideBySide:
        """All figures of all toolchains as a table, with the differences from the first.

        Figures that are zero everywhere, and settings that are equal everywhere, are left out.
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
        """Return every figure of a check paired with that of the first one."""
        if self._first is None or self._first.report is None or check.report is None:
            return []
        return compare_reports(self._first.report, check.report)

    def to_dict(self) -> JsonObject:
        """Return plain data: each report, and its changes."""
        return {
            "schema": COMPARISON_SCHEMA,
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

    def __rich__(self) -> Renderable:
        return self.side_by_side

    @property
    def _first(self) -> ToolchainCheck | None:
        return next((one for one in self.checks if one.report is not None), None)

    @property
    def _traced_by(self) -> str:
        """The jax that traced a captured program; "" for a job."""
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
        # Parts of a sum are sorted by the change of the last toolchain.
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
