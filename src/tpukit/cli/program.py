"""`tpukit check … -- COMMAND`: check any unmodified program as if it ran on a slice."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand

from ..errors import ConfigError, TPUError
from ..exit_codes import ExitCode
from .output import Announcer, print_whole, refusals_as_exit_codes, show

if TYPE_CHECKING:
    from ..capturing.captured import Captured
    from ..checker.result import CheckResult
    from ..compiler.memory import MemoryReport
    from ..hardware import Slice
    from ..runtime.progress import Progress

COMMAND = "tpukit.command"


class ProgramCommand(TyperCommand):
    """A command that takes another command behind `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split off everything behind the first `--`, and parse the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def is_kept(target: str | None) -> bool:
    """Whether a target is a folder of `tpukit check --keep`."""
    return target is not None and (Path(target) / "capture.json").is_file()


def command_behind(called: typer.Context) -> list[str] | None:
    """Return the command behind `--`; None without `--`."""
    return called.meta.get(COMMAND)


@dataclass(frozen=True)
class AskedProgram:
    """A command to capture, with its options.

    Attributes:
        command: The program and its arguments.
        folder: A kept capture, instead of a command.
        program: The jitted function to check; None for the training step.
    """

    command: Sequence[str]
    folder: Path | None = None
    program: str | None = None
    list_programs: bool = False
    network: bool = False
    keep: Path | None = None
    timeout_s: float | None = None

    def capture(self, on: str, progress: "Progress") -> "Captured":
        """Return the capture for a slice."""
        from ..capturing.captured import read_capture
        from ..capturing.running import run_captured
        from ..hardware import Slice

        if self.folder is None:
            return run_captured(
                self.command,
                on,
                program=self.program,
                network=self.network,
                keep=self.keep,
                timeout_s=self.timeout_s,
                progress=progress,
            )
        captured = read_capture(self.folder)
        return captured.moved_to(Slice.parse(on)) if on else captured

    def capture_on_one(self, on: str | None, progress: "Progress") -> "Captured":
        """Return the capture for the only slice of `--on`."""
        from ..hardware import Slice

        if on is None and self.folder is None:
            raise ConfigError("which slice? Give --on v6e-8.")
        if on is not None and "," in on:
            raise ConfigError(f"expected one slice, but --on is {on}; several are for one check.")
        return self.capture("" if on is None else str(Slice.parse(on)), progress)

    @contextmanager
    def kept_capture(self, on: str | None, progress: "Progress") -> "Generator[Path]":
        """Yield a folder with the capture for one slice, for another process to read."""
        from ..runtime.files import temporary_folder

        if self.folder is not None:
            self.capture_on_one(on, progress)  # refuses a slice that it is not for
            yield self.folder
            return
        with temporary_folder("tpukit-kept-") as place:
            folder = self.keep or place / "capture"
            replace(self, keep=folder).capture_on_one(on, progress)
            yield folder

    def capture_again(self, say: Announcer) -> "Callable[[Slice], Captured] | None":
        """Return a function that captures for another slice; None for a kept capture."""
        if self.folder is not None:
            return None
        other = replace(self, keep=None)
        return lambda target: other.capture(str(target), say)


def check_programs(
    asked: AskedProgram, on: str | None, say: Announcer, **how: Any
) -> Mapping[str, Any]:
    """Check a program on each slice of `--on`; return the result or the reason by slice."""
    from ..checker.captured import check_captured
    from ..hardware import Slice

    if on is None and asked.folder is None:
        raise ConfigError("which slice? Give --on v6e-8, or several: --on v5e-64,v6e-32.")
    names = [str(Slice.parse(name)) for name in (on or "").split(",") if name] or [""]
    if asked.keep is not None and len(names) > 1:
        raise ConfigError("--keep is for one slice, because a capture is of one slice.")
    found: dict[str, Any] = {}
    for name in names:
        try:
            captured = asked.capture(name, say)
            if asked.list_programs:
                found[name] = captured
                continue
            found[str(captured.slice)] = check_captured(
                captured, progress=say, again=asked.capture_again(say), **how
            )
        except TPUError as error:
            if len(names) == 1:
                raise
            found[name] = str(error)
    return found


def check_command(
    asked: AskedProgram,
    on: str | None,
    say: Announcer,
    *,
    json: bool,
    baseline: Path | None,
    write: Any,
    **how: Any,
) -> None:
    """Check a program, show the result, and exit as `check` does."""
    from ..checker.capture_report import ProgramTable, SliceComparison
    from ..compiler.memory.view import verdict_line
    from ..hardware import Slice

    def tell(memory: "MemoryReport") -> None:
        print_whole(verdict_line(memory))

    several = json or "," in (on or "")
    with refusals_as_exit_codes():
        found = check_programs(asked, on, say, verdict=None if several else tell, **how)
    if asked.list_programs:
        for captured in found.values():
            show(ProgramTable(captured), json=json)
        raise typer.Exit(ExitCode.DONE)
    if len(found) > 1:
        table = SliceComparison([(Slice.parse(name), one) for name, one in found.items()])
        show(table, json=json)
        raise typer.Exit(table.exit_code)
    (result,) = found.values()
    write(result)
    end_check(result, json=json, baseline=baseline)


def end_check(result: "CheckResult", *, json: bool, baseline: Path | None) -> NoReturn:
    """Show a result and its regressions against an earlier report, and exit."""
    from ..checker.report.comparison import find_regressions

    if json:
        show(result, json=True)
    else:
        print_whole(result.details())
    worse = [] if baseline is None else find_regressions(result, baseline)
    for sentence in worse:
        typer.secho(f"worse than {baseline}: {sentence}", fg=typer.colors.RED, err=True)
    raise typer.Exit(ExitCode.WORSE_THAN_BASELINE if worse else result.exit_code)
