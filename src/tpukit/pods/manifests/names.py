"""Labels, annotations and API versions that GKE, JobSet and Kueue read."""

from dataclasses import dataclass

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Versions that tpukit can use, the best first. Kueue before 0.15 serves only v1beta1."""
MESSAGE_PATTERNS = "onJobFailureMessagePatterns"


@dataclass(frozen=True, kw_only=True)
class ClusterVersions:
    """What a manifest may use in its cluster.

    Attributes:
        kueue: Version of Kueue's API.
        has_message_patterns: Whether JobSet's rules can tell failures apart by their message, as
            JobSet 0.10 and newer can.
    """

    kueue: str = KUEUE_VERSIONS[0]
    has_message_patterns: bool = True

    @property
    def kueue_api(self) -> str:
        """The `apiVersion` of Kueue's kinds."""
        return f"{KUEUE_GROUP}/{self.kueue}"


NEWEST = ClusterVersions()

# Labels of GKE nodes, used as selectors.
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
SPOT = "cloud.google.com/gke-spot"
FLEX_START = "cloud.google.com/gke-flex-start"
RESERVATION = "cloud.google.com/reservation-name"
ZONE = "topology.kubernetes.io/zone"
MAINTENANCE = "cloud.google.com/active-node-maintenance"

# The resource name of chips, and the taint of every TPU node.
CHIPS = "google.com/tpu"

# Super-slicing: Kueue's slice controller joins a slice from whole cubes.
SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
MAX_RUN = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"

# tpukit's own labels on every object: owner, job and attempt, and the request.
OURS = "tpukit.dev/"
SLICE = "tpukit.dev/slice"
TIER = "tpukit.dev/tier"
ZONE_ASKED = "tpukit.dev/zone"
