"""Kueue: whether a JobSet would be admitted, and then find nodes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import did_you_mean
from ....runtime.doctor.finding import DoctorFinding
from .. import names
from ..admission import Admitted, PodSet, Quotas, Refused
from ..findings import found
from ..pools import NodePool
from ..reading import JobSet, ReplicatedJob, at, jobsets, sequence

MOST_POD_SETS = 18


def check_queues(documents: Sequence[Mapping[str, Any]]) -> Iterator[DoctorFinding]:
    """Say which JobSets would never be admitted by the queues in the documents."""
    quotas = Quotas.of(documents)
    yield from _check_flavors(quotas)
    for jobset in jobsets(documents):
        if jobset.queue is None:
            continue
        if len(jobset.jobs) > MOST_POD_SETS:
            yield found(
                "queue.pod_sets",
                "error",
                jobset,
                f"{len(jobset.jobs)} replicated Jobs; Kueue takes {MOST_POD_SETS} at most.",
                "Use replicas instead of further entries.",
            )
        yield from _check_priority(jobset, documents)
        yield from _check_admission(jobset, documents, quotas)


def check_placement(
    documents: Sequence[Mapping[str, Any]], pools: Sequence[NodePool]
) -> Iterator[DoctorFinding]:
    """Say which JobSets would find no nodes, though their quota may be granted."""
    quotas = Quotas.of(documents)
    for jobset in jobsets(documents):
        decided = _decide(jobset, documents, quotas)
        if isinstance(decided, Refused) and decided.is_final:
            continue
        for job in jobset.tpu_jobs:
            extra = _flavor_labels(decided, job, quotas)
            if why := never_placed(job, pools, extra):
                start = "would be admitted and never placed" if decided else "would never be placed"
                yield found(
                    "queue.placement",
                    "error",
                    job.path,
                    f"{start}: {why}",
                    "Add such a node pool, or select what a pool has.",
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
        whole = [pool for pool in matching if pool.nodes >= job.parallelism]
        if len(whole) < job.replicas:
            sizes = ", ".join(f"{pool.name} has {pool.nodes} nodes" for pool in matching)
            return (
                f"{job.replicas} node pools of {job.parallelism} nodes are needed, one a slice, "
                f"and {len(whole)} are there ({sizes})."
            )
    nodes = sum(pool.nodes * (pool.chips // max(job.chips, 1)) for pool in matching)
    if nodes < job.replicas * job.parallelism:
        return f"{job.replicas * job.parallelism} hosts are needed, and {nodes} match."
    return None


def _check_flavors(quotas: Quotas) -> Iterator[DoctorFinding]:
    for queue in quotas.queues.values():
        for group in queue.groups:
            for name, resources in group.flavors.items():
                if quotas.flavors and name not in quotas.flavors:
                    yield found(
                        "queue.flavor",
                        "error",
                        f"ClusterQueue {queue.name}",
                        f"there is no ResourceFlavor {name!r}."
                        + did_you_mean(name, quotas.flavors),
                        "The queue stays inactive: add the flavor, or correct the name.",
                    )
                if set(resources) != set(group.covered):
                    yield found(
                        "queue.covered",
                        "error",
                        f"ClusterQueue {queue.name}",
                        f"flavor {name} has quotas for {sorted(resources)}, and coveredResources "
                        f"are {sorted(group.covered)}.",
                        "Give every flavor a quota for each covered resource, in the same order.",
                    )


def _check_priority(
    jobset: JobSet, documents: Sequence[Mapping[str, Any]]
) -> Iterator[DoctorFinding]:
    wanted = jobset.labels.get(names.PRIORITY_CLASS)
    classes = _names(documents, "WorkloadPriorityClass")
    if wanted and classes and wanted not in classes:
        yield found(
            "queue.priority",
            "error",
            jobset,
            f"there is no WorkloadPriorityClass {wanted!r}." + did_you_mean(wanted, classes),
            f"Name one of {', '.join(sorted(classes))}.",
        )


def _check_admission(
    jobset: JobSet, documents: Sequence[Mapping[str, Any]], quotas: Quotas
) -> Iterator[DoctorFinding]:
    local = _local_queue(jobset, documents)
    if local is None:
        others = _names(documents, "LocalQueue", jobset.namespace)
        if others:
            yield found(
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
        yield found(
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
        yield found(
            "queue.quota",
            "error",
            jobset,
            f"would never be admitted: {decided.message} (ClusterQueue {cluster_queue}, "
            f"{decided.reason}).",
            "Ask for less, raise the quota, or name another queue.",
        )
    elif isinstance(decided, Refused) and decided.reason == "Suspended":
        yield found(
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
                yield found(
                    "queue.counted",
                    "warning",
                    job.path,
                    f"flavor {flavor} does not say {' or '.join(unsaid)}: Kueue counts its chips "
                    "alone, and would admit a slice of which there is no node.",
                    f"Give the flavor nodeLabels {', '.join(unsaid)}.",
                )


def _decide(
    jobset: JobSet, documents: Sequence[Mapping[str, Any]], quotas: Quotas
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


def _local_queue(
    jobset: JobSet, documents: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    for one in documents:
        named = at(one, "metadata", "name"), at(one, "metadata", "namespace") or "default"
        if one.get("kind") == "LocalQueue" and named == (jobset.queue, jobset.namespace):
            return one
    return None


def _names(
    documents: Sequence[Mapping[str, Any]], kind: str, namespace: str | None = None
) -> set[str]:
    return {
        str(at(one, "metadata", "name"))
        for one in documents
        if one.get("kind") == kind
        if namespace is None or (at(one, "metadata", "namespace") or "default") == namespace
    }
