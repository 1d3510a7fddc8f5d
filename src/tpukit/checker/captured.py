"""The verdict on a captured program: the same answers as for a job, from the user's own step."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..capturing.captured import Captured, CapturedProgram, ListedProgram
from ..capturing.in_process import captured_block
from ..capturing.running import run_captured
from ..compiler.memory import MemoryReport
from ..errors import CaptureError
from ..hardware import Slice
from ..runtime.progress import Progress, silent
from .captured_flops import COUNTED, count_model_flops
from .check import NOTHING_TO_FIX, check_request
from .fixes import Fix, FixList
from .fixes.of_capture import CaptureAgain, CaptureFixer
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
    """Judge any jax program, unmodified: run it as if on a slice, and compile the step it calls.

    Args:
        command: The program and its arguments, such as ["python", "train.py"].
        on: The slice.
        program: The name of a jitted function to judge instead of the training step.
        network: Whether the command may reach other machines.
        keep: A folder that keeps the capture, for `check_captured` later.
        timeout_s: For the command, and for each compile.
        progress: Called with each stage as it is reached.
        **how: As for `check_captured`.

    Raises:
        CaptureError: Nothing was captured; the message names the reason and the user's line.
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
    options: Mapping[str, Any] | None = None,
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
    """Compile what a capture recorded, and predict its step.

    A step of several programs, such as gradients and an optimizer apart, gives one result for the
    heaviest of them; the others are in `CheckResult.parts`, and times add up.

    Args:
        captured: What was recorded.
        options: Compiler options beside the flags that the program sets itself.
        per_step: Tokens or examples per step, for prices and rates.
        memory_only: Whether the verdict on memory is enough.
        timeout_s: Until a compile is killed.
        use_cache: Whether an earlier answer is accepted, and this one kept.
        dump_to: A folder that gets a copy of every file the compiler wrote.
        progress: Called with each stage as it is reached.
        verdict: Called with the memory report of the heaviest program as soon as it is known.
        fix: Whether to prove what would take less memory, each change by a compile.
        again: Captures the same program for another slice, so that a larger one can be proved.
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
    """Return what a program could change; None where nothing is worth it."""
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
    """Return the prediction with the FLOPs that were counted, for its MFU."""
    if found.prediction is None:
        return None
    counted = count_model_flops(program, found.compiled).value
    return replace(found.prediction, model_flops=counted, flops_counted=COUNTED)


@dataclass(frozen=True)
class CapturedBlock:
    """What a `with tpukit.capture(...)` block recorded; complete when the block ends."""

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
        """Return the verdict on the step; the arguments are those of `check_captured`."""
        return check_captured(self.captured, **how)


@contextmanager
def capture(on: Slice | str, *, program: str | None = None) -> Generator[CapturedBlock]:
    """Record the large programs of a block instead of running them, as if on a slice.

    The block is left at the first call of its training step, or of `program`.

    Args:
        on: The slice.
        program: The name of a jitted function to capture instead of the training step.

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
