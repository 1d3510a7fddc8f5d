"""Findings about manifests, and the report that shows them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...runtime.doctor.finding import DoctorFinding, Severity
from ...shown import Shown

_MARKS = {
    "error": ("✗", "red"),
    "warning": ("!", "yellow"),
    "info": ("i", "blue"),
    "ok": ("✓", "green"),
}
_ORDER = ("error", "warning", "info", "ok")


def finding(
    id_: str, severity: Severity, where: object, seen: str, fix: str | None = None
) -> DoctorFinding:
    """Return a finding about one place in a manifest."""
    return DoctorFinding(id_, "resources", severity, f"{where}: {seen}", fix)


@dataclass(frozen=True)
class LintReport(Shown):
    """Findings about manifests, the worst first."""

    findings: tuple[DoctorFinding, ...]

    @classmethod
    def of(cls, findings: Sequence[DoctorFinding]) -> "LintReport":
        """Make a report of findings without duplicates, the worst first."""
        once = dict.fromkeys(findings)
        return cls(tuple(sorted(once, key=lambda finding: _ORDER.index(finding.severity))))

    @property
    def is_ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    @property
    def errors(self) -> tuple[DoctorFinding, ...]:
        """Findings for which a job would be refused or never run."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    def __iter__(self) -> Iterator[DoctorFinding]:
        return iter(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"ok": self.is_ok, "findings": [asdict(finding) for finding in self.findings]}

    def __rich__(self) -> Any:
        from rich.text import Text

        if not self.findings:
            return Text.assemble(_MARKS["ok"], " no findings")
        return Text("\n").join(
            Text.assemble(
                _MARKS[finding.severity],
                f" {finding.seen}" + (f"\n  → {finding.fix}" if finding.fix else ""),
                (f" ({finding.id})", "dim"),
            )
            for finding in self.findings
        )
