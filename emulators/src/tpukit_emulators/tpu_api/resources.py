"""Queued resources and their nodes: what was asked for, and how it looks at a stage of its life."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import code_pb2

from tpukit.errors import SliceError
from tpukit.hardware import Slice

from ..holding import Holding, Stage, Zone
from .offers import CONFIG_TYPES, RUNTIME_VERSIONS, configured, types_in
from .versions import V2

# https://cloud.google.com/tpu/docs/queued-resources: WAITING_FOR_RESOURCES took ACCEPTED's place.
STATES = {
    Stage.NEW: "CREATING",
    Stage.WAITING: "WAITING_FOR_RESOURCES",
    Stage.STARTING: "PROVISIONING",
    Stage.RUNNING: "ACTIVE",
    Stage.LEAVING: "SUSPENDING",
    Stage.LOST: "SUSPENDED",
    Stage.REFUSED: "FAILED",
    Stage.ENDING: "DELETING",
}
PROJECT_NUMBER = "123456789012"
_ID = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


class Refused(Exception):
    """A call that the API refuses."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(message)


def invalid(message: str) -> Refused:
    """Return the refusal of a request that is wrong in itself."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, message)


@dataclass
class Node:
    """One slice of a queued resource."""

    name: str
    asked: Any
    slice: Slice
    addresses: tuple[str, ...] = ()
    taken: bool = False

    @property
    def short_name(self) -> str:
        """The name without its project and zone."""
        return self.name.rsplit("/", 1)[1]


@dataclass
class Queued:
    """A queued resource as it was asked for."""

    name: str
    asked: Any
    nodes: Sequence[Node]
    request_id: str
    initiator: str = "USER"
    only_node: int | None = field(default=None)
    """Which node alone is taken away, where not all are."""

    @property
    def short_name(self) -> str:
        """The name without its project and zone."""
        return self.name.rsplit("/", 1)[1]


def read_nodes(queued_id: str, parent: str, asked: Any, zone: Zone, here: str) -> list[Node]:
    """Return the nodes that a request for a queued resource means.

    Raises:
        Refused: Something in it is wrong.
    """
    if not _ID.fullmatch(queued_id):
        raise invalid(f"Invalid queued_resource_id {queued_id!r}")
    if not asked.tpu.node_spec:
        raise invalid("tpu.node_spec is required")
    nodes: list[Node] = []
    for spec in asked.tpu.node_spec:
        if spec.parent != parent:
            raise invalid(f"node_spec.parent {spec.parent!r} is not {parent!r}")
        if spec.node.runtime_version not in RUNTIME_VERSIONS:
            raise invalid(f"Runtime version {spec.node.runtime_version!r} is not found")
        slice_ = _read_slice(spec.node, zone, here)
        for node_id in _node_ids(spec, queued_id):
            if not _ID.fullmatch(node_id):
                raise invalid(f"Invalid node_id {node_id!r}")
            nodes.append(Node(f"{parent}/nodes/{node_id}", spec.node, slice_))
    return nodes


def _node_ids(spec: Any, queued_id: str) -> list[str]:
    if spec.node_id and spec.HasField("multislice_params"):
        raise invalid("node_id and multislice_params exclude each other")
    if spec.node_id:
        return [spec.node_id]
    count = spec.multislice_params.node_count
    if count < 2:
        raise invalid("node_id, or multislice_params with a node_count above 1, is required")
    prefix = spec.multislice_params.node_id_prefix or queued_id
    return [f"{prefix}-{index}" for index in range(count)]


def _read_slice(node: Any, zone: Zone, here: str) -> Slice:
    if node.HasField("accelerator_config"):
        config = node.accelerator_config
        kind = V2.message("AcceleratorConfig").Type.Name(config.type_)
        try:
            slice_ = configured(kind, config.topology)
        except (KeyError, SliceError) as error:
            raise invalid(f"Invalid accelerator_config {kind} {config.topology}") from error
        if slice_.chip.name not in zone.capacity:
            raise invalid(
                "Cloud TPU received a bad request. "
                f"the accelerator {kind} was not found in zone {here}"
            )
        return slice_
    if node.accelerator_type not in (offered := types_in(zone)):
        # As users saw it: github.com/skypilot-org/skypilot/issues/3840.
        raise invalid(
            "Cloud TPU received a bad request. "
            f"the accelerator {node.accelerator_type} was not found in zone {here}"
        )
    return offered[node.accelerator_type]


def show_queued(queued: Queued, held: Holding) -> Any:
    """Return a queued resource as v2 shows it."""
    shown = V2.message("QueuedResource")()
    shown.CopyFrom(queued.asked)
    shown.name = queued.name
    for spec in shown.tpu.node_spec:
        spec.parent = _numbered(spec.parent)
    shown.create_time.FromNanoseconds(int(held.created_at * 1e9))
    state = shown.state
    state.state = type(state).State.Value(STATES[held.stage])
    state.state_initiator = type(state).StateInitiator.Value(queued.initiator)
    if held.stage is Stage.REFUSED:
        state.failed_data.error.code = code_pb2.RESOURCE_EXHAUSTED
        state.failed_data.error.message = (
            "The allocation interval (valid until) expired before the request was fulfilled"
            if held.reason == "expired"
            else held.reason
        )
    return shown


def show_node(node: Node, queued: Queued, held: Holding) -> Any:
    """Return a node as v2 shows it."""
    shown = V2.message("Node")()
    shown.CopyFrom(node.asked)
    shown.name = node.name
    shown.queued_resource = _numbered(queued.name)
    shown.multislice_node = len(queued.nodes) > 1
    shown.accelerator_type = node.slice.api_name or ""
    shown.accelerator_config.type_ = type(shown.accelerator_config).Type.Value(
        CONFIG_TYPES[node.slice.chip.name]
    )
    shown.accelerator_config.topology = node.slice.gke_topology
    shown.scheduling_config.spot = held.spot
    shown.state = type(shown).State.Value(_node_state(node, held))
    maintained = held.reason == "maintenance" and held.stage in (Stage.LEAVING, Stage.LOST)
    shown.health = type(shown).Health.Value("UNHEALTHY_MAINTENANCE" if maintained else "HEALTHY")
    if node.addresses and not node.taken:
        external = node.asked.network_config.enable_external_ips
        for address in node.addresses:
            endpoint = shown.network_endpoints.add(ip_address=address, port=8470)
            if external:
                endpoint.access_config.external_ip = address
    return shown


def _numbered(name: str) -> str:
    """Return a name with the number of its project, as some replies have it."""
    _, _, *rest = name.split("/")
    return "/".join(("projects", PROJECT_NUMBER, *rest))


def _node_state(node: Node, held: Holding) -> str:
    if node.taken:
        return "PREEMPTED" if held.spot else "TERMINATED"
    if held.stage is Stage.ENDING:
        return "DELETING"
    return "CREATING" if held.stage is Stage.STARTING else "READY"
