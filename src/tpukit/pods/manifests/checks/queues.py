"""Check whether Kueue would admit a JobSet, and whether its Pods would find nodes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ....errors import did_you_mean
from ....runtime.doctor.finding import DoctorFinding
from .. import names
from ..documents import Fields
from ..findings import finding
from ..reading import (
    JobSet,
    NodePool,
    ReplicatedJob,
    at,
    jobsets,
    mapping,
    quantity,
    sequence,
    texts,
    tolerates,
)

Usage = dict[tuple[str, str], int]  # keys are (flavor, resource)

# Reasons of a Workload's condition QuotaReserved=False, from Kueue 0.19 on.
Reason = Literal[
    "WaitingForQuota", "ExceedsMaxQuota", "NoMatchingFlavor", "Misconfigured", "Suspended"
]


@dataclass(frozen=True)
class PodSet:
    """Identical Pods of a workload."""

    name: str
    count: int
    requests: Mapping[str, int]
    selector: Mapping[str, str]
    tolerations: Sequence[Any] = ()

    @classmethod
    def of(cls, job: ReplicatedJob) -> "PodSet":
        """Make it from a JobSet's replicated Job."""
        return cls(
            name=job.name,
            count=job.replicas * job.parallelism,
            requests=job.requests,
            selector=job.selector,
            tolerations=sequence(job.pod.get("tolerations")),
        )

    @property
    def total(self) -> dict[str, int]:
        """Requests of all Pods together, by resource."""
        return {resource: each * self.count for resource, each in self.requests.items()}


