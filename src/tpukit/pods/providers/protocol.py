"""Protocols of a provider of pods and of the processes on a pod.

A provider creates and deletes pods, that is, machines. A gang is one process per host, which start,
run and end together. On Kubernetes the cluster runs the gang, elsewhere tpukit does; the supervisor
sees no difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from ...errors import ConfigError
from ...job.sections import ChipLimit, LaunchSettings
from ...runtime.doctor.finding import DoctorFinding
from ...runtime.progress import Progress
from ..causes import Ending
from ..config import PodConfig
from ..limits import applies_to
from ..pod import Host, Pod, Tier
from ..worker.order import PythonOrder


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command for every host of a pod.

    Attributes:
        argv: An argument list; no shell is used.
        environment: Variables to set in addition to those that identify the process. Values may be
            secret, so they are not logged, and reach a host by standard input.
        bundle: A tar archive with the job's files, unpacked on each host.
        python: Python environment to make on each host; None uses the host's own Python.
        setup: Argument lists to run once on each new host before the command.
        heartbeat_s: How long a process may be silent before it counts as lost.
        first_step_s: Time limit of the first step, which includes compilation.
        step_s: Time limit of later steps, after which the gang counts as hung; None sets no limit.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    bundle: Path | None = None
    python: PythonOrder | None = None
    setup: tuple[tuple[str, ...], ...] = ()
    heartbeat_s: int = 10
    first_step_s: float = 1800.0
    step_s: float | None = 300.0


@dataclass(frozen=True)
class Line:
    """A line of a process's output."""

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
    """The gang was restarted by its runner (JobSet, on Kubernetes)."""

    attempt: int
    ending: Ending


@dataclass(frozen=True)
class Ended:
    """Every process of the gang has ended, and none will be restarted."""

    ending: Ending


GangEvent = Line | StepCompleted | Restarted | Ended


class Gang(Protocol):
    """The processes of one attempt: they start together, and when one dies all end."""

    @property
    def hosts(self) -> Sequence[Host]:
        """Its hosts, in the order of process ids."""
        ...

    def wait(self, timeout_s: float) -> list[GangEvent]:
        """Return new events as soon as there are any; an empty list after `timeout_s`."""
        ...

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM so that processes save and end, and kill those that run too long."""
        ...

    def close(self) -> None:
        """Release resources, and end all processes at once unless the provider runs them itself.

        Repeated calls do nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features that a provider offers, with reasons for those it does not.

    Attributes:
        generations: Chip names of `hardware.catalog`; empty means all.
        refused: Reasons by feature ("spot", "reserved", "multislice", "network", …). Features
            without a reason are offered.
        runs_gangs: Whether the provider places and restarts processes itself. Then they go on
            without a supervisor, and only their owner's request ends them.
        has_bare_hosts: Whether hosts come without tpukit, so that its environment is shipped.
        zones: Zones with pods; empty accepts any zone.
        limits: Chips that the project was granted, by zone, type and tier, as the user states them;
            empty means no limit.
    """

    generations: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    runs_gangs: bool = False
    has_bare_hosts: bool = False
    zones: tuple[str, ...] = ()
    limits: tuple[ChipLimit, ...] = ()

    def within(self, launch: LaunchSettings) -> Self:
        """Return the capabilities within a project's limits, with the zones of these limits."""
        zones = tuple(dict.fromkeys(row.zone for row in launch.limits))
        return replace(self, limits=launch.limits, zones=self.zones or zones)

    def zones_for(self, config: PodConfig) -> tuple[str, ...]:
        """Return the zones to ask: the request's, or those in which its chips are granted."""
        granted = tuple(row.zone for row in self.limits if applies_to(row, config))
        return config.zones or granted or self.zones


class Provider(Protocol):
    """Creates and deletes pods. All methods are idempotent.

    Within 5 s, all raise `PodUnavailable` (with `cause`) without capacity or quota, and
    `ProviderError` if the provider cannot be reached or rejects the credentials. A provider that is
    reached but slow may take longer.
    """

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """The features it offers."""
        ...

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Request a pod; return an existing pod of that name unchanged.

        The result may only repeat the request; the next query shows the pod's state.

        Args:
            name: Also the idempotency key: after a lost reply, a second call does not create a
                second pod.
            config: The request, with one zone.
            command: The command, for providers that run gangs themselves.
        """
        ...

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the pod's present state, or None if it does not exist."""
        ...

    def list(self, *, owner: str | None = None) -> list[Pod]:
        """Return all pods in the provider's zones, or those with an owner's label."""
        ...

    def delete(self, name: str, *, zone: str) -> None:
        """Delete a pod in any state; a missing pod is no error."""
        ...

    def start(self, pod: Pod, command: Command, *, attempt: int) -> Gang:
        """Start a process on every host of a ready pod, or follow those that the pod runs."""
        ...

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Return what would prevent a pod from being allocated, without requesting one."""
        ...


@runtime_checkable
class Reachable(Protocol):
    """A provider with hosts that a person can log in to."""

    def login(self, pod: Pod, host: Host) -> Sequence[str]:
        """Return the command that logs in to a host, as an argument list."""
        ...


class Rendered(Protocol):
    """Documents of a pod."""

    def to_yaml(self) -> str:
        """Return them for the provider's own tool."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        ...


@runtime_checkable
class Renders(Protocol):
    """A provider whose pods are documents that a user can read and apply."""

    def render(
        self, name: str, config: PodConfig, command: Command, *, progress: Progress
    ) -> Rendered:
        """Return the documents of a pod, without creating it."""
        ...


_OF_A_POD = ("network", "software_version", "enable_ip_alias")


def check_terms(provider: str, offered: Capabilities, request: PodConfig | LaunchSettings) -> None:
    """Refuse a request with terms that the provider does not offer; defaults are not checked.

    Raises:
        ConfigError: The message names the term, and why the provider does not offer it.
    """
    for term in _terms(request):
        if (why := offered.refused.get(term)) is not None:
            raise ConfigError(f"Provider '{provider}' does not support {term}: {why}; remove it.")


def _terms(request: PodConfig | LaunchSettings) -> list[str]:
    if isinstance(request, LaunchSettings):
        return [
            name for name in request.model_fields_set if _differs(request, LaunchSettings(), name)
        ]
    changed = [name for name in _OF_A_POD if _differs(request, PodConfig(), name)]
    if request.tier is not Tier.ON_DEMAND:
        changed.append(request.tier.value)
    if request.slice.num_slices > 1:
        changed.append("multislice")
    return changed


def _differs(value: object, usual: object, name: str) -> bool:
    return getattr(value, name) != getattr(usual, name)
