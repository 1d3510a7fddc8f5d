"""`rehearse`: runs all stages of a job on this machine."""

import resource
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import ConfigError, TPUError, TPUValidationError
from ..job.job import Job
from ..job.reading import read_job
from ..runtime.files import finish_folder, folder_beside
from ..runtime.interruption import undone_if_interrupted
from ..runtime.progress import Progress, watched
from ..runtime.ranges import Range
from .cloud import emulated_cloud
from .result import RESULT, RehearsalResult
from .stage import LeftOut, Played, Scene, Stage
from .stages.check import CheckStage
from .stages.launch import LaunchStage
from .stages.monitor import MonitorStage, ProfileStage
from .stages.plan import PlanStage
from .stages.preempt import PreemptStage, ResumeStage
from .stages.quantize import GenerateStage, QuantizeStage
from .stand_in import StandIn, make_stand_in, write_own_source

STAGES: tuple[Stage, ...] = (
    *(PlanStage(), CheckStage(), LaunchStage(), PreemptStage(), ResumeStage(), MonitorStage()),
    *(ProfileStage(), QuantizeStage(), GenerateStage()),
)
DEFAULT_STEPS = 120
STEPS = Range(30, 100_000)  # with fewer, the run ends before a pod can be preempted twice
DEFAULT_FOLDER = Path("runs/rehearsal")


@dataclass(frozen=True)
class Began:
    """A stage begins."""

    name: str
    question: str


def rehearse(
    job: Job | str | None = None,
    *,
    steps: int = DEFAULT_STEPS,
    folder: str | Path = DEFAULT_FOLDER,
    stages: Sequence[Stage] = STAGES,
    progress: Progress = watched,
    tell: Callable[[Began | Played], None] | None = None,
) -> RehearsalResult:
    """Rehearse a job: plan, check, launch, preempt, resume, monitor, profile, quantize, generate.

    The job itself is planned, and checked by the TPU compiler. Launched, on an emulated cloud with
    real processes of this machine, is the job if it is small, else a small stand-in; the result
    lists the differences.

    Args:
        job: A job, a job file, or a preset's name; by default a tiny job.
        steps: Steps to train.
        folder: Output folder of report, runs and quantized model; an earlier rehearsal in it is
            replaced.
        stages: Stages to run, in order.
        progress: Called with messages on the progress.
        tell: Called when a stage begins, and with its result.

    Raises:
        ConfigError: The job is wrong, or names no slice.
        MissingExtraError: What emulators are made of is not installed.
        TPUValidationError: The folder contains something else.

    Example:
        >>> result = tpukit.rehearse("job.yaml", progress=print)
        >>> result.is_good, [played.sentence for played in result.played]
    """
    target = Path(folder)
    refuse_other_folder(target)
    hear = tell or (lambda event: None)
    began = time.time()
    with _no_empty_folder(target.parent), folder_beside(target) as made:
        read, stand_in = prepare(job, steps=steps, folder=made)
        if stand_in.corpus is not None:
            write_own_source(stand_in.corpus)
        with emulated_cloud(stand_in.job.slice) as cloud:
            scene = Scene(read, stand_in, made, cloud, progress)
            played: list[Played] = []
            for stage in stages:
                hear(Began(stage.name, stage.question))
                played.append(play(stage, scene))
                hear(played[-1])
            emulated = cloud.meaning
        result = RehearsalResult(
            job=read,
            stand_in=stand_in,
            played=tuple(played),
            moments=tuple(scene.moments),
            began=began,
            seconds=time.time() - began,
            emulated=emulated,
            folder=target,
        )
        result.write(made)
        finish_folder(made, target)
    return result


def prepare(
    job: Job | str | None, *, steps: int = DEFAULT_STEPS, folder: str | Path = DEFAULT_FOLDER
) -> tuple[Job, StandIn]:
    """Return a job and its stand-in, without starting anything.

    Arguments and errors are those of `rehearse`.
    """
    STEPS.check_whole("steps", steps, unit="steps")
    read = default_job() if job is None else job if isinstance(job, Job) else read_job(job)
    if read.on is None:
        raise ConfigError("which slice? Give on='v6e-8' (--on v6e-8, or on: v6e-8 in the job).")
    read.refuse_parts("a rehearsal")
    return read, make_stand_in(read, steps=steps, folder=Path(folder))


def play(stage: Stage, scene: Scene) -> Played:
    """Run one stage; an error becomes its result, and later stages go on."""
    at, clock, spent = time.time(), time.perf_counter(), _processor_s()

    def over(**found: object) -> Played:
        return Played(
            name=stage.name,
            question=stage.question,
            began=at,
            seconds=time.perf_counter() - clock,
            processor_s=_processor_s() - spent,
            **found,  # pyright: ignore[reportArgumentType]  named just below
        )

    try:
        finding = stage.run(scene)
    except LeftOut as reason:
        return over(verdict="left out", why=str(reason))
    except TPUError as error:
        return over(verdict="failed", why=str(error))
    scene.findings.append(finding)
    return over(finding=finding, verdict="passed" if finding.is_good else "failed")


def default_job() -> Job:
    """Return the default job."""
    return read_job(str(files("tpukit.rehearsal") / "default_job.yaml"))


def refuse_other_folder(folder: Path) -> None:
    """Raise for a folder that contains anything but an earlier rehearsal.

    Raises:
        TPUValidationError: It contains something else, or is no folder.
    """
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / RESULT).is_file()):
        return
    if folder.exists():
        raise TPUValidationError(
            f"{folder} contains something other than a rehearsal, and is not replaced; name "
            "another folder (--output)."
        )


@contextmanager
def _no_empty_folder(folder: Path) -> Generator[None]:
    """Remove a folder made in the block, if Ctrl-C leaves it empty."""
    if folder.exists():
        yield
        return
    with undone_if_interrupted(folder.rmdir):
        yield


def _processor_s() -> float:
    """Return the CPU seconds of this process and its finished children."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in spent)