@dataclass(frozen=True)
class Flavor:
    """A ResourceFlavor."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Fields, ...] = ()
    tolerations: tuple[Any, ...] = ()

    @classmethod
    def of(cls, document: Fields) -> "Flavor":
        """Make it from a document."""
        spec = mapping(document.get("spec"))
        return cls(
            name=str(at(document, "metadata", "name")),
            labels=texts(spec.get("nodeLabels")),
            taints=tuple(mapping(taint) for taint in sequence(spec.get("nodeTaints"))),
            tolerations=tuple(sequence(spec.get("tolerations"))),
        )

    def why_not(self, pods: PodSet, keys: set[str]) -> str | None:
        """Return why Pods cannot use the flavor, or None.

        Args:
            pods: The Pods.
            keys: Labels that any flavor of the group has. Only these are compared.
        """
        for key in sorted(keys & set(pods.selector)):
            if self.labels.get(key) != pods.selector[key]:
                return (
                    f"flavor {self.name} has {key}={self.labels.get(key, '(none)')}, but the Pods "
                    f"select {pods.selector[key]}"
                )
        for taint in self.taints:
            if not tolerates([*pods.tolerations, *self.tolerations], taint):
                return (
                    f"flavor {self.name} has the taint {taint.get('key')}, which the Pods do "
                    "not tolerate"
                )
        return None


@dataclass(frozen=True)
class Quota:
    """The quota of a ClusterQueue for a resource of one flavor."""

    nominal: int
    borrowing: int | None = None
    lending: int | None = None


@dataclass(frozen=True)
class Group:
    """Resources that are assigned together, and their flavors in order."""

    covered: tuple[str, ...]
    flavors: Mapping[str, Mapping[str, Quota]]


@dataclass(frozen=True)
class ClusterQueue:
    """A ClusterQueue."""

    name: str
    groups: tuple[Group, ...]
    cohort: str | None = None
    within: str = "Never"
    reclaim: str = "Never"
    strict: bool = False
    is_stopped: bool = False

    @classmethod
    def of(cls, document: Fields) -> "ClusterQueue":
        """Make it from a document."""
        spec = mapping(document.get("spec"))
        return cls(
            name=str(at(document, "metadata", "name")),
            groups=tuple(_group(group) for group in sequence(spec.get("resourceGroups"))),
            cohort=spec.get("cohortName") or spec.get("cohort"),
            within=str(at(spec, "preemption", "withinClusterQueue") or "Never"),
            reclaim=str(at(spec, "preemption", "reclaimWithinCohort") or "Never"),
            strict=spec.get("queueingStrategy") == "StrictFIFO",
            is_stopped=(spec.get("stopPolicy") or "None") != "None",
        )

    def quota(self, flavor: str, resource: str) -> Quota | None:
        """Return the quota for a resource of a flavor."""
        for group in self.groups:
            if quota := group.flavors.get(flavor, {}).get(resource):
                return quota
        return None


def _group(value: object) -> Group:
    flavors: dict[str, dict[str, Quota]] = {}
    for entry in sequence(at(value, "flavors")):
        quotas: dict[str, Quota] = {}
        for resource in sequence(at(entry, "resources")):
            quotas[str(at(resource, "name"))] = Quota(
                nominal=quantity(at(resource, "nominalQuota")) or 0,
                borrowing=quantity(at(resource, "borrowingLimit")),
                lending=quantity(at(resource, "lendingLimit")),
            )
        flavors[str(at(entry, "name"))] = quotas
    return Group(
        tuple(str(resource) for resource in sequence(at(value, "coveredResources"))), flavors
    )


@dataclass(frozen=True)
class Admitted:
    """Enough quota: the flavor of each resource, per pod set."""

    flavors: Mapping[str, Mapping[str, str]]
    usage: Usage
    borrows: bool = False


@dataclass(frozen=True)
class Refused:
    """Not enough quota.

    Attributes:
        is_final: Whether waiting cannot help.
        would_fit: Usage if nothing else ran; None if even then there is not enough quota.
    """

    reason: Reason
    message: str
    is_final: bool = False
    would_fit: Admitted | None = None


@dataclass(frozen=True)
class _Choice:
    """A flavor for some resources of a pod set, and what it has to wait for."""

    flavor: str
    borrows: bool
    waits: str = ""


@dataclass
class Quotas:
    """The queues and flavors of a cluster, with their usage."""

    queues: dict[str, ClusterQueue]
    flavors: dict[str, Flavor]
    used: dict[str, Usage] = field(default_factory=dict[str, Usage])

    def decide(self, pod_sets: Sequence[PodSet], queue: ClusterQueue) -> Admitted | Refused:
        """Return the quota that a workload would get in a queue now."""
        if queue.is_stopped:
            return Refused("Suspended", f"ClusterQueue {queue.name} is stopped")
        flavors: dict[str, dict[str, str]] = {}
        taken: Usage = {}
        borrows, waits = False, ""
        for pods in pod_sets:
            flavors[pods.name] = {}
            for resource in pods.requests:
                if not any(resource in group.covered for group in queue.groups):
                    return Refused(
                        "NoMatchingFlavor",
                        f"resource {resource} unavailable in ClusterQueue {queue.name}",
                        is_final=True,
                    )
            for group in queue.groups:
                wanted = {key: pods.total[key] for key in group.covered if key in pods.total}
                if not wanted:
                    continue
                choice = self._choose(pods, group, wanted, queue, taken)
                if isinstance(choice, Refused):
                    return choice
                borrows, waits = borrows or choice.borrows, waits or choice.waits
                for resource, amount in wanted.items():
                    key = (choice.flavor, resource)
                    flavors[pods.name][resource] = choice.flavor
                    taken[key] = taken.get(key, 0) + amount
        given = Admitted(flavors, taken, borrows)
        return Refused("WaitingForQuota", waits, would_fit=given) if waits else given

    def _choose(
        self,
        pods: PodSet,
        group: Group,
        wanted: Mapping[str, int],
        queue: ClusterQueue,
        taken: Usage,
    ) -> "_Choice | Refused":
        """Return the first flavor with enough quota now, else the first that could have enough."""
        known = [self.flavors[name] for name in group.flavors if name in self.flavors]
        keys = {key for flavor in known for key in flavor.labels}
        mismatches: list[str] = []
        short: list[str] = []
        later: _Choice | None = None
        for name in group.flavors:
            if name not in self.flavors:
                missing = f"ResourceFlavor {name} does not exist"
                return Refused("Misconfigured", missing, is_final=True)
            if why := self.flavors[name].why_not(pods, keys):
                mismatches.append(why)
                continue
            requests = {key: amount + taken.get((name, key), 0) for key, amount in wanted.items()}
            too_much = [
                f"{key} needs {amount}, quota {most}"
                for key, amount in requests.items()
                if amount > (most := self.most(queue, name, key))
            ]
            if too_much:
                short.append(f"{', '.join(too_much)} in flavor {name}")
                continue
            lacking = [
                f"{amount - free} more {key} needed"
                for key, amount in requests.items()
                if amount > (free := self.free(queue, name, key))
            ]
            if not lacking:
                return _Choice(name, borrows=self._borrows(queue, name, requests))
            lack = f"insufficient unused quota in flavor {name}: {', '.join(lacking)}"
            later = later or _Choice(name, borrows=False, waits=lack)
        if later:
            return later
        if short:
            return Refused("ExceedsMaxQuota", "; ".join(short), is_final=True)
        return Refused("NoMatchingFlavor", "; ".join(mismatches), is_final=True)

    def _borrows(self, queue: ClusterQueue, flavor: str, requests: Mapping[str, int]) -> bool:
        return any(
            amount + self._use(queue.name, flavor, key) > self._nominal(queue, flavor, key)
            for key, amount in requests.items()
        )

    def most(self, queue: ClusterQueue, flavor: str, resource: str) -> int:
        """Return the largest amount of a flavor's resource that a queue can ever use."""
        own = queue.quota(flavor, resource)
        nominal = own.nominal if own else 0
        if queue.cohort is None:
            return nominal
        lent = sum(
            quota.nominal if quota.lending is None else min(quota.nominal, quota.lending)
            for other in self.queues.values()
            if other.cohort == queue.cohort and other.name != queue.name
            if (quota := other.quota(flavor, resource))
        )
        limit = own.borrowing if own else None
        return nominal + (lent if limit is None else min(lent, limit))

    def free(self, queue: ClusterQueue, flavor: str, resource: str) -> int:
        """Return the amount of a flavor's resource that a queue could use now."""
        own = self._use(queue.name, flavor, resource)
        left = self.most(queue, flavor, resource) - own
        if queue.cohort is None:
            return left
        members = [member for member in self.queues.values() if member.cohort == queue.cohort]
        all_of_it = sum(self._nominal(member, flavor, resource) for member in members)
        return min(
            left, all_of_it - sum(self._use(member.name, flavor, resource) for member in members)
        )

    def _nominal(self, queue: ClusterQueue, flavor: str, resource: str) -> int:
        quota = queue.quota(flavor, resource)
        return quota.nominal if quota else 0

    def _use(self, queue: str, flavor: str, resource: str) -> int:
        return self.used.get(queue, {}).get((flavor, resource), 0)

    @classmethod
    def of(cls, documents: Sequence[Fields]) -> "Quotas":
        """Make it from the ClusterQueues and ResourceFlavors among documents."""
        queues = [
            ClusterQueue.of(document)
            for document in documents
            if document.get("kind") == "ClusterQueue"
        ]
        flavors = [
            Flavor.of(document)
            for document in documents
            if document.get("kind") == "ResourceFlavor"
        ]
        return cls(
            {queue.name: queue for queue in queues},
            {flavor.name: flavor for flavor in flavors},
        )


