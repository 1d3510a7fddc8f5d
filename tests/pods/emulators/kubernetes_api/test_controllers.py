"""JobSet, Job, scheduler and Kueue: what they do with real processes."""

import copy

import pytest
from emulated_cluster import LAUNCH, Watched, conditions, pod_spec, small_jobset, until

from tpukit.pods import PodConfig
from tpukit.pods.manifests import queue_documents
from tpukit.pods.manifests.reading import at
from tpukit_emulators.kubernetes_api.kinds import (
    BY_PATH,
    JOB,
    NODE,
    POD,
    RESOURCE_QUOTA,
    SECRET,
    SERVICE,
    WORKLOAD,
)
from tpukit_emulators.kubernetes_api.refusal import Refusal

QUEUED = LAUNCH.model_copy(update={"queue": "tpu"})


def test_a_jobset_runs_to_its_end(cluster):
    job = Watched(cluster, small_jobset("gem", "true", on="2xv6e-16"))
    assert job.wait_state("Completed")["reason"] == "AllJobsCompleted"
    assert len(job.pods) == 8
    first = [pod for pod in job.pods if "slice-0" in pod["metadata"]["name"]]
    assert len({pod["spec"]["nodeName"].rpartition("-")[0] for pod in first}) == 1
    assert cluster.store.get(SERVICE, "default", "gem")["spec"]["clusterIP"] == "None"
    assert job.status["replicatedJobsStatus"][0]["succeeded"] == 2


@pytest.mark.parametrize(
    ("code", "restarts", "charged", "state"),
    [
        (201, 3, 0, None),  # peer lost: again and again, for free
        (143, 3, 0, None),
        (1, 0, 0, "FailJobSetFailurePolicyAction"),  # an error of the program: at once
        (200, 1, 1, "ReachedMaxRestarts"),  # a hang: once, then it is over
        (137, 1, 1, "ReachedMaxRestarts"),
        (2, 0, 0, "FailJobSetFailurePolicyAction"),  # bad input: at once
    ],
)
def test_exit_codes_are_charged_as_they_should(cluster, code, restarts, charged, state):
    job = Watched(cluster, small_jobset("gem", "sh", "-c", f"exit {code}"))
    if state:
        assert job.wait_state("Failed")["reason"] == state
    status = job.wait_restarts(restarts)
    assert status["restartsCountTowardsMax"] == charged
    cluster.store.delete(*_key(job), propagation="Foreground")
    until(lambda: not job.pods)


def _key(job):
    return BY_PATH["jobset.x-k8s.io", "v1alpha2", "jobsets"], "default", job.name


def test_without_a_policy_the_first_failure_is_the_end(cluster):
    jobset = small_jobset("gem", "false")
    del jobset["spec"]["failurePolicy"]
    assert Watched(cluster, jobset).wait_state("Failed")["reason"] == "FailedJobs"


def test_attempts_do_not_mix(cluster):
    job = Watched(cluster, small_jobset("gem", "sleep", "60"))
    first = job.wait_running()
    cluster.mishaps.kill(first[1])
    second = job.wait_running(attempt=1)
    assert not {pod["metadata"]["uid"] for pod in first} & {
        pod["metadata"]["uid"] for pod in job.pods
    }
    assert cluster.kubelet.processes.running == 4
    assert second[0]["status"]["podIP"] == first[0]["status"]["podIP"]
    until(lambda: conditions(job.object)["RestartingJobSet"] == "JobsReady")


MISHAPS = {
    # name of the mishap: what says so on the Pod, and whether the restart is charged
    "shut_down": ("TerminationByKubelet", 0),
    "remove": ("DeletionByPodGC", 0),
    "taint": ("DeletionByTaintManager", 0),
    "drain": ("EvictionByEvictionAPI", 0),
    "preempt_by_scheduler": ("PreemptionByScheduler", 0),
    "starve": ("TerminationByKubelet", 0),
    "preempt_for_critical": (None, 1),
    "out_of_memory": (None, 1),
    "kill": (None, 1),
    "vanish": (None, None),
}


