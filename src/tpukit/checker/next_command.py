"""The command to run after a check: apply a fix, predict the step, or tune flags."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ..hardware.mesh_sizes import write_mesh
from ..job.hidden import is_hidden
from ..job.model_source import is_torch_source
from ..job.yaml_text import write_yaml
from ..models.remat.policy import FULL
from ..plain_data import JsonMapping, JsonObject

if TYPE_CHECKING:
    from ..capturing.captured import Captured
    from ..job.job import Job
    from .result import CheckResult

# Keys of a job with their own option; other keys are written as --set key=value.
_OPTIONS = {
    "on": "--on",
    "batch_size": "--batch-size",
    "sequence_length": "--sequence-length",
    "mesh": "--mesh",
    "strategy": "--strategy",
    "remat": "--remat",
    "train.optimizer": "--optimizer",
    "train.moment_dtype": "--moment-dtype",
    "microbatches": "--microbatches",
    "attention": "--attention",
    "options": "--flags",
}
_REPEATED = {"arg": "--arg", "donate": "--donate"}


def next_command(result: "CheckResult") -> str:
    """Return the command to run next; "" if the check has no target.

    The command applies a verified fix, verifies estimated fixes, predicts the step of a program
    that fits, or tunes the flags of one that has a prediction.
    """
    if result.captured is not None:
        return _after_capture(result, result.captured)
    target, asked = result.target, dict(result.asked)
    if not target and result.job is not None:
        target, asked = job_settings(result.job)
    if not target:
        return ""
    fixes = result.fixes.fixes if result.fixes is not None else ()
    if not result.compiled.fits:
        verified = next((fix for fix in fixes if fix.fits), None)
        if verified is not None:
            return command("check", target, {**asked, **verified.changes})
        if any(fix.promising for fix in fixes) and not any(fix.fits is not None for fix in fixes):
            return command("check", target, asked, "--fix")
        hoped = next((fix for fix in fixes if fix.promising), None)
        if hoped is not None:
            return command("check", target, {**asked, **hoped.changes})
        if is_torch_source(target) and "remat" not in asked:  # it keeps every activation
            return command("check", target, {**asked, "remat": FULL})
        return command("check", target, asked, "--html", "report.html")
    if result.prediction is None and not result.memory_only:
        return command("check", target, asked, "--html", "report.html")
    if result.prediction is None:
        return command("check", target, asked)
    return command("flags tune", target, asked)


def _after_capture(result: "CheckResult", captured: "Captured") -> str:
    """Return the command to run after a captured program; "" if its code must change."""
    here = str(captured.slice)

    def run(verb: str, on: str, *more: str) -> str:
        words = ["tpukit", *verb.split(), "--on", on, *more, "--", *captured.command]
        return shlex.join(words)

    def check(on: str, *more: str) -> str:
        return run("check", on, *more)

    if not captured.peak_bytes:  # a block of Python, which no command runs
        return ""
    if result.fits:
        return run("flags tune", here) if result.step_time_s is not None else ""
    fixes = result.fixes.fixes if result.fixes is not None else ()
    for fix in fixes:
        if fix.fits and "flags" in fix.changes:
            return check(here, "--flags", fix.changes["flags"])
        if fix.fits and "on" in fix.changes:
            return check(fix.changes["on"])
    tried = any(fix.fits is not None for fix in fixes)
    return check(here, "--fix") if fixes and not tried else ""


def command(verb: str, target: str, settings: JsonMapping, *more: str) -> str:
    """Return `tpukit VERB TARGET` with the settings as options, quoted for a shell.

    Environment variables of the job are left out, because no check depends on them and they may be
    secret.
    """
    from ..job.job import Job

    words = ["tpukit", *verb.split(), target]
    stated = {
        key: value
        for key, value in settings.items()
        if value is not None and value != {} and not is_hidden(key, Job)
    }
    for key, option in _OPTIONS.items():
        if key in stated:
            words += [option, _written(key, stated[key])]
    for key, value in stated.items():
        if key not in _OPTIONS and key not in _REPEATED:
            words += ["--set", f"{key}={_scalar(value)}"]
    for key, option in _REPEATED.items():
        for value in stated.get(key) or ():
            words += [option, str(value)]
    return shlex.join([*words, *more])


def job_settings(job: "Job") -> tuple[str, JsonObject]:
    """Return target and settings of a job that was not typed; empty if Python gave its model."""
    if not isinstance(job.model, str) or job.parts:
        return "", {}
    stated = job.to_dict()
    model = stated.pop("model")
    flat: JsonObject = {} if isinstance(model, str) else {"model": model}
    for key, value in stated.items():
        flat |= {key: value} if key in ("mesh", "options") else _flattened(key, value)
    return job.model, flat


def _flattened(key: str, value: Any) -> JsonObject:
    """Return the keys of a section by dotted path, nested sections included: `train.lora.rank`."""
    if not isinstance(value, Mapping):
        return {key: value}
    below = cast("JsonMapping", value)
    return {
        name: one
        for inner, each in below.items()
        for name, one in _flattened(f"{key}.{inner}", each).items()
    }


def _written(key: str, value: Any) -> str:
    if key == "mesh" and isinstance(value, Mapping):
        return write_mesh(cast("Mapping[str, int]", value))
    if key == "options":
        flags = cast("JsonMapping", value)
        return " ".join(f"--{name}={_scalar(one)}" for name, one in flags.items())
    return str(value)


def _scalar(value: Any) -> str:
    """Return a value in the form of `--set`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping | list | tuple):
        text = write_yaml({"value": value}).removeprefix("value:").strip()
        if "\n" in text or text.startswith("- "):
            import json

            return json.dumps(value)
        return text
    return str(value)
