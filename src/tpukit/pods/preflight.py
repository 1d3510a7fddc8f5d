"""What would stand in the way of a pod, found without asking for one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.doctor.finding import DoctorFinding
from ..shown import Shown

_STYLES = {"ok": "green", "info": "", "warning": "yellow"}


@dataclass(frozen=True)
class PreflightReport(Shown):
    """The findings of a provider."""

    provider: str
    slice: str
    findings: Sequence[DoctorFinding]

    @property
    def is_clear(self) -> bool:
        """Whether nothing is in the way."""
        return all(finding.severity != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "provider": self.provider,
            "slice": self.slice,
            "clear": self.is_clear,
            "findings": [
                {"id": one.id, "severity": one.severity, "seen": one.seen, "fix": one.fix}
                for one in self.findings
            ],
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        lines = [Text(f"{self.slice} from {self.provider}", style="bold")]
        for one in self.findings:
            mark = one.severity if one.severity in _STYLES else "error"
            fix = f"\n  → {one.fix}" if one.fix else ""
            lines.append(Text.assemble((mark, _STYLES.get(mark, "red")), f"  {one.seen}{fix}"))
        return Text("\n").join(lines)
