"""`GKEProvider`: a pod is a JobSet, which is also the gang that runs on it."""

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ....errors import ConfigError, PodUnavailable, ProviderError
from ....job.sections import LaunchSettings
from ....runtime.doctor.finding import DoctorFinding
from ...config import PodConfig
from ...manifests import names
from ...manifests.jobset import CONTAINER
from ...manifests.manifest import Manifest, build_manifest
from ...manifests.reading import at, texts
from ...pod import Host, Pod
from ..protocol import Capabilities, Command
from ..terms import check_terms
from .api import AGAIN_S, CORE, JOBSETS, KUEUE, PAUSE_S, ClusterApi, Object
from .failures import Unanswered
from .gang import JobSetGang
from .preflight import check_cluster
from .reading import PROVIDER, is_ours, read_pod

CAPABILITIES = Capabilities(
    generations=("v3", "v4", "v5e", "v5p", "v6e", "7x"),
    refused={
        "network": "the nodes of a cluster have its network; choose another cluster",
        "software_version": "what a job runs in is its image (launch.image)",
        "enable_ip_alias": "a cluster's nodes always have alias addresses",
        "flex_start_seconds": "its node pool says for how long; here one says flex_start alone",
    },
    runs_gangs=True,
)


class GKEProvider:
    """Gives pods in a Kubernetes cluster with TPU nodes.

    Args:
        launch: Context, namespace, queue, image and the like. `endpoint` is another address than
            the kubeconfig's.
    """

    name = PROVIDER

    def __init__(self, launch: LaunchSettings) -> None:
        self._launch = launch
        self.capabilities = CAPABILITIES.within(launch)
        self._api = ClusterApi(launch)
        self._jobsets = f"{JOBSETS}/namespaces/{launch.namespace}/jobsets"
        self._inside = f"{CORE}/namespaces/{launch.namespace}"

    def create(self, name: str, config: PodConfig, *, command: Command | None = None) -> Pod:
        """Ask for a pod; a pod of that name that is there already is returned as it is.

        Raises:
            ConfigError: The pod cannot be had on GKE as it is asked for.
            PodUnavailable: A quota is used up.
            ProviderError: The cluster cannot be reached, or refuses who asks.
        """
        check_terms(self.name, self.capabilities, config)
        manifest = build_manifest(name, config, self._launch, command)
        if there := self.get(name, zone=""):
            return there
        self._check_zone(config)
        began = time.monotonic()
        while True:
            try:
                made = self._make(manifest)
                return made if isinstance(made, Pod) else read_pod(made, (), None)
            except Unanswered:
                # It may have been done: then the pod is there. Else it is asked for again.
                if there := self.get(name, zone=""):
                    return there
                if time.monotonic() > began + AGAIN_S:
                    with suppress(ProviderError):
                        self._remove_parts(name)
                    raise
                time.sleep(PAUSE_S)

    def get(self, name: str, *, zone: str) -> Pod | None:
        """Return a pod as it is now, or None where there is none."""
        found = self._api.get(f"{self._jobsets}/{name}")
        if found is None or not is_ours(found):
            return None
        pods, _ = self._api.list(
            f"{self._inside}/pods", labelSelector=f"{names.JOBSET_NAME}={name}"
        )
        workload = None
        if texts(found["metadata"].get("labels")).get(names.QUEUE):
            workload = _owned(self._workloads(), found)
        return read_pod(found, pods, workload)

    def list(self, *, owner: str | None = None) -> list[Pod]:
        """Return all pods of ours in the namespace, or those with an owner's label."""
        query = {"labelSelector": f"{names.OURS}owner={owner}"} if owner else {}
        jobsets, _ = self._api.list(self._jobsets, **query)
        ours = [one for one in jobsets if is_ours(one)]
        if not ours:
            return []
        pods, _ = self._api.list(f"{self._inside}/pods", labelSelector=names.JOBSET_NAME)
        by_jobset: dict[str, list[Object]] = {}
        for pod in pods:
            by_jobset.setdefault(pod["metadata"]["labels"][names.JOBSET_NAME], []).append(pod)
        queued = any(texts(one["metadata"].get("labels")).get(names.QUEUE) for one in ours)
        workloads = self._workloads() if queued else []
        return [
            read_pod(one, by_jobset.get(one["metadata"]["name"], ()), _owned(workloads, one))
            for one in ours
        ]

    def delete(self, name: str, *, zone: str) -> None:
        """Remove a pod in whatever state it is; one that is not there is no error."""
        found = self._api.get(f"{self._jobsets}/{name}")
        if found is not None and not is_ours(found):
            return
        self._api.delete(f"{self._jobsets}/{name}", propagation="Foreground")
        self._remove_parts(name)

    def start(self, pod: Pod, command: Command, *, attempt: int) -> JobSetGang:
        """Follow what the pod runs; it has started it by itself."""
        return JobSetGang(self._api, pod, command, attempt=attempt)

    def login(self, pod: Pod, host: Host) -> Sequence[str]:
        """Return the argument list that opens a shell on a host, with the system's kubectl.

        Raises:
            PodUnavailable: Nothing runs on that host now.
            ConfigError: There is no kubectl.
        """
        if shutil.which("kubectl") is None:
            raise ConfigError("A shell in a cluster is opened by kubectl; install it first.")
        found, _ = self._api.list(
            f"{self._inside}/pods", labelSelector=f"{names.JOBSET_NAME}={pod.name}"
        )
        here = [one for one in found if at(one, "spec", "hostname") == host.name]
        running = [one for one in here if at(one, "status", "phase") == "Running"]
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
        """Say what would stand in the way of a pod, without asking for one."""
        return check_cluster(self._api, config, self._launch)

    # Inner parts.

    def _make(self, manifest: Manifest) -> Object | Pod:
        """Make everything that a pod needs, the JobSet last; leave nothing where that fails."""
        try:
            for document in (*manifest.documents[:-1], manifest.secret_document):
                if document is not None:
                    self._make_part(document)
            made = self._api.create(self._jobsets, manifest.jobset)
        except ProviderError as error:
            if not isinstance(error, Unanswered):
                with suppress(ProviderError):
                    self._remove_parts(manifest.name)
            raise
        if made is None:  # somebody else was faster
            return self.get(manifest.name, zone="") or self._vanished(manifest.name)
        self._adopt(made, manifest)
        return made

    def _make_part(self, document: Object) -> None:
        path = self._path_of(document)
        if self._api.create(path, document) is None and document["kind"] != "WorkloadPriorityClass":
            # Left from a pod of this name whose making failed: it may hold other values.
            self._api.delete(f"{path}/{document['metadata']['name']}")
            self._api.create(path, document)

    def _adopt(self, jobset: Object, manifest: Manifest) -> None:
        """Let what belongs to a JobSet be removed with it."""
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
            return f"{KUEUE}/workloadpriorityclasses"
        return f"{self._inside}/{document['kind'].lower()}s"

    def _remove_parts(self, name: str) -> None:
        self._api.delete(f"{self._inside}/secrets/{name}-env")
        self._api.delete(f"{self._inside}/configmaps/{name}-files")

    def _workloads(self) -> Sequence[Object]:
        path = f"{KUEUE}/namespaces/{self._launch.namespace}/workloads"
        return self._api.list(path)[0]

    def _check_zone(self, config: PodConfig) -> None:
        """Refuse a zone in whose region the cluster has no node at all."""
        if not config.zones:
            return
        zone = config.zones[0]
        nodes, _ = self._api.list(f"{CORE}/nodes")
        known = {texts(at(node, "metadata", "labels")).get(names.ZONE, "") for node in nodes}
        regions = {one.rpartition("-")[0] for one in known if one}
        if regions and zone.rpartition("-")[0] not in regions:
            raise ConfigError(
                f"The cluster has no node in {zone}: its nodes are in "
                f"{', '.join(sorted(filter(None, known)))}. Choose one of these zones, or another "
                "cluster (launch.context)."
            )

    def _vanished(self, name: str) -> Pod:
        raise ProviderError(f"JobSet {name} was there a moment ago and is gone; try again.")


def _owned(workloads: Sequence[Object], jobset: Object) -> Object | None:
    uid = jobset["metadata"]["uid"]
    for one in workloads:
        if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ())):
            return one
    return None
