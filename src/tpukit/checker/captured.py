"""Check a captured program as a job is checked: compile the user's own step."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..capturing.captured import Captured, CapturedProgram, ListedProgram
from ..capturing.running import captured_block, run_captured
from ..compiler.memory import MemoryReport
from ..errors import CaptureError
from ..hardware import Slice
from ..plain_data import JsonMapping
from ..runtime.progress import Progress, silent
from .capture_fixes import CaptureAgain, CaptureFixer
from .capture_report import COUNTED, count_model_flops
from .check import NOTHING_TO_FIX, check_request
from .fix import Fix, FixList
from .program_findings import find_in_program
from .result import CheckResult

if TYPE_CHECKING:
    from ..compiler.timeline import StepPrediction


def check_program(
    command: Sequence[str],
    on: Slice | str,
    *,
    program: str | None = None,
    network: bool = False,
    keep: Path | None = None,
    timeout_s: float | None = None,
    progress: Progress = silent,
    **how: Any,
) -> CheckResult:
    """Check any unmodified jax program: run it as if on a slice, and compile its training step.

    Args:
        command: The program and its arguments, such as ["python", "train.py"].
        on: The slice.
        program: Name of a jitted function to check instead of the training step.
        network: Whether the command may reach other machines.
        keep: Folder to keep the capture in, for a later `check_captured`.
        timeout_s: Time limit of the command, and of each compile.
        progress: Called with each stage as it is reached.
        **how: Further arguments of `check_captured`.

    Raises:
        CaptureError: Nothing was captured; the message has the reason and the line of the user's
            code.
    """

    def run(target: Slice | str, kept: Path | None = None) -> Captured:
        return run_captured(
            command,
            target,
            program=program,
            network=network,
            keep=kept,
            timeout_s=timeout_s,
            progress=progress,
        )

    return check_captured(run(on, keep), timeout_s=timeout_s, progress=progress, again=run, **how)


def check_captured(
    captured: Captured,
    *,
    options: JsonMapping | None = None,
    per_step: int | None = None,
    memory_only: bool = False,
    timeout_s: float | None = None,
    use_cache: bool = True,
    dump_to: Path | None = None,
    progress: Progress = silent,
    verdict: Callable[[MemoryReport], None] | None = None,
    fix: bool = False,
    again: CaptureAgain | None = None,
) -> CheckResult:
    """Compile the programs of a capture, and predict its step.

    If a step consists of several programs, such as gradients and optimizer update, the result is
    for the heaviest program. `CheckResult.parts` has the others, and their times are added up.

    Args:
        captured: The capture.
        options: Compiler options in addition to the flags that the program sets itself.
        per_step: Tokens or examples per step, for prices and rates.
        memory_only: Whether to stop after the memory report.
        timeout_s: Time limit of each compile.
        use_cache: Whether to use and keep cached compiles.
        dump_to: Folder for a copy of every file that the compiler writes.
        progress: Called with each stage as it is reached.
        verdict: Called with the memory report of the heaviest program as soon as it is known.
        fix: Whether to prove changes that reduce memory, each by a compile.
        again: Captures the same program for another slice, to prove that a larger slice helps.
    """
    ordered = sorted(captured.programs, key=lambda one: -one.about.flops)
    results: list[CheckResult] = []
    for number, one in enumerate(ordered):
        progress(f"compile {one.name} for {captured.slice}")
        found = check_request(
            captured.request(one, options or {}),
            memory_only=memory_only,
            timeout_s=timeout_s,
            use_cache=use_cache,
            dump_to=dump_to if number == 0 else None,
            tokens_per_step=per_step if number == 0 else None,
            progress=progress,
            verdict=verdict if number == 0 else None,
        )
        findings = find_in_program(captured, one, found.compiled, found.prediction)
        results.append(
            replace(
                found,
                captured=captured,
                program=one,
                calls=one.calls,
                findings=findings,
                prediction=_with_flops(found, one),
                fixes=_fixes(
                    CaptureFixer(captured, one, found.memory, options or {}, again),
                    prove=fix,
                    timeout_s=timeout_s,
                    use_cache=use_cache,
                    progress=progress,
                ),
            )
        )
    if fix and not any(one.fixes for one in results):
        progress(NOTHING_TO_FIX)
    fixes = _named_fixes(results) if len(results) > 1 else results[0].fixes
    return replace(results[0], parts=tuple(results[1:]), fixes=fixes)


def _fixes(fixer: CaptureFixer, *, prove: bool, **how: Any) -> FixList | None:
    """Return changes to a program that reduce its memory; None if there are none."""
    proposed = fixer.propose()
    if not proposed.fixes:
        return None
    return fixer.prove(proposed, **how) if prove else proposed


def _named_fixes(results: Sequence[CheckResult]) -> FixList | None:
    """Return the fixes of all programs of a step, each with its program's name."""
    named = [
        fix if "on" in fix.changes or "flags" in fix.changes else _of_program(fix, one)
        for one in results
        if one.fixes is not None
        for fix in one.fixes.fixes
    ]
    return FixList(tuple(named)) if named else None


def _of_program(fix: Fix, result: CheckResult) -> Fix:
    name = result.compiled.name
    return replace(fix, changes={key: f"{one} ({name})" for key, one in fix.changes.items()})


def _with_flops(found: CheckResult, program: CapturedProgram) -> "StepPrediction | None":
    """Return the prediction with the counted model FLOPs, from which it computes MFU."""
    if found.prediction is None:
        return None
    counted = count_model_flops(program, found.compiled).value
    return replace(found.prediction, model_flops=counted, flops_counted=COUNTED)


@dataclass(frozen=True)
class CapturedBlock:
    """The recording of a `with tpukit.capture(...)` block; complete when the block ends."""

    slice: Slice
    found: list[Captured] = field(default_factory=list[Captured], repr=False)

    @property
    def captured(self) -> Captured:
        """The capture.

        Raises:
            CaptureError: The block has not ended.
        """
        if not self.found:
            raise CaptureError("the capture is complete when its `with` block ends; read it then.")
        return self.found[0]

    @property
    def programs(self) -> tuple[ListedProgram, ...]:
        """Every program that was recorded instead of run."""
        return self.captured.listed

    @property
    def step(self) -> tuple[CapturedProgram, ...]:
        """The programs of one training step."""
        return self.captured.programs

    def check(self, **how: Any) -> CheckResult:
        """Check the step; the arguments are those of `check_captured`."""
        return check_captured(self.captured, **how)


@contextmanager
def capture(on: Slice | str, *, program: str | None = None) -> Generator[CapturedBlock]:
    """Record the large programs of a block, as if on a slice, instead of running them.

    The block ends at the first call of its training step, or of `program`.

    Args:
        on: The slice.
        program: Name of a jitted function to capture instead of the training step.

    Raises:
        CaptureError: Nothing was recorded in the block.

    Example:
        >>> with tpukit.capture(on="v6e-256") as captured:
        ...     main()
        >>> captured.check().fits
    """
    block = CapturedBlock(Slice.parse(on) if isinstance(on, str) else on)
    with captured_block(block.slice, program, block.found):
        yield block
