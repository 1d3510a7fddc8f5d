"""The report on what would prevent a pod from being allocated."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.doctor.finding import DoctorFinding
from ..shown import Shown

_STYLES = {"ok": "green", "info": "", "warning": "yellow"}


@dataclass(frozen=True)
class PreflightReport(Shown):
    """A provider's findings."""

    provider: str
    slice: str
    findings: Sequence[DoctorFinding]

    @property
    def is_clear(self) -> bool:
        """Whether there is no error among them."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "provider": self.provider,
            "slice": self.slice,
            "clear": self.is_clear,
            "findings": [
                {
                    "id": finding.id,
                    "severity": finding.severity,
                    "seen": finding.seen,
                    "fix": finding.fix,
                }
                for finding in self.findings
            ],
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        lines = [Text(f"{self.slice} from {self.provider}", style="bold")]
        for finding in self.findings:
            mark = finding.severity if finding.severity in _STYLES else "error"
            fix = f"\n  → {finding.fix}" if finding.fix else ""
            lines.append(Text.assemble((mark, _STYLES.get(mark, "red")), f"  {finding.seen}{fix}"))
        return Text("\n").join(lines)
