"""Every signal of kubernetes.md §4, as documents, to its cause."""

import pytest

from tpukit.pods.causes import Cause, Kind
from tpukit.pods.providers.gke.gang import PodRound
from tpukit.pods.providers.gke.signals import (
    jobset_signal,
    pod_signal,
    waiting_for,
    workload_signal,
)

SPOT = {"cloud.google.com/gke-spot": "true"}


def pod(
    *, condition=None, reason=None, code=None, ended="Error", waiting=None, spot=True, name="p-0-x",
    deleted=False, phase=None,
):  # fmt: skip
    state = {}
    if code is not None:
        state = {"terminated": {"exitCode": code, "reason": ended}}
    elif waiting:
        state = {"waiting": {"reason": waiting, "message": "m"}}
    type_, because = condition or (None, None)
    conditions = [{"type": type_, "status": "True", "reason": because, "message": "m"}]
    metadata = {"name": name, "uid": name, "labels": {}}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "metadata": metadata,
        "spec": {"nodeSelector": SPOT if spot else {}, "hostname": name.rpartition("-")[0]},
        "status": {
            "phase": phase or ("Failed" if code or reason else "Running"),
            "reason": reason,
            "conditions": conditions if condition else [],
            "containerStatuses": [{"name": "train", "state": state}] if state else [],
        },
    }


def disrupted(by, **more):
    return pod(condition=("DisruptionTarget", by), code=143, **more)


POD_ROWS = [
    (pod(condition=("TerminationTarget", "WorkloadEvictedDueToPreempted"), code=143), Cause.QUEUE),
    (disrupted("PreemptionByScheduler"), Cause.SCHEDULER),
    (disrupted("TerminationByKubelet", reason="Terminated"), Cause.SPOT),
    (disrupted("TerminationByKubelet", reason="Terminated", spot=False), Cause.MAINTENANCE),
    (pod(reason="NodeShutdown"), Cause.SPOT),
    (disrupted("TerminationByKubelet", reason="Evicted"), Cause.PRESSURE),
    (disrupted("EvictionByEvictionAPI"), Cause.DRAIN),
    (disrupted("DeletionByTaintManager"), Cause.DRAIN),
    (disrupted("DeletionByPodGC"), Cause.NODE_GONE),
    (pod(reason="Preempting", code=137), Cause.SCHEDULER),
    (pod(code=137, ended="OOMKilled"), Cause.OUT_OF_MEMORY),
    (pod(code=137), Cause.KILLED),
    (pod(waiting="ErrImagePull"), Cause.IMAGE),
    (pod(waiting="ImagePullBackOff"), Cause.IMAGE),
    (pod(waiting="InvalidImageName"), Cause.IMAGE),
    (pod(waiting="CreateContainerConfigError"), Cause.CONFIGURATION),
    (pod(waiting="CreateContainerError"), Cause.CONFIGURATION),
    (pod(waiting="RunContainerError"), Cause.CONFIGURATION),
    (pod(waiting="CrashLoopBackOff"), Cause.CONFIGURATION),
    (pod(code=128, ended="StartError"), Cause.CONFIGURATION),
    (pod(reason="UnexpectedAdmissionError"), Cause.DIRTY_HOST),
    (pod(reason="DeadlineExceeded"), Cause.DEADLINE),
    (pod(code=143), Cause.NOTICE),
    (pod(code=134), Cause.ABORTED),
    (pod(code=201), Cause.PEER_LOST),
    (pod(code=200), Cause.HUNG),
    (pod(code=1), Cause.FAILED),
    (pod(code=2), Cause.BAD_INPUT),
    (pod(code=3), Cause.DIVERGED),
    (pod(phase="Failed"), Cause.KILLED),
    (pod(), None),
    (pod(waiting="ContainerCreating"), None),
    (pod(code=0, phase="Succeeded"), None),
]


