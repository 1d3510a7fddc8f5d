"""Run the same check with several toolchains, each in its own process."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..capturing.captured import copy_without_flags, read_capture
from ..errors import ConfigError, TPUValidationError
from ..exit_codes import ExitCode
from ..runtime.files import temporary_folder
from ..runtime.flags.syntax import read_values
from ..runtime.progress import Progress, silent
from ..runtime.toolchains import EndedProgram, Toolchain, environment, run_tpukit
from .report.comparison import Comparison, ToolchainCheck
from .report.schema import as_report

_SECONDS = re.compile(r"^\s*\d+\.\d s  ")  # before each line that a check says of itself
_KIND = re.compile(r"^(?:error|could not tell): ")


@dataclass(frozen=True)
class _Asked:
    """The arguments of a check.

    Attributes:
        words: Returns the arguments of `tpukit check`, given the flags that a compiler rejects.
        flags: Compiler options by name; they replace the job's own.
    """

    words: Callable[[Collection[str]], Sequence[str]]
    flags: Mapping[str, object]


def compare_toolchains(
    toolchains: Sequence[Toolchain],
    arguments: Sequence[str],
    *,
    flags: Mapping[str, object] | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Run one check with each toolchain; missing environments are created.

    A flag that a compiler does not accept is left out there, and reported.

    Args:
        toolchains: The toolchains; the others are compared with the first.
        arguments: Arguments of `tpukit check`, without compiler options.
        flags: All compiler options of the job; they replace those in its file.
        progress: Called with a line about each action.

    Raises:
        ConfigError: The first toolchain refuses the job.
        ToolchainError: An environment cannot be created.
    """
    wanted = flags or {}

    def words(rejected: Collection[str]) -> list[str]:
        return [*arguments, *(_as_options(wanted, rejected) or _without_options(wanted))]

    return _compare(toolchains, _Asked(words, wanted), progress)


def compare_captured(
    toolchains: Sequence[Toolchain],
    folder: Path,
    arguments: Sequence[str],
    *,
    flags: Mapping[str, object] | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compile one kept capture with each toolchain.

    The program was traced once, by the jax of its own environment, so only the compiler differs. A
    flag of the program that a compiler does not accept is left out there, and reported.

    Args:
        toolchains: The toolchains; the others are compared with the first.
        folder: Folder of the capture.
        arguments: Arguments of `tpukit check FOLDER`, without compiler options.
        flags: Compiler options in addition to the program's own.
        progress: Called with a line about each action.

    Raises:
        ConfigError: The first toolchain refuses the command.
        CaptureError: The folder has no complete capture.
        ToolchainError: An environment cannot be created.
    """
    own, wanted = read_values(read_capture(folder).libtpu_init_args), flags or {}
    with temporary_folder("tpukit-captures-") as copies:

        def words(rejected: Collection[str]) -> list[str]:
            place = folder
            if own.keys() & set(rejected):
                name = f"without-{len(list(copies.iterdir()))}"
                place = copy_without_flags(folder, copies / name, rejected)
            return [str(place.absolute()), *arguments, *_as_options(wanted, rejected)]

        return _compare(toolchains, _Asked(words, {**own, **wanted}), progress)


def _compare(toolchains: Sequence[Toolchain], asked: _Asked, progress: Progress) -> Comparison:
    with ExitStack() as in_use:
        # Create all environments first, so that a missing Python is reported before any compile.
        pythons = [in_use.enter_context(environment(one, progress=progress)) for one in toolchains]
        checks: list[ToolchainCheck] = []
        for toolchain, python in zip(toolchains, pythons, strict=True):
            checks.append(_check(toolchain, python, asked, progress, is_first=not checks))
    return Comparison(tuple(checks), asked_flags=tuple(asked.flags))


def _check(
    toolchain: Toolchain, python: Path, asked: _Asked, progress: Progress, *, is_first: bool
) -> ToolchainCheck:
    def tell(line: str) -> None:
        if line.strip():
            progress(f"{toolchain.name}: {_SECONDS.sub('', line).strip()}")

    rejected = _rejected_flags(python, asked.flags, tell)
    command = ["check", *asked.words(rejected), "--json"]
    ended = run_tpukit(python, command, progress=tell)
    if ended.code == ExitCode.BAD_INPUT and is_first:
        raise ConfigError(_last_words(ended))
    if ended.code not in (ExitCode.DONE, ExitCode.DOES_NOT_FIT):
        return ToolchainCheck(
            toolchain.name, toolchain.python, None, _last_words(ended), tuple(rejected)
        )
    if not ended.output.startswith("{"):  # refused before there was anything to report
        return ToolchainCheck(
            toolchain.name, toolchain.python, None, ended.output.strip(), tuple(rejected)
        )
    report = as_report(json.loads(ended.output), name=f"what {toolchain.name} answered")
    seen = (report.get("versions") or {}).get("jax", "")
    if toolchain.jax and seen != toolchain.jax:
        raise TPUValidationError(
            f"the environment of {toolchain.name} ran with jax {seen}; take its folder out of "
            "PYTHONPATH, which goes before what the environment has."
        )
    return ToolchainCheck(toolchain.name, toolchain.python, report, rejected_flags=tuple(rejected))


def _rejected_flags(python: Path, flags: Mapping[str, object], progress: Progress) -> list[str]:
    """Return the flags that the compiler of an environment does not accept."""
    if not flags:
        return []
    ended = run_tpukit(python, ["flags", "check", "--json", *_written(flags)], progress=progress)
    try:
        found = json.loads(ended.output)["flags"]
    except (ValueError, KeyError):
        raise ConfigError(_last_words(ended)) from None
    return [one["name"] for one in found if one["problem"] is not None]


def _as_options(flags: Mapping[str, object], rejected: Collection[str]) -> list[str]:
    taken = {name: value for name, value in flags.items() if name not in rejected}
    return ["--flags", " ".join(_written(taken))] if taken else []


def _without_options(asked: Mapping[str, object]) -> list[str]:
    """Return arguments that remove the job's own options."""
    return ["--set", "options={}"] if asked else []


def _written(flags: Mapping[str, object]) -> list[str]:
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flags.items()
    }
    return [f"--{name}={text}" for name, text in texts.items()]


def _last_words(ended: EndedProgram) -> str:
    """Return the last line of a failed command that explains why it failed."""
    lines = [line.strip() for line in ended.errors.splitlines() if line.strip()]
    kind = next((line for line in reversed(lines) if _KIND.match(line)), "")
    return _KIND.sub("", kind) or (lines[-1] if lines else f"ended with code {ended.code}")
