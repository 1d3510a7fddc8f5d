"""`LocalProvider`: pods of virtual hosts on this machine, each a real process with real jax.

`--on v6e-16` is four processes of four CPU devices: the mesh of the real slice, with everything
that comes with several processes. Zones, a limit on hosts, a queue and preemption are there to
rehearse what happens elsewhere.
"""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from ....errors import ConfigError, PodUnavailable, ProviderError, did_you_mean
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ....runtime.files import state_folder
from ...causes import Cause
from ...config import PodConfig
from ...pod import Host, Pod, PodState, check_name
from ..protocol import Capabilities, Command
from ..terms import check_terms
from .book import Book, Entry
from .gang import LOOPBACK, LocalGang, LocalTransport
from .spares import SparePool

ZONES = ("local-a", "local-b", "local-c")
# A job for a cloud runs here unchanged: us-central1-a, and zones for AI such as us-south1-ai1b.
_CLOUD_ZONE = re.compile(r"[a-z]+-[a-z]+\d+-(ai\d+)?[a-z]")
HOSTS_VARIABLE = "TPUKIT_LOCAL_HOSTS"
HOST_BYTES = 512 * 2**20  # what a process of a small model takes, at the least
GONE_S = 5.0
_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")


class LocalProvider:
    """Gives pods on this machine.

    Its zones are local-a, local-b and local-c, and any name that a zone of a cloud can have, so
    that a job for a cloud runs here unchanged. A zone has room for as many hosts as fit this
    machine's memory, unless `hosts` or the variable TPUKIT_LOCAL_HOSTS sets another number ("8", or
    by zone "local-a=4,local-b=0").

    Args:
        launch: Of which `warm_spares` counts here.
        hosts: Hosts that a zone has room for, for each or by zone.
        folder: Where the pods are kept; by default in the state folder.
    """

    name = "local"

    def __init__(
        self,
        launch: LaunchSettings | None = None,
        *,
        hosts: int | Mapping[str, int] | None = None,
        folder: Path | None = None,
    ) -> None:
        settings = launch or LaunchSettings()
        self._room = _Room(hosts)
        self._book = Book(folder or state_folder() / "local")
        self._spares = SparePool({"JAX_PLATFORMS": "cpu"}) if settings.warm_spares else None
        self.capabilities = Capabilities(
            zones=ZONES,
            refused={"reserved": "this machine has nothing to reserve"},
        )

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Ask for a pod: it is ready at once, or waits until others have made room."""
        zone = self._zone(config.zones)
        where = config.slice
        check_terms(self.name, self.capabilities, config)
        with self._book.held():
            there = self._book.get(check_name(name), zone)
            if there is None:
                self._refuse_impossible(zone, where.hosts, str(where))
                pod = Pod(
                    name=name,
                    provider=self.name,
                    slice=where,
                    zone=zone,
                    state=PodState.WAITING,
                    tier=config.tier,
                    reason="waiting for hosts that other pods use",
                    labels=dict(config.labels),
                    created_at=time.time(),
                )
                self._book.put(Entry(pod=pod, priority=config.priority))
                self._place()
                there = self._book.get(name, zone)
            assert there is not None
            return there.seen()

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return a pod as it is now, or None where there is none."""
        with self._book.held():
            self._place()
            entry = self._book.get(name, self._zone((zone,)))
            return None if entry is None else entry.seen()

    def list(self, *, owner: str | None = None) -> list[Pod]:
        """Return all pods, or those with an owner's label."""
        with self._book.held():
            self._place()
            pods = [entry.seen() for entry in self._book.entries()]
        return [pod for pod in pods if owner is None or pod.labels.get("owner") == owner]

    def delete(self, name: str, *, zone: str) -> None:
        """Remove a pod, ending what runs on it; one that is not there is no error."""
        with self._book.held():
            entry = self._book.get(name, self._zone((zone,)))
            if entry is not None:
                _kill(entry)
                self._book.remove(name, zone)
                self._place()

    def start(self, pod: Pod, command: Command, *, attempt: int) -> LocalGang:
        """Start a process on every host of a ready pod."""
        if not pod.is_ready:
            raise ProviderError(f"Pod {pod.name} is {pod.state}, so nothing can run on it.")
        files = None if command.bundle is None else self._book.files_of(pod.name, pod.zone)
        transport = LocalTransport(files, self._spares)
        gang = LocalGang(
            pod.hosts,
            _on_cpu(command, pod),
            transport,
            attempt=attempt,
            spares=self._spares,
            on_close=lambda: self._remember_agents(pod, ()),
        )
        self._remember_agents(pod, transport.agents)
        return gang

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Say whether the pod fits on this machine."""
        zone, need = self._zone(config.zones), config.slice.hosts
        room = self._room.of(zone)
        seen = f"{config.slice} is {need} processes here; {zone} has room for {room}"
        if need <= room:
            return [DoctorFinding("local-room", "resources", "ok", seen)]
        fix = f"ask for a smaller slice, or set {HOSTS_VARIABLE}={need}"
        return [DoctorFinding("local-room", "resources", "error", seen, fix)]

    def preempt(self, name: str, *, zone: str, notice_s: float = 0.0) -> None:
        """Take a pod away, as spot capacity is: a notice (SIGTERM) to its hosts, then a kill."""
        with self._book.held():
            entry = self._book.get(name, self._zone((zone,)))
            if entry is None:
                raise ProviderError(
                    f"There is no pod {name} in {zone}; `tpukit pods ls` shows all."
                )
            lost = entry.pod.in_state(PodState.SUSPENDED, "preempted, as was asked for")
            self._book.put(replace(entry, pod=replace(lost, cause=Cause.SPOT), agents=()))
            self._place()
        if notice_s:
            for agent in entry.living_agents():
                agent.terminate()
            _wait_until_gone(entry, notice_s)
        _kill(entry)

    def count_ready_spares(self) -> int:
        """Return how many spares have imported everything and wait."""
        return 0 if self._spares is None else self._spares.count_ready()

    def close(self) -> None:
        """End the spares that wait."""
        if self._spares is not None:
            self._spares.close()

    def _zone(self, zones: Sequence[str]) -> str:
        zone = zones[0] if zones else ZONES[0]
        if zone not in ZONES and not _CLOUD_ZONE.fullmatch(zone):
            raise ConfigError(
                f"There is no zone {zone!r} on this machine; there are {', '.join(ZONES)}, and any "
                f"zone of a cloud such as us-central1-a.{did_you_mean(zone, ZONES)}"
            )
        return zone

    def _refuse_impossible(self, zone: str, hosts: int, asked: str) -> None:
        room = self._room.of(zone)
        if not room:
            raise PodUnavailable(
                f"{zone} has no room for any host; ask in another zone.", cause=Cause.STOCKOUT
            )
        if hosts > room:
            raise PodUnavailable(
                f"{asked} is {hosts} processes on this machine, and {zone} has room for {room}; "
                f"ask for a smaller slice, or set {HOSTS_VARIABLE}.",
                cause=Cause.UNPLACEABLE,
            )

    def _remember_agents(self, pod: Pod, agents: "Sequence[subprocess.Popen[bytes]]") -> None:
        known = tuple((one.pid, psutil.Process(one.pid).create_time()) for one in agents)
        with self._book.held():
            entry = self._book.get(pod.name, pod.zone)
            if entry is not None:
                self._book.put(replace(entry, agents=known))

    def _place(self) -> None:
        """Give hosts to waiting pods, by priority and then by age; none is overtaken."""
        entries = self._book.entries()
        for zone in dict.fromkeys(entry.pod.zone for entry in entries):
            here = [entry for entry in entries if entry.pod.zone == zone]
            used = sum(entry.pod.slice.hosts for entry in here if entry.pod.is_ready)
            waiting = [entry for entry in here if entry.pod.state is PodState.WAITING]
            for entry in sorted(waiting, key=lambda one: (-one.priority, one.pod.created_at)):
                used += entry.pod.slice.hosts
                if used > self._room.of(zone):
                    break
                ready = replace(entry.pod.in_state(PodState.READY), hosts=_hosts(entry.pod))
                self._book.put(replace(entry, pod=ready))


def _hosts(pod: Pod) -> tuple[Host, ...]:
    each = pod.slice.hosts // pod.slice.num_slices
    return tuple(
        Host(f"{pod.name}-{number}", LOOPBACK, number // each, number % each)
        for number in range(pod.slice.hosts)
    )


def _on_cpu(command: Command, pod: Pod) -> Command:
    """Return the command for virtual hosts, with as many CPU devices as a real one has chips."""
    own = command.environment.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    count = f"--xla_force_host_platform_device_count={pod.slice.devices_per_host}"
    variables = {
        **command.environment,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": f"{_DEVICES.sub('', own)} {count}".strip(),
    }
    return replace(command, environment=variables)


def _kill(entry: Entry) -> None:
    for agent in entry.living_agents():
        with contextlib.suppress(psutil.NoSuchProcess):
            agent.kill()  # the kernel ends what it started
    _wait_until_gone(entry, GONE_S)


def _wait_until_gone(entry: Entry, timeout_s: float) -> None:
    # Without reaping them: whoever started them wants their exit codes.
    deadline = time.monotonic() + timeout_s
    while entry.living_agents() and time.monotonic() < deadline:
        time.sleep(0.01)


class _Room:
    """How many hosts each zone has room for."""

    def __init__(self, hosts: int | Mapping[str, int] | None) -> None:
        self._asked = hosts if hosts is not None else _read_room(os.environ.get(HOSTS_VARIABLE, ""))
        self._by_memory = max(1, psutil.virtual_memory().total // HOST_BYTES)

    def of(self, zone: str) -> int:
        if isinstance(self._asked, int):
            return self._asked
        return (self._asked or {}).get(zone, self._by_memory)


def _read_room(text: str) -> int | dict[str, int] | None:
    """Read "8" or "local-a=4,local-b=0"."""
    if not text:
        return None
    try:
        if "=" not in text:
            return int(text)
        pairs = [part.split("=") for part in text.split(",")]
        return {zone.strip(): int(count) for zone, count in pairs}
    except ValueError:
        raise ConfigError(
            f"{HOSTS_VARIABLE} is {text!r}; it must be a number of hosts, or numbers by zone like "
            "'local-a=4,local-b=0'."
        ) from None
