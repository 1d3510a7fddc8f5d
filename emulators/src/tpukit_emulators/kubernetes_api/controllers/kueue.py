"""Kueue: a Workload for each JobSet in a queue, quota, priorities, and preemption.

Preemption as a JobSet sees it: its Workload is Evicted and Preempted, the JobSet is suspended and
its Pods are deleted with no condition on them; when none is left, the Workload waits again.
"""

import copy
import hashlib
from collections.abc import Sequence

from tpukit.pods.manifests.reading import JobSet, at, count, sequence, texts

from .. import well_known
from ..kinds import (
    CLUSTER_QUEUE,
    JOB,
    JOBSET,
    LOCAL_QUEUE,
    POD,
    PRIORITY_CLASS,
    RESOURCE_FLAVOR,
    WORKLOAD,
)
from ..recording import owned_by, record
from ..store import (
    Change,
    Key,
    Object,
    Store,
    condition_of,
    conditions,
    has_condition,
    set_condition,
)
from .quotas import Admitted, ClusterQueue, PodSet, Quotas, Refused, Usage
from .work import no_keys

ALL: Key = ("", "")
_KINDS = (JOBSET, JOB, CLUSTER_QUEUE, LOCAL_QUEUE, PRIORITY_CLASS, RESOURCE_FLAVOR, WORKLOAD, POD)


