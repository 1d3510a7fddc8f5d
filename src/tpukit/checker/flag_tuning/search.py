"""`tune_flags`: which compiler options make a step faster or smaller, each tried by a compile."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...capturing.captured import Captured
from ...compiler.aot import DEFAULT_TIMEOUT_S, compile_many, run_request
from ...compiler.compiled import CompiledStep
from ...compiler.program.lowered import Program
from ...compiler.program.request import CompileRequest, StepSource, make_request
from ...errors import FlagError, TPUError, TPUValidationError
from ...hardware import Slice
from ...job.job import Job
from ...runtime.flags import FlagRegistry, as_compiler_options, format_flags, set_xla_flags
from ...runtime.flags.setting import check_flags
from ...runtime.flags.syntax import read_values
from ...runtime.progress import Progress, watched
from ..compiling import lower_job
from .candidates import CandidateGroup, OptionSet, load_candidates
from .judging import in_one_step, is_better, judge
from .trials import FlagSearch, FlagTrial

if TYPE_CHECKING:
    from ...annotations import AnyMesh

DEFAULT_BUDGET = 24


def tune_flags(
    workload: Job | Callable[..., Any] | Program | StepSource | CompileRequest | Captured,
    on: Slice | str | None = None,
    *args: Any,
    mesh: "Mapping[str, int] | AnyMesh | None" = None,
    donate_argnums: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    budget: int = DEFAULT_BUDGET,
    seconds: float | None = None,
    beam: int = 1,
    workers: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    use_cache: bool = True,
    progress: Progress = watched,
    groups: Sequence[CandidateGroup] | None = None,
    registry: FlagRegistry | None = None,
) -> FlagSearch:
    """Search the options of one compile for a workload and a slice.

    Group after group is tried on top of the best so far; a candidate stays only when the predicted
    step gets shorter (or the memory smaller at the same time). What the compiler refuses is
    recorded with its reason; what the prediction is blind to is tried and shown, not chosen.

    Args:
        workload: A `Job`, what `compile_for` takes, what `make_request` made of it, or a captured
            program, whose own flags stay on; a step of several programs is tried as a whole.
        on: The slice to compile for; a job, a request or a capture names its own.
        *args: Example arguments of a function.
        mesh: For a workload, as for `compile_for`.
        donate_argnums: For a function, as for `compile_for`.
        options: Where to start from; the compiler's defaults when left out.
        budget: Compiles to spend at most, the first one included.
        seconds: Time to spend at most; a compile that has begun is then cut off.
        beam: Sets of options carried from group to group; 1 keeps only the best.
        workers: Compiles at once; by default as many as cores and memory allow.
        timeout_s: For each compile.
        use_cache: Whether answers on disk will do.
        progress: Called with a line for each thing that is done.
        groups: What to try; by default the groups that come with tpukit.
        registry: The flags to check against; those installed here by default.

    Raises:
        XLACompilationError: The program does not compile with the options it starts from.
        TPUValidationError: The budget or the beam is less than one.
    """
    if budget < 1 or beam < 1:
        raise TPUValidationError(
            f"budget is {budget} and beam {beam}; a search needs at least one compile and one set "
            "of options to go on from."
        )
    registry = FlagRegistry.installed() if registry is None else registry
    started = as_compiler_options(options or {}, registry=registry)
    if isinstance(workload, Job):
        workload = lower_job(workload if on is None else workload.replace(on=str(on)))
    calls = [1]
    if isinstance(workload, Captured):
        ordered = workload.by_flops
        requests = [workload.request(one, started) for one in ordered]
        calls = [one.calls for one in ordered]
    elif isinstance(workload, CompileRequest):
        requests = [replace(workload, options={**workload.options, **started})]
    elif on is None:
        raise TPUValidationError("which slice? Name one, for example on='v6e-8'.")
    else:
        requests = [
            make_request(
                workload, on, *args, mesh=mesh, donate_argnums=donate_argnums, options=started
            )
        ]
    search = _FlagSearch(
        requests=requests,
        calls=calls,
        registry=registry,
        budget=budget,
        deadline=None if seconds is None else time.monotonic() + seconds,
        beam=beam,
        compile_options={"workers": workers, "timeout_s": timeout_s, "use_cache": use_cache},
        progress=progress,
    )
    return search.run(load_candidates() if groups is None else groups)


@dataclass
class _FlagSearch:
    """One search.

    Attributes:
        requests: The programs of one step, the heaviest first; all get the same options.
        calls: How often one step runs each of them.
    """

    requests: Sequence[CompileRequest]
    calls: Sequence[int]
    registry: FlagRegistry
    budget: int
    deadline: float | None
    beam: int
    compile_options: Mapping[str, Any]
    progress: Progress
    trials: list[FlagTrial] = field(default_factory=list[FlagTrial])
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    stopped: str = ""

    @property
    def name(self) -> str:
        return ", ".join(one.program.name for one in self.requests)

    @property
    def variables(self) -> dict[str, str]:
        """The flags that the program sets for itself."""
        own = self.requests[0].libtpu_init_args
        return {"LIBTPU_INIT_ARGS": own} if own else {}

    def run(self, groups: Sequence[CandidateGroup]) -> FlagSearch:
        self.progress(f"compiling {self.name} with the options as given")
        how = {name: self.compile_options[name] for name in ("timeout_s", "use_cache")}
        compiled = [run_request(one, until="schedule", **how) for one in self.requests]
        baseline = self._judge(compiled, FlagTrial(options=self.requests[0].options))
        self.trials.append(baseline)
        self.progress(f"as given: {baseline.outcome}")
        kept = [baseline]
        for group in groups:
            missing = [group.missing_in(one) for one in compiled]
            if all(missing):
                self.skipped.append((group.name, missing[0]))
                continue
            kept = self._choose(group, kept)
            if self.stopped:
                break
        return self._result(baseline, kept[0])

    def _choose(self, group: CandidateGroup, kept: list[FlagTrial]) -> list[FlagTrial]:
        """The best sets of options once a group was tried on top of those kept so far."""
        tried: list[FlagTrial] = []
        for candidate in group.candidates_for(self.requests[0].slice.chip.name):
            already = self._already_set(candidate)
            if already:
                self.skipped.append((candidate.name, already))
                continue
            tried += self._refuse_or_pose(candidate, kept)
        answers = self._compile([trial for trial in tried if not trial.refusal])
        better = list(kept)
        for trial in answers:
            parent = next(one for one in kept if one.names == trial.names[:-1])
            if is_better(trial, parent) and (not group.unseen or trial.fits != parent.fits):
                better.append(trial)
        if group.unseen and answers:
            self.skipped.append((f"{group.name} by its time", group.unseen))
        return sorted(better, key=lambda trial: trial.order)[: self.beam]

    def _refuse_or_pose(self, candidate: OptionSet, kept: list[FlagTrial]) -> list[FlagTrial]:
        posed: list[FlagTrial] = []
        for parent in kept:
            wanted = {**parent.options, **candidate.options}
            names = (*parent.names, candidate.name)
            try:
                options = as_compiler_options(wanted, registry=self.registry)
                if self.variables:  # refuses what excludes a flag of the program's own
                    set_xla_flags(wanted, environment=self.variables, registry=self.registry)
                posed.append(FlagTrial(names=names, options=options))
            except FlagError as error:  # unknown to this libtpu, or not with what is on already
                self._record(FlagTrial(names=names, options=wanted, refusal=str(error)))
        return posed

    def _already_set(self, candidate: OptionSet) -> str:
        own = read_values(self.requests[0].libtpu_init_args)
        flags = {name: self.registry.get(name) for name in candidate.options}
        same = [
            flag is not None and own.get(name, flag.default) == flag.render(candidate.options[name])
            for name, flag in flags.items()
        ]
        if not all(same):
            return ""
        return "the program sets it already" if own.keys() & flags else "already the default"

    def _compile(self, posed: list[FlagTrial]) -> list[FlagTrial]:
        """Compile as many as budget and time allow, some side by side."""
        left = self.budget // len(self.requests) - len(self.trials)
        affordable = posed[: max(0, left)]
        if len(affordable) < len(posed):
            self.stopped = f"the budget of {self.budget} compiles is spent"
        how = dict(self.compile_options)
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left <= 0:
                self.stopped = "the time is spent"
                return []
            how["timeout_s"] = min(how["timeout_s"], left)
        count = len(self.requests)
        requests = [
            replace(one, options=trial.options) for trial in affordable for one in self.requests
        ]
        answers = compile_many(requests, until="schedule", **how)
        return [
            self._record(self._judge(answers[number * count : (number + 1) * count], trial))
            for number, trial in enumerate(affordable)
        ]

    def _judge(self, answers: Sequence[CompiledStep | TPUError], trial: FlagTrial) -> FlagTrial:
        return in_one_step([judge(answer, trial) for answer in answers], self.calls)

    def _record(self, trial: FlagTrial) -> FlagTrial:
        self.trials.append(trial)
        self.progress(f"+ {trial.names[-1]}: {trial.outcome}")
        return trial

    def _result(self, baseline: FlagTrial, best: FlagTrial) -> FlagSearch:
        record = set_xla_flags(best.options, environment=self.variables, registry=self.registry)
        written = check_flags(best.options, registry=self.registry)
        return FlagSearch(
            program=self.name,
            slice=self.requests[0].slice,
            baseline=baseline,
            best=best,
            trials=tuple(self.trials),
            skipped=tuple(self.skipped),
            variables=record.variables,
            flags=format_flags({name: text for name, (_, text) in written.items()}),
            stopped=self.stopped,
        )
