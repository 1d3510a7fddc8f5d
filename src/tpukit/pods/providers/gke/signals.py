"""Read pods, causes and states from Pods, Workloads and JobSets of Kubernetes.

Conditions and reasons are examined before exit codes, because they tell why a Pod was ended, while
its program only knows that it was. All functions depend only on the API's documents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ....hardware import Slice
from ...causes import Cause, Ending
from ...gang.verdict import cause_of as cause_of_code
from ...manifests import names
from ...manifests.jobset import hostname_of
from ...manifests.reading import at, mapping, sequence, texts
from ...pod import Host, Pod, PodState, Tier

Object = Mapping[str, Any]

# Reasons of the condition DisruptionTarget.
_DISRUPTIONS = {
    "PreemptionByScheduler": Cause.SCHEDULER,
    "EvictionByEvictionAPI": Cause.DRAIN,
    "DeletionByTaintManager": Cause.DRAIN,
    "DeletionByPodGC": Cause.NODE_GONE,
    "ExclusivePlacementViolation": Cause.SCHEDULER,
}
# Reasons in a Pod's status.
_POD_REASONS = {
    "Terminated": Cause.SPOT,
    "NodeShutdown": Cause.SPOT,
    "Shutdown": Cause.SPOT,
    "Evicted": Cause.PRESSURE,
    "Preempting": Cause.SCHEDULER,
    "NodeLost": Cause.NODE_GONE,
    "UnexpectedAdmissionError": Cause.DIRTY_HOST,
    "DeadlineExceeded": Cause.DEADLINE,
}
# Reasons for which a container can never start.
_STUCK = {
    **dict.fromkeys(("ErrImagePull", "ImagePullBackOff", "InvalidImageName"), Cause.IMAGE),
    **dict.fromkeys(
        (
            "CreateContainerConfigError",
            "CreateContainerError",
            "RunContainerError",
            "CrashLoopBackOff",
        ),
        Cause.CONFIGURATION,
    ),
}
# Reasons of a Workload's condition Evicted.
_EVICTIONS = {
    "NodeFailures": Cause.NODE_GONE,
    "PodsReadyTimeout": Cause.WAITED_TOO_LONG,
    "Deactivated": Cause.STOPPED,
}
# Reasons of QuotaReserved=False for which waiting does not help.
_HOPELESS = {
    "ExceedsMaxQuota": Cause.QUOTA,
    "NoMatchingFlavor": Cause.UNPLACEABLE,
    "Misconfigured": Cause.UNPLACEABLE,
}


@dataclass(frozen=True)
class Signal:
    """A cause, with the message from which it was derived."""

    cause: Cause
    evidence: str

    def on(self, host: str) -> Ending:
        """Return it as an ending on a host."""
        return Ending(self.cause, host=host, evidence=self.evidence)


def pod_signal(pod: Object, node: Object | None = None) -> Signal | None:
    """Return why a Pod ended or cannot start; None if it runs, waits or has succeeded.

    Args:
        pod: The Pod's document.
        node: Its node, if known, which shows whether there is maintenance.
    """
    return _disruption(pod, node) or _by_reason(pod) or _stuck(pod) or _by_exit_code(pod)


def is_evicted(pod: Object) -> bool:
    """Return whether the Pod was evicted, by its conditions."""
    return _disruption(pod, None) is not None or at(pod, "status", "reason") in _POD_REASONS


def workload_signal(workload: Object) -> Signal | None:
    """Return why Kueue took a Workload's quota back, or will never grant it."""
    evicted = condition(workload, "Evicted")
    if evicted:
        reason = str(evicted.get("reason"))
        cause = next(
            (cause for start, cause in _EVICTIONS.items() if reason.startswith(start)), Cause.QUEUE
        )
        return Signal(cause, _message("Workload Evicted", evicted))
    reserved = condition(workload, "QuotaReserved", "False")
    if reserved and (cause := _HOPELESS.get(str(reserved.get("reason")))):
        return Signal(cause, _message("Workload", reserved))
    return None


def waiting_for(workload: Object | None, pods: Sequence[Object]) -> Signal | None:
    """Return what a JobSet waits for, if known: quota or nodes."""
    if workload is not None and (held := condition(workload, "QuotaReserved", "False")):
        return Signal(Cause.QUOTA, _message("Kueue", held))
    if workload is not None and (held := condition(workload, "Admitted", "False")):
        return Signal(Cause.QUOTA, _message("Kueue", held))
    for pod in pods:
        refused = condition(pod, "PodScheduled", "False")
        if refused and refused.get("reason") == "Unschedulable":
            return Signal(Cause.STOCKOUT, _message("Pod", refused))
    return None


def jobset_signal(jobset: Object) -> Signal | None:
    """Return why a JobSet has failed permanently, as far as it shows; None if it has not."""
    failed = condition(jobset, "Failed")
    if failed is None:
        return None
    words = _message("JobSet", failed)
    if "DeadlineExceeded" in words:
        return Signal(Cause.DEADLINE, words)
    return Signal(Cause.FAILED, words)