@pytest.mark.parametrize("mishap", MISHAPS)
def test_every_eviction_gives_its_signal_and_the_job_starts_again(cluster, mishap):
    job = Watched(cluster, small_jobset("gem", "sleep", "60"))
    pods = job.wait_running()
    seen = []
    cluster.store.listen(lambda change: seen.append(change.object) if change.kind is POD else None)
    target = pods[2]
    on_node = mishap in ("shut_down", "remove", "taint", "drain")
    back = {"back_after_s": 0.0} if mishap == "remove" else {}
    getattr(cluster.mishaps, mishap)(target["spec"]["nodeName"] if on_node else target, **back)
    reason, charged = MISHAPS[mishap]
    if mishap == "vanish":  # the Job makes a new one by itself; the others would notice
        until(lambda: len(job.wait_running()) == 4 and target not in job.pods)
        return
    if mishap in ("taint", "drain"):
        undo = {"taint": "untaint", "drain": "uncordon"}[mishap]
        until(lambda: job.status.get("restarts"))
        getattr(cluster.mishaps, undo)(target["spec"]["nodeName"])
    job.wait_running(attempt=1)
    assert job.status["restartsCountTowardsMax"] == charged
    own = [one for one in seen if one["metadata"]["uid"] == target["metadata"]["uid"]]
    assert {conditions(one).get("DisruptionTarget") for one in own} >= {reason}
    last = own[-1]["status"]
    assert last["phase"] == "Failed"
    if mishap == "out_of_memory":
        assert last["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"
        assert last["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    if mishap == "shut_down":
        assert last["reason"] == "Terminated"


def test_pods_wait_for_nodes_and_followers_for_their_leader(cluster):
    jobset = small_jobset("gem")
    pod_spec(jobset)["nodeSelector"]["cloud.google.com/gke-tpu-topology"] = "8x8"
    job = Watched(cluster, jobset)
    (leader,) = until(lambda: [pod for pod in job.pods if conditions(pod).get("PodScheduled")])
    assert leader["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "0"
    assert conditions(leader)["PodScheduled"] == "Unschedulable"
    message = leader["status"]["conditions"][0]["message"]
    assert message.startswith("0/8 nodes are available: 8 node(s) didn't match")
    assert len(job.pods) == 1


def test_two_jobs_do_not_share_a_slice(cluster):
    jobs = [Watched(cluster, small_jobset(name)) for name in ("one", "two")]
    pools = [{pod["spec"]["nodeName"][4] for pod in job.wait_running()} for job in jobs]
    assert sorted(map(sorted, pools)) == [["a"], ["b"]]
    third = Watched(cluster, small_jobset("three"))
    until(lambda: any(conditions(pod).get("PodScheduled") == "Unschedulable" for pod in third.pods))
    cluster.store.delete(*_key(jobs[0]), propagation="Background")
    third.wait_running()


def test_what_cannot_start_says_so(cluster):
    cluster.kubelet.bad_images.add(LAUNCH.image)
    waiting = Watched(cluster, small_jobset("gem"))
    until(lambda: any(at(pod, "status", "containerStatuses") for pod in waiting.pods))
    (state,) = (pod["status"]["containerStatuses"][0]["state"] for pod in waiting.pods[:1])
    assert state["waiting"]["reason"] == "ImagePullBackOff"


def test_a_missing_secret_is_waited_for(cluster):
    jobset = small_jobset("gem", "sh", "-c", 'test "$A" = b')
    source = {"secretKeyRef": {"name": "s", "key": "A"}}
    pod_spec(jobset)["containers"][0]["env"].append({"name": "A", "valueFrom": source})
    job = Watched(cluster, jobset)
    until(lambda: any(at(pod, "status", "containerStatuses") for pod in job.pods))
    reason = job.pods[0]["status"]["containerStatuses"][0]["state"]["waiting"]["reason"]
    assert reason == "CreateContainerConfigError"
    secret = {"metadata": {"name": "s", "namespace": "default"}, "data": {"A": "Yg=="}}
    cluster.store.create(SECRET, secret)
    job.wait_state("Completed")


def test_a_program_that_is_not_there_fails_the_pod(cluster):
    job = Watched(cluster, small_jobset("gem", "no-such-program"))
    assert job.wait_state("Failed")["reason"] == "ReachedMaxRestarts"


def test_deadlines_and_device_plugins(cluster):
    jobset = small_jobset("gem")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] = 1
    job = Watched(cluster, jobset)
    job.wait_running()
    cluster.kubelet.rejects = {node["metadata"]["name"] for node in cluster.store.items(NODE)}
    assert job.wait_state("Failed")["reason"] == "ReachedMaxRestarts"
    reasons = {at(pod, "status", "reason") for pod in job.pods}
    assert "UnexpectedAdmissionError" in reasons


def test_a_resource_quota_keeps_pods_from_being_made(cluster):
    hard = {"spec": {"hard": {"requests.google.com/tpu": "8"}}}
    metadata = {"metadata": {"name": "q", "namespace": "default"}}
    cluster.store.create(RESOURCE_QUOTA, metadata | hard)
    job = Watched(cluster, small_jobset("gem"))
    until(lambda: len(cluster.mishaps.pods_of("gem")) == 2)
    assert cluster.settle()
    events = [one["message"] for one in cluster.store.items(BY_PATH["", "v1", "events"])]
    assert any("exceeded quota: q" in one for one in events)
    assert len(job.pods) == 2


def add(cluster, documents):
    for one in documents:
        kind = next(kind for kind in BY_PATH.values() if kind.name == one["kind"])
        cluster.store.create(kind, cluster.admission.admit(kind, one))


def workload(cluster, name):
    every = cluster.store.items(WORKLOAD)
    found = [one for one in every if one["metadata"]["name"].startswith(f"jobset-{name}-")]
    return found[0] if found else {}


def queued(name, priority=0):
    jobset = small_jobset(name, launch=QUEUED)
    if priority:
        jobset["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = f"p{priority}"
    return jobset


def priority_class(value):
    document = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass"}
    return document | {"metadata": {"name": f"p{value}"}, "value": value}


def test_quota_is_held_and_given_in_turn(cluster):
    add(cluster, queue_documents(PodConfig(tpu_type="v6e-16"), QUEUED))
    first, second = Watched(cluster, queued("first")), Watched(cluster, queued("second"))
    first.wait_running()
    until(lambda: conditions(workload(cluster, "second")).get("QuotaReserved") == "WaitingForQuota")
    assert second.object["spec"]["suspend"] is True
    assert second.pods == []
    cluster.store.delete(*_key(first), propagation="Background")
    second.wait_running()
    assert conditions(workload(cluster, "second"))["Admitted"] == "Admitted"


@pytest.mark.parametrize(
    ("chips", "kind", "reason"),
    [(8, None, "ExceedsMaxQuota"), (16, "LocalQueue", "Misconfigured")],
)
def test_what_will_never_be_admitted_says_why(cluster, chips, kind, reason):
    documents = queue_documents(PodConfig(tpu_type="v6e-16"), QUEUED, chips=chips)
    add(cluster, [one for one in documents if one["kind"] != kind])
    Watched(cluster, queued("gem"))
    until(lambda: conditions(workload(cluster, "gem")).get("QuotaReserved") == reason)


def test_a_higher_priority_takes_the_quota_and_gives_it_back(cluster):
    add(cluster, [*queue_documents(PodConfig(tpu_type="v6e-16"), QUEUED), priority_class(5)])
    low = Watched(cluster, queued("low"))
    before = copy.deepcopy(low.object["spec"]["replicatedJobs"])
    low.wait_running()
    seen = []
    cluster.store.listen(lambda change: seen.append(change.object) if change.kind is POD else None)
    high = Watched(cluster, queued("high", 5))
    high.wait_running()
    until(lambda: not low.pods)
    said = conditions(workload(cluster, "low"))
    assert said["Evicted"] == "Preempted"
    assert said["Preempted"] == "InClusterQueue"
    assert said["Requeued"] == "Preempted"
    assert low.object["spec"]["suspend"] is True
    assert low.object["spec"]["replicatedJobs"] == before
    gone = [one for one in seen if one["metadata"]["name"].startswith("low")]
    assert not any("DisruptionTarget" in conditions(one) for one in gone)
    assert low.status["restarts"] == 0
    cluster.store.delete(*_key(high), propagation="Background")
    low.wait_running()
    assert conditions(workload(cluster, "low"))["Evicted"] == "QuotaReserved"


def test_admitted_and_never_placed(cluster):
    add(cluster, queue_documents(PodConfig(tpu_type="v6e-16"), QUEUED, chips=64))
    cluster.scheduler.is_stopped = True
    job = Watched(cluster, queued("gem"))
    until(lambda: conditions(workload(cluster, "gem")).get("Admitted") == "Admitted")
    until(lambda: job.pods)
    assert cluster.settle()
    assert all(not at(pod, "spec", "nodeName") for pod in job.pods)


def test_what_jobset_would_refuse_is_refused(cluster):
    long = small_jobset("x" * 40)
    long["metadata"]["name"] = "x" * 60
    with pytest.raises(Refusal, match="no valid name of a pod"):
        Watched(cluster, long)
    alone = small_jobset("gem")
    pod_spec(alone)["restartPolicy"] = "OnFailure"
    with pytest.raises(Refusal, match="needs restartPolicy Never"):
        Watched(cluster, alone)
    job = Watched(cluster, small_jobset("gem"))
    changed = copy.deepcopy(job.object)
    changed["spec"]["failurePolicy"]["maxRestarts"] = 9
    with pytest.raises(Refusal, match="field is immutable"):
        cluster.admission.admit_change(_key(job)[0], job.object, changed)


def test_jobs_go_with_their_jobset(cluster):
    job = Watched(cluster, small_jobset("gem"))
    job.wait_running()
    cluster.store.delete(*_key(job), propagation="Foreground")
    until(lambda: cluster.store.find(*_key(job)) is None)
    assert not cluster.store.items(JOB)
    assert cluster.kubelet.processes.running == 0
