"""The Job controller: indexed Jobs, backoffLimit, podFailurePolicy, suspension, deadlines.

A Pod carries a finalizer until the Job has counted it, so none is lost however it ends.
"""

import copy
import uuid
from collections.abc import Sequence

from tpukit.pods.manifests.reading import at, count

from ...clock import Clock
from .. import well_known
from ..admission import Admission, LeaderNotPlaced
from ..kinds import JOB, POD
from ..recording import owned_by, record
from ..refusal import Refusal
from ..store import Change, Key, Object, Store, condition_of, has_condition, set_condition
from .pod_failures import failure_rule
from .work import Worker, no_keys

TRACKING = "batch.kubernetes.io/job-tracking"
DEFAULT_BACKOFF = 6
RETRY_S = 1.0


class JobController:
    """Runs the Pods of Jobs."""

    def __init__(self, store: Store, clock: Clock, admission: Admission) -> None:
        self._store = store
        self._clock = clock
        self._admission = admission
        self.worker: Worker | None = None

    def wants(self, change: Change) -> Sequence[Key]:
        """Look at Jobs that changed, and whose Pods did."""
        metadata = change.object["metadata"]
        if change.kind is JOB:
            return [(metadata["namespace"], metadata["name"])]
        if change.kind is POD and (name := metadata.get("labels", {}).get(well_known.JOB_NAME)):
            return [(metadata["namespace"], name)]
        return no_keys()

    def reconcile(self, key: Key) -> None:
        """Bring one Job forward."""
        job = self._store.find(JOB, *key)
        if job is None or job["metadata"].get("deletionTimestamp"):
            for pod in self._store.items(POD, key[0]):
                if pod["metadata"].get("labels", {}).get(well_known.JOB_NAME) == key[1]:
                    self._release(pod)
            return
        pods = self._store.dependents(job, POD)
        if has_condition(job, "Failed") or has_condition(job, "Complete"):
            for pod in pods:
                self._release(pod)
            return
        if at(job, "spec", "suspend") is True:
            self._suspend(job, pods)
            return
        job = self._begin(job)
        job = self._count(job, pods)
        pods = self._store.dependents(job, POD)
        if has_condition(job, "FailureTarget"):
            self._end(job, pods)
        else:
            self._go_on(job, pods)

    # The parts.

    def _begin(self, job: Object) -> Object:
        def edit(after: Object) -> None:
            status = after.setdefault("status", {})
            if "startTime" not in status:
                status["startTime"] = self._store.stamp()
                deadline_s = at(after, "spec", "activeDeadlineSeconds")
                if isinstance(deadline_s, int):
                    self._clock.call_later(deadline_s, lambda: self._expire(job))
            if has_condition(after, "Suspended"):
                self._say(after, "Suspended", "False", "JobResumed", "Job resumed")

        return self._store.change(JOB, job, edit) or job

    def _suspend(self, job: Object, pods: list[Object]) -> None:
        for pod in pods:
            self._release(pod)
            if not pod["metadata"].get("deletionTimestamp"):
                self._delete(pod)

        def edit(after: Object) -> None:
            status = after.setdefault("status", {})
            status.pop("startTime", None)
            status |= {"active": sum(map(_is_active, pods)), "ready": 0}
            if not has_condition(after, "Suspended"):
                self._say(after, "Suspended", "True", "JobSuspended", "Job suspended")

        self._store.change(JOB, job, edit)

    def _count(self, job: Object, pods: list[Object]) -> Object:
        """Count the Pods that have ended since, and decide whether the Job has failed."""
        new = [
            pod
            for pod in pods
            if TRACKING in pod["metadata"].get("finalizers", ()) and not _is_active(pod)
        ]
        failed, done, fatal = 0, set(_completed(job)), ""
        for pod in new:
            if at(pod, "status", "phase") == "Succeeded":
                done.add(_index(pod))
                continue
            action, message = failure_rule(job, pod)
            fatal = fatal or (message if action == "FailJob" else "")
            failed += action != "Ignore"
        active = [pod for pod in pods if _is_active(pod)]

        def edit(after: Object) -> None:
            status = after.setdefault("status", {})
            status["failed"] = count(status.get("failed"), 0) + failed
            status["succeeded"] = len(done)
            status["completedIndexes"] = ",".join(str(one) for one in sorted(done))
            status["active"] = len(active)
            status["ready"] = sum(has_condition(pod, "Ready") for pod in active)
            limit = count(at(after, "spec", "backoffLimit"), DEFAULT_BACKOFF)
            if has_condition(after, "FailureTarget"):
                return
            if fatal:
                self._say(after, "FailureTarget", "True", "PodFailurePolicy", fatal)
            elif status["failed"] > limit:
                said = "Job has reached the specified backoff limit"
                self._say(after, "FailureTarget", "True", "BackoffLimitExceeded", said)

        changed = self._store.change(JOB, job, edit) or job
        for pod in new:
            self._release(pod)
        return changed

    def _go_on(self, job: Object, pods: list[Object]) -> None:
        wanted = count(at(job, "spec", "completions"), count(at(job, "spec", "parallelism"), 1))
        done = set(_completed(job))
        if len(done) >= wanted:
            self._finish(
                job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods"
            )
            return
        active = {_index(pod) for pod in pods if _is_active(pod)}
        room = count(at(job, "spec", "parallelism"), 1) - len(active)
        for index in range(wanted):
            if room <= 0:
                break
            if index not in done and index not in active:
                room -= 1
                try:
                    pod = self._admission.admit_pod(
                        self._pod(job, index), hosts=count(at(job, "spec", "parallelism"), 1)
                    )
                except Refusal as refusal:
                    record(
                        self._store,
                        job,
                        "FailedCreate",
                        f"Error creating: {refusal.message}",
                        type_="Warning",
                        component="job-controller",
                    )
                    if not isinstance(refusal, LeaderNotPlaced):  # whose change is seen
                        self._clock.call_later(RETRY_S, lambda: self._look_again(job))
                    break
                self._store.create(POD, pod)

    def _end(self, job: Object, pods: list[Object]) -> None:
        """Delete what still runs; the Job has failed when nothing does."""
        active = [pod for pod in pods if _is_active(pod)]
        for pod in active:
            if not pod["metadata"].get("deletionTimestamp"):
                self._delete(pod)
        if not active:
            target = condition_of(job, "FailureTarget")
            self._finish(job, "Failed", target["reason"], target["message"])

    def _finish(self, job: Object, type_: str, reason: str, message: str) -> None:
        def edit(after: Object) -> None:
            after["status"]["completionTime"] = self._store.stamp()
            after["status"] |= {"active": 0, "ready": 0}
            self._say(after, type_, "True", reason, message)

        if finished := self._store.change(JOB, job, edit):
            kind = "Warning" if type_ == "Failed" else "Normal"
            record(self._store, finished, reason, message, type_=kind, component="job-controller")

    def _expire(self, job: Object) -> None:
        def edit(after: Object) -> None:
            if not any(
                has_condition(after, one) for one in ("Failed", "Complete", "FailureTarget")
            ):
                said = "Job was active longer than specified deadline"
                self._say(after, "FailureTarget", "True", "DeadlineExceeded", said)

        self._store.change(JOB, job, edit)

    def _look_again(self, job: Object) -> None:
        if self.worker:
            metadata = job["metadata"]
            self.worker.enqueue(self, (metadata["namespace"], metadata["name"]))

    def _pod(self, job: Object, index: int) -> Object:
        metadata = job["metadata"]
        template = at(job, "spec", "template")
        inner = template.get("metadata") or {}
        name = f"{metadata['name']}-{index}"
        spec = {
            **copy.deepcopy(template["spec"]),
            "hostname": name,
            "containers": [
                {
                    **copy.deepcopy(container),
                    "env": [
                        *(container.get("env") or ()),
                        {"name": "JOB_COMPLETION_INDEX", "value": str(index)},
                    ],
                }
                for container in template["spec"]["containers"]
            ],
        }
        marks = {well_known.JOB_NAME: metadata["name"], well_known.COMPLETION_INDEX: str(index)}
        return {
            "metadata": {
                "name": f"{name}-{uuid.uuid4().hex[:5]}",
                "namespace": metadata["namespace"],
                "labels": {**(inner.get("labels") or {}), **marks, "job-name": metadata["name"]},
                "annotations": {
                    **(inner.get("annotations") or {}),
                    well_known.COMPLETION_INDEX: str(index),
                },
                "finalizers": [TRACKING],
                "ownerReferences": [owned_by(job)],
            },
            "spec": spec,
            "status": {"phase": "Pending"},
        }

    def _release(self, pod: Object) -> None:
        """Take the tracking finalizer from a Pod that is counted, or need not be."""

        def edit(after: Object) -> None:
            finalizers = after["metadata"].get("finalizers", [])
            after["metadata"]["finalizers"] = [one for one in finalizers if one != TRACKING]

        if TRACKING in pod["metadata"].get("finalizers", ()):
            self._store.change(POD, pod, edit)

    def _delete(self, pod: Object) -> None:
        self._store.delete(POD, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _say(self, job: Object, type_: str, status: str, reason: str, message: str) -> None:
        set_condition(job, type_, status, reason, message, self._store.stamp())


def _is_active(pod: Object) -> bool:
    return at(pod, "status", "phase") not in ("Succeeded", "Failed")


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][well_known.COMPLETION_INDEX])


def _completed(job: Object) -> list[int]:
    return [int(one) for one in str(at(job, "status", "completedIndexes") or "").split(",") if one]