MOST_POD_SETS = 18


def check_queues(documents: Sequence[Fields]) -> Iterator[DoctorFinding]:
    """Yield JobSets that the queues in the documents would never admit."""
    quotas = Quotas.of(documents)
    yield from _check_flavors(quotas)
    for jobset in jobsets(documents):
        if jobset.queue is None:
            continue
        if len(jobset.jobs) > MOST_POD_SETS:
            yield finding(
                "queue.pod_sets",
                "error",
                jobset,
                f"{len(jobset.jobs)} replicated Jobs; Kueue takes {MOST_POD_SETS} at most.",
                "Use replicas instead of further entries.",
            )
        yield from _check_priority(jobset, documents)
        yield from _check_admission(jobset, documents, quotas)


def check_placement(
    documents: Sequence[Fields], pools: Sequence[NodePool]
) -> Iterator[DoctorFinding]:
    """Yield JobSets that would find no nodes, even with quota."""
    quotas = Quotas.of(documents)
    for jobset in jobsets(documents):
        decided = _decide(jobset, documents, quotas)
        if isinstance(decided, Refused) and decided.is_final:
            continue
        for job in jobset.tpu_jobs:
            extra = _flavor_labels(decided, job, quotas)
            if why := never_placed(job, pools, extra):
                start = "would be admitted but never placed" if decided else "would never be placed"
                yield finding(
                    "queue.placement",
                    "error",
                    job.path,
                    f"{start}: {why}",
                    "Add such a node pool, or select the labels of an existing one.",
                )


