"""Labels, annotations and resources as GKE, JobSet and Kueue document them.

tpukit has its own list (`tpukit.pods.manifests.names`). The two are apart on purpose: a misspelled
label there is one that this cluster does not read.
"""

# GKE: node labels, the taint and resource of TPUs.
ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY = "cloud.google.com/gke-tpu-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
SPOT = "cloud.google.com/gke-spot"
IMPENDING_TERMINATION = "cloud.google.com/impending-node-termination"
MAINTENANCE = "cloud.google.com/active-node-maintenance"
CHIPS = "google.com/tpu"

# Kubernetes.
ZONE = "topology.kubernetes.io/zone"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
JOB_NAME = "batch.kubernetes.io/job-name"

# JobSet.
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
JOB_KEY = "jobset.sigs.k8s.io/job-key"
COORDINATOR = "jobset.sigs.k8s.io/coordinator"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"

# Kueue.
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY_CLASS = "kueue.x-k8s.io/priority-class"

LONGEST_NAME = 63
RANDOM_SUFFIX = "-abcde"
