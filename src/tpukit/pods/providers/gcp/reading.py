"""What Cloud TPU says of a pod: its queued resource and nodes, read into our words."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from google.cloud import tpu_v2

from ....errors import SliceError
from ....hardware import Slice
from ...causes import Cause
from ...pod import Host, Pod, PodState, Tier
from .failures import cause_of_failure
from .request import CONFIG_TYPES

_QueuedState = tpu_v2.QueuedResourceState.State
_NodeState = tpu_v2.Node.State
STATES = {
    _QueuedState.CREATING: PodState.WAITING,
    _QueuedState.ACCEPTED: PodState.WAITING,
    _QueuedState.WAITING_FOR_RESOURCES: PodState.WAITING,
    _QueuedState.PROVISIONING: PodState.PROVISIONING,
    _QueuedState.ACTIVE: PodState.READY,
    _QueuedState.SUSPENDING: PodState.SUSPENDED,
    _QueuedState.SUSPENDED: PodState.SUSPENDED,
    _QueuedState.FAILED: PodState.FAILED,
    _QueuedState.DELETING: PodState.DELETING,
}
# Nodes in these states do not come back by themselves.
_LOST = frozenset(
    {
        _NodeState.PREEMPTED,
        _NodeState.TERMINATED,
        _NodeState.STOPPED,
        _NodeState.STOPPING,
        _NodeState.HIDDEN,
        _NodeState.HIDING,
        _NodeState.DELETING,
    }
)
_MAINTENANCE = tpu_v2.Node.Health.UNHEALTHY_MAINTENANCE


def node_names(queued: tpu_v2.QueuedResource) -> list[str]:
    """Return the full names of the nodes of a queued resource, in the order of its slices."""
    parent, _, own_id = queued.name.rpartition("/queuedResources/")
    names: list[str] = []
    for spec in queued.tpu.node_spec:
        if spec.node_id:
            names.append(f"{parent}/nodes/{spec.node_id}")
            continue
        prefix = spec.multislice_params.node_id_prefix or own_id
        count = spec.multislice_params.node_count
        names += [f"{parent}/nodes/{prefix}-{index}" for index in range(count)]
    return names


def as_asked(name: str, asked: tpu_v2.QueuedResource) -> tpu_v2.QueuedResource:
    """Return a queued resource as the API shows it in the first moment after the request."""
    begun = tpu_v2.QueuedResource(asked)
    begun.name = name
    begun.state = tpu_v2.QueuedResourceState(state=_QueuedState.CREATING)
    return begun


def node_key(name: str) -> tuple[str, str]:
    """Return zone and id of a node: its project is a name in one reply and a number in another."""
    _, _, _, zone, _, node_id = name.split("/")
    return zone, node_id


def read_pod(
    queued: tpu_v2.QueuedResource,
    nodes: Mapping[tuple[str, str], tpu_v2.Node],
    *,
    notices: Mapping[tuple[str, str], str],
) -> Pod | None:
    """Return a pod, or None for a queued resource of a kind that tpukit does not know.

    Args:
        queued: As the API shows it.
        nodes: Those of its nodes that are there, by `node_key`.
        notices: What is known to come, such as maintenance, by `node_key`.
    """
    where = _slice_of(queued)
    if where is None:
        return None
    keys = [node_key(name) for name in node_names(queued)]
    here = [nodes[key] for key in keys if key in nodes]
    tier = _tier_of(queued)
    state, reason, cause = _judge(queued, here, tier)
    hosts: tuple[Host, ...] = ()
    if state is PodState.READY:
        hosts = _hosts_of(here)
        if len(hosts) != where.hosts:
            state, reason = PodState.PROVISIONING, f"{len(hosts)} of {where.hosts} hosts are there"
            hosts = ()
        else:
            reason = next((notices[key] for key in keys if key in notices), "")
    _, _, _, zone, _, name = queued.name.split("/")
    return Pod(
        name=name,
        provider="gcp",
        slice=where,
        zone=zone,
        state=state,
        tier=tier,
        hosts=hosts,
        reason=reason,
        cause=cause,
        labels=dict(queued.tpu.node_spec[0].node.labels),
        created_at=_moment(queued.create_time),
    )


def _moment(time: object) -> float | None:
    # Google's client turns timestamps into datetimes, and its types do not say so.
    return time.timestamp() if isinstance(time, datetime) else None


def _slice_of(queued: tpu_v2.QueuedResource) -> Slice | None:
    if not queued.tpu.node_spec:
        return None
    spec = queued.tpu.node_spec[0]
    count = spec.multislice_params.node_count if not spec.node_id else len(queued.tpu.node_spec)
    try:
        if "accelerator_config" in spec.node and not spec.node.accelerator_type:
            config = spec.node.accelerator_config
            generation = {type_: name for name, type_ in CONFIG_TYPES.items()}[config.type_]
            return Slice.of(generation, topology=config.topology, num_slices=count)
        one = Slice.parse(spec.node.accelerator_type)
        return Slice(one.chip, one.topology, count)
    except (SliceError, KeyError):
        return None


def _tier_of(queued: tpu_v2.QueuedResource) -> Tier:
    if "spot" in queued:
        return Tier.SPOT
    scheduling = queued.tpu.node_spec[0].node.scheduling_config
    if queued.reservation_name or scheduling.reserved:
        return Tier.RESERVED
    return Tier.SPOT if scheduling.spot or scheduling.preemptible else Tier.ON_DEMAND


def _judge(
    queued: tpu_v2.QueuedResource, here: Sequence[tpu_v2.Node], tier: Tier
) -> tuple[PodState, str, Cause | None]:
    """Return the state, why, and for a lost pod the cause in one word."""
    said = queued.state.state
    state = STATES.get(said, PodState.WAITING)
    if state is PodState.FAILED:
        error = queued.state.failed_data.error.message
        return state, error or "failed, and Cloud TPU does not say why", cause_of_failure(error)
    lost = [node for node in here if node.state in _LOST or node.health == _MAINTENANCE]
    if state is PodState.SUSPENDED or (state is PodState.READY and lost):
        nodes = ", ".join(f"{_short(node.name)} {node.state.name}" for node in lost)
        reason = said.name + (f" ({nodes})" if nodes else "")
        return PodState.SUSPENDED, reason, _cause_of_loss(here, tier)
    if state is PodState.READY and not all(node.state == _NodeState.READY for node in here):
        waiting = ", ".join(
            f"{_short(node.name)} {node.state.name}"
            for node in here
            if node.state != _NodeState.READY
        )
        return PodState.PROVISIONING, waiting, None
    return state, "" if state is PodState.READY else said.name, None


def _cause_of_loss(here: Sequence[tpu_v2.Node], tier: Tier) -> Cause:
    if any(node.health == _MAINTENANCE for node in here):
        return Cause.MAINTENANCE
    preempted = any(node.state == _NodeState.PREEMPTED for node in here)
    return Cause.SPOT if tier is Tier.SPOT or preempted else Cause.NODE_GONE


def _hosts_of(nodes: Sequence[tpu_v2.Node]) -> tuple[Host, ...]:
    """Return hosts in the order of process ids: slices, then workers as the API lists them."""
    return tuple(
        Host(
            name=f"{_short(node.name)}-w{worker}",
            address=endpoint.access_config.external_ip or endpoint.ip_address,
            internal_address=endpoint.ip_address,
            slice_index=index,
            worker_id=worker,
        )
        for index, node in enumerate(nodes)
        for worker, endpoint in enumerate(node.network_endpoints)
    )


def _short(name: str) -> str:
    return name.rsplit("/", 1)[1]