@pytest.mark.parametrize(("document", "cause"), POD_ROWS)
def test_pods(document, cause):
    signal = pod_signal(document)
    assert (signal.cause if signal else None) is cause


def test_a_node_under_maintenance_says_so():
    node = {"metadata": {"labels": {"cloud.google.com/active-node-maintenance": "ONGOING"}}}
    assert pod_signal(disrupted("EvictionByEvictionAPI"), node).cause is Cause.MAINTENANCE


def workload(type_, reason, status="True"):
    said = {"type": type_, "status": status, "reason": reason, "message": "m"}
    return {"status": {"conditions": [said]}}


@pytest.mark.parametrize(
    ("document", "cause"),
    [
        (workload("Evicted", "Preempted"), Cause.QUEUE),
        (workload("Evicted", "ClusterQueueStopped"), Cause.QUEUE),
        (workload("Evicted", "NodeFailures"), Cause.NODE_GONE),
        (workload("Evicted", "PodsReadyTimeout"), Cause.WAITED_TOO_LONG),
        (workload("Evicted", "DeactivatedDueToRequeuingLimitExceeded"), Cause.STOPPED),
        (workload("QuotaReserved", "ExceedsMaxQuota", "False"), Cause.QUOTA),
        (workload("QuotaReserved", "NoMatchingFlavor", "False"), Cause.UNPLACEABLE),
        (workload("QuotaReserved", "WaitingForQuota", "False"), None),
        (workload("QuotaReserved", "QuotaReserved"), None),
        (workload("Evicted", "QuotaReserved", "False"), None),
    ],
)
def test_workloads(document, cause):
    signal = workload_signal(document)
    assert (signal.cause if signal else None) is cause


def test_what_is_waited_for():
    held = workload("QuotaReserved", "WaitingForQuota", "False")
    assert waiting_for(held, []).cause is Cause.QUOTA
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/8"}
    assert waiting_for(None, [{"status": {"conditions": [said]}}]).cause is Cause.STOCKOUT
    gated = {**said, "reason": "SchedulingGated"}
    assert waiting_for(None, [{"status": {"conditions": [gated]}}]) is None


def test_jobsets():
    failed = workload("Failed", "FailedJobs")
    assert jobset_signal(failed).cause is Cause.FAILED
    failed["status"]["conditions"][0]["message"] = "DeadlineExceeded: Job was active longer"
    assert jobset_signal(failed).cause is Cause.DEADLINE
    assert jobset_signal(workload("Completed", "AllJobsCompleted")) is None


def judged(*pods):
    seen = PodRound(0)
    for one in pods:
        seen.see(one, is_there=True)
    return seen.ending()


def test_an_eviction_is_the_cause_though_the_others_failed_first():
    ending = judged(
        pod(name="g-0-a", code=201),
        pod(name="g-1-b", code=134),
        disrupted("TerminationByKubelet", reason="Terminated", name="g-2-c"),
    )
    assert (ending.cause, ending.host) == (Cause.SPOT, "g-2")
    assert ending.cause.kind is Kind.EVICTION


def test_who_failed_is_blamed_and_not_who_followed():
    told = pod(name="g-0-a", code=143, deleted=True)
    lost = pod(name="g-1-b", code=201)
    killed = pod(name="g-2-c", code=137)
    assert judged(told, lost, killed).host == "g-2"
    assert judged(told, lost).cause is Cause.PEER_LOST
    failed = pod(name="g-3-d", code=1)
    assert judged(told, lost, failed).cause is Cause.FAILED
    # A program of one's own ends with 1 when it loses a peer.
    assert judged(failed, killed).cause is Cause.KILLED


def test_a_pod_that_vanished_is_infrastructure():
    seen = PodRound(0)
    seen.see(pod(name="g-0-a"), is_there=True)
    seen.see(pod(name="g-0-a"), is_there=False)
    ending = seen.ending()
    assert ending.evidence == "the Pod vanished"
    assert ending.cause.is_worth_restarting
