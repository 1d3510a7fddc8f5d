"""`tpukit check --toolchain`: run the typed command again with other versions of jax and libtpu."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from ..plain_data import JsonMapping, JsonObject
from .output import show

if TYPE_CHECKING:
    from ..checker.report import Comparison
    from ..runtime.progress import Progress
    from .program import AskedProgram


@dataclass(frozen=True)
class TypedCheck:
    """The arguments of `tpukit check`, without outputs and toolchains.

    Attributes:
        changes: Keys of the job from options and `--set`.
        flags: Compiler options as one string.
        arguments: Shapes of a function's arguments, as in `--arg`.
        switches: Options without a value, and whether each was given.
    """

    target: str
    changes: JsonMapping
    flags: str
    arguments: Sequence[str]
    donated: Sequence[int]
    timeout_s: float | None
    switches: Mapping[str, bool]

    def compiler_flags(self) -> JsonObject:
        """Return all compiler options: those typed, or else those of the job.

        Each toolchain decides itself which of them it accepts.
        """
        from ..checker.check import as_job
        from ..runtime.flags import parse_flags

        if self.flags:
            return dict(parse_flags(self.flags))
        return {} if self.arguments else dict(as_job(self.target, self.changes).options)

    def words(self) -> list[str]:
        """Return the command-line words, without compiler options and with one spelling per key."""
        words = [self.target]
        for key, value in self.changes.items():
            if key != "options":
                words += ["--set", f"{key}={json.dumps(value)}"]
        for one in self.arguments:
            words += ["--arg", one]
        for number in self.donated:
            words += ["--donate", str(number)]
        if self.timeout_s is not None:
            words += ["--timeout", str(self.timeout_s)]
        return [*words, *(name for name, given in self.switches.items() if given)]


def check_toolchains(names: str, typed: TypedCheck, *, progress: "Progress") -> "Comparison":
    """Check with each of the toolchains, and compare the results."""
    from ..checker.toolchains import compare_toolchains
    from ..runtime.toolchains import parse_toolchains

    toolchains = parse_toolchains(names)
    return compare_toolchains(
        toolchains, typed.words(), flags=typed.compiler_flags(), progress=progress
    )


def check_program_toolchains(
    names: str,
    asked: "AskedProgram",
    on: str | None,
    words: JsonMapping,
    *,
    flags: str,
    progress: "Progress",
) -> "Comparison":
    """Capture a program once, compile it with each of the toolchains, and compare the results.

    Args:
        names: Toolchains, separated by commas.
        asked: The command, or a kept capture.
        on: The slice.
        words: Values by option; None and False are left out.
        flags: Compiler options as one string.
        progress: Called with a line about each action.
    """
    from ..checker.toolchains import compare_captured
    from ..runtime.flags import parse_flags
    from ..runtime.toolchains import parse_toolchains

    toolchains, options = parse_toolchains(names), parse_flags(flags)
    typed: list[str] = []
    for name, value in words.items():
        typed += [] if value in (None, False) else [name] if value is True else [name, str(value)]
    with asked.kept_capture(on, progress) as folder:
        return compare_captured(toolchains, folder, typed, flags=options, progress=progress)


def end_comparison(
    comparison: "Comparison", *, html: Path | None, json: bool, progress: "Progress"
) -> NoReturn:
    """Write the requested page, show a comparison, and exit."""
    if html is not None:
        from ..checker.report import write_comparison

        progress(f"wrote {write_comparison(comparison, html)}")
    show(comparison, json=json)
    raise typer.Exit(comparison.exit_code)
