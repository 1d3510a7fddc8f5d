"""Read a pod from the Cloud TPU API: its queued resource, its nodes, and errors."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions
from google.cloud import tpu_v2

from ....errors import (
    ConfigError,
    PodUnavailable,
    ProviderError,
    ProviderSilent,
    SliceError,
    TPUError,
)
from ....hardware import Slice
from ....runtime.google_credentials import WAY_OUT
from ...causes import Cause
from ...pod import Host, Pod, PodState, Tier
from ..google import ZONES_PAGE, UnknownZone
from .request import CONFIG_TYPES

# Seen by users: github.com/skypilot-org/skypilot/issues/3840.
_NOT_OFFERED = re.compile(r"the accelerator \S+ was not found in zone")
_ZONE = re.compile(r"'locations/([^']+)'")
_NO_TOKEN = "metadata from plugin failed"  # gRPC's message when no token is available


def is_not_offered(error: Exception) -> bool:
    """Return whether the error means that the zone does not have the slice."""
    return _NOT_OFFERED.search(str(error)) is not None


def is_silence(error: Exception) -> bool:
    """Return whether no answer came, so that the call may or may not have taken effect."""
    return isinstance(
        error,
        (exceptions.ServiceUnavailable, exceptions.DeadlineExceeded, exceptions.Aborted),
    ) and _NO_TOKEN not in str(error)


def explained(error: Exception, *, source: str, endpoint: str) -> TPUError:
    """Translate an error of Google's client to tpukit's.

    Args:
        error: The client's error.
        source: Source of the credentials.
        endpoint: The client's endpoint.
    """
    if isinstance(error, auth_exceptions.GoogleAuthError):
        return _no_token(error, source)
    message = getattr(error, "message", None) or str(error)
    match error:
        case exceptions.Unauthenticated():
            return ProviderError(
                f"Cloud TPU does not accept the credentials of {source}: they are wrong or "
                f"expired, or this machine's clock is wrong; {WAY_OUT}."
            )
        case exceptions.PermissionDenied():
            if (zone := _ZONE.search(message)) is not None:
                return UnknownZone(zone[1], who="Cloud TPU", listed_at=ZONES_PAGE)
            return ProviderError(
                f"Cloud TPU refuses {source}: {message} Ask for the role roles/tpu.admin in the "
                "project, and check launch.project."
            )
        case exceptions.ResourceExhausted():
            return PodUnavailable(
                f"Cloud TPU has no capacity: {message}", cause=cause_of_failure(message).value
            )
        case exceptions.ServiceUnavailable() if _NO_TOKEN in message:
            return _no_token(error, source)
        case _ if isinstance(error, exceptions.GoogleAPICallError) and is_silence(error):
            return ProviderSilent(
                f"The Cloud TPU API at {endpoint} does not answer ({_first_line(message)}); check "
                "the network, a proxy, or launch.endpoint."
            )
        case exceptions.InvalidArgument() if _NOT_OFFERED.search(message):
            return PodUnavailable(
                f"Cloud TPU has no such slice in this zone: {message}",
                cause=Cause.UNPLACEABLE.value,
            )
        case exceptions.InvalidArgument() | exceptions.NotFound() | exceptions.FailedPrecondition():
            return ConfigError(
                f"Cloud TPU refuses the request: {message}. `tpukit pods preflight` lists what it "
                "offers."
            )
        case _:
            return ProviderError(f"Cloud TPU failed: {_first_line(message)}.")


def cause_of_failure(message: str) -> Cause:
    """Return the cause of a refused pod, from the API's message."""
    words = message.lower()
    if "quota" in words:
        return Cause.QUOTA
    if "capacity" in words or "stockout" in words or "resources" in words:
        return Cause.STOCKOUT
    if "valid until" in words or "expired" in words or "interval" in words:
        return Cause.WAITED_TOO_LONG
    return Cause.UNPLACEABLE


def _no_token(error: Exception, source: str) -> ProviderError:
    return ProviderError(
        f"No token is available for the credentials of {source} ({type(error).__name__}): they "
        f"are revoked or expired, or Google's token server cannot be reached; {WAY_OUT}."
    )


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0][:200] if message.strip() else "no reason given"


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
    """Return the full names of a queued resource's nodes, in the order of its slices."""
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


def as_requested(name: str, request: tpu_v2.QueuedResource) -> tpu_v2.QueuedResource:
    """Return a queued resource as the API shows it right after the request."""
    begun = tpu_v2.QueuedResource(request)
    begun.name = name
    begun.state = tpu_v2.QueuedResourceState(state=_QueuedState.CREATING)
    return begun


def node_key(name: str) -> tuple[str, str]:
    """Return zone and id of a node, because replies name its project in different ways."""
    _, _, _, zone, _, node_id = name.split("/")
    return zone, node_id


def read_pod(
    queued: tpu_v2.QueuedResource,
    nodes: Mapping[tuple[str, str], tpu_v2.Node],
    *,
    notices: Mapping[tuple[str, str], str],
) -> Pod | None:
    """Return a pod, or None for a queued resource that is not tpukit's.

    Args:
        queued: The queued resource.
        nodes: Its existing nodes, by `node_key`.
        notices: Announced maintenance, by `node_key`.
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
            state, reason = PodState.PROVISIONING, f"{len(hosts)} of {where.hosts} hosts are ready"
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
    # Google's client returns datetimes here, but its type stubs do not show it.
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
        node_slice = Slice.parse(spec.node.accelerator_type)
        return Slice(node_slice.chip, node_slice.topology, count)
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
    """Return the state with its reason, and the cause for a lost pod."""
    said = queued.state.state
    state = STATES.get(said, PodState.WAITING)
    if state is PodState.FAILED:
        error = queued.state.failed_data.error.message
        return state, error or "failed, and Cloud TPU gives no reason", cause_of_failure(error)
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
    """Return hosts in the order of process ids: by slice, then as the API lists workers."""
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
