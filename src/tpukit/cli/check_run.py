"""One check, step by step: compile or remember, predict, look for fixes."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..checker.fixes import FixList
    from ..compiler import CompiledStep, CompileRequest
    from ..compiler.timeline import StepPrediction
    from ..job.job import Plan
    from ..runtime.progress import Progress

FIXES_VERIFIED = 6


@contextmanager
def refusals_as_exit_codes() -> Generator[None]:
    """Say what the compiler refused before there was anything to report, and exit as `check` does.

    Other errors are the user's, and pass through to `main.run`.
    """
    from ..checker.result import COULD_NOT_TELL, DOES_NOT_FIT
    from ..errors import TPUNotAvailableError, TPUOutOfMemoryError, XLACompilationError

    try:
        yield
    except TPUOutOfMemoryError as error:
        typer.secho(f"DOES NOT FIT {error}", fg=typer.colors.RED)
        raise typer.Exit(DOES_NOT_FIT) from None
    except (XLACompilationError, TPUNotAvailableError) as error:
        typer.secho(f"could not tell: {error}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(COULD_NOT_TELL) from None


class Announcer:
    """Says on standard error what is being done, with the seconds since the start."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def __call__(self, what: str) -> None:
        """Write one line."""
        sys.stderr.write(f"{time.perf_counter() - self.started:6.1f} s  {what}\n")
        sys.stderr.flush()

    def stage(self, stage: str) -> None:
        """Write a compile's stage, as its progress callback."""
        self(stage)


class Run:
    """One check: how to compile, and whom to tell."""

    def __init__(
        self, say: Announcer, *, use_cache: bool, dump: Path | None, timeout_s: float
    ) -> None:
        self.say, self.use_cache, self.dump, self.timeout_s = say, use_cache, dump, timeout_s

    def job(self, job: "Plan") -> "CompiledStep":
        """Compile a job, or find what an earlier check of the same job left."""
        from ..compiler.aot import run_request

        known = self.known(job)
        if known is not None:
            return known
        request = self.lower(job, self.say.stage)
        return run_request(request, until="schedule", **self._how())

    def known(self, job: "Plan") -> "CompiledStep | None":
        """What an earlier check of the same job left; needs no jax."""
        from ..checker.compiling import known_compile

        return known_compile(job) if self.use_cache and self.dump is None else None

    def lower(self, job: "Plan", progress: "Progress") -> "CompileRequest":
        """Lower a job's training step, and remember which compile answers it."""
        from ..checker.compiling import lower_job

        return lower_job(job, progress=progress, remember=self.use_cache)

    def function(
        self,
        target: str,
        arg: list[str] | None,
        donate: list[int] | None,
        settings: dict[str, Any],
    ) -> "CompiledStep":
        """Compile somebody's own function."""
        from ..compiler.aot import run_request

        request = self.lower_function(target, arg, donate, settings)
        return run_request(request, until="schedule", **self._how())

    def lower_function(
        self,
        target: str,
        arg: list[str] | None,
        donate: list[int] | None,
        settings: dict[str, Any],
    ) -> "CompileRequest":
        """Lower somebody's own function."""
        from ..compiler.program.entry import load_function, parse_argument
        from ..compiler.program.request import make_request
        from ..errors import ConfigError
        from ..runtime.environment import configure_tpu_environment

        only_for_jobs = [
            name for name, value in settings.items() if value and name not in ("slice", "options")
        ]
        if only_for_jobs or not settings["slice"]:
            wrong = f"takes no {', '.join(only_for_jobs)}" if only_for_jobs else "needs --on"
            raise ConfigError(f"a function {wrong}; write --on SLICE and its arguments as --arg.")
        configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
        return make_request(
            load_function(target),
            settings["slice"],
            *[parse_argument(text) for text in arg or ()],
            donate_argnums=donate or (),
            options=settings["options"],
            progress=self.say.stage,
        )

    def _how(self) -> dict[str, Any]:
        return {
            "timeout_s": self.timeout_s,
            "progress": self.say.stage,
            "use_cache": self.use_cache,
            "dump_to": self.dump,
        }


def predict(compiled: "CompiledStep", job: "Plan | None") -> "tuple[StepPrediction | None, str]":
    """The predicted step, or the reason there is none."""
    from ..errors import TPUError

    if not compiled.fits:
        return None, "a program that does not fit takes no step"
    try:
        return compiled.predict(
            tokens_per_step=None if job is None else job.tokens_per_step,
            model_flops=None if job is None else job.model_flops,
        ), ""
    except TPUError as error:
        return None, str(error)


def find_fixes(run: Run, job: "Plan", compiled: "CompiledStep", *, verify: bool) -> "FixList":
    """The fixes; with `verify` the first of them compiled."""
    from ..checker.fixes import JobShape, propose_fixes, rank
    from ..compiler import CompiledStep, compile_many
    from ..errors import TPUError
    from ..runtime.progress import silent

    proposed = propose_fixes(JobShape.of(job), compiled.memory)
    if not verify:
        return proposed
    tried = list(proposed.fixes[:FIXES_VERIFIED])
    run.say(f"verifying {len(tried)} fixes, each by a compile")
    requests: dict[int, CompileRequest] = {}
    for place, one in enumerate(tried):
        try:
            changed = job.replace(**one.changes)
            known = run.known(changed)
            if known is not None:
                tried[place] = one.verified(known.memory)
            else:
                requests[place] = run.lower(changed, silent)
        except TPUError as error:
            tried[place] = replace(one, failure=str(error))
    answers = compile_many(
        requests.values(), until="memory", timeout_s=run.timeout_s, use_cache=run.use_cache
    )
    for place, answer in zip(requests, answers, strict=True):
        tried[place] = (
            tried[place].verified(answer.memory)
            if isinstance(answer, CompiledStep)
            else replace(tried[place], failure=str(answer))
        )
    return rank([*tried, *proposed.fixes[FIXES_VERIFIED:]])