def condition(document: Object, type_: str, status: str = "True") -> Mapping[str, Any] | None:
    """Return an object's condition of that type and status, or None."""
    for entry in sequence(at(document, "status", "conditions")):
        fields = mapping(entry)
        if fields.get("type") == type_ and fields.get("status") == status:
            return fields
    return None


def exit_code(pod: Object) -> int | None:
    """Return the worst exit code of a Pod's containers; None if none has ended."""
    codes = [
        at(status, "state", "terminated", "exitCode")
        for status in sequence(at(pod, "status", "containerStatuses"))
    ]
    known = [code for code in codes if isinstance(code, int)]
    return max(known, default=None)


def _disruption(pod: Object, node: Object | None) -> Signal | None:
    target = condition(pod, "TerminationTarget")
    if target and str(target.get("reason")).startswith("WorkloadEvicted"):
        return Signal(Cause.QUEUE, _message("TerminationTarget", target))
    disrupted = condition(pod, "DisruptionTarget")
    if disrupted is None:
        return None
    words = _message("DisruptionTarget", disrupted)
    reason = str(disrupted.get("reason"))
    cause = _DISRUPTIONS.get(reason, Cause.DRAIN)
    if reason == "TerminationByKubelet":
        cause = _POD_REASONS.get(str(at(pod, "status", "reason")), Cause.SPOT)
    labels, wanted = texts(at(node, "metadata", "labels")), texts(at(pod, "spec", "nodeSelector"))
    # Only maintenance shuts down a node that is not spot.
    is_spot = "true" in (labels.get(names.SPOT), wanted.get(names.SPOT))
    if labels.get(names.MAINTENANCE) == "ONGOING" or (cause is Cause.SPOT and not is_spot):
        cause = Cause.MAINTENANCE
    return Signal(cause, words)


def _by_reason(pod: Object) -> Signal | None:
    reason = str(at(pod, "status", "reason") or "")
    cause = _POD_REASONS.get(reason)
    if cause is None:
        return None
    message = at(pod, "status", "message")
    return Signal(cause, f"Pod {reason}" + (f": {message}" if message else ""))


def _stuck(pod: Object) -> Signal | None:
    for status in sequence(at(pod, "status", "containerStatuses")):
        waiting = mapping(at(status, "state", "waiting"))
        if cause := _STUCK.get(str(waiting.get("reason"))):
            return Signal(cause, _message(f"container {at(status, 'name')}", waiting))
    return None


def _by_exit_code(pod: Object) -> Signal | None:
    for status in sequence(at(pod, "status", "containerStatuses")):
        ended = mapping(at(status, "state", "terminated"))
        code = ended.get("exitCode")
        if not isinstance(code, int) or code == 0:
            continue
        if ended.get("reason") == "OOMKilled":
            return Signal(Cause.OUT_OF_MEMORY, f"OOMKilled, exit code {code}")
        if ended.get("reason") == "StartError":
            return Signal(Cause.CONFIGURATION, _message("container", ended))
        return Signal(cause_of_code(code), f"exit code {code}")
    if at(pod, "status", "phase") == "Failed":
        return Signal(Cause.KILLED, "the Pod failed without a reason")
    return None


def _message(who: str, condition: Mapping[str, Any]) -> str:
    message = condition.get("message")
    return f"{who} {condition.get('reason')}" + (f": {message}" if message else "")


PROVIDER = "gke"


def is_ours(jobset: Object) -> bool:
    """Return whether tpukit created a JobSet, by its slice annotation."""
    return names.SLICE in texts(at(jobset, "metadata", "annotations"))


def hosts_of(name: str, where: Slice) -> tuple[Host, ...]:
    """Return the hosts of a pod, with the names that JobSet derives."""
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
    """Return a pod from the cluster's documents.

    Args:
        jobset: A JobSet of tpukit.
        pods: Its Kubernetes Pods.
        workload: Its Kueue Workload, if it is queued.
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
    """Return a pod's state, with the reason if there is one.

    A pod is ready when all its Pods have a node. Whether processes start, run or fail is reported
    by the gang, even for a JobSet that has ended.
    """
    if jobset["metadata"].get("deletionTimestamp"):
        return PodState.DELETING, None
    if state := at(jobset, "status", "terminalState"):
        done = condition(jobset, str(state)) or {}
        return PodState.READY, Signal(Cause.DONE, str(done.get("message", state)))
    if workload is not None and (signal := workload_signal(workload)):
        # An evicted JobSet waits in its queue again; one that can never be admitted is refused.
        is_back = condition(workload, "Evicted") is not None
        return (PodState.WAITING if is_back else PodState.FAILED), signal
    if at(jobset, "spec", "suspend") is True:
        if not texts(jobset["metadata"].get("labels")).get(names.QUEUE):
            return PodState.WAITING, Signal(Cause.STOPPED, "the JobSet was suspended by hand")
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
