"""From what Kubernetes says of a Pod, a Workload or a JobSet to the one cause.

Conditions and reasons are read before exit codes: who ended a Pod knows why, and its program only
knows that it was ended. Everything here is a function of documents as the API gives them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...causes import Cause, Ending
from ...gang.verdict import cause_of as cause_of_code
from ...manifests import names
from ...manifests.reading import at, mapping, sequence, texts

Object = Mapping[str, Any]

# Reasons of the condition DisruptionTarget.
_DISRUPTIONS = {
    "PreemptionByScheduler": Cause.SCHEDULER,
    "EvictionByEvictionAPI": Cause.DRAIN,
    "DeletionByTaintManager": Cause.DRAIN,
    "DeletionByPodGC": Cause.NODE_GONE,
    "ExclusivePlacementViolation": Cause.SCHEDULER,
}
# Reasons of a Pod's status.
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
# Reasons why a container waits that do not pass by themselves.
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
# Reasons of the condition Evicted of a Workload.
_EVICTIONS = {
    "NodeFailures": Cause.NODE_GONE,
    "PodsReadyTimeout": Cause.WAITED_TOO_LONG,
    "Deactivated": Cause.STOPPED,
}
# Reasons of QuotaReserved=False that waiting does not mend.
_HOPELESS = {
    "ExceedsMaxQuota": Cause.QUOTA,
    "NoMatchingFlavor": Cause.UNPLACEABLE,
    "Misconfigured": Cause.UNPLACEABLE,
    "Inadmissible": Cause.UNPLACEABLE,
}


@dataclass(frozen=True)
class Signal:
    """A cause with what was seen, in the words of whoever said it."""

    cause: Cause
    evidence: str

    def on(self, host: str) -> Ending:
        """Return the ending that it is, on a host."""
        return Ending(self.cause, host=host, evidence=self.evidence)


def pod_signal(pod: Object, node: Object | None = None) -> Signal | None:
    """Return why a Pod ended, or cannot start; None where it runs, waits or has succeeded.

    Args:
        pod: As the API gives it.
        node: The node it is on, where that is known: it says whether there is maintenance.
    """
    return _disruption(pod, node) or _by_reason(pod) or _stuck(pod) or _by_exit_code(pod)


def is_evicted(pod: Object) -> bool:
    """Whether somebody else ended a Pod, and said so."""
    return _disruption(pod, None) is not None or at(pod, "status", "reason") in _POD_REASONS


def workload_signal(workload: Object) -> Signal | None:
    """Return why Kueue took a Workload's quota back, or will never give it any."""
    evicted = condition(workload, "Evicted")
    if evicted:
        reason = str(evicted.get("reason"))
        cause = next(
            (cause for start, cause in _EVICTIONS.items() if reason.startswith(start)), Cause.QUEUE
        )
        return Signal(cause, _words("Workload Evicted", evicted))
    reserved = condition(workload, "QuotaReserved", "False")
    if reserved and (cause := _HOPELESS.get(str(reserved.get("reason")))):
        return Signal(cause, _words("Workload", reserved))
    return None


def waiting_for(workload: Object | None, pods: Sequence[Object]) -> Signal | None:
    """Return what a JobSet waits for, where it says so: quota, or nodes."""
    if workload is not None and (held := condition(workload, "QuotaReserved", "False")):
        return Signal(Cause.QUOTA, _words("Kueue", held))
    if workload is not None and (held := condition(workload, "Admitted", "False")):
        return Signal(Cause.QUOTA, _words("Kueue", held))
    for pod in pods:
        refused = condition(pod, "PodScheduled", "False")
        if refused and refused.get("reason") == "Unschedulable":
            return Signal(Cause.STOCKOUT, _words("Pod", refused))
    return None


def jobset_signal(jobset: Object) -> Signal | None:
    """Return why a JobSet has failed for good, as far as it tells; None where it has not."""
    failed = condition(jobset, "Failed")
    if failed is None:
        return None
    said = _words("JobSet", failed)
    if "DeadlineExceeded" in said:
        return Signal(Cause.DEADLINE, said)
    return Signal(Cause.FAILED, said)


def condition(one: Object, type_: str, status: str = "True") -> Mapping[str, Any] | None:
    """Return an object's condition of that type and status, or None."""
    for entry in sequence(at(one, "status", "conditions")):
        said = mapping(entry)
        if said.get("type") == type_ and said.get("status") == status:
            return said
    return None


def exit_code(pod: Object) -> int | None:
    """Return the worst exit code of a Pod's containers, or None where none has ended."""
    codes = [
        at(one, "state", "terminated", "exitCode")
        for one in sequence(at(pod, "status", "containerStatuses"))
    ]
    known = [code for code in codes if isinstance(code, int)]
    return max(known, default=None)


def _disruption(pod: Object, node: Object | None) -> Signal | None:
    target = condition(pod, "TerminationTarget")
    if target and str(target.get("reason")).startswith("WorkloadEvicted"):
        return Signal(Cause.QUEUE, _words("TerminationTarget", target))
    disrupted = condition(pod, "DisruptionTarget")
    if disrupted is None:
        return None
    said = _words("DisruptionTarget", disrupted)
    reason = str(disrupted.get("reason"))
    cause = _DISRUPTIONS.get(reason, Cause.DRAIN)
    if reason == "TerminationByKubelet":
        cause = _POD_REASONS.get(str(at(pod, "status", "reason")), Cause.SPOT)
    labels, wanted = texts(at(node, "metadata", "labels")), texts(at(pod, "spec", "nodeSelector"))
    # A node that is no spot is shut down for maintenance only.
    is_spot = "true" in (labels.get(names.SPOT), wanted.get(names.SPOT))
    if labels.get(names.MAINTENANCE) == "ONGOING" or (cause is Cause.SPOT and not is_spot):
        cause = Cause.MAINTENANCE
    return Signal(cause, said)


def _by_reason(pod: Object) -> Signal | None:
    reason = str(at(pod, "status", "reason") or "")
    cause = _POD_REASONS.get(reason)
    if cause is None:
        return None
    message = at(pod, "status", "message")
    return Signal(cause, f"Pod {reason}" + (f": {message}" if message else ""))


def _stuck(pod: Object) -> Signal | None:
    for one in sequence(at(pod, "status", "containerStatuses")):
        waiting = mapping(at(one, "state", "waiting"))
        if cause := _STUCK.get(str(waiting.get("reason"))):
            return Signal(cause, _words(f"container {at(one, 'name')}", waiting))
    return None


def _by_exit_code(pod: Object) -> Signal | None:
    for one in sequence(at(pod, "status", "containerStatuses")):
        ended = mapping(at(one, "state", "terminated"))
        code = ended.get("exitCode")
        if not isinstance(code, int) or code == 0:
            continue
        if ended.get("reason") == "OOMKilled":
            return Signal(Cause.OUT_OF_MEMORY, f"OOMKilled, exit code {code}")
        if ended.get("reason") == "StartError":
            return Signal(Cause.CONFIGURATION, _words("container", ended))
        return Signal(cause_of_code(code), f"exit code {code}")
    if at(pod, "status", "phase") == "Failed":
        return Signal(Cause.KILLED, "the Pod failed, and nothing says why")
    return None


def _words(who: str, said: Mapping[str, Any]) -> str:
    message = said.get("message")
    return f"{who} {said.get('reason')}" + (f": {message}" if message else "")
