"""What would prevent a pod in a cluster: access, missing parts, a refused manifest, no nodes."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from ....errors import ConfigError, ProviderError, did_you_mean
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ...config import PodConfig
from ...manifests import names
from ...manifests.findings import LintReport, finding
from ...manifests.lint import lint
from ...manifests.manifest import Manifest, build_manifest
from ...manifests.reading import pools_of
from .api import CORE, INSTALL_JOBSET, JOBSETS, ClusterApi

NAME = "preflight"


class Planner(Protocol):
    """Writes manifests that a cluster has accepted in a dry run."""

    def plan(self, name: str, config: PodConfig) -> Manifest:
        """Return a pod's manifest."""
        ...


def check_cluster(
    planner: Planner, api: ClusterApi, config: PodConfig, launch: LaunchSettings
) -> Sequence[DoctorFinding]:
    """Return what would prevent a pod from being allocated, or what was found if nothing does."""
    try:
        build_manifest(NAME, config, launch)
    except ConfigError as error:
        return [
            finding("gke.manifest", "error", "launch", str(error), "Change the job's settings.")
        ]
    try:
        return LintReport.of(list(_check(planner, api, config, launch))).findings
    except ProviderError as error:
        return [finding("gke.access", "error", "cluster", str(error), "See the message.")]


def _check(
    planner: Planner, api: ClusterApi, config: PodConfig, launch: LaunchSettings
) -> Iterator[DoctorFinding]:
    where = f"cluster {api.server}"
    if not api.offers(JOBSETS):
        yield finding("gke.jobset", "error", where, "JobSet is not installed.", INSTALL_JOBSET)
        return
    yield finding("gke.jobset", "ok", where, "JobSet is installed.")
    if launch.queue:
        yield from _check_queue(api, launch, where)
    try:
        manifest = planner.plan(NAME, config)
    except ProviderError as error:
        yield finding("gke.manifest", "error", where, str(error), "See the message.")
        return
    yield finding("gke.manifest", "ok", where, "It accepts the manifest in a dry run.")
    yield from _check_nodes(api, manifest, where)


def _check_queue(api: ClusterApi, launch: LaunchSettings, where: str) -> Iterator[DoctorFinding]:
    if api.kueue is None:
        yield finding(
            "gke.kueue",
            "error",
            where,
            f"launch.queue is {launch.queue!r}, but Kueue is not installed.",
            "Install Kueue (https://kueue.sigs.k8s.io), or remove launch.queue.",
        )
        return
    group = f"/apis/{names.KUEUE_GROUP}/{api.kueue}"
    queues, _ = api.list(f"{group}/namespaces/{launch.namespace}/localqueues")
    known = [queue["metadata"]["name"] for queue in queues]
    if launch.queue in known:
        yield finding("gke.queue", "ok", where, f"LocalQueue {launch.queue} exists.")
        return
    yield finding(
        "gke.queue",
        "error",
        where,
        f"namespace {launch.namespace} has no LocalQueue {launch.queue!r}."
        + did_you_mean(str(launch.queue), known),
        f"Name one of {', '.join(known)}." if known else "Make a queue first.",
    )


def _check_nodes(api: ClusterApi, manifest: Manifest, where: str) -> Iterator[DoctorFinding]:
    try:
        nodes, _ = api.list(f"{CORE}/nodes")
    except ProviderError as error:  # many users may see only their namespace
        yield finding("gke.nodes", "info", where, f"nodes are not checked. {error}")
        return
    pools = pools_of(nodes)
    findings = lint(manifest.documents, pools=pools).findings
    yield from findings
    if not findings:
        yield finding(
            "gke.nodes", "ok", where, f"{len(pools)} node pools, and enough of them match."
        )
