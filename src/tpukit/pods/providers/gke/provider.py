"""`GKEProvider`: a pod is a JobSet, which is also the gang that runs on it."""

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ....errors import ConfigError, PodUnavailable, ProviderError
from ....hardware import list_chips
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ....runtime.progress import Progress
from ...config import PodConfig
from ...manifests import names
from ...manifests.jobset import CONTAINER
from ...manifests.manifest import Manifest, build_manifest, bundle_part_name
from ...manifests.reading import at, texts
from ...pod import Host, Pod
from ..protocol import Capabilities, Command, check_terms
from .api import (
    CORE,
    FIRST_PAUSE_S,
    JOBSETS,
    LONGEST_PAUSE_S,
    ClusterApi,
    NoKubeconfig,
    Object,
    Unanswered,
)
from .gang import JobSetGang
from .preflight import check_cluster
from .signals import PROVIDER, is_ours, read_pod

CAPABILITIES = Capabilities(
    generations=tuple(chip.name for chip in list_chips() if chip.gke_accelerator),
    refused={
        "network": "nodes use the cluster's network; choose another cluster",
        "software_version": "the software is in the image (launch.image)",
        "enable_ip_alias": "a cluster's nodes always have alias addresses",
        "flex_start_seconds": "the node pool sets the duration; set only flex_start here",
    },
    runs_gangs=True,
)


