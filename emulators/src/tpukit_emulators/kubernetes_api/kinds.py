"""The kinds of objects that the cluster knows, and what `kubectl get` shows of them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of object.

    Attributes:
        columns: What `kubectl get` shows after the name: titles with the path of each value.
        has_status: Whether its status is written apart from its spec.
    """

    name: str
    plural: str
    group: str = ""
    version: str = "v1"
    is_namespaced: bool = True
    short_names: tuple[str, ...] = ()
    columns: tuple[tuple[str, str], ...] = ()
    has_status: bool = True
    subresources: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """As objects state it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """As messages and Statuses name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def __str__(self) -> str:
        return self.full_name


def _kueue(name: str, plural: str, **more: object) -> Kind:
    return Kind(name, plural, "kueue.x-k8s.io", "v1beta2", **more)  # pyright: ignore[reportArgumentType]


POD = Kind(
    "Pod",
    "pods",
    short_names=("po",),
    columns=(("Status", "status.phase"), ("Node", "spec.nodeName"), ("Reason", "status.reason")),
    subresources=("log", "eviction", "exec"),
)
NODE = Kind(
    "Node",
    "nodes",
    is_namespaced=False,
    short_names=("no",),
    columns=(
        ("Pool", "metadata.labels.cloud.google.com/gke-nodepool"),
        ("TPU", "metadata.labels.cloud.google.com/gke-tpu-accelerator"),
        ("Topology", "metadata.labels.cloud.google.com/gke-tpu-topology"),
        ("Chips", "status.allocatable.google.com/tpu"),
        ("Unschedulable", "spec.unschedulable"),
    ),
)
NAMESPACE = Kind("Namespace", "namespaces", is_namespaced=False, short_names=("ns",))
SERVICE = Kind(
    "Service", "services", short_names=("svc",), columns=(("ClusterIP", "spec.clusterIP"),)
)
CONFIG_MAP = Kind("ConfigMap", "configmaps", short_names=("cm",), has_status=False)
SECRET = Kind("Secret", "secrets", columns=(("Type", "type"),), has_status=False)
EVENT = Kind(
    "Event",
    "events",
    short_names=("ev",),
    columns=(("Type", "type"), ("Reason", "reason"), ("Message", "message")),
    has_status=False,
)
RESOURCE_QUOTA = Kind("ResourceQuota", "resourcequotas", short_names=("quota",))
LEASE = Kind(
    "Lease",
    "leases",
    "coordination.k8s.io",
    columns=(("Holder", "spec.holderIdentity"),),
    has_status=False,
)
JOB = Kind(
    "Job",
    "jobs",
    "batch",
    columns=(
        ("Completions", "spec.completions"),
        ("Active", "status.active"),
        ("Succeeded", "status.succeeded"),
        ("Failed", "status.failed"),
    ),
)
JOBSET = Kind(
    "JobSet",
    "jobsets",
    "jobset.x-k8s.io",
    "v1alpha2",
    columns=(
        ("TerminalState", "status.terminalState"),
        ("Restarts", "status.restarts"),
        ("Completed", "status.conditions.Completed"),
        ("Suspended", "spec.suspend"),
    ),
)
WORKLOAD = _kueue(
    "Workload",
    "workloads",
    short_names=("kwl",),
    columns=(
        ("Queue", "spec.queueName"),
        ("Reserved in", "status.admission.clusterQueue"),
        ("Admitted", "status.conditions.Admitted"),
        ("Finished", "status.conditions.Finished"),
    ),
)
CLUSTER_QUEUE = _kueue(
    "ClusterQueue",
    "clusterqueues",
    is_namespaced=False,
    short_names=("cq",),
    columns=(("Cohort", "spec.cohortName"), ("Pending Workloads", "status.pendingWorkloads")),
)
LOCAL_QUEUE = _kueue(
    "LocalQueue",
    "localqueues",
    short_names=("lq", "queue"),
    columns=(("ClusterQueue", "spec.clusterQueue"), ("Pending", "status.pendingWorkloads")),
)
RESOURCE_FLAVOR = _kueue(
    "ResourceFlavor", "resourceflavors", is_namespaced=False, short_names=("rf", "flavor")
)
PRIORITY_CLASS = _kueue(
    "WorkloadPriorityClass",
    "workloadpriorityclasses",
    is_namespaced=False,
    short_names=("wpc",),
    columns=(("Value", "value"),),
    has_status=False,
)
ADMISSION_CHECK = _kueue(
    "AdmissionCheck", "admissionchecks", is_namespaced=False, short_names=("ac",)
)
TOPOLOGY = _kueue("Topology", "topologies", is_namespaced=False, short_names=("topo",))

KINDS = (
    *(POD, NODE, NAMESPACE, SERVICE, CONFIG_MAP, SECRET, EVENT, RESOURCE_QUOTA, LEASE, JOB, JOBSET),
    *(
        WORKLOAD,
        CLUSTER_QUEUE,
        LOCAL_QUEUE,
        RESOURCE_FLAVOR,
        PRIORITY_CLASS,
        ADMISSION_CHECK,
        TOPOLOGY,
    ),
)
BY_PATH = {(kind.group, kind.version, kind.plural): kind for kind in KINDS}
KUEUE_VERSIONS = ("v1beta2", "v1beta1")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Versions of the extensions that a cluster has.

    Attributes:
        kueue: API versions that Kueue serves, the preferred one first; only v1beta1 before 0.15.
        jobset: JobSet's version.
    """

    kueue: tuple[str, ...] = KUEUE_VERSIONS
    jobset: tuple[int, int] = (0, 11)

    def versions_of(self, kind: Kind) -> tuple[str, ...]:
        """Return the versions in which a kind is served."""
        return self.kueue if kind.group == "kueue.x-k8s.io" else (kind.version,)

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        """Return the kind that a path names, or None."""
        for kind in KINDS:
            if (kind.group, kind.plural) == (group, plural) and version in self.versions_of(kind):
                return kind
        return None
