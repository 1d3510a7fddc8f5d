"""`tune_flags`: compile with many options, and choose those that make a step faster or smaller."""

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from ...capturing.captured import Captured
from ...compiler.aot import DEFAULT_TIMEOUT_S, compile_many, run_request
from ...compiler.compiled import CompiledStep
from ...compiler.program.lowered import Program
from ...compiler.program.request import CompileRequest, StepSource, make_request
from ...errors import FlagError, TPUError, TPUValidationError
from ...hardware import Slice
from ...job.job import Job
from ...plain_data import JsonMapping
from ...runtime.flags import FlagRegistry, as_compiler_options, format_flags, set_xla_flags
from ...runtime.flags.setting import check_flags
from ...runtime.flags.syntax import read_values
from ...runtime.progress import Progress, watched
from ..compiling import lower_job
from .trials import FlagSearch, FlagTrial, in_one_step, is_better, judge

if TYPE_CHECKING:
    from ...annotations import AnyMesh


@dataclass(frozen=True)
class OptionSet:
    """Options that are tried together.

    Attributes:
        generations: TPU generations it applies to; None for all.
        reason: Its effect, according to its source.
    """

    group: str
    label: str
    options: JsonMapping
    generations: frozenset[str] | None
    reason: str
    source: str

    @property
    def name(self) -> str:
        """Group and label."""
        return f"{self.group}: {self.label}"


@dataclass(frozen=True)
class CandidateGroup:
    """Alternative sets of options, of which at most one is chosen.

    Attributes:
        question: What the group decides, as a question.
        needs: A feature the program must have for the group to matter, such as "collectives"; ""
            for none.
        unseen: The effect that the prediction does not model; such a group is not chosen by its
            time.
    """

    name: str
    question: str
    needs: str
    unseen: str
    candidates: tuple[OptionSet, ...]

    def candidates_for(self, generation: str) -> tuple[OptionSet, ...]:
        """Return the candidates for one TPU generation."""
        return tuple(
            one
            for one in self.candidates
            if one.generations is None or generation in one.generations
        )

    def missing_in(self, compiled: CompiledStep) -> str:
        """Return why the group cannot affect a program; "" if it can."""
        if not self.needs or _HAS[self.needs](compiled):
            return ""
        return f"it needs {self.needs}, and {compiled.name} on {compiled.slice} has none"


@cache
def load_candidates() -> tuple[CandidateGroup, ...]:
    """Return tpukit's groups, in the order of the search."""
    place = resources.files("tpukit.runtime.flags").joinpath("data", "search.toml")
    data = tomllib.loads(place.read_text())
    return tuple(_group(entry, data["sources"]) for entry in data["group"])


def _group(entry: JsonMapping, sources: Mapping[str, str]) -> CandidateGroup:
    return CandidateGroup(
        name=entry["name"],
        question=entry["question"],
        needs=entry.get("needs", ""),
        unseen=entry.get("unseen", ""),
        candidates=tuple(
            OptionSet(
                group=entry["name"],
                label=one["label"],
                options=one["options"],
                generations=frozenset(one["generations"]) if "generations" in one else None,
                reason=one["reason"],
                source=sources[one["source"]],
            )
            for one in entry["candidate"]
        ),
    )


_HAS = {
    "collectives": lambda compiled: bool(compiled.collectives),
    "several slices": lambda compiled: compiled.slice.num_slices > 1,
    "sparse cores": lambda compiled: (
        bool(compiled.collectives) and bool(compiled.slice.chip.sparse_cores.value)
    ),
    "megacore": lambda compiled: (
        compiled.slice.chip.cores_per_chip > compiled.slice.chip.devices_per_chip
    ),
    "host transfers": lambda compiled: bool(compiled.memory.host_bytes),
}


DEFAULT_BUDGET = 24


def tune_flags(
    workload: Job | Callable[..., Any] | Program | StepSource | CompileRequest | Captured,
    on: Slice | str | None = None,
    *args: Any,
    mesh: "Mapping[str, int] | AnyMesh | None" = None,
    donate_argnums: Sequence[int] = (),
    options: JsonMapping | None = None,
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
    """Search the compiler options for a workload and a slice.

    Each group is tried on top of the best options so far. A candidate is kept only if the predicted
    step gets shorter, or the memory smaller at the same time. Candidates that the compiler refuses
    are recorded with the reason. Candidates whose effect the prediction does not model are reported
    but not chosen.

    Args:
        workload: A `Job`, anything that `compile_for` takes, a `CompileRequest`, or a capture,
            which keeps its own flags. A step of several programs is tried as one.
        on: The slice; a job, a request or a capture has its own.
        *args: Example arguments of a function.
        mesh: The mesh of a workload, as for `compile_for`.
        donate_argnums: Donated arguments of a function, as for `compile_for`.
        options: Options to start from; the compiler's defaults by default.
        budget: Most compiles, including the first.
        seconds: Most time; a running compile is then stopped.
        beam: Sets of options that are carried from group to group; 1 keeps only the best.
        workers: Parallel compiles; by default as many as cores and memory allow.
        timeout_s: Time limit of each compile.
        use_cache: Whether to use and keep cached compiles.
        progress: Called with a line about each action.
        groups: Groups to try; by default tpukit's own.
        registry: Flags to validate against; by default those of the installed libtpu.

    Raises:
        XLACompilationError: The program does not compile with the initial options.
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
    """The state of a search.

    Attributes:
        requests: The programs of one step, the heaviest first; all get the same options.
        calls: How often a step runs each program.
    """

    requests: Sequence[CompileRequest]
    calls: Sequence[int]
    registry: FlagRegistry
    budget: int
    deadline: float | None
    beam: int
    compile_options: JsonMapping
    progress: Progress
    trials: list[FlagTrial] = field(default_factory=list[FlagTrial])
    skipped: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    stopped: str = ""

    @property
    def name(self) -> str:
        return ", ".join(one.program.name for one in self.requests)

    @property
    def variables(self) -> dict[str, str]:
        """The flags that the program sets itself, as environment variables."""
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
        """Return the best sets of options after trying a group on top of `kept`."""
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
        """Compile as many trials as budget and time allow, some in parallel."""
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
