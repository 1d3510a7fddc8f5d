"""`diagnose_tpu()`: run every check and return the findings."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import psutil

from ...hardware.detect import detect_accelerators
from ...shown import MappedResult, Renderable
from . import compiler, devices, resources, software, variables
from .finding import Check, DoctorFinding, Severity, Site, Topic

CHECKS: Mapping[Topic, tuple[Check, ...]] = {
    "software": software.CHECKS,
    "devices": devices.CHECKS,
    "environment": variables.CHECKS,
    "resources": resources.CHECKS,
    "compiler": compiler.CHECKS,
}
# A word beside each sign: neither colour nor a symbol alone carries the meaning.
SIGNS: Mapping[Severity, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "info": ("•", "cyan"),
    "warning": ("!", "yellow"),
    "error": ("✗", "red"),
}


@dataclass(frozen=True)
class Diagnosis(MappedResult):
    """All findings; also a mapping: `diagnosis["summary"]`, `diagnosis["findings"]`."""

    machine: str
    findings: tuple[DoctorFinding, ...]
    has_tpu: bool = False
    _facts = "summary healthy machine has_tpu findings"

    @property
    def healthy(self) -> bool:
        """Whether there is no error; warnings are allowed."""
        return not self.of("error")

    @property
    def summary(self) -> str:
        """One line: the verdict, whether there is a TPU, and the number of problems."""
        counts = Counter(finding.severity for finding in self.findings)
        tally = ", ".join(
            f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
            for severity in ("error", "warning")
        )
        found = "a TPU is here" if self.has_tpu else "no TPU here"
        return f"{'healthy' if self.healthy else 'not healthy'}: {found}, {self.machine}; {tally}"

    def of(self, severity: Severity) -> tuple[DoctorFinding, ...]:
        """Return the findings of one severity."""
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = []
        for topic in get_args(Topic):
            here = [finding for finding in self.findings if finding.topic == topic]
            if not here:
                continue
            table = Table.grid(padding=(0, 1))
            table.add_column(width=9, no_wrap=True)
            table.add_column(overflow="fold")
            for finding in here:
                sign, colour = SIGNS[finding.severity]
                table.add_row(Text(f"{sign} {finding.severity}", style=colour), Text(finding.seen))
                if finding.fix:
                    table.add_row("", Text(f"→ {finding.fix}", style="bold"))
            parts += [Text(topic, style="bold underline"), table, Text()]
        verdict = Text(self.summary, style="bold green" if self.healthy else "bold red")
        return Group(*parts, verdict)


def diagnose_tpu(
    *,
    deep: bool = False,
    environment: Mapping[str, str] | None = None,
    root: str | Path = "/",
) -> Diagnosis:
    """Check everything that TPU work needs on this machine.

    This process loads no libtpu, opens no device and makes no connection. If a TPU or GPU is
    present, a child process asks jax, and is killed if it hangs.

    Args:
        deep: Also compile a small program with the real TPU compiler, and check flags that are
            not in the cache; this takes some seconds.
        environment: The environment to check; by default the process's own.
        root: Root of the file system to read; other values than "/" are for tests and containers.
    """
    variables_here = dict(os.environ if environment is None else environment)
    here = detect_accelerators(root=root, environment=variables_here)
    site = Site(environment=variables_here, here=here, root=Path(root), deep=deep)
    return examine(site)


def examine(site: Site) -> Diagnosis:
    """Run every check on `site`."""
    findings = tuple(
        finding
        for topic, checks in CHECKS.items()
        for check in checks
        for finding in _run(check, site, topic)
    )
    return Diagnosis(str(site.here), findings, has_tpu=site.here.kind == "tpu")


def _run(check: Check, site: Site, topic: Topic) -> list[DoctorFinding]:
    try:
        return list(check(site))
    except (OSError, psutil.Error) as error:
        # One file that cannot be read must not cost the user all the other findings.
        name = check.__name__.removeprefix("check_")
        seen = f"{name} could not be checked: {error}"
        return [DoctorFinding(name, topic, "warning", seen, "Run as a user who may read it.")]
