"""Read a pod from Compute Engine: its template, its groups and their machines.

A group exists before its machines, and they run before they form a slice. A pod is ready when every
group is stable, changes no machine, and has an active topology.
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
from .api import cause_of, error_text
from .request import POD_LABEL, SLICE_KEY, ZONE_KEY, group_name

MAKING_S = 120.0
"""How long a pod may be incomplete before it counts as abandoned."""
_STOPPED = frozenset(
    {"STOPPING", "STOPPED", "TERMINATED", "SUSPENDING", "SUSPENDED", "PENDING_STOP", "REPAIRING"}
)
_EVENTS = {
    # https://cloud.google.com/compute/docs/logging/audit-logging (system events)
    "compute.instances.preempted": Cause.SPOT,
    "compute.instances.terminateOnHostMaintenance": Cause.MAINTENANCE,
    "compute.instances.hostError": Cause.NODE_GONE,
}
# A pod has the worst state of its slices.
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
    """The state of a slice or a pod, with the reason."""

    state: PodState
    reason: str = ""
    cause: Cause | None = None


@dataclass(frozen=True)
class Asked:
    """The request that a pod's template records."""

    name: str
    slice: Slice
    zone: str
    tier: Tier
    labels: Mapping[str, str]
    created_at: float


def read_template(template: compute_v1.InstanceTemplate) -> Asked | None:
    """Return the recorded request, or None for a template that is not tpukit's."""
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
        asked: The request in its template.
        groups: Its existing groups, by name.
        instances: Its machines.
        errors: Returns why the machines of a group are missing.
        events: Returns Google's operations on the pod's machines.
    """
    by_slice: list[list[compute_v1.Instance]] = []
    verdicts: list[Verdict] = []
    for index in range(asked.slice.num_slices):
        name = group_name(asked.name, index)
        own = [machine for machine in instances if machine.name.rpartition("-")[0] == name]
        by_slice.append(sorted(own, key=_worker_number))
        verdicts.append(_judge(groups.get(name), own, errors))
    verdict = min(verdicts, key=lambda verdict: _ORDER.index(verdict.state))
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
    """Return the state of one slice."""
    if group is None:
        return Verdict(PodState.FAILED, "a group is missing")
    if group.current_actions.deleting or group.target_size == 0:
        return Verdict(PodState.DELETING, "its machines are being deleted")
    stopped = [machine for machine in instances if machine.status in _STOPPED]
    if stopped:
        machines = ", ".join(f"{machine.name} {machine.status}" for machine in stopped)
        return Verdict(PodState.SUSPENDED, machines)
    topologies = {topology.state for topology in group.status.applied_accelerator_topologies}
    running = [machine for machine in instances if machine.status == "RUNNING"]
    if (
        group.status.is_stable
        and topologies <= {"ACTIVE"}
        and group.current_actions.none == group.target_size == len(running)
    ):
        return Verdict(PodState.READY)
    if group.status.is_stable and topologies & {"INCOMPLETE", "FAILED", "DEACTIVATING"}:
        states = ", ".join(sorted(topologies))
        return Verdict(PodState.SUSPENDED, f"the topology of {group.name} is {states}")
    if instances:
        there = f"{len(running)} of {group.target_size} machines run"
        forming = ", ".join(sorted(topologies - {"ACTIVE"}))
        return Verdict(PodState.PROVISIONING, there + (f", topology {forming}" if forming else ""))
    failures = list(group.status.bulk_instance_operation.last_progress_check.error.errors)
    failures = failures or list(errors(group.name))
    if not failures:
        return Verdict(PodState.WAITING, "its machines do not exist yet")
    cause = cause_of(failures[0].code)
    # A group retries, and may get capacity later. A wrong request stays wrong.
    state = PodState.FAILED if cause is None else PodState.WAITING
    return Verdict(state, error_text(failures), cause or Cause.CONFIGURATION)


def _judge_half(template: Asked, verdict: Verdict) -> Verdict:
    """Return the state of a pod with missing groups."""
    if verdict.state is PodState.DELETING:
        return verdict
    if time.time() - template.created_at < MAKING_S:
        return Verdict(PodState.WAITING, "it is being created")
    return Verdict(
        PodState.FAILED, "its creation or deletion is incomplete; delete it", Cause.NODE_GONE
    )


def _cause_of_loss(template: Asked, events: Sequence[compute_v1.Operation]) -> Cause:
    for event in events:
        if event.operation_type in _EVENTS:
            return _EVENTS[event.operation_type]
    return Cause.SPOT if template.tier is Tier.SPOT else Cause.NODE_GONE


def _tier_of(properties: compute_v1.InstanceProperties) -> Tier:
    if properties.scheduling.provisioning_model == "SPOT":
        return Tier.SPOT
    taken = properties.reservation_affinity.consume_reservation_type
    return Tier.RESERVED if taken.endswith("_RESERVATION") and taken[:2] != "NO" else Tier.ON_DEMAND


def _hosts(by_slice: Sequence[Sequence[compute_v1.Instance]]) -> tuple[Host, ...]:
    """Return hosts in the order of process ids: by slice, then by worker number."""
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
    """Return a sort key for the machines of a slice, whose names end in random letters."""
    for item in instance.metadata.items:
        if item.key == "agent-worker-number":
            return int(item.value), instance.name
    return 0, instance.name


def _notice(instances: Sequence[compute_v1.Instance]) -> str:
    """Return a sentence about scheduled maintenance, or ""."""
    for instance in instances:
        window = instance.resource_status.upcoming_maintenance
        if window.window_start_time:
            return f"maintenance from {window.window_start_time} to {window.window_end_time}"
    return ""
