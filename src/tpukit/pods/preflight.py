"""What would stand in the way of a pod, found without asking for one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.doctor.finding import Finding
from ..shown import Shown

_MARKS = {"ok": "[green]ok[/]", "info": "info", "warning": "[yellow]warning[/]"}


@dataclass(frozen=True)
class PreflightReport(Shown):
    """The findings of a provider."""

    provider: str
    slice: str
    findings: Sequence[Finding]

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

    def __rich__(self) -> str:
        from rich.markup import escape

        lines = [f"[bold]{self.slice} from {self.provider}[/]"]
        for one in self.findings:
            mark = _MARKS.get(one.severity, "[red]error[/]")
            fix = f"\n  → {escape(one.fix)}" if one.fix else ""
            lines.append(f"{mark}  {escape(one.seen)}{fix}")
        return "\n".join(lines)
