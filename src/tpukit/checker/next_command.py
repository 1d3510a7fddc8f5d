"""The exact command to run after a check: the fix to apply, or the next question to ask."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from .result import CheckResult

# Keys of a job, and what `tpukit check` and `tpukit flags tune` call them.
_OPTIONS = {
    "slice": "--on",
    "batch_size": "--batch",
    "sequence_length": "--sequence",
    "mesh": "--mesh",
    "strategy": "--strategy",
    "remat": "--remat",
    "optimizer": "--optimizer",
    "microbatches": "--microbatches",
    "attention": "--attention",
    "options": "--flags",
}
_REPEATED = {"arg": "--arg", "donate": "--donate"}


def next_command(result: "CheckResult") -> str:
    """What to run next, or "" when the check does not say what it was a check of.

    A verified fix is applied; fixes that are only estimates are verified; what fits and has no
    predicted step gets one; what fits and has one is tuned.
    """
    target, asked = result.target, dict(result.asked)
    if not target and result.job is not None:
        target, asked = _from_job(result.job)
    if not target:
        return ""
    fixes = result.fixes.fixes if result.fixes is not None else ()
    if not result.compiled.fits:
        expressible = [fix for fix in fixes if all(key in _OPTIONS for key in fix.changes)]
        verified = next((fix for fix in expressible if fix.fits), None)
        if verified is not None:
            return command("check", target, {**asked, **verified.changes})
        if any(fix.promising for fix in fixes) and not any(fix.fits is not None for fix in fixes):
            return command("check", target, asked, "--fix")
        hoped = next((fix for fix in expressible if fix.promising), None)
        if hoped is not None:
            return command("check", target, {**asked, **hoped.changes})
        return command("check", target, asked, "--html", "report.html")
    if result.prediction is None and not result.memory_only:
        return command("check", target, asked, "--html", "report.html")
    if result.prediction is None:
        return command("check", target, asked)
    return command("flags tune", target, asked)


def command(verb: str, target: str, settings: Mapping[str, Any], *more: str) -> str:
    """`tpukit VERB TARGET` with the settings as options, ready for a shell."""
    words = ["tpukit", *verb.split(), target]
    for key, option in _OPTIONS.items():
        value = settings.get(key)
        if value is not None and value != {}:
            words += [option, _written(key, value)]
    for key, option in _REPEATED.items():
        for value in settings.get(key) or ():
            words += [option, str(value)]
    return shlex.join([*words, *more])


def _from_job(job: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Target and settings of a job that nobody typed; none where only a file could hold it."""
    if not isinstance(job["model"], str) or job.get("dcn_mesh") or job.get("schedule") == "gpipe":
        return "", {}
    return job["model"], {key: job.get(key) for key in _OPTIONS}


def _written(key: str, value: Any) -> str:
    if key == "mesh" and isinstance(value, Mapping):
        sizes = cast("Mapping[str, int]", value)
        return ",".join(f"{name}={size}" for name, size in sizes.items())
    if key == "options":
        flags = cast("Mapping[str, Any]", value)
        return " ".join(f"--{name}={_value(one)}" for name, one in flags.items())
    return str(value)


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