class Kueue:
    """Admits JobSets by quota and priority."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def wants(self, change: Change) -> Sequence[Key]:
        """Look again whenever something that is queued, or a queue, changed."""
        if change.kind not in _KINDS or (change.kind is POD and change.type != "DELETED"):
            return no_keys()
        if change.kind is JOBSET and not texts(change.object["metadata"].get("labels")).get(
            well_known.QUEUE
        ):
            return no_keys()
        if change.kind in (JOB, POD) and not self._store.has(WORKLOAD):
            return no_keys()
        return [ALL]

    def reconcile(self, key: Key) -> None:
        """Keep Workloads in step with JobSets, then admit what fits."""
        for jobset in self._store.items(JOBSET):
            if texts(jobset["metadata"].get("labels")).get(well_known.QUEUE):
                self._follow(jobset)
        waiting = [one for one in self._store.items(WORKLOAD) if _waits(one)]
        waiting.sort(key=_order)
        blocked: set[str] = set()
        quotas = self._quotas()
        for workload in waiting:
            self._admit(workload, quotas, blocked)
        self._count()

    # Workloads and their JobSets.

    def _follow(self, jobset: Object) -> None:
        workload = next(iter(self._store.dependents(jobset, WORKLOAD)), None)
        if workload is None:
            if not jobset["metadata"].get("deletionTimestamp"):
                self._store.create(WORKLOAD, self._workload(jobset))
            return
        if state := at(jobset, "status", "terminalState"):
            if not has_condition(workload, "Finished"):
                reason = "Succeeded" if state == "Completed" else "Failed"
                self._set(workload, "Finished", "True", reason, f"JobSet finished: {state}")
            return
        if has_condition(workload, "Evicted"):
            self._stop(jobset, workload)
        elif has_condition(workload, "Admitted"):
            self._start(jobset, workload)
        elif at(jobset, "spec", "suspend") is not True:
            self._store.change(JOBSET, jobset, lambda one: one["spec"].update(suspend=True))

    def _workload(self, jobset: Object) -> Object:
        metadata = jobset["metadata"]
        labels = texts(metadata.get("labels"))
        class_name = labels.get(well_known.PRIORITY_CLASS, "")
        class_ = self._store.find(PRIORITY_CLASS, "", class_name)
        text = f"JobSet\n{JOBSET.group}\n{metadata['name']}\n{metadata['uid']}"
        return {
            "metadata": {
                "name": f"jobset-{metadata['name']}-{hashlib.sha1(text.encode()).hexdigest()[:5]}",
                "namespace": metadata["namespace"],
                "ownerReferences": [owned_by(jobset)],
            },
            "spec": {
                "active": True,
                "queueName": labels[well_known.QUEUE],
                "priority": count(class_.get("value"), 0) if class_ else 0,
                "podSets": [
                    {
                        "name": job.name,
                        "count": job.replicas * job.parallelism,
                        "template": copy.deepcopy(dict(job.template)),
                    }
                    for job in JobSet(jobset).jobs
                ],
            },
        }

    def _start(self, jobset: Object, workload: Object) -> None:
        """Let a JobSet run on the nodes of the flavors that it was given."""
        if at(jobset, "spec", "suspend") is not True:
            return
        labels: dict[str, dict[str, str]] = {}
        for given in sequence(at(workload, "status", "admission", "podSetAssignments")):
            found = [
                self._store.find(RESOURCE_FLAVOR, "", flavor)
                for flavor in set(texts(given.get("flavors")).values())
            ]
            labels[given["name"]] = {
                key: value
                for flavor in found
                for key, value in texts(at(flavor, "spec", "nodeLabels")).items()
            }

        def edit(after: Object) -> None:
            after["spec"]["suspend"] = False
            for job in after["spec"]["replicatedJobs"]:
                pod = job["template"]["spec"]["template"]["spec"]
                pod["nodeSelector"] = {**(pod.get("nodeSelector") or {}), **labels[job["name"]]}

        if started := self._store.change(JOBSET, jobset, edit):
            said = f"Admitted by clusterQueue {at(workload, 'status', 'admission', 'clusterQueue')}"
            record(self._store, started, "Started", said, component="kueue")

    def _stop(self, jobset: Object, workload: Object) -> None:
        """Suspend a JobSet; when nothing of it runs, let its Workload wait again."""
        original = {one["name"]: one["template"] for one in workload["spec"]["podSets"]}

        def edit(after: Object) -> None:
            after["spec"]["suspend"] = True
            for job in after["spec"]["replicatedJobs"]:
                job["template"]["spec"]["template"] = copy.deepcopy(original[job["name"]])

        if at(jobset, "spec", "suspend") is not True:
            if stopped := self._store.change(JOBSET, jobset, edit):
                said = condition_of(workload, "Evicted")["message"]
                record(self._store, stopped, "Stopped", said, component="kueue")
            return
        pods = [
            pod
            for job in self._store.dependents(jobset, JOB)
            for pod in self._store.dependents(job, POD)
            if at(pod, "status", "phase") not in ("Succeeded", "Failed")
        ]
        if pods or not has_condition(workload, "QuotaReserved"):
            return
        reason = condition_of(workload, "Evicted")["reason"]

        def requeue(after: Object) -> None:
            now = self._store.stamp()
            set_condition(after, "Requeued", "True", reason, "The workload waits again", now)
            said = "Previously admitted; evicted"
            set_condition(after, "QuotaReserved", "False", "Pending", said, now)
            set_condition(after, "Admitted", "False", "NoReservation", said, now)
            after["status"].pop("admission", None)

        self._store.change(WORKLOAD, workload, requeue)

    # Admission.

    def _admit(self, workload: Object, quotas: Quotas, blocked: set[str]) -> None:
        queue = self._queue(workload)
        if isinstance(queue, str):
            self._refuse(workload, "Misconfigured", queue)
            return
        if queue.name in blocked:
            return
        decided = quotas.decide(_pod_sets(workload), queue)
        if isinstance(decided, Admitted):
            self._reserve(workload, queue, decided)
            used = quotas.used.setdefault(queue.name, {})
            for key, amount in decided.usage.items():
                used[key] = used.get(key, 0) + amount
            return
        if decided.would_fit and self._make_room(workload, queue, decided.would_fit, quotas):
            self._refuse(workload, "WaitingForPreemptedWorkloads", decided.message)
            blocked.add(queue.name)
            return
        if queue.strict:
            blocked.add(queue.name)
        self._refuse(workload, decided.reason, _explain(decided))

    def _queue(self, workload: Object) -> ClusterQueue | str:
        local = self._store.find(
            LOCAL_QUEUE, workload["metadata"]["namespace"], workload["spec"]["queueName"]
        )
        if local is None:
            return f"LocalQueue {workload['spec']['queueName']} doesn't exist"
        name = str(at(local, "spec", "clusterQueue"))
        found = self._store.find(CLUSTER_QUEUE, "", name)
        return ClusterQueue.of(found) if found else f"ClusterQueue {name} doesn't exist"

    def _quotas(self) -> Quotas:
        quotas = Quotas.of([*self._store.items(CLUSTER_QUEUE), *self._store.items(RESOURCE_FLAVOR)])
        for workload in self._store.items(WORKLOAD):
            if has_condition(workload, "QuotaReserved") and not has_condition(workload, "Finished"):
                queue = str(at(workload, "status", "admission", "clusterQueue"))
                used = quotas.used.setdefault(queue, {})
                for key, amount in _usage(workload).items():
                    used[key] = used.get(key, 0) + amount
        return quotas

    def _reserve(self, workload: Object, queue: ClusterQueue, given: Admitted) -> None:
        pod_sets = {one.name: one for one in _pod_sets(workload)}
        checks = at(
            self._store.find(CLUSTER_QUEUE, "", queue.name),
            *("spec", "admissionChecksStrategy", "admissionChecks"),
        )

        def edit(after: Object) -> None:
            now = self._store.stamp()
            after.setdefault("status", {})["admission"] = {
                "clusterQueue": queue.name,
                "podSetAssignments": [
                    {
                        "name": name,
                        "flavors": dict(flavors),
                        "resourceUsage": {
                            key: str(amount) for key, amount in pod_sets[name].total.items()
                        },
                        "count": pod_sets[name].count,
                    }
                    for name, flavors in given.flavors.items()
                ],
            }
            said = f"Quota reserved in ClusterQueue {queue.name}"
            set_condition(after, "QuotaReserved", "True", "QuotaReserved", said, now)
            for type_ in ("Evicted", "Preempted"):
                if has_condition(after, type_):
                    set_condition(after, type_, "False", "QuotaReserved", said, now)
            if checks:
                said = "The workload has not all checks ready"
                set_condition(after, "Admitted", "False", "UnsatisfiedAdmissionChecks", said, now)
            else:
                set_condition(
                    after, "Admitted", "True", "Admitted", "The workload is admitted", now
                )

        if admitted := self._store.change(WORKLOAD, workload, edit):
            record(
                self._store, admitted, "Admitted", f"Admitted by {queue.name}", component="kueue"
            )

    def _make_room(
        self, workload: Object, queue: ClusterQueue, wanted: Admitted, quotas: Quotas
    ) -> bool:
        """Evict what may be evicted, until a workload fits; return whether that helps."""
        if any(has_condition(one, "Evicted") for one in self._store.items(WORKLOAD) if _holds(one)):
            return True  # wait for those first
        victims: list[Object] = []
        for other in sorted(filter(_holds, self._store.items(WORKLOAD)), key=_order, reverse=True):
            name = str(at(other, "status", "admission", "clusterQueue"))
            if not _may_preempt(workload, queue, other, quotas.queues.get(name), quotas):
                continue
            used = quotas.used[name]
            for key, amount in _usage(other).items():
                used[key] -= amount
            victims.append(other)
            if all(
                amount <= quotas.free(queue, flavor, resource)
                for (flavor, resource), amount in wanted.usage.items()
            ):
                for victim in victims:
                    reason = "InClusterQueue"
                    if at(victim, "status", "admission", "clusterQueue") != queue.name:
                        reason = "InCohortReclamation"
                    self.evict(victim, preempted=reason)
                return True
        for victim in victims:  # it would not help: leave them alone
            used = quotas.used[str(at(victim, "status", "admission", "clusterQueue"))]
            for key, amount in _usage(victim).items():
                used[key] += amount
        return False

    def evict(self, workload: Object, *, reason: str = "Preempted", preempted: str = "") -> None:
        """Take the quota of a Workload back."""
        message = "Preempted to accommodate a higher priority workload"
        if reason != "Preempted":
            message = f"The workload was evicted: {reason}"

        def edit(after: Object) -> None:
            now = self._store.stamp()
            set_condition(after, "Evicted", "True", reason, message, now)
            if preempted:
                set_condition(after, "Preempted", "True", preempted, message, now)

        if evicted := self._store.change(WORKLOAD, workload, edit):
            record(self._store, evicted, f"EvictedDueTo{reason}", message, component="kueue")

    def _refuse(self, workload: Object, reason: str, message: str) -> None:
        wanted = {"status": "False", "reason": reason, "message": message}
        said = [one for one in conditions(workload) if one["type"] == "QuotaReserved"]
        if said and wanted.items() <= said[0].items():
            return
        self._set(workload, "QuotaReserved", "False", reason, message)
        record(self._store, workload, "Pending", message, type_="Warning", component="kueue")

    def _set(self, workload: Object, type_: str, status: str, reason: str, message: str) -> None:
        now = self._store.stamp()
        self._store.change(
            WORKLOAD, workload, lambda one: set_condition(one, type_, status, reason, message, now)
        )

    def _count(self) -> None:
        workloads = [
            one for one in self._store.items(WORKLOAD) if not has_condition(one, "Finished")
        ]
        for local in self._store.items(LOCAL_QUEUE):
            own = [
                one
                for one in workloads
                if one["spec"]["queueName"] == local["metadata"]["name"]
                and one["metadata"]["namespace"] == local["metadata"]["namespace"]
            ]
            self._store.change(LOCAL_QUEUE, local, lambda one, own=own: _say_counts(one, own))
        for queue in self._store.items(CLUSTER_QUEUE):
            own = [one for one in workloads if _is_in(self._queue(one), queue)]
            self._store.change(CLUSTER_QUEUE, queue, lambda one, own=own: _say_counts(one, own))


def _may_preempt(
    workload: Object,
    queue: ClusterQueue,
    other: Object,
    its: ClusterQueue | None,
    quotas: Quotas,
) -> bool:
    own, theirs = workload["spec"]["priority"], other["spec"]["priority"]
    if its is None:
        return False
    if its.name == queue.name:
        is_newer = theirs == own and _order(other) > _order(workload)
        return (queue.within != "Never" and theirs < own) or (
            queue.within == "LowerOrNewerEqualPriority" and is_newer
        )
    if queue.cohort is None or its.cohort != queue.cohort or queue.reclaim == "Never":
        return False
    borrows = any(
        amount > (quota.nominal if (quota := its.quota(*key)) else 0)
        for key, amount in quotas.used[its.name].items()
    )
    return borrows and (queue.reclaim == "Any" or theirs < own)


def _is_in(queue: ClusterQueue | str, document: Object) -> bool:
    return not isinstance(queue, str) and queue.name == document["metadata"]["name"]


def _say_counts(queue: Object, workloads: list[Object]) -> None:
    reserving = sum(has_condition(one, "QuotaReserved") for one in workloads)
    queue.setdefault("status", {}).update(
        pendingWorkloads=len(workloads) - reserving,
        reservingWorkloads=reserving,
        admittedWorkloads=sum(has_condition(one, "Admitted") for one in workloads),
    )


def _waits(workload: Object) -> bool:
    return not any(has_condition(workload, one) for one in ("QuotaReserved", "Finished"))


def _holds(workload: Object) -> bool:
    return has_condition(workload, "QuotaReserved") and not has_condition(workload, "Finished")


def _order(workload: Object) -> tuple[int, str, str]:
    """Sort by priority, then by age."""
    metadata = workload["metadata"]
    return -workload["spec"]["priority"], metadata["creationTimestamp"], metadata["name"]


def _pod_sets(workload: Object) -> list[PodSet]:
    jobs = [
        {
            "name": one["name"],
            "template": {"spec": {"parallelism": one["count"], "template": one["template"]}},
        }
        for one in workload["spec"]["podSets"]
    ]
    return [PodSet.of(job) for job in JobSet({"spec": {"replicatedJobs": jobs}}).jobs]


def _usage(workload: Object) -> Usage:
    usage: Usage = {}
    for one in sequence(at(workload, "status", "admission", "podSetAssignments")):
        for resource, flavor in texts(one.get("flavors")).items():
            key = (flavor, resource)
            usage[key] = usage.get(key, 0) + int(one["resourceUsage"][resource])
    return usage


def _explain(refused: Refused) -> str:
    return f"couldn't assign flavors to pod set: {refused.message}"
