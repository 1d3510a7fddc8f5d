"""The types of a diagnosis: a finding, and the site that checks read."""

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
    """One result of a check.

    Attributes:
        id: Stable name, for scripts.
        topic: Its section of the report.
        severity: "ok", "info", "warning" (may cause failures) or "error" (will cause failures).
        seen: What the check observed.
        fix: How to fix it; required for a warning or an error.
    """

    id: str
    topic: Topic
    severity: Severity
    seen: str
    fix: str | None = None

    def __post_init__(self) -> None:
        if self.severity in ("warning", "error") and not self.fix:
            raise ValueError(f"finding {self.id!r} is a {self.severity} but has no fix")


@dataclass(frozen=True)
class Site:
    """The machine's facts; checks read only these, so that tests can invent a machine."""

    environment: Mapping[str, str]
    here: Accelerators
    root: Path = Path("/")
    deep: bool = False
    version_of: Callable[[str], str | None] = installed_version
    requirements_of: Callable[[str], list[str]] = installed_requirements


# A check covers one thing. To add one, write the function in the file of its topic and add it to
# that file's CHECKS. It must not load libtpu, open a device or use the network.
Check = Callable[[Site], Iterable[DoctorFinding]]
