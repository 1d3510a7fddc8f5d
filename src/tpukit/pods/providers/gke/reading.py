"""Pods as JobSets, their Pods and their Workload show them."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ....hardware import Slice
from ...causes import Cause
from ...manifests import names
from ...manifests.jobset import hostname_of
from ...manifests.reading import at, texts
from ...pod import Host, Pod, PodState, Tier
from .signals import Signal, condition, waiting_for, workload_signal

Object = dict[str, Any]

PROVIDER = "gke"


def is_ours(jobset: Object) -> bool:
    """Whether a JobSet was made here: it says which slice it is."""
    return names.SLICE in texts(at(jobset, "metadata", "annotations"))


def hosts_of(name: str, where: Slice) -> tuple[Host, ...]:
    """Return the hosts of a pod, whose names JobSet derives from its own."""
    hosts = where.hosts // where.num_slices
    names_ = [
        (slice_index, worker, hostname_of(name, slice_index, worker))
        for slice_index in range(where.num_slices)
        for worker in range(hosts)
    ]
    return tuple(
        Host(hostname, f"{hostname}.{name}", slice_index, worker)
        for slice_index, worker, hostname in names_
    )


def read_pod(jobset: Object, pods: Sequence[Object], workload: Object | None) -> Pod:
    """Return a pod as the cluster describes it.

    Args:
        jobset: One of ours.
        pods: The Kubernetes Pods that belong to it.
        workload: Kueue's, where it waits in a queue.
    """
    metadata = jobset["metadata"]
    notes = texts(metadata.get("annotations"))
    where = Slice.parse(notes[names.SLICE])
    state, signal = _state(jobset, list(pods), workload, where.hosts)
    return Pod(
        name=metadata["name"],
        provider=PROVIDER,
        slice=where,
        zone=notes.get(names.ZONE_ASKED, ""),
        state=state,
        tier=Tier(notes.get(names.TIER, Tier.ON_DEMAND.value)),
        hosts=hosts_of(metadata["name"], where) if state is PodState.READY else (),
        reason=signal.evidence if signal else "",
        cause=signal.cause if signal and state.is_lost else None,
        labels=_labels(texts(metadata.get("labels"))),
        created_at=_seconds(str(metadata.get("creationTimestamp", ""))),
    )


def _state(
    jobset: Object, pods: list[Object], workload: Object | None, hosts: int
) -> tuple[PodState, Signal | None]:
    """Return a pod's state, with why where there is a why.

    Its hosts are there when all Pods have a node. Whether the processes on them start, run or
    fail is the gang's to say, also of a JobSet that has ended already.
    """
    if jobset["metadata"].get("deletionTimestamp"):
        return PodState.DELETING, None
    if state := at(jobset, "status", "terminalState"):
        done = condition(jobset, str(state)) or {}
        return PodState.READY, Signal(Cause.DONE, str(done.get("message", state)))
    if workload is not None and (signal := workload_signal(workload)):
        # What was evicted waits in its queue again; what can never be admitted is refused.
        is_back = condition(workload, "Evicted") is not None
        return (PodState.WAITING if is_back else PodState.FAILED), signal
    if at(jobset, "spec", "suspend") is True:
        if not texts(jobset["metadata"].get("labels")).get(names.QUEUE):
            return PodState.SUSPENDED, Signal(Cause.STOPPED, "the JobSet was suspended by hand")
        return PodState.WAITING, waiting_for(workload, pods)
    placed = [pod for pod in pods if at(pod, "spec", "nodeName") and not _is_leaving(pod)]
    if len(placed) >= hosts:
        return PodState.READY, None
    if signal := waiting_for(None, pods):
        return PodState.WAITING, signal
    return PodState.PROVISIONING, None


def _is_leaving(pod: Object) -> bool:
    return bool(at(pod, "metadata", "deletionTimestamp"))


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {
        key.removeprefix(names.OURS): value
        for key, value in labels.items()
        if key.startswith(names.OURS)
    }


def _seconds(text: str) -> float | None:
    try:
        moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp()
