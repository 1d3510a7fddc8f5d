"""What a provider of pods can do, and what runs on a pod: small protocols, many citizens.

Pods (`Provider`) and the processes on them (`Gang`) are two things. A provider gives and takes
machines; a gang is one process a host that starts, runs and ends together. On Kubernetes the
cluster runs the gang, elsewhere we do; whoever watches one cannot tell.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from ...job.sections import ChipLimit, LaunchSettings
from ...runtime.doctor.finding import DoctorFinding
from ..causes import Ending
from ..config import PodConfig
from ..limits import is_of
from ..pod import Host, Pod


@dataclass(frozen=True, kw_only=True)
class Command:
    """What every host of a pod runs.

    Attributes:
        argv: An argument list; no shell reads it.
        environment: Variables to set, beside those that say which process of the job it is.
            Values may be secret: they are not logged, and reach a host by its standard input.
        bundle: An archive (tar) of the files that the job names, unpacked on each host.
        setup: Argument lists that run on each host before, once for each new host.
        heartbeat_s: How long a silent process counts as alive.
        first_step_s: How long the first step may take: compiling is slow.
        step_s: How long any later step may take before the gang counts as hung; None: for ever.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    bundle: Path | None = None
    setup: tuple[tuple[str, ...], ...] = ()
    heartbeat_s: int = 10
    first_step_s: float = 1800.0
    step_s: float | None = 300.0


@dataclass(frozen=True)
class Line:
    """One line that a process printed."""

    host: str
    text: str


@dataclass(frozen=True)
class StepCompleted:
    """A process completed a step."""

    host: str
    step: int
    loss: float | None = None


@dataclass(frozen=True)
class Restarted:
    """The gang was started again by whoever runs it (JobSet, on Kubernetes)."""

    attempt: int
    ending: Ending


@dataclass(frozen=True)
class Ended:
    """The gang is over: every process has ended and none will start again by itself."""

    ending: Ending


GangEvent = Line | StepCompleted | Restarted | Ended


class Gang(Protocol):
    """The processes of one attempt: they start together, and one that dies ends all."""

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts it runs on, in the order of process ids."""
        ...

    def wait(self, timeout_s: float) -> list[GangEvent]:
        """Return what happened, as soon as something has; nothing after `timeout_s`."""
        ...

    def stop(self, grace_s: float) -> None:
        """Tell all processes to save and end (SIGTERM), and kill those that have not by then."""
        ...

    def close(self) -> None:
        """End everything at once and release it; may be called again."""
        ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a provider offers, and why not where it does not.

    Attributes:
        generations: Names of `hardware.catalog`; empty: all.
        refused: Reasons by feature ("spot", "reserved", "multislice", "network", …); what is not
            listed is offered.
        runs_gangs: Whether the provider restarts the processes itself.
        zones: Where it offers pods; empty: wherever it is told.
        limits: How many chips the project was granted, by zone, type and tier, as the user says;
            empty: as many as the provider gives.
    """

    generations: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    runs_gangs: bool = False
    zones: tuple[str, ...] = ()
    limits: tuple[ChipLimit, ...] = ()

    def within(self, launch: LaunchSettings) -> Self:
        """Return what is offered within the limits of a project, and where those are."""
        zones = tuple(dict.fromkeys(row.zone for row in launch.limits))
        return replace(self, limits=launch.limits, zones=self.zones or zones)

    def zones_for(self, config: PodConfig) -> tuple[str, ...]:
        """Return where to ask: as the request says, or where its kind of chips is granted."""
        granted = tuple(row.zone for row in self.limits if is_of(row, config))
        return config.zones or granted or self.zones


class Provider(Protocol):
    """Gives and takes pods. Every method may be called again with no other effect.

    All raise `PodUnavailable` where there is no capacity or quota (with `cause`), and
    `ProviderError` where the provider cannot be reached or refuses who asks, within 5 s.
    """

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """What it offers."""
        ...

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Ask for a pod; a pod of that name that is there already is returned as it is.

        A new one may be returned as it was asked for: what became of it is seen at the next look.

        Args:
            name: Also the key of idempotency: a lost reply and a second call give one pod.
            config: What is asked for, with one zone.
            command: What it will run, for providers that run gangs themselves.
        """
        ...

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return a pod as it is now, or None where there is none."""
        ...

    def list(self, *, owner: str | None = None) -> list[Pod]:
        """Return all pods in the zones it knows, or those with an owner's label."""
        ...

    def delete(self, name: str, *, zone: str) -> None:
        """Remove a pod in whatever state it is; one that is not there is no error."""
        ...

    def start(self, pod: Pod, command: Command, *, attempt: int) -> Gang:
        """Start a process on every host of a ready pod (or follow those that the pod runs)."""
        ...

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Say what would stand in the way of a pod, without asking for one."""
        ...


@runtime_checkable
class Reachable(Protocol):
    """A provider on whose hosts a person can log in."""

    def login(self, pod: Pod, host: Host) -> Sequence[str]:
        """Return the argument list that logs in to a host."""
        ...
