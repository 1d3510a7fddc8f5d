"""Slices for a model of unknown dimensions: its step is compiled for one after another."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...checker.compiling import compile_jobs
from ...checker.host_memory import host_memory
from ...compiler.compiled import CompiledStep
from ...errors import TPUError, TPUNotAvailableError
from ...job.job import Job
from ...runtime.progress import Progress
from ...runtime.ranges import COUNT
from ..answer.choice import Choice, Verified
from ..cost.compiled_memory import split_of
from ..cost.money import SPOT, host_bytes_per_s
from ..cost.step_variant import CAUSES
from .objectives import PlanLimits
from .search import Ask, optimizer_settings
from .verification import Compile, broken_limit, sort_key

AT_ONCE = 2  # compiles side by side before the clock is looked at again
_REFUSED = "the compiler refused it"
_CAUSES = {"kernel": "attention", "vector": "hbm", "overhead": "hbm"}


@dataclass
class OwnModelSearch:
    """Compiles a user's own step for one slice after another, each as one `fsdp` axis.

    Attributes:
        budget_s: No compile starts after so long.
        progress: Called with a line before each compile.
        notes: Slices that were compiled for and do not do, and why.
    """

    ask: Ask
    budget_s: float
    progress: Progress
    compile: Compile = compile_jobs
    compiled: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list[str])

    def choices(self) -> tuple[list[Choice], str]:
        """Choices that meet the limits, the best first; else the nearest, and why."""
        started = time.perf_counter()
        found: list[Choice] = []
        waiting = list(self._jobs())
        skipped = 0
        while waiting:
            left = self.budget_s - (time.perf_counter() - started)
            if left <= 0:
                skipped = len(waiting)
                break
            now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            self.progress(f"compiling for {', '.join(str(job.on) for job in now)}")
            answers = self.compile(now, timeout_s=left, progress=self.progress)
            for job, answer in zip(now, answers, strict=True):
                self.compiled += 1
                found += self._read(job, answer)
        if skipped:
            self.notes.append(f"{skipped} slices were not asked about: time was up")
        self.seconds = time.perf_counter() - started
        found.sort(key=lambda choice: sort_key(self.ask.objective, choice))
        passed = [choice for choice in found if not broken_limit(choice, self.ask.limits)]
        if passed:
            return passed, ""
        if not found:
            refused = next((note for note in self.notes if _REFUSED in note), "")
            return [], refused or "no slice that its batch can be split over holds it"
        return found, f"every slice that holds it breaks a limit: {self._nearest(found[0])}"

    def _nearest(self, choice: Choice) -> str:
        limits: PlanLimits = self.ask.limits
        return f"{choice.slice}: {broken_limit(choice, limits).rstrip(',')}"

    def _jobs(self) -> Iterator[Job]:
        """A job for every slice its batch can be split over, the smallest slices first."""
        subject, optimizer = self.ask.subject, self.ask.space.optimizers[0]
        where = [one for one in self.ask.space.slices() if one.num_slices == 1]
        for on in sorted(where, key=lambda one: one.chips):
            examples = subject.fixed_examples or on.devices  # one a device, where nobody said
            if examples % on.devices == 0:
                yield Job(
                    model=subject.name if subject.given is None else subject.given,
                    on=str(on),
                    mesh={"fsdp": -1},
                    batch_size=examples,
                    sequence_length=subject.sequence_length,
                    remat=subject.remat,
                    train={**optimizer_settings(optimizer), **subject.fine_tuning},
                )

    def _read(self, job: Job, answer: CompiledStep | TPUError) -> list[Choice]:
        if isinstance(answer, TPUNotAvailableError):
            raise answer
        if isinstance(answer, TPUError):
            self.notes.append(f"{job.on}: {_REFUSED}: {answer}")
            return []
        memory = answer.memory
        usable = float(memory.usable_bytes or math.inf)
        if not answer.fits or memory.total_bytes > usable * (1 - self.ask.limits.min_headroom):
            self.notes.append(f"{job.on}: {memory.verdict}")
            return []
        hosts = host_memory(job, answer)
        if hosts is not None and hosts.fits is False:
            self.notes.append(f"{job.on}: {hosts.verdict}")
            return []
        step = answer.predict(
            tokens_per_step=job.tokens_per_step,
            progress=lambda line: self.progress(f"{answer.name} on {job.on}: {line}"),
        )
        return [self._choice(job, memory, step)]

    def _choice(self, job: Job, memory: Any, step: Any) -> Choice:
        ask, on = self.ask, job.slice
        purposes = split_of(memory).to_dict()
        causes: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        spent: dict[str, float] = step.seconds_by_cause
        for name, seconds in spent.items():
            causes[_CAUSES.get(name, name)] += seconds
        steps = math.ceil(ask.tokens / job.tokens_per_step)
        state = purposes["weights"] + purposes["optimizer"]  # of one device; all are split alike
        quote, region = ask.market.quote(on)
        return Choice(
            slice=on,
            mesh=job.mesh_sizes,
            batch_size=job.examples,
            microbatches=job.microbatches,
            remat=job.remat or "",
            precision="bf16",
            optimizer=ask.space.optimizers[0],
            job=job.replace(
                {"launch": ask.market.launch_terms(on)},
                **({"train.steps": steps} if steps in COUNT else {}),
            ),
            memory={**purposes, "total": float(memory.total_bytes)},
            usable_bytes=float(memory.usable_bytes or 0),
            modelled_step_s=step.step_time_s,
            seconds_by_cause=causes,
            steps=steps,
            tokens_per_step=job.tokens_per_step,
            model_flops=None,
            usd_per_chip_hour=quote,
            region=region,
            preemption=ask.market.preemption if ask.market.tier == SPOT else None,
            save_s=state / host_bytes_per_s(on),
            write_s=ask.market.preemption.write_s(state * on.devices),
            verified=Verified(
                fits=True,
                memory_bytes=memory.total_bytes,
                step_time_s=step.step_time_s,
                reason=" ".join(step.caveats),
            ),
        ).corrected(1.0)
