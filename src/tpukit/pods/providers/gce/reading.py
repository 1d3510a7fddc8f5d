"""What Compute Engine shows of a pod, as a pod: its template, its groups and their machines.

A group is there before its machines are, and they run before they form a slice. A pod is ready
when each group is stable, does nothing to any machine, and its topology is active.
"""

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from google.cloud import compute_v1

from ....errors import SliceError
from ....hardware import Slice
from ...causes import Cause
from ...pod import Host, Pod, PodState, Tier
from .failures import cause_of, words_of
from .request import POD_LABEL, SLICE_KEY, ZONE_KEY, group_name

MAKING_S = 120.0
"""How long a pod may be half made before it counts as left behind."""
_STOPPED = frozenset(
    {"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED", "PENDING_STOP", "REPAIRING"}
)
_EVENTS = {
    # https://cloud.google.com/compute/docs/logging/audit-logging (system events)
    "compute.instances.preempted": Cause.SPOT,
    "compute.instances.terminateOnHostMaintenance": Cause.MAINTENANCE,
    "compute.instances.hostError": Cause.NODE_GONE,
}
# The worst of several slices is what the pod is.
_ORDER = (
    PodState.DELETING,
    PodState.SUSPENDED,
    PodState.FAILED,
    PodState.WAITING,
    PodState.PROVISIONING,
    PodState.READY,
)


@dataclass(frozen=True)
class Verdict:
    """The state of a slice or a pod, and why."""

    state: PodState
    reason: str = ""
    cause: Cause | None = None


@dataclass(frozen=True)
class Asked:
    """What a pod's template says of it."""

    name: str
    slice: Slice
    zone: str
    tier: Tier
    labels: Mapping[str, str]
    created_at: float


def read_template(template: compute_v1.InstanceTemplate) -> Asked | None:
    """Return what was asked for, or None for a template that is not tpukit's."""
    properties = template.properties
    facts = {item.key: item.value for item in properties.metadata.items}
    labels = dict(properties.labels)
    try:
        where = Slice.parse(facts[SLICE_KEY])
        zone = facts[ZONE_KEY]
        labels.pop(POD_LABEL)
    except (KeyError, SliceError):
        return None
    return Asked(
        name=template.name,
        slice=where,
        zone=zone,
        tier=_tier_of(properties),
        labels=labels,
        created_at=datetime.datetime.fromisoformat(template.creation_timestamp).timestamp(),
    )


def read_pod(
    asked: Asked,
    groups: Mapping[str, compute_v1.InstanceGroupManager],
    instances: Sequence[compute_v1.Instance],
    *,
    errors: Callable[[str], Sequence[compute_v1.Errors]],
    events: Callable[[Asked], Sequence[compute_v1.Operation]],
) -> Pod:
    """Return a pod.

    Args:
        asked: What its template says.
        groups: Those of its groups that are there, by name.
        instances: Its machines.
        errors: Asks why the machines of a group are not there.
        events: Asks what Google did to the pod's machines.
    """
    by_slice: list[list[compute_v1.Instance]] = []
    verdicts: list[Verdict] = []
    for index in range(asked.slice.num_slices):
        name = group_name(asked.name, index)
        own = [one for one in instances if one.name.rpartition("-")[0] == name]
        by_slice.append(sorted(own, key=_worker_number))
        verdicts.append(_judge(groups.get(name), own, errors))
    verdict = min(verdicts, key=lambda one: _ORDER.index(one.state))
    if len(groups) < asked.slice.num_slices and verdict.state is not PodState.SUSPENDED:
        verdict = _judge_half(asked, verdict)
    if verdict.state is PodState.SUSPENDED:
        verdict = Verdict(verdict.state, verdict.reason, _cause_of_loss(asked, events(asked)))
    hosts: tuple[Host, ...] = ()
    if verdict.state is PodState.READY:
        hosts = _hosts(by_slice)
        verdict = Verdict(verdict.state, _notice(instances))
    return Pod(
        name=asked.name,
        provider="gce",
        slice=asked.slice,
        zone=asked.zone,
        state=verdict.state,
        tier=asked.tier,
        hosts=hosts,
        reason=verdict.reason,
        cause=verdict.cause,
        labels=asked.labels,
        created_at=asked.created_at,
    )


