"""`tpukit check … -- COMMAND`: any program, unmodified, judged as if it ran on the slice."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand

from ..errors import ConfigError, TPUError
from .output import Announcer, print_whole, refusals_as_exit_codes, show

if TYPE_CHECKING:
    from ..capturing.captured import Captured
    from ..checker.result import CheckResult
    from ..compiler.memory import MemoryReport
    from ..hardware import Slice
    from ..runtime.progress import Progress

COMMAND = "tpukit.command"


class ProgramCommand(TyperCommand):
    """A command that takes another command behind `--`, kept apart from its own words."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take everything behind the first `--` as the command, and parse the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


def is_kept(target: str | None) -> bool:
    """Return whether a target is a folder that `tpukit check --keep` wrote."""
    return target is not None and (Path(target) / "capture.json").is_file()


def command_behind(called: typer.Context) -> list[str] | None:
    """Return the command that was typed behind `--`, or None where there is no `--`."""
    return called.meta.get(COMMAND)


@dataclass(frozen=True)
class AskedProgram:
    """What was typed beside a command.

    Attributes:
        command: The program and its arguments.
        folder: A capture that was kept, instead of a command.
        program: The jitted function to judge; None for the training step.
    """

    command: Sequence[str]
    folder: Path | None = None
    program: str | None = None
    list_programs: bool = False
    network: bool = False
    keep: Path | None = None
    timeout_s: float | None = None

    def capture(self, on: str, progress: "Progress") -> "Captured":
        """Return the capture for one slice."""
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
        """Return the capture for the one slice that a command needs."""
        from ..hardware import Slice

        if on is None and self.folder is None:
            raise ConfigError("which slice? Give --on v6e-8.")
        if on is not None and "," in on:
            raise ConfigError(f"expected one slice, but --on is {on}; several are for one check.")
        return self.capture("" if on is None else str(Slice.parse(on)), progress)

    @contextmanager
    def kept_capture(self, on: str | None, progress: "Progress") -> "Generator[Path]":
        """Yield a folder with the capture for one slice, as another process reads it."""
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
        """Return what captures the command for another slice; None for a kept capture."""
        if self.folder is not None:
            return None
        other = replace(self, keep=None)
        return lambda target: other.capture(str(target), say)


def check_programs(
    asked: AskedProgram, on: str | None, say: Announcer, **how: Any
) -> "Mapping[str, Any]":
    """Judge a program on each slice named between commas; return results or reasons by slice."""
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
    """Judge a program, show the answer, and exit as `check` does."""
    from ..checker.capture_view import ProgramTable, SliceComparison
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
        raise typer.Exit(0)
    if len(found) > 1:
        table = SliceComparison([(Slice.parse(name), one) for name, one in found.items()])
        show(table, json=json)
        raise typer.Exit(table.exit_code)
    (result,) = found.values()
    write(result)
    end_check(result, json=json, baseline=baseline)


def end_check(result: "CheckResult", *, json: bool, baseline: Path | None) -> NoReturn:
    """Show a result, name what is worse than in an earlier report, and exit."""
    from ..checker.baseline import find_regressions
    from ..checker.result import WORSE

    if json:
        show(result, json=True)
    else:
        print_whole(result.details())
    worse = [] if baseline is None else find_regressions(result, baseline)
    for sentence in worse:
        typer.secho(f"worse than {baseline}: {sentence}", fg=typer.colors.RED, err=True)
    raise typer.Exit(WORSE if worse else result.exit_code)
