"""Labels, annotations and API versions that GKE, JobSet and Kueue read."""

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
KUEUE_API = "kueue.x-k8s.io/v1beta2"

# Labels of GKE nodes, used as selectors.
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
SPOT = "cloud.google.com/gke-spot"
FLEX_START = "cloud.google.com/gke-flex-start"
RESERVATION = "cloud.google.com/reservation-name"
ZONE = "topology.kubernetes.io/zone"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
IMPENDING_TERMINATION = "cloud.google.com/impending-node-termination"
MAINTENANCE = "cloud.google.com/active-node-maintenance"

# The resource name of chips, and the taint of every TPU node.
CHIPS = "google.com/tpu"

# Super-slicing: Kueue's slice controller joins a slice from whole cubes.
SLICE_TOPOLOGY = "cloud.google.com/gke-tpu-slice-topology"
SUPER_SLICE = "cloud.google.com/gke-tpu-slice"
CUBE = "cloud.google.com/gke-tpu-partition-4x4x4-id"

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"
JOB_KEY = "jobset.sigs.k8s.io/job-key"
COORDINATOR = "jobset.sigs.k8s.io/coordinator"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"
MAX_RUN = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"
SLICE_REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-slice-required-topology"
SLICE_SIZE = "kueue.x-k8s.io/podset-slice-size"

# tpukit's own labels on every object: owner, job and attempt, and the request.
OURS = "tpukit.dev/"
SLICE = "tpukit.dev/slice"
TIER = "tpukit.dev/tier"
ZONE_ASKED = "tpukit.dev/zone"

LONGEST_NAME = 63
RANDOM_SUFFIX = "-abcde"  # a Pod's name is its hostname with such a suffix