def _judge(
    group: compute_v1.InstanceGroupManager | None,
    instances: Sequence[compute_v1.Instance],
    errors: Callable[[str], Sequence[compute_v1.Errors]],
) -> Verdict:
    """Return how one slice stands."""
    if group is None:
        return Verdict(PodState.FAILED, "a group is missing")
    if group.current_actions.deleting or group.target_size == 0:
        return Verdict(PodState.DELETING, "its machines are being deleted")
    stopped = [one for one in instances if one.status in _STOPPED]
    if stopped:
        machines = ", ".join(f"{one.name} {one.status}" for one in stopped)
        return Verdict(PodState.SUSPENDED, machines)
    topologies = {one.state for one in group.status.applied_accelerator_topologies}
    running = [one for one in instances if one.status == "RUNNING"]
    if (
        group.status.is_stable
        and topologies <= {"ACTIVE"}
        and group.current_actions.none == group.target_size == len(running)
    ):
        return Verdict(PodState.READY)
    if group.status.is_stable and topologies & {"INCOMPLETE", "FAILED", "DEACTIVATING"}:
        said = ", ".join(sorted(topologies))
        return Verdict(PodState.SUSPENDED, f"the topology of {group.name} is {said}")
    if instances:
        there = f"{len(running)} of {group.target_size} machines run"
        forming = ", ".join(sorted(topologies - {"ACTIVE"}))
        return Verdict(PodState.PROVISIONING, there + (f", topology {forming}" if forming else ""))
    found = list(group.status.bulk_instance_operation.last_progress_check.error.errors)
    found = found or list(errors(group.name))
    if not found:
        return Verdict(PodState.WAITING, "its machines are not there yet")
    cause = cause_of(found[0].code)
    # A group goes on trying, and may get what it lacks; what is wrong in itself stays so.
    state = PodState.FAILED if cause is None else PodState.WAITING
    return Verdict(state, words_of(found), cause or Cause.CONFIGURATION)


def _judge_half(asked: Asked, verdict: Verdict) -> Verdict:
    """Return how a pod stands some of whose groups are not there."""
    if verdict.state is PodState.DELETING:
        return verdict
    if time.time() - asked.created_at < MAKING_S:
        return Verdict(PodState.WAITING, "it is being made")
    return Verdict(PodState.FAILED, "it was half made, or half deleted; delete it", Cause.NODE_GONE)


def _cause_of_loss(asked: Asked, events: Sequence[compute_v1.Operation]) -> Cause:
    for event in events:
        if event.operation_type in _EVENTS:
            return _EVENTS[event.operation_type]
    return Cause.SPOT if asked.tier is Tier.SPOT else Cause.NODE_GONE


def _tier_of(properties: compute_v1.InstanceProperties) -> Tier:
    if properties.scheduling.provisioning_model == "SPOT":
        return Tier.SPOT
    taken = properties.reservation_affinity.consume_reservation_type
    return Tier.RESERVED if taken.endswith("_RESERVATION") and taken[:2] != "NO" else Tier.ON_DEMAND


def _hosts(by_slice: Sequence[Sequence[compute_v1.Instance]]) -> tuple[Host, ...]:
    """Return hosts in the order of process ids: slices, then workers as their metadata says."""
    return tuple(
        Host(
            name=instance.name,
            address=_outside(instance) or instance.network_interfaces[0].network_i_p,
            internal_address=instance.network_interfaces[0].network_i_p,
            slice_index=index,
            worker_id=worker,
        )
        for index, instances in enumerate(by_slice)
        for worker, instance in enumerate(instances)
    )


def _outside(instance: compute_v1.Instance) -> str:
    configs = instance.network_interfaces[0].access_configs
    return configs[0].nat_i_p if configs else ""


def _worker_number(instance: compute_v1.Instance) -> tuple[int, str]:
    """Return what sorts machines of a slice: names end in random letters."""
    for item in instance.metadata.items:
        if item.key == "agent-worker-number":
            return int(item.value), instance.name
    return 0, instance.name


def _notice(instances: Sequence[compute_v1.Instance]) -> str:
    """Return a sentence about maintenance that is to come, or ""."""
    for instance in instances:
        window = instance.resource_status.upcoming_maintenance
        if window.window_start_time:
            return f"maintenance from {window.window_start_time} to {window.window_end_time}"
    return ""
