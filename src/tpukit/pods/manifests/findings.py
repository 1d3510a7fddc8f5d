"""What is wrong with a manifest, as a report that prints itself."""

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


def found(
    id_: str, severity: Severity, where: object, seen: str, fix: str | None = None
) -> DoctorFinding:
    """Return a finding about one place in a manifest."""
    return DoctorFinding(id_, "resources", severity, f"{where}: {seen}", fix)


@dataclass(frozen=True)
class LintReport(Shown):
    """What checks of manifests found, the worst first."""

    findings: tuple[DoctorFinding, ...]

    @classmethod
    def of(cls, findings: Sequence[DoctorFinding]) -> "LintReport":
        """Return findings in order of weight; each once."""
        once = dict.fromkeys(findings)
        return cls(tuple(sorted(once, key=lambda one: _ORDER.index(one.severity))))

    @property
    def is_ok(self) -> bool:
        """Whether nothing stands in the way."""
        return not self.errors

    @property
    def errors(self) -> tuple[DoctorFinding, ...]:
        """What would be refused, or never run."""
        return tuple(one for one in self.findings if one.severity == "error")

    def __iter__(self) -> Iterator[DoctorFinding]:
        return iter(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"ok": self.is_ok, "findings": [asdict(one) for one in self.findings]}

    def __rich__(self) -> Any:
        from rich.text import Text

        if not self.findings:
            return Text.assemble(_MARKS["ok"], " nothing to object to")
        return Text("\n").join(
            Text.assemble(
                _MARKS[one.severity],
                f" {one.seen}" + (f"\n  → {one.fix}" if one.fix else ""),
                (f" ({one.id})", "dim"),
            )
            for one in self.findings
        )
