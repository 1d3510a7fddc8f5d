"""Kueue's quotas: queues, flavors, and whether a workload fits in them now or ever."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tpukit.pods.manifests.documents import Fields
from tpukit.pods.manifests.reading import (
    ReplicatedJob,
    at,
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