class GKEProvider:
    """Provides pods in a Kubernetes cluster with TPU nodes.

    Args:
        launch: Has the context, namespace, queue and image. `endpoint` replaces the kubeconfig's
            address.
    """

    name = PROVIDER

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self.capabilities = CAPABILITIES.within(launch)
        self._api = ClusterApi(launch)
        self._jobsets = f"{JOBSETS}/namespaces/{launch.namespace}/jobsets"
        self._inside = f"{CORE}/namespaces/{launch.namespace}"

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Request a pod; return an existing pod of that name unchanged.

        Raises:
            ConfigError: GKE does not offer the requested pod.
            PodUnavailable: A quota is used up.
            ProviderError: The cluster cannot be reached, or rejects the credentials.
        """
        check_terms(self.name, self.capabilities, config)
        build_manifest(name, config, self._launch, command)  # refuses settings before any call
        if there := self.get(name, zone=""):
            return there
        self._check_zone(config)
        began, pause_s = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                jobset = self._make(self.plan(name, config, command))
                return jobset if isinstance(jobset, Pod) else read_pod(jobset, (), None)
            except Unanswered:
                is_late = time.monotonic() + pause_s > began + self._api.timeout_s
                # The call may have taken effect, and then the pod exists. Otherwise it is repeated.
                with suppress(ProviderError):
                    if there := self.get(name, zone=""):
                        return there
                    if is_late:
                        self._remove_parts(name)
                if is_late:
                    raise
                time.sleep(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def plan(self, name: str, config: PodConfig, command: Command | None = None) -> Manifest:
        """Return the manifest of a pod, checked and accepted by the cluster in a dry run.

        Raises:
            ConfigError: GKE does not offer the requested pod.
            ProviderError: The cluster cannot be reached, or refuses the manifest.
        """
        kueue = self._api.kueue if self._launch.queue else None
        versions = names.ClusterVersions(kueue=kueue) if kueue else names.NEWEST
        manifest = build_manifest(name, config, self._launch, command, versions=versions)
        try:
            self._api.create(self._jobsets, manifest.jobset, is_dry_run=True)
        except ProviderError as error:
            if names.MESSAGE_PATTERNS not in str(error):
                raise
            versions = replace(versions, has_message_patterns=False)
            manifest = build_manifest(name, config, self._launch, command, versions=versions)
            self._api.create(self._jobsets, manifest.jobset, is_dry_run=True)
        return manifest

    def render(
        self, name: str, config: PodConfig, command: Command, *, progress: Progress
    ) -> Manifest:
        """Return the manifest of a pod; the cluster checks it in a dry run if it can be reached.

        Raises:
            ConfigError: GKE does not offer the requested pod.
            ProviderError: The cluster refuses the manifest, or the credentials.
        """
        try:
            manifest = self.plan(name, config, command)
        except (Unanswered, NoKubeconfig) as error:
            progress(f"no cluster has checked the manifest: {error}")
            return build_manifest(name, config, self._launch, command)
        progress(f"the cluster at {self._api.server} accepts the manifest")
        return manifest

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return the pod's present state, or None if it does not exist."""
        jobset = self._api.get(f"{self._jobsets}/{name}")
        if jobset is None or not is_ours(jobset):
            return None
        pods, _ = self._api.list(
            f"{self._inside}/pods", labelSelector=f"{names.JOBSET_NAME}={name}"
        )
        workload = None
        if texts(jobset["metadata"].get("labels")).get(names.QUEUE):
            workload = _owned(self._workloads(), jobset)
        return read_pod(jobset, pods, workload)

    def list(self, *, owner: str | None = None) -> list[Pod]:
        """Return all tpukit pods in the namespace, or those with an owner's label."""
        query = {"labelSelector": f"{names.OURS}owner={owner}"} if owner else {}
        jobsets, _ = self._api.list(self._jobsets, **query)
        ours = [jobset for jobset in jobsets if is_ours(jobset)]
        if not ours:
            return []
        pods, _ = self._api.list(f"{self._inside}/pods", labelSelector=names.JOBSET_NAME)
        by_jobset: dict[str, list[Object]] = {}
        for pod in pods:
            by_jobset.setdefault(pod["metadata"]["labels"][names.JOBSET_NAME], []).append(pod)
        queued = any(texts(jobset["metadata"].get("labels")).get(names.QUEUE) for jobset in ours)
        workloads = self._workloads() if queued else []
        return [
            read_pod(
                jobset, by_jobset.get(jobset["metadata"]["name"], ()), _owned(workloads, jobset)
            )
            for jobset in ours
        ]

    def delete(self, name: str, *, zone: str) -> None:
        """Delete a pod in any state; a missing pod is no error."""
        jobset = self._api.get(f"{self._jobsets}/{name}")
        if jobset is not None and not is_ours(jobset):
            return
        self._api.delete(f"{self._jobsets}/{name}", propagation="Foreground")
        self._remove_parts(name)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> JobSetGang:
        """Follow the processes that the pod has started itself."""
        return JobSetGang(self._api, pod, attempt=attempt)

    def login(self, pod: Pod, host: Host) -> Sequence[str]:
        """Return the kubectl command that opens a shell on a host, as an argument list.

        Raises:
            PodUnavailable: Nothing runs on that host now.
            ConfigError: kubectl is not installed.
        """
        if shutil.which("kubectl") is None:
            raise ConfigError("A shell in a cluster is opened by kubectl; install it first.")
        pods, _ = self._api.list(
            f"{self._inside}/pods", labelSelector=f"{names.JOBSET_NAME}={pod.name}"
        )
        here = [pod for pod in pods if at(pod, "spec", "hostname") == host.name]
        running = [pod for pod in here if at(pod, "status", "phase") == "Running"]
        if not running:
            raise PodUnavailable(f"Nothing runs on {host.name} now; tpukit pods ls shows the pod.")
        return [
            "kubectl",
            *(("--context", self._launch.context) if self._launch.context else ()),
            *(("--server", self._launch.endpoint) if self._launch.endpoint else ()),
            *("--namespace", self._launch.namespace, "exec", "--stdin"),
            *(("--tty",) if sys.stdin.isatty() else ()),
            *(running[0]["metadata"]["name"], "--container", CONTAINER, "--", "sh"),
        ]

    def preflight(self, config: PodConfig) -> Sequence[DoctorFinding]:
        """Return what would prevent a pod from being allocated, without requesting one."""
        return check_cluster(self, self._api, config, self._launch)

    def _make(self, manifest: Manifest) -> Object | Pod:
        """Create everything that a pod needs, the JobSet last; clean up on failure."""
        try:
            for document in (*manifest.documents[:-1], manifest.secret_document):
                if document is not None:
                    self._make_part(document)
            jobset = self._api.create(self._jobsets, manifest.jobset)
        except ProviderError as error:
            if not isinstance(error, Unanswered):
                with suppress(ProviderError):
                    self._remove_parts(manifest.name)
            raise
        if jobset is None:  # another process was faster
            return self.get(manifest.name, zone="") or self._vanished(manifest.name)
        self._adopt(jobset, manifest)
        return jobset

    def _make_part(self, document: Object) -> None:
        path = self._path_of(document)
        if self._api.create(path, document) is None and document["kind"] != "WorkloadPriorityClass":
            # Left by a failed creation of a pod with this name; it may have other values.
            self._api.delete(f"{path}/{document['metadata']['name']}")
            self._api.create(path, document)

    def _adopt(self, jobset: Object, manifest: Manifest) -> None:
        """Make the JobSet the owner of its parts, so that they are deleted with it."""
        metadata = jobset["metadata"]
        owner = {
            "apiVersion": names.JOBSET_API,
            "kind": "JobSet",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        for document in (*manifest.documents[:-1], manifest.secret_document):
            if document is not None and document["kind"] in ("ConfigMap", "Secret"):
                path = f"{self._path_of(document)}/{document['metadata']['name']}"
                self._api.patch(path, {"metadata": {"ownerReferences": [owner]}})

    def _path_of(self, document: Object) -> str:
        if document["kind"] == "WorkloadPriorityClass":
            return f"/apis/{document['apiVersion']}/workloadpriorityclasses"
        return f"{self._inside}/{document['kind'].lower()}s"

    def _remove_parts(self, name: str) -> None:
        self._api.delete(f"{self._inside}/secrets/{name}-env")
        part = 0
        while self._api.delete(f"{self._inside}/configmaps/{bundle_part_name(name, part)}"):
            part += 1

    def _workloads(self) -> Sequence[Object]:
        return self._api.list_workloads()

    def _check_zone(self, config: PodConfig) -> None:
        """Refuse a zone if the cluster has no node in its region, as far as nodes can be listed."""
        if not config.zones:
            return
        zone = config.zones[0]
        try:
            nodes, _ = self._api.list(f"{CORE}/nodes")
        except ProviderError:  # many users may see only their namespace
            return
        known = {texts(at(node, "metadata", "labels")).get(names.ZONE, "") for node in nodes}
        regions = {zone.rpartition("-")[0] for zone in known if zone}
        if regions and zone.rpartition("-")[0] not in regions:
            raise ConfigError(
                f"The cluster has no node in {zone}: its nodes are in "
                f"{', '.join(sorted(filter(None, known)))}. Choose one of these zones, or another "
                "cluster (launch.context)."
            )

    def _vanished(self, name: str) -> Pod:
        raise ProviderError(f"JobSet {name} existed a moment ago and is gone; try again.")


def _owned(workloads: Sequence[Object], jobset: Object) -> Object | None:
    uid = jobset["metadata"]["uid"]
    for workload in workloads:
        if any(owner["uid"] == uid for owner in workload["metadata"].get("ownerReferences", ())):
            return workload
    return None
