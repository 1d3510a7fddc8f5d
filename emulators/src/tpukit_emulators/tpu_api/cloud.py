"""The store behind the API: queued resources as holdings of the world, nodes as machines.

A holding of the world carries the full name of its queued resource. What the world does to it,
its machines suffer: they start, are told to stop, and are gone.
"""

import ipaddress
from typing import Any, Protocol

import grpc

from ..holding import Holding, NotOffered, OverQuota, Stage
from ..world import World
from .resources import Node, Queued, Refused, invalid, read_nodes


class Machines(Protocol):
    """Who runs the hosts of nodes; `emulators.hosts` runs real ones."""

    @property
    def host_key(self) -> tuple[str, str]:
        """The key that every host shows: its type, and the rest."""
        ...

    def start(self, name: str, ssh_keys: str, *, devices: int = 1) -> str:
        """Start a host that lets the owners of these keys in, and return its address."""
        ...

    def warn(self, name: str) -> None:
        """Tell a host's processes to end."""
        ...

    def stop(self, name: str) -> None:
        """End a host with all its processes; one that is not there is no error."""
        ...


class Cloud:
    """Queued resources and nodes of all projects."""

    def __init__(self, world: World, machines: Machines | None = None) -> None:
        self.world = world
        self._machines = machines
        self._addresses = 0
        self._queued: dict[str, Queued] = {}
        self._by_node: dict[str, Queued] = {}
        self.world.watch(self._follow)

    def create(self, parent: str, queued_id: str, asked: Any, request_id: str) -> Queued:
        """Take a request for a queued resource.

        Raises:
            Refused: As the API refuses it.
        """
        zone = parent.split("/")[-1]
        with self.world.lock:
            name = f"{parent}/queuedResources/{queued_id}"
            if name in self._queued:
                raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"Resource '{name}' already exists")
            nodes = read_nodes(queued_id, parent, asked, self.world.zones[zone], zone)
            for node in nodes:
                if node.name in self._by_node:
                    raise Refused(
                        grpc.StatusCode.ALREADY_EXISTS, f"Resource '{node.name}' already exists"
                    )
            queued = Queued(name, asked, nodes, request_id)
            self._queued[name] = queued
            try:
                self.world.ask(self._holding(queued, zone))
            except (NotOffered, OverQuota) as error:
                del self._queued[name]
                raise _refusal(error, zone, nodes[0], asked) from error
            self._by_node.update({node.name: queued for node in nodes})
            return queued

    def delete(self, name: str, *, force: bool) -> None:
        """Delete a queued resource, with its nodes where `force` allows that."""
        with self.world.lock:
            queued, held = self.get(name)
            # https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.queuedResources/delete
            unforced = held.stage in (Stage.NEW, Stage.WAITING, Stage.LOST, Stage.REFUSED)
            if not force and not unforced and held.stage is not Stage.ENDING:
                raise Refused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"Queued resource '{name}' has nodes; delete them first, or use force",
                )
            queued.initiator = "USER"
            self.world.release(name)

    def reset(self, name: str) -> None:
        """Ask again for what a queued resource had."""
        with self.world.lock:
            queued, held = self.get(name)
            if held.stage not in (Stage.RUNNING, Stage.LOST, Stage.REFUSED):
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"'{name}' cannot be reset now")
            queued.initiator = "USER"
            self.world.requeue(name)

    def preempt(self, name: str, *, node: int | None = None, notice_s: float | None = None) -> bool:
        """Take a queued resource away, or one node of it; tell whether there was one to take.

        Args:
            name: Full, or without its project and zone.
            node: Which slice loses its machines, where the others keep theirs.
            notice_s: How long its processes have after SIGTERM; None: the world's pace.
        """
        with self.world.lock:
            full = self.full_name(name)
            if full is None or self.world.get(full) is None:
                return False
            self._queued[full].only_node = node
            return self.world.preempt(full, notice_s=notice_s)

    def full_name(self, name: str) -> str | None:
        """Return the full name of a queued resource whose last part may be all that is known."""
        return next(
            (one for one in self._queued if one in (name,) or one.endswith(f"/{name}")), None
        )

    def get(self, name: str) -> tuple[Queued, Holding]:
        """Return a queued resource and how it stands.

        Raises:
            Refused: There is none.
        """
        queued, held = self._queued.get(name), self.world.get(name)
        if queued is None or held is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Resource '{name}' was not found")
        return queued, held

    def get_node(self, name: str) -> tuple[Node, Queued, Holding]:
        """Return a node, its queued resource and how that stands."""
        queued = self._by_node.get(name)
        node = next((one for one in queued.nodes if one.name == name), None) if queued else None
        if queued is None or node is None or not (node.addresses or node.taken):
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Resource '{name}' was not found")
        return node, queued, self.get(queued.name)[1]

    def host_keys(self, name: str) -> list[tuple[str, str]]:
        """Return the keys that the hosts of a node have published."""
        node, _, _ = self.get_node(name)
        is_enabled = node.asked.metadata.get("enable-guest-attributes") == "TRUE"
        return [self._machines.host_key] if self._machines is not None and is_enabled else []

    def names(self, parent: str) -> list[str]:
        """Return names of queued resources in a zone, or in all of them for the zone `-`."""
        return _inside(self._queued, parent)

    def node_names(self, parent: str) -> list[str]:
        """Return names of nodes in a zone that exist by now."""
        there = [
            node.name
            for queued in self._queued.values()
            for node in queued.nodes
            if node.addresses or node.taken
        ]
        return _inside(there, parent)

    def _holding(self, queued: Queued, zone: str) -> Holding:
        policy = queued.asked.queueing_policy
        now, until = self.world.clock.now(), None
        if policy.HasField("valid_until_duration"):
            until = now + policy.valid_until_duration.ToNanoseconds() / 1e9
        elif policy.HasField("valid_until_time"):
            until = policy.valid_until_time.ToNanoseconds() / 1e9
        elif policy.HasField("valid_interval"):
            until = policy.valid_interval.end_time.ToNanoseconds() / 1e9
        return Holding(
            name=queued.name,
            zone=zone,
            kind=queued.nodes[0].slice.chip.name,
            amount=sum(node.slice.chips for node in queued.nodes),
            spot=queued.asked.HasField("spot"),
            reservation=queued.asked.reservation_name.rsplit("/", 1)[-1] or None,
            expires_at=until,
        )

    def _follow(self, held: Holding) -> None:
        """Let machines suffer what the world does to their holding."""
        queued = self._queued.get(held.name)
        if queued is None:
            return
        if held.stage in (Stage.STARTING, Stage.LEAVING, Stage.LOST, Stage.REFUSED):
            queued.initiator = "SERVICE"
        if held.stage is Stage.STARTING:
            for node in queued.nodes:
                node.taken = False
                node.addresses = self._start(node)
        elif held.stage is Stage.LEAVING and self._machines is not None:
            for host in self._struck_hosts(queued):
                self._machines.warn(host)
        elif held.stage in (Stage.LOST, Stage.WAITING, Stage.REFUSED, Stage.ENDING, Stage.GONE):
            self._stop(queued, only_struck=held.stage is Stage.LOST)
        if held.stage is Stage.GONE:
            del self._queued[held.name]
            for node in queued.nodes:
                self._by_node.pop(node.name, None)

    def _start(self, node: Node) -> tuple[str, ...]:
        return tuple(self._address(host, node) for host in _hosts_of(node))

    def _address(self, host: str, node: Node) -> str:
        if self._machines is not None:
            keys = node.asked.metadata.get("ssh-keys", "")
            return self._machines.start(host, keys, devices=node.slice.devices_per_host)
        self._addresses += 1
        return str(ipaddress.ip_address("10.0.0.0") + self._addresses)

    def _stop(self, queued: Queued, *, only_struck: bool) -> None:
        struck = range(len(queued.nodes))
        if only_struck and queued.only_node is not None:
            struck = (queued.only_node,)
        for index in struck:
            node = queued.nodes[index]
            if not node.addresses:
                continue
            if self._machines is not None:
                for host in _hosts_of(node):
                    self._machines.stop(host)
            node.addresses, node.taken = (), only_struck

    def _struck_hosts(self, queued: Queued) -> list[str]:
        nodes = queued.nodes if queued.only_node is None else [queued.nodes[queued.only_node]]
        return [host for node in nodes for host in _hosts_of(node)]


def _hosts_of(node: Node) -> list[str]:
    zone = node.name.split("/")[3]
    return [f"{node.short_name}-w{worker}.{zone}" for worker in range(node.slice.hosts)]


def _inside(names: Any, parent: str) -> list[str]:
    if parent.endswith("/locations/-"):
        parent = parent.removesuffix("/-")
    return sorted(name for name in names if name.startswith(f"{parent}/"))


def _refusal(error: Exception, zone: str, node: Node, asked: Any) -> Refused:
    if isinstance(error, OverQuota):
        # As users saw it: github.com/marin-community/marin/pull/1612.
        tier = "Preemptible" if asked.HasField("spot") else ""
        kind = node.slice.chip.name.upper()
        return Refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Quota limit 'TPU{kind}{tier}PerProjectPerZoneForTPUAPI' has been exceeded. "
            f"Limit: {error.limit} in zone {zone}.",
        )
    if asked.reservation_name:
        return Refused(
            grpc.StatusCode.NOT_FOUND, f"Reservation '{asked.reservation_name}' was not found"
        )
    return invalid(str(error))
