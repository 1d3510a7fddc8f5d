"""JobSet's controller, in the order of its own reconcile loop (v0.12).

Sort Jobs into those of earlier attempts, active, failed and successful; update the status; stop
where the JobSet is finished; delete earlier Jobs; failure policy; success policy; Service; create
missing Jobs; suspend or resume.
"""

import copy
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpukit.pods.manifests.reading import JobSet, ReplicatedJob, at, count, mapping, sequence

from ...clock import Clock
from .. import well_known
from ..admission import write_quantities
from ..kinds import JOB, JOBSET, SERVICE
from ..recording import owned_by, record
from ..store import Change, Key, Object, Store, condition_of, has_condition, set_condition
from .work import no_keys

PREFIX = "jobset.sigs.k8s.io/"


@dataclass
class Jobs:
    """The Jobs of a JobSet."""

    previous: list[Object]
    active: list[Object]
    failed: list[Object]
    successful: list[Object]

    @property
    def current(self) -> list[Object]:
        """Those of this attempt."""
        return [*self.active, *self.failed, *self.successful]


class JobSetController:
    """Runs the Jobs of JobSets together."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def wants(self, change: Change) -> Sequence[Key]:
        """Look at JobSets that changed, and whose Jobs did."""
        metadata = change.object["metadata"]
        if change.kind is JOBSET:
            return [(metadata["namespace"], metadata["name"])]
        if change.kind is JOB and (name := metadata.get("labels", {}).get(well_known.JOBSET_NAME)):
            return [(metadata["namespace"], name)]
        return no_keys()

    def reconcile(self, key: Key) -> None:
        """Bring one JobSet forward."""
        found = self._store.find(JOBSET, *key)
        if found is None or found["metadata"].get("deletionTimestamp"):
            return
        jobs = self._sort(found)
        found = self._update_status(found, jobs)
        if at(found, "status", "terminalState"):
            self._clean_up(found, jobs)
            return
        for job in jobs.previous:
            self._delete(job)
        if jobs.failed:
            self._apply_failure_policy(found, jobs)
            return
        if _is_successful(found, jobs):
            self._finish(found, "Completed", "AllJobsCompleted", "jobset completed successfully")
            return
        self._ensure_service(found)
        is_suspended = at(found, "spec", "suspend") is True
        blocks = at(found, "spec", "failurePolicy", "restartStrategy") == "BlockingRecreate"
        if not (blocks and jobs.previous):
            self._create_missing(found, jobs, suspend=is_suspended)
        self._suspend_or_resume(found, jobs, suspend=is_suspended)

    # The parts, in order.

    def _sort(self, jobset: Object) -> Jobs:
        restarts = count(at(jobset, "status", "restarts"), 0)
        jobs = Jobs([], [], [], [])
        for job in self._store.dependents(jobset, JOB):
            if int(job["metadata"]["labels"][well_known.RESTART_ATTEMPT]) < restarts:
                jobs.previous.append(job)
            elif has_condition(job, "Failed"):
                jobs.failed.append(job)
            elif has_condition(job, "Complete"):
                jobs.successful.append(job)
            else:
                jobs.active.append(job)
        return jobs

    def _update_status(self, jobset: Object, jobs: Jobs) -> Object:
        said: list[Object] = []
        for job in JobSet(jobset).jobs:
            own = [one for one in jobs.current if _label(one, "replicatedjob-name") == job.name]
            is_ready = [
                count(at(one, "status", "ready"), 0) + count(at(one, "status", "succeeded"), 0)
                >= job.parallelism
                for one in own
            ]
            said.append(
                {
                    "name": job.name,
                    "ready": sum(
                        ready and one in jobs.active
                        for ready, one in zip(is_ready, own, strict=True)
                    ),
                    "succeeded": sum(one in jobs.successful for one in own),
                    "failed": sum(one in jobs.failed for one in own),
                    "active": sum(bool(at(one, "status", "active")) for one in own),
                    "suspended": sum(at(one, "spec", "suspend") is True for one in own),
                }
            )

        def edit(after: Object) -> None:
            status = after.setdefault("status", {})
            status.setdefault("restarts", 0)
            status.setdefault("restartsCountTowardsMax", 0)
            status["replicatedJobsStatus"] = said
            ready = all(
                one["ready"] + one["succeeded"] >= job.replicas
                for one, job in zip(said, JobSet(after).jobs, strict=True)
            )
            if ready and has_condition(after, "RestartingJobSet"):
                self._say(after, "RestartingJobSet", "False", "JobsReady", "jobs are ready")

        return self._store.change(JOBSET, jobset, edit) or jobset

    def _clean_up(self, jobset: Object, jobs: Jobs) -> None:
        for job in (*jobs.previous, *jobs.active):
            self._delete(job)
        ttl_s = at(jobset, "spec", "ttlSecondsAfterFinished")
        if isinstance(ttl_s, int):
            metadata = jobset["metadata"]
            self._clock.call_later(ttl_s, lambda: self._expire(metadata))

    def _expire(self, metadata: Object) -> None:
        found = self._store.find(JOBSET, metadata["namespace"], metadata["name"])
        if found and found["metadata"]["uid"] == metadata["uid"]:
            self._store.delete(
                JOBSET, metadata["namespace"], metadata["name"], propagation="Foreground"
            )

    def _apply_failure_policy(self, jobset: Object, jobs: Jobs) -> None:
        policy = at(jobset, "spec", "failurePolicy")
        first = min(jobs.failed, key=lambda one: _failure(one)["lastTransitionTime"])
        name, failure = first["metadata"]["name"], _failure(first)["message"]
        blamed = f"(first failed job: {name})"
        if policy is None:
            message = f"jobset failed due to one or more job failures {blamed}"
            self._finish(jobset, "Failed", "FailedJobs", message)
            return
        rule, action = _matching_rule(policy, first)
        if action == "FailJobSet":
            message = f"applying FailJobSet action for job {name}: {failure}"
            self._finish(jobset, "Failed", "FailJobSetFailurePolicyAction", message)
            return
        is_free = action.endswith("IgnoreMaxRestarts")
        charged = count(at(jobset, "status", "restartsCountTowardsMax"), 0)
        most = count(policy.get("maxRestarts"), 0)
        if not is_free and charged + 1 > most:
            message = f"jobset failed due to reaching max number of restarts {blamed}"
            self._finish(jobset, "Failed", "ReachedMaxRestarts", message)
            return

        def edit(after: Object) -> None:
            after["status"]["restarts"] += 1
            after["status"]["restartsCountTowardsMax"] += 0 if is_free else 1
            reason = f"FailurePolicy_{rule}" if rule else "DefaultFailurePolicy"
            self._say(after, "RestartingJobSet", "True", reason, f"{name}: {failure}")

        restarted = self._store.change(JOBSET, jobset, edit)
        if restarted:
            record(self._store, restarted, "Restarting", failure)

    def _finish(self, jobset: Object, state: str, reason: str, message: str) -> None:
        def edit(after: Object) -> None:
            after["status"]["terminalState"] = state
            self._say(after, state, "True", reason, message)

        finished = self._store.change(JOBSET, jobset, edit)
        if finished:
            type_ = "Normal" if state == "Completed" else "Warning"
            record(self._store, finished, reason, message, type_=type_)

    def _ensure_service(self, jobset: Object) -> None:
        metadata = jobset["metadata"]
        name = _subdomain(jobset)
        if at(jobset, "spec", "network", "enableDNSHostnames") is False:
            return
        if self._store.find(SERVICE, metadata["namespace"], name):
            return
        self._store.create(
            SERVICE,
            {
                "metadata": {
                    "name": name,
                    "namespace": metadata["namespace"],
                    "ownerReferences": [owned_by(jobset)],
                },
                "spec": {
                    "clusterIP": "None",
                    "selector": {well_known.JOBSET_NAME: metadata["name"]},
                    "publishNotReadyAddresses": at(
                        jobset, "spec", "network", "publishNotReadyAddresses"
                    )
                    is not False,
                },
            },
        )

    def _create_missing(self, jobset: Object, jobs: Jobs, *, suspend: bool) -> None:
        present = {one["metadata"]["name"] for one in (*jobs.current, *jobs.previous)}
        statuses = {
            one["name"]: one for one in sequence(at(jobset, "status", "replicatedJobsStatus"))
        }
        start = 0
        for job in JobSet(jobset).jobs:
            waits = any(
                statuses.get(str(at(other, "name")), {}).get(
                    "ready" if at(other, "status") == "Ready" else "succeeded", 0
                )
                == 0
                for other in sequence(job.fields.get("dependsOn"))
            )
            for index in range(job.replicas):
                made = _job(jobset, job, index, start + index, suspend=suspend)
                if made["metadata"]["name"] not in present and not waits:
                    self._store.create(JOB, made)
            start += job.replicas

    def _suspend_or_resume(self, jobset: Object, jobs: Jobs, *, suspend: bool) -> None:
        by_name = {job.name: job for job in JobSet(jobset).jobs}
        for job in jobs.active:
            if (at(job, "spec", "suspend") is True) == suspend:
                continue
            template = by_name[str(_label(job, "replicatedjob-name"))].pod

            def edit(after: Object, template: Any = template) -> None:
                after["spec"]["suspend"] = suspend
                if not suspend:
                    pod = after["spec"]["template"]["spec"]
                    for field in ("nodeSelector", "tolerations", "schedulingGates"):
                        if field in template:
                            pod[field] = copy.deepcopy(template[field])
                        else:
                            pod.pop(field, None)

            self._store.change(JOB, job, edit)
        said = has_condition(jobset, "Suspended")
        if suspend and not said:
            self._set(jobset, "Suspended", "True", "SuspendedJobs", "jobset is suspended")
        elif said and not suspend:
            self._set(jobset, "Suspended", "False", "ResumeJobs", "jobset is resumed")

    def _delete(self, job: Object) -> None:
        metadata = job["metadata"]
        if not metadata.get("deletionTimestamp"):
            self._store.delete(
                JOB, metadata["namespace"], metadata["name"], propagation="Foreground"
            )

    def _set(self, jobset: Object, type_: str, status: str, reason: str, message: str) -> None:
        self._store.change(
            JOBSET, jobset, lambda after: self._say(after, type_, status, reason, message)
        )

    def _say(self, jobset: Object, type_: str, status: str, reason: str, message: str) -> None:
        set_condition(jobset, type_, status, reason, message, self._store.stamp())


def _subdomain(jobset: Object) -> str:
    return str(at(jobset, "spec", "network", "subdomain") or jobset["metadata"]["name"])


def _label(one: Object, name: str) -> str | None:
    return one["metadata"].get("labels", {}).get(PREFIX + name)


def _failure(job: Object) -> Object:
    return condition_of(job, "Failed")


def _is_successful(jobset: Object, jobs: Jobs) -> bool:
    policy = mapping(at(jobset, "spec", "successPolicy"))
    targets = sequence(policy.get("targetReplicatedJobs"))
    wanted = [job for job in JobSet(jobset).jobs if not targets or job.name in targets]
    done = [
        sum(_label(one, "replicatedjob-name") == job.name for one in jobs.successful)
        for job in wanted
    ]
    if policy.get("operator") == "Any":
        return any(done)
    return all(many >= job.replicas for many, job in zip(done, wanted, strict=True))


def _matching_rule(policy: Object, job: Object) -> tuple[str | None, str]:
    """Return the name and the action of the first rule that matches a failed Job."""
    failure = _failure(job)
    for rule in sequence(policy.get("rules")):
        reasons = sequence(rule.get("onJobFailureReasons"))
        patterns = sequence(rule.get("onJobFailureMessagePatterns"))
        targets = sequence(rule.get("targetReplicatedJobs"))
        if reasons and failure["reason"] not in reasons:
            continue
        if targets and _label(job, "replicatedjob-name") not in targets:
            continue
        if patterns and not any(re.search(one, failure["message"]) for one in patterns):
            continue
        return rule["name"], rule["action"]
    return None, "RestartJobSet"


def _job(
    jobset: Object, job: ReplicatedJob, index: int, global_index: int, *, suspend: bool
) -> Object:
    metadata = jobset["metadata"]
    name = f"{metadata['name']}-{job.name}-{index}"
    total = sum(one.replicas for one in job.jobset.jobs)
    marks = {
        PREFIX + key: str(value)
        for key, value in {
            "jobset-name": metadata["name"],
            "jobset-uid": metadata["uid"],
            "replicatedjob-name": job.name,
            "replicatedjob-replicas": job.replicas,
            "global-replicas": total,
            "job-index": index,
            "job-global-index": global_index,
            "job-key": hashlib.sha1(f"{metadata['namespace']}/{name}".encode()).hexdigest(),
            "restart-attempt": count(at(jobset, "status", "restarts"), 0),
            "group-name": job.fields.get("groupName", "default"),
            "group-replicas": total,
            "job-group-index": global_index,
        }.items()
    }
    if coordinator := mapping(at(jobset, "spec", "coordinator")):
        numbers = [count(coordinator.get(key), 0) for key in ("jobIndex", "podIndex")]
        marks[well_known.COORDINATOR] = (
            f"{metadata['name']}-{coordinator['replicatedJob']}-{numbers[0]}-{numbers[1]}"
            f".{_subdomain(jobset)}"
        )
    exclusive = job.jobset.annotations.get(well_known.EXCLUSIVE)
    notes = marks | ({well_known.EXCLUSIVE: exclusive} if exclusive else {})
    spec = copy.deepcopy(dict(job.job))
    template = spec.setdefault("template", {})
    inner = template.setdefault("metadata", {})
    inner["labels"] = {**mapping(inner.get("labels")), **marks}
    inner["annotations"] = {**mapping(inner.get("annotations")), **notes}
    template["spec"]["subdomain"] = _subdomain(jobset)
    write_quantities(template["spec"])
    spec["suspend"] = suspend
    return {
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": marks,
            "annotations": notes,
            "ownerReferences": [owned_by(jobset)],
        },
        "spec": spec,
    }
