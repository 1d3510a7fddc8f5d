"""`SSHProvider`: pods on the user's own hosts, which the job lists."""

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil

from ....errors import ConfigError, PodUnavailable, ProviderError, did_you_mean
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ....runtime.files import state_folder
from ...causes import Cause
from ...config import PodConfig
from ...gang.process_gang import ProcessGang
from ...pod import Host, Pod, PodState, check_name
from ..local.book import Book, Entry
from ..protocol import Capabilities, Command, check_terms
from .transport import SSHTransport, split_address

ZONE = "on-premise"
REFUSED = {
    "spot": "your own hosts cannot be preempted, so there is no spot price",
    "reserved": "your own hosts need no reservation",
    "preemption": "your own hosts are never preempted; a broken one is unreachable",
    "network": "the network of your own hosts is fixed",
    "software_version": "the software of your own hosts is fixed",
    "flex_start": "your own hosts need no start",
    "flex_start_seconds": "your own hosts need no start",
}


class SSHProvider:
    """Provides pods of the hosts in `launch.hosts`, each to one job at a time.

    This machine's state folder records the job of each host, so always launch from the same
    machine. Addresses and keys come from ssh's own configuration.
    """

    name = "ssh"

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self._addresses = launch.hosts
        for address in self._addresses:
            split_address(address)
        if doubled := {
            address for address in self._addresses if self._addresses.count(address) > 1
        }:
            raise ConfigError(
                f"launch.hosts names {sorted(doubled)[0]} twice; name each host once."
            )
        self._book = Book(state_folder() / "ssh-pods")
        self.capabilities = Capabilities(zones=(ZONE,), refused=REFUSED, has_bare_hosts=True)

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Request a pod: it is ready at once, or waits until other pods free their hosts."""
        self._refuse(config)
        with self._book.held():
            entry = self._book.get(check_name(name), ZONE)
            if entry is None:
                pod = Pod(
                    name=name,
                    provider=self.name,
                    slice=config.slice,
                    zone=ZONE,
                    state=PodState.WAITING,
                    reason="waiting for hosts that other pods use",
                    labels=dict(config.labels),
                    created_at=time.time(),
                )
                self._book.put(Entry(pod=pod, priority=config.priority, avoid=config.avoid))
                entry = self._placed(name)
            assert entry is not None
            return entry.pod

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the pod's present state, or None if it does not exist."""
        with self._book.held():
            entry = self._placed(name) if zone == ZONE else None
            return None if entry is None else entry.pod

    def list(self, *, owner: str | None = None) -> "list[Pod]":
        """Return all pods, or those with an owner's label."""
        with self._book.held():
            pods = [entry.pod for entry in self._book.entries()]
        return [pod for pod in pods if owner is None or pod.labels.get("owner") == owner]

    def delete(self, name: str, *, zone: str) -> None:
        """Release a pod's hosts, and end its processes."""
        with self._book.held():
            entry = self._book.get(name, zone)
            if entry is None:
                return
            for connection in entry.living_agents():
                with contextlib.suppress(psutil.NoSuchProcess):
                    connection.kill()  # its agent ends with it, and so do the agent's processes
            self._book.remove(name, zone)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> ProcessGang:
        """Start a process on every host of a ready pod."""
        if not pod.is_ready:
            raise ProviderError(f"Pod {pod.name} is {pod.state}, so nothing can run on it.")
        transport = self._transport(pod.name)
        gang = ProcessGang(pod.hosts, command, transport, attempt=attempt)
        agents = tuple(
            (agent.pid, psutil.Process(agent.pid).create_time()) for agent in transport.agents
        )
        with self._book.held():
            entry = self._book.get(pod.name, pod.zone)
            if entry is not None:
                self._book.put(replace(entry, agents=agents))
        return gang

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Return whether there are enough hosts, and which cannot be reached."""
        need, there = config.slice.hosts, len(self._addresses)
        seen = f"{config.slice} has {need} hosts, but launch.hosts names {there}"
        enough = DoctorFinding("ssh-hosts", "resources", "ok", seen)
        if need > there:
            fix = f"name {need - there} more, or use a smaller slice"
            enough = DoctorFinding("ssh-hosts", "resources", "error", seen, fix)
        hosts = [Host(address, address) for address in self._addresses]
        with ThreadPoolExecutor(max_workers=16) as pool:
            return [enough, *pool.map(self._reach, hosts)]

    def _reach(self, host: Host) -> DoctorFinding:
        error = self._transport("preflight").try_host(host)
        if error is None:
            seen = f"{host.name} accepts ssh, and has Python"
            return DoctorFinding("ssh-reach", "environment", "ok", seen)
        seen = f"{host.name} cannot be used: {error}"
        fix = f"make `ssh {host.name} python3 -V` work without a prompt"
        return DoctorFinding("ssh-reach", "environment", "error", seen, fix)

    def login(self, pod: Pod, host: Host) -> "list[str]":
        """Return the command that logs in to a host, as an argument list."""
        return self._transport(pod.name).login(host)

    def _transport(self, pod: str) -> SSHTransport:
        return SSHTransport(
            pod,
            user=self._launch.ssh_user,
            config=self._launch.ssh_config,
            connect_s=self._launch.connect_timeout_seconds,
            silent_s=self._launch.network_timeout_seconds,
        )

    def _refuse(self, config: PodConfig) -> None:
        for zone in config.zones:
            if zone != ZONE:
                raise ConfigError(
                    f"There is no zone {zone!r}: your own hosts are all in {ZONE!r}; remove "
                    f"launch.zone.{did_you_mean(zone, (ZONE,))}"
                )
        check_terms(self.name, self.capabilities, config)
        good = [
            address for address in self._addresses if split_address(address)[1] not in config.avoid
        ]
        if config.slice.hosts > len(good):
            left_out = (
                f", without {', '.join(config.avoid)}, which failed before" if config.avoid else ""
            )
            raise PodUnavailable(
                f"{config.slice} has {config.slice.hosts} hosts, but launch.hosts names "
                f"{len(self._addresses)}{left_out}; name more, or use a smaller slice.",
                cause=Cause.UNPLACEABLE.value,
            )

    def _placed(self, name: str) -> Entry | None:
        """Assign free hosts to waiting pods, by priority and then by age; return one of them."""
        entries = self._book.entries()
        taken = {host.address for entry in entries for host in entry.pod.hosts}
        free = [address for address in self._addresses if address not in taken]
        waiting = [entry for entry in entries if entry.pod.state is PodState.WAITING]
        for entry in sorted(waiting, key=lambda entry: (-entry.priority, entry.pod.created_at)):
            need = entry.pod.slice.hosts
            good = [address for address in free if split_address(address)[1] not in entry.avoid][
                :need
            ]
            if len(good) < need:
                break
            free = [address for address in free if address not in good]
            ready = replace(entry.pod.in_state(PodState.READY), hosts=_hosts(entry.pod, good))
            self._book.put(replace(entry, pod=ready))
        return self._book.get(name, ZONE)


def _hosts(pod: Pod, addresses: Sequence[str]) -> tuple[Host, ...]:
    each = pod.slice.hosts // pod.slice.num_slices
    return tuple(
        Host(split_address(address)[1], address, number // each, number % each)
        for number, address in enumerate(addresses)
    )
