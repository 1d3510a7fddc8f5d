"""The verdict on a captured program: the same answers as for a job, from the user's own step."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..capturing.captured import Captured, CapturedProgram, ListedProgram
from ..capturing.in_process import captured_block
from ..capturing.running import run_captured
from ..compiler.memory import MemoryReport
from ..errors import CaptureError
from ..hardware import Slice
from ..runtime.progress import Progress, silent
from .check import check_request
from .program_findings import find_in_program
from .result import CheckResult


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
    captured = run_captured(
        command,
        on,
        program=program,
        network=network,
        keep=keep,
        timeout_s=timeout_s,
        progress=progress,
    )
    return check_captured(captured, timeout_s=timeout_s, progress=progress, **how)


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
        results.append(replace(found, captured=captured, calls=one.calls, findings=findings))
    return replace(results[0], parts=tuple(results[1:]))


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
