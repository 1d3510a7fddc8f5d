"""The words of a diagnosis: a finding, and the site that a check looks at."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...hardware.detect import Accelerators
from ..versions import installed_requirements, installed_version

Severity = Literal["ok", "info", "warning", "error"]
Topic = Literal["software", "devices", "environment", "resources", "compiler"]


@dataclass(frozen=True)
class DoctorFinding:
    """One thing a check has seen.

    Attributes:
        id: Stable name, for scripts.
        topic: Where it belongs in the report.
        severity: "ok", "info" (good to know), "warning" (may bite) or "error" (will bite).
        seen: What is the case.
        fix: What to do about it; always there for a warning or an error.
    """

    id: str
    topic: Topic
    severity: Severity
    seen: str
    fix: str | None = None

    def __post_init__(self) -> None:
        if self.severity in ("warning", "error") and not self.fix:
            raise ValueError(f"finding {self.id!r} is a {self.severity} and names no fix")


@dataclass(frozen=True)
class Site:
    """What the checks look at: everything they know comes from here, so tests can make one up."""

    environment: Mapping[str, str]
    here: Accelerators
    root: Path = Path("/")
    deep: bool = False
    version_of: Callable[[str], str | None] = installed_version
    requirements_of: Callable[[str], list[str]] = installed_requirements


# A check looks at one thing. To add one: write the function in the file of its topic and add it
# to that file's CHECKS. It must not load libtpu, open a device or leave the machine.
Check = Callable[[Site], Iterable[DoctorFinding]]