def never_placed(
    job: ReplicatedJob, pools: Sequence[NodePool], extra: Mapping[str, str] | None = None
) -> str | None:
    """Return why the Pods of a replicated Job can never all run, or None."""
    selector = {**job.selector, **(extra or {})}
    tolerations = sequence(job.pod.get("tolerations"))
    reasons = {pool.name: pool.why_not(selector, tolerations, job.chips) for pool in pools}
    matching = [pool for pool in pools if reasons[pool.name] is None]
    if not matching:
        shown = "; ".join(f"{name}: {why}" for name, why in sorted(reasons.items())[:4])
        return f"no node pool matches ({shown or 'there is none'})."
    if job.jobset.annotations.get(names.EXCLUSIVE) == names.NODE_POOL:
        large_enough = [pool for pool in matching if pool.nodes >= job.parallelism]
        if len(large_enough) < job.replicas:
            sizes = ", ".join(f"{pool.name} has {pool.nodes} nodes" for pool in matching)
            return (
                f"{job.replicas} node pools of {job.parallelism} nodes are needed, one per slice, "
                f"but {len(large_enough)} exist ({sizes})."
            )
    nodes = sum(pool.nodes * (pool.chips // max(job.chips, 1)) for pool in matching)
    if nodes < job.replicas * job.parallelism:
        return f"{job.replicas * job.parallelism} hosts are needed, but {nodes} match."
    return None


def _check_flavors(quotas: Quotas) -> Iterator[DoctorFinding]:
    for queue in quotas.queues.values():
        for group in queue.groups:
            for name, resources in group.flavors.items():
                if quotas.flavors and name not in quotas.flavors:
                    yield finding(
                        "queue.flavor",
                        "error",
                        f"ClusterQueue {queue.name}",
                        f"there is no ResourceFlavor {name!r}."
                        + did_you_mean(name, quotas.flavors),
                        "The queue stays inactive: add the flavor, or correct the name.",
                    )
                if set(resources) != set(group.covered):
                    yield finding(
                        "queue.covered",
                        "error",
                        f"ClusterQueue {queue.name}",
                        f"flavor {name} has quotas for {sorted(resources)}, but coveredResources "
                        f"are {sorted(group.covered)}.",
                        "Give every flavor a quota for each covered resource, in the same order.",
                    )


def _check_priority(jobset: JobSet, documents: Sequence[Fields]) -> Iterator[DoctorFinding]:
    wanted = jobset.labels.get(names.PRIORITY_CLASS)
    classes = _names(documents, "WorkloadPriorityClass")
    if wanted and classes and wanted not in classes:
        yield finding(
            "queue.priority",
            "error",
            jobset,
            f"there is no WorkloadPriorityClass {wanted!r}." + did_you_mean(wanted, classes),
            f"Name one of {', '.join(sorted(classes))}.",
        )


def _check_admission(
    jobset: JobSet, documents: Sequence[Fields], quotas: Quotas
) -> Iterator[DoctorFinding]:
    local = _local_queue(jobset, documents)
    if local is None:
        others = _names(documents, "LocalQueue", jobset.namespace)
        if others:
            yield finding(
                "queue.local",
                "error",
                jobset,
                f"there is no LocalQueue {jobset.queue!r} in namespace {jobset.namespace}, so it "
                "would wait for ever." + did_you_mean(str(jobset.queue), others),
                f"Name one of {', '.join(sorted(others))}.",
            )
        return
    cluster_queue = str(at(local, "spec", "clusterQueue"))
    if quotas.queues and cluster_queue not in quotas.queues:
        yield finding(
            "queue.cluster",
            "error",
            f"LocalQueue {jobset.queue}",
            f"there is no ClusterQueue {cluster_queue!r}."
            + did_you_mean(cluster_queue, quotas.queues),
            "Point the LocalQueue to a ClusterQueue that exists.",
        )
        return
    decided = _decide(jobset, documents, quotas)
    if isinstance(decided, Refused) and decided.is_final:
        yield finding(
            "queue.quota",
            "error",
            jobset,
            f"would never be admitted: {decided.message} (ClusterQueue {cluster_queue}, "
            f"{decided.reason}).",
            "Ask for less, raise the quota, or name another queue.",
        )
    elif isinstance(decided, Refused) and decided.reason == "Suspended":
        yield finding(
            "queue.stopped",
            "warning",
            jobset,
            f"would not be admitted for now: {decided.message}.",
            "Set the ClusterQueue's stopPolicy to None.",
        )
    elif isinstance(decided, Admitted):
        for job in jobset.tpu_jobs:
            labels = _flavor_labels(decided, job, quotas)
            unsaid = [key for key in (names.ACCELERATOR, names.TOPOLOGY) if key not in labels]
            if unsaid:
                flavor = decided.flavors.get(job.name, {}).get(names.CHIPS)
                yield finding(
                    "queue.counted",
                    "warning",
                    job.path,
                    f"flavor {flavor} does not set {' or '.join(unsaid)}: Kueue counts only its "
                    "chips, and would admit a slice for which there is no node.",
                    f"Give the flavor nodeLabels {', '.join(unsaid)}.",
                )


def _decide(
    jobset: JobSet, documents: Sequence[Fields], quotas: Quotas
) -> Admitted | Refused | None:
    local = _local_queue(jobset, documents)
    queue = quotas.queues.get(str(at(local, "spec", "clusterQueue"))) if local else None
    if queue is None:
        return None
    return quotas.decide([PodSet.of(job) for job in jobset.jobs], queue)


def _flavor_labels(
    decided: Admitted | Refused | None, job: ReplicatedJob, quotas: Quotas
) -> Mapping[str, str]:
    given = decided.would_fit if isinstance(decided, Refused) else decided
    if given is None:
        return {}
    flavor = quotas.flavors.get(given.flavors.get(job.name, {}).get(names.CHIPS, ""))
    return flavor.labels if flavor else {}


def _local_queue(jobset: JobSet, documents: Sequence[Fields]) -> Fields | None:
    for document in documents:
        named = at(document, "metadata", "name"), at(document, "metadata", "namespace") or "default"
        if document.get("kind") == "LocalQueue" and named == (jobset.queue, jobset.namespace):
            return document
    return None


def _names(documents: Sequence[Fields], kind: str, namespace: str | None = None) -> set[str]:
    return {
        str(at(document, "metadata", "name"))
        for document in documents
        if document.get("kind") == kind
        if namespace is None or (at(document, "metadata", "namespace") or "default") == namespace
    }
