"""Looks at a cluster before a pod is asked for: access, JobSet, Kueue, queue, nodes, manifest."""

from collections.abc import Iterator, Sequence

from ....errors import ConfigError, ProviderError, did_you_mean
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ...config import PodConfig
from ...manifests import names
from ...manifests.findings import LintReport, found
from ...manifests.lint import lint
from ...manifests.manifest import build_manifest
from ...manifests.pools import pools_of
from .api import CORE, JOBSETS, KUEUE, ClusterApi, Object
from .failures import INSTALL_JOBSET


def check_cluster(
    api: ClusterApi, config: PodConfig, launch: LaunchSettings
) -> Sequence[DoctorFinding]:
    """Return what would stand in the way of a pod; where nothing does, what was found."""
    try:
        manifest = build_manifest("preflight", config, launch)
    except ConfigError as error:
        return [found("gke.manifest", "error", "launch", str(error), "Change the job's settings.")]
    try:
        return LintReport.of(list(_check(api, config, launch, list(manifest.documents)))).findings
    except ProviderError as error:
        return [found("gke.access", "error", "cluster", str(error), "See the message.")]


def _check(
    api: ClusterApi, config: PodConfig, launch: LaunchSettings, documents: list[Object]
) -> Iterator[DoctorFinding]:
    where = f"cluster {api.server}"
    if api.get(f"{CORE}/namespaces/{launch.namespace}") is None:
        spaces = [one["metadata"]["name"] for one in api.list(f"{CORE}/namespaces")[0]]
        yield found(
            "gke.namespace",
            "error",
            where,
            f"there is no namespace {launch.namespace!r}." + did_you_mean(launch.namespace, spaces),
            f"kubectl create namespace {launch.namespace}",
        )
    if not api.offers(JOBSETS):
        yield found("gke.jobset", "error", where, "JobSet is not installed.", INSTALL_JOBSET)
    else:
        yield found("gke.jobset", "ok", where, "JobSet is installed.")
    if launch.queue:
        yield from _check_kueue(api, launch, where, documents)
    nodes, _ = api.list(f"{CORE}/nodes")
    pools = pools_of(nodes)
    findings = lint(documents, pools=pools).findings
    yield from findings
    if not any(one.id == "queue.placement" for one in findings):
        yield found("gke.nodes", "ok", where, f"{len(pools)} node pools, and enough of them match.")


def _check_kueue(
    api: ClusterApi, launch: LaunchSettings, where: str, documents: list[Object]
) -> Iterator[DoctorFinding]:
    """Check the queue, and add Kueue's objects to the documents that are linted."""
    if not api.offers(KUEUE):
        yield found(
            "gke.kueue",
            "error",
            where,
            f"launch.queue is {launch.queue!r}, and Kueue is not installed.",
            "Install Kueue (https://kueue.sigs.k8s.io), or leave launch.queue out.",
        )
        return
    queues, _ = api.list(f"{KUEUE}/namespaces/{launch.namespace}/localqueues")
    known = [one["metadata"]["name"] for one in queues]
    if launch.queue not in known:
        yield found(
            "gke.queue",
            "error",
            where,
            f"namespace {launch.namespace} has no LocalQueue {launch.queue!r}."
            + did_you_mean(str(launch.queue), known),
            f"Name one of {', '.join(known)}." if known else "Make a queue first.",
        )
        return
    yield found("gke.queue", "ok", where, f"LocalQueue {launch.queue} is there.")
    documents += [{**one, "apiVersion": names.KUEUE_API, "kind": "LocalQueue"} for one in queues]
    plurals = {
        "ClusterQueue": "clusterqueues",
        "ResourceFlavor": "resourceflavors",
        "WorkloadPriorityClass": "workloadpriorityclasses",
    }
    for kind, plural in plurals.items():
        listed, _ = api.list(f"{KUEUE}/{plural}")
        documents += [{**one, "apiVersion": names.KUEUE_API, "kind": kind} for one in listed]
