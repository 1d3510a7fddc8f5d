"""`tune_flags`: which compiler options make a step faster or smaller, each tried by a compile."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...compiler.aot import DEFAULT_TIMEOUT_S, compile_many, run_request
from ...compiler.compiled import CompiledStep
from ...compiler.program.lowered import Program
from ...compiler.program.request import CompileRequest, StepSource, make_request
from ...errors import FlagError, TPUError, TPUValidationError
from ...hardware import Slice
from ...job.job import Job
from ...runtime.flags import FlagRegistry, as_compiler_options, format_flags, set_xla_flags
from ...runtime.flags.setting import check_flags
from ...runtime.progress import Progress, watched
from ..compiling import lower_job
from .candidates import CandidateGroup, OptionSet, load_candidates
from .trials import FlagSearch, FlagTrial

if TYPE_CHECKING:
    from ...annotations import AnyMesh

DEFAULT_BUDGET = 24
# Predicted times nearer than this count as equal: no search can tell them apart.
SMALLEST_GAIN = 0.005
SMALLEST_SAVING = 0.01  # of memory, where the time is equal


def tune_flags(
    workload: Job | Callable[..., Any] | Program | StepSource | CompileRequest,
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
        workload: A `Job`, what `compile_for` takes, or what `make_request` made of it.
        on: The slice to compile for; a job or a request names its own.
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
    if isinstance(workload, CompileRequest):
        request = replace(workload, options={**workload.options, **started})
    elif on is None:
        raise TPUValidationError("which slice? Name one, for example on='v6e-8'.")
    else:
        request = make_request(
            workload, on, *args, mesh=mesh, donate_argnums=donate_argnums, options=started
        )
    search = _FlagSearch(
        request=request,
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
    request: CompileRequest
    registry: FlagRegistry
    budget: int
    deadline: float | None
    beam: int
    compile_options: Mapping[str, Any]
    progress: Progress
    trials: list[FlagTrial] = field(default_factory=list[FlagTrial])
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    stopped: str = ""

    def run(self, groups: Sequence[CandidateGroup]) -> FlagSearch:
        self.progress(f"compiling {self.request.program.name} with the options as given")
        how = {name: self.compile_options[name] for name in ("timeout_s", "use_cache")}
        compiled = run_request(self.request, until="schedule", **how)
        baseline = judge(compiled, FlagTrial(options=self.request.options))
        self.trials.append(baseline)
        self.progress(f"as given: {baseline.outcome}")
        kept = [baseline]
        for group in groups:
            missing = group.missing_in(compiled)
            if missing:
                self.skipped.append((group.name, missing))
                continue
            kept = self._choose(group, kept)
            if self.stopped:
                break
        return self._result(baseline, kept[0])

    def _choose(self, group: CandidateGroup, kept: list[FlagTrial]) -> list[FlagTrial]:
        """The best sets of options once a group was tried on top of those kept so far."""
        tried: list[FlagTrial] = []
        for candidate in group.candidates_for(self.request.slice.chip.name):
            default = self._already_default(candidate)
            if default:
                self.skipped.append((candidate.name, default))
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
                posed.append(FlagTrial(names=names, options=options))
            except FlagError as error:  # unknown to this libtpu, or not with what is on already
                self._record(FlagTrial(names=names, options=wanted, refusal=str(error)))
        return posed

    def _already_default(self, candidate: OptionSet) -> str:
        flags = {name: self.registry.get(name) for name in candidate.options}
        same = [
            flag is not None and flag.default == flag.render(candidate.options[name])
            for name, flag in flags.items()
        ]
        return "already the default" if all(same) else ""

    def _compile(self, posed: list[FlagTrial]) -> list[FlagTrial]:
        """Compile as many as budget and time allow, some side by side."""
        affordable = posed[: max(0, self.budget - len(self.trials))]
        if len(affordable) < len(posed):
            self.stopped = f"the budget of {self.budget} compiles is spent"
        how = dict(self.compile_options)
        if self.deadline is not None:
            left = self.deadline - time.monotonic()
            if left <= 0:
                self.stopped = "the time is spent"
                return []
            how["timeout_s"] = min(how["timeout_s"], left)
        requests = [replace(self.request, options=trial.options) for trial in affordable]
        answers = compile_many(requests, until="schedule", **how)
        return [
            self._record(judge(answer, trial))
            for trial, answer in zip(affordable, answers, strict=True)
        ]

    def _record(self, trial: FlagTrial) -> FlagTrial:
        self.trials.append(trial)
        self.progress(f"+ {trial.names[-1]}: {trial.outcome}")
        return trial

    def _result(self, baseline: FlagTrial, best: FlagTrial) -> FlagSearch:
        record = set_xla_flags(best.options, environment={}, registry=self.registry)
        written = check_flags(best.options, registry=self.registry)
        return FlagSearch(
            program=self.request.program.name,
            slice=self.request.slice,
            baseline=baseline,
            best=best,
            trials=tuple(self.trials),
            skipped=tuple(self.skipped),
            variables=record.variables,
            flags=format_flags({name: text for name, (_, text) in written.items()}),
            stopped=self.stopped,
        )


def judge(answer: CompiledStep | TPUError, trial: FlagTrial) -> FlagTrial:
    """A trial with what the compiler said of it, and the step predicted from that."""
    if isinstance(answer, TPUError):
        return replace(trial, refusal=str(answer))
    try:
        found = replace(trial, fits=answer.fits, total_bytes=answer.memory.total_bytes)
        if not answer.fits:
            return replace(found, no_prediction="a program that does not fit takes no step")
        prediction = answer.predict()
    except TPUError as error:
        return replace(trial, refusal=str(error))
    return replace(found, step_time_s=prediction.step_time_s, caveats=prediction.caveats)


def is_better(trial: FlagTrial, than: FlagTrial) -> bool:
    """Whether a trial is worth keeping: it fits, is faster, or is smaller at the same time."""
    # What the prediction cannot see counts as nothing there, which would look like a gain.
    if trial.refusal or len(trial.caveats) > len(than.caveats):
        return False
    if bool(trial.fits) != bool(than.fits):
        return bool(trial.fits)
    smaller = (trial.total_bytes or 0) < (1 - SMALLEST_SAVING) * (than.total_bytes or 0)
    if trial.step_time_s is None or than.step_time_s is None:
        return smaller
    if trial.step_time_s < (1 - SMALLEST_GAIN) * than.step_time_s:
        return True
    return smaller and trial.step_time_s <= than.step_time_s
