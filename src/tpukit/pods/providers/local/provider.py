"""`LocalProvider`: pods of virtual hosts on this machine, each a real process with real jax.

`--on v6e-16` starts four processes with four CPU devices each, which gives the mesh of the real
slice. Zones, a limit on hosts, a queue and preemption serve to rehearse what happens on a cloud.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from ....errors import ConfigError, PodUnavailable, ProviderError, did_you_mean
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ....runtime.files import state_folder
from ...causes import Cause
from ...config import PodConfig
from ...gang.process_gang import ProcessGang
from ...gang.transport import WorkerProcess, free_port
from ...pod import Host, Pod, PodState, check_name
from ...worker.spare import READY
from ..protocol import Capabilities, Command, GangEvent, StepCompleted, check_terms
from .book import Book, Entry

# In the order in which a training process imports them.
MODULES = (
    *("jax", "optax", "flax.nnx", "orbax.checkpoint", "grain.python"),
    *("tpukit.cli.app", "tpukit.training", "tpukit.training.trainer", "tpukit.job.reading"),
)


def start_agent(
    modules: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start an agent on this machine, in its own session so that Ctrl-C does not reach it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tpukit.pods.worker", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


class SparePool:
    """Keeps some spare processes ready.

    Args:
        environment: Variables that modules read when they are imported. jax still uses the values
            of a later order.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._ready: set[int] = set()
        # Also without close(), because this process keeps their standard input open.
        self._finalizer = weakref.finalize(self, _end, self._waiting)

    def keep(self, count: int) -> None:
        """Start spares until there are `count`, without waiting for them."""
        alive = [spare for spare in self._waiting if spare.poll() is None]
        _end([spare for spare in self._waiting if spare not in alive])
        missing = range(count - len(alive))
        self._waiting[:] = [*alive, *(start_agent(MODULES, self._environment) for _ in missing)]

    def take(self) -> "subprocess.Popen[bytes] | None":
        """Return the oldest living spare, or None."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.poll() is None:
                return spare
            _end([spare])
        return None

    def count_ready(self) -> int:
        """Return the number of spares that have imported everything."""
        for spare in self._waiting:
            assert spare.stderr is not None
            os.set_blocking(spare.stderr.fileno(), False)
            if READY.encode() in (spare.stderr.read() or b""):
                self._ready.add(spare.pid)
        return sum(spare.pid in self._ready for spare in self._waiting)

    def close(self) -> None:
        """End all spares."""
        self._finalizer()


def _end(spares: "list[subprocess.Popen[bytes]]") -> None:
    for spare in spares:
        for stream in (spare.stdin, spare.stdout, spare.stderr):
            if stream is not None:
                stream.close()
    for spare in spares:
        spare.wait()
    spares.clear()


LOOPBACK = "127.0.0.1"


class LocalTransport:
    """Starts agents as children of this process.

    Args:
        files: Folder with one subfolder per host, into which the bundle is unpacked; None runs all
            hosts in the current folder.
        spares: Spares to use first.

    Attributes:
        agents: Agents started so far.
    """

    shares_files = True
    connect_s = 0.0
    unreachable_code = None

    def __init__(self, files: Path | None, spares: SparePool | None) -> None:
        self._files, self._spares = files, spares
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host) -> WorkerProcess:
        """Start an agent that waits for its order."""
        spare = None if self._spares is None else self._spares.take()
        self.agents.append(spare or start_agent())
        return self.agents[-1]

    def is_worth_retrying(self, last_words: str) -> bool:
        """Return False: a process of this machine that cannot be started never can."""
        return False

    def folder(self, host: Host) -> str:
        """Return the folder in which a bundle is unpacked and the command runs."""
        return str(Path.cwd() if self._files is None else self._files / host.name)

    def coordinator(self, hosts: Sequence[Host]) -> str:
        """Return an address with a free port of this machine."""
        return f"{LOOPBACK}:{free_port(LOOPBACK)}"


class LocalGang(ProcessGang):
    """A gang that starts spares only after its own start, which they would slow down."""

    def __init__(
        self,
        hosts: Sequence[Host],
        command: Command,
        transport: LocalTransport,
        *,
        attempt: int,
        spares: SparePool | None,
        on_close: Callable[[], None],
    ) -> None:
        self._spares, self._on_close = spares, on_close
        super().__init__(hosts, command, transport, attempt=attempt)

    def wait(self, timeout_s: float) -> list[GangEvent]:
        """Return new events as soon as there are any; an empty list after `timeout_s`."""
        events = super().wait(timeout_s)
        if self._spares is not None and any(isinstance(event, StepCompleted) for event in events):
            self._spares.keep(len(self.hosts))
        return events

    def close(self) -> None:
        """End all processes at once and release resources; repeated calls do nothing."""
        super().close()
        self._on_close()


ZONES = ("local-a", "local-b", "local-c")
# Cloud jobs run here unchanged, in zones such as us-central1-a, or us-south1-ai1b for AI.
_CLOUD_ZONE = re.compile(r"[a-z]+-[a-z]+\d+-(ai\d+)?[a-z]")
HOSTS_VARIABLE = "TPUKIT_LOCAL_HOSTS"
HOST_BYTES = 512 * 2**20  # least memory of a process with a small model
GONE_S = 5.0
_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\S*\s*")


class LocalProvider:
    """Provides pods on this machine.

    Zones are local-a, local-b and local-c, and every valid name of a cloud zone, so that a cloud
    job runs here unchanged. A zone has as many hosts as fit into this machine's memory, unless
    `hosts` or the variable TPUKIT_LOCAL_HOSTS sets a number ("8", or per zone
    "local-a=4,local-b=0").

    Args:
        launch: Only `warm_spares` is used.
        hosts: Number of hosts per zone, for all zones or by zone.
        folder: Folder of the pods; by default in the state folder.
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
        """Request a pod: it is ready at once, or waits until other pods free their hosts."""
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
        """Return the pod's present state, or None if it does not exist."""
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
        """Delete a pod and end its processes; a missing pod is no error."""
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
        """Return whether the pod fits on this machine."""
        zone, need = self._zone(config.zones), config.slice.hosts
        room = self._room.of(zone)
        seen = f"{config.slice} is {need} processes here, but {zone} has room for {room}"
        if need <= room:
            return [DoctorFinding("local-room", "resources", "ok", seen)]
        fix = f"use a smaller slice, or set {HOSTS_VARIABLE}={need}"
        return [DoctorFinding("local-room", "resources", "error", seen, fix)]

    def preempt(self, name: str, *, zone: str, notice_s: float = 0.0) -> None:
        """Preempt a pod like spot capacity: send SIGTERM to its hosts, then kill them."""
        with self._book.held():
            entry = self._book.get(name, self._zone((zone,)))
            if entry is None:
                raise ProviderError(
                    f"There is no pod {name} in {zone}; `tpukit pods ls` shows all."
                )
            lost = entry.pod.in_state(PodState.SUSPENDED, "preempted on request")
            self._book.put(replace(entry, pod=replace(lost, cause=Cause.SPOT), agents=()))
            self._place()
        if notice_s:
            for agent in entry.living_agents():
                agent.terminate()
            _wait_until_gone(entry, notice_s)
        _kill(entry)

    def count_ready_spares(self) -> int:
        """Return the number of spares that have imported everything."""
        return 0 if self._spares is None else self._spares.count_ready()

    def close(self) -> None:
        """End the spares."""
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

    def _refuse_impossible(self, zone: str, hosts: int, wanted: str) -> None:
        room = self._room.of(zone)
        if not room:
            raise PodUnavailable(
                f"{zone} has no room for any host; ask in another zone.", cause=Cause.STOCKOUT
            )
        if hosts > room:
            raise PodUnavailable(
                f"{wanted} is {hosts} processes on this machine, but {zone} has room for {room}; "
                f"use a smaller slice, or set {HOSTS_VARIABLE}.",
                cause=Cause.UNPLACEABLE,
            )

    def _remember_agents(self, pod: Pod, agents: "Sequence[subprocess.Popen[bytes]]") -> None:
        known = tuple((agent.pid, psutil.Process(agent.pid).create_time()) for agent in agents)
        with self._book.held():
            entry = self._book.get(pod.name, pod.zone)
            if entry is not None:
                self._book.put(replace(entry, agents=known))

    def _place(self) -> None:
        """Assign hosts to waiting pods, by priority and then by age, without overtaking."""
        entries = self._book.entries()
        for zone in dict.fromkeys(entry.pod.zone for entry in entries):
            here = [entry for entry in entries if entry.pod.zone == zone]
            used = sum(entry.pod.slice.hosts for entry in here if entry.pod.is_ready)
            waiting = [entry for entry in here if entry.pod.state is PodState.WAITING]
            for entry in sorted(waiting, key=lambda entry: (-entry.priority, entry.pod.created_at)):
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
    """Return the command for virtual hosts, with one CPU device per chip of a real host."""
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
            agent.kill()  # the kernel ends its child processes
    _wait_until_gone(entry, GONE_S)


def _wait_until_gone(entry: Entry, timeout_s: float) -> None:
    # They are not reaped, because their starter needs the exit codes.
    deadline = time.monotonic() + timeout_s
    while entry.living_agents() and time.monotonic() < deadline:
        time.sleep(0.01)


class _Room:
    """Number of hosts per zone."""

    def __init__(self, hosts: int | Mapping[str, int] | None) -> None:
        self._hosts = hosts if hosts is not None else _read_room(os.environ.get(HOSTS_VARIABLE, ""))
        self._by_memory = max(1, psutil.virtual_memory().total // HOST_BYTES)

    def of(self, zone: str) -> int:
        if isinstance(self._hosts, int):
            return self._hosts
        return (self._hosts or {}).get(zone, self._by_memory)


def _read_room(text: str) -> int | dict[str, int] | None:
    """Parse "8" or "local-a=4,local-b=0"."""
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
