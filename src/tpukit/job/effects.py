"""Settings that nothing reads yet, and why: whoever sets one is told."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import Job

_NO_MONITOR = "no monitor runs beside a job in this version"
_NO_LAUNCH = "nothing asks a cloud for chips in this version"
WITHOUT_EFFECT = {
    "observe.monitoring_interval_seconds": _NO_MONITOR,
    "observe.monitoring_duration_seconds": _NO_MONITOR,
    "observe.allocation_history_retention_seconds": _NO_MONITOR,
    "launch.project": _NO_LAUNCH,
    "launch.zone": _NO_LAUNCH,
    "launch.network": _NO_LAUNCH,
    "launch.software_version": _NO_LAUNCH,
    "launch.enable_ip_alias": _NO_LAUNCH,
    "launch.reserved": _NO_LAUNCH,
    "launch.credentials_file": _NO_LAUNCH,
}


def settings_without_effect(job: "Job") -> list[str]:
    """Return a sentence for each setting that was given and does nothing."""
    found: list[str] = []
    for path, why in WITHOUT_EFFECT.items():
        section, _, name = path.partition(".")
        if name in getattr(job, section).model_fields_set:
            found.append(f"{path} has no effect: {why}")
    return found
