"""A JobSet that runs one process on every host of a pod's slices, and restarts them together."""

import json
from dataclasses import dataclass

from ...errors import ConfigError
from ...hardware import Slice
from ...job.sections import LaunchSettings
from ...records.reporting import VARIABLE as PROGRESS
from ...records.reporting import WANTED
from ..config import PodConfig
from ..pod import Tier, check_name
from ..providers.protocol import Command
from . import names
from .documents import Document
from .entrypoint import IDLE, PROGRAM
from .restarts import failure_policy, pod_failure_policy

CONTAINER = "train"
REPLICATED_JOB = "slice"
BUNDLE_FOLDER = "/etc/tpukit"
BUNDLE_FILE = "bundle.tar.gz"

# A spot node leaves its pods 15 s of its 30; asking for more has no effect.
SPOT_GRACE_S = 15
GRACE_S = 120
LONGEST_FLEX_START_S = 7 * 24 * 3600
METRICS_PORT = 8431


@dataclass(frozen=True, kw_only=True)
class JobSetSource:
    """Everything that a JobSet is made from.

    Attributes:
        name: Of the pod, and of everything in the cluster that belongs to it.
        command: What every host runs; None: nothing, until the pod is deleted.
        secret: Name of the Secret that holds the variables `secret_keys`.
        bundle: Name of the ConfigMap that holds the job's files.
    """

    name: str
    config: PodConfig
    launch: LaunchSettings
    command: Command | None = None
    secret: str | None = None
    secret_keys: tuple[str, ...] = ()
    bundle: str | None = None

    @property
    def slice(self) -> Slice:
        """What is asked for."""
        return self.config.slice


def jobset(work: JobSetSource) -> Document:
    """Return the JobSet of a pod.

    Raises:
        ConfigError: Something is missing, or GKE does not offer it.
    """
    hosts = work.slice.hosts // work.slice.num_slices
    return {
        "apiVersion": names.JOBSET_API,
        "kind": "JobSet",
        "metadata": {
            "name": check_name(work.name),
            "namespace": work.launch.namespace,
            "labels": owner_labels(work.config) | _queue_labels(work.config, work.launch),
            "annotations": _annotations(work),
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": failure_policy(work.launch.max_restarts),
            "replicatedJobs": [
                {
                    "name": REPLICATED_JOB,
                    "replicas": work.slice.num_slices,
                    "template": {
                        "spec": {
                            "parallelism": hosts,
                            "completions": hosts,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "podFailurePolicy": pod_failure_policy(CONTAINER),
                            "template": {
                                "metadata": {"labels": owner_labels(work.config)},
                                "spec": _pod_spec(work),
                            },
                        }
                    },
                }
            ],
        },
    }


def hostname_of(name: str, slice_index: int, worker_id: int) -> str:
    """Return the hostname that JobSet gives a host; its Pod's name has a random ending more."""
    return f"{name}-{REPLICATED_JOB}-{slice_index}-{worker_id}"


def owner_labels(config: PodConfig) -> dict[str, str]:
    """Return the labels of a pod as everything in the cluster carries them."""
    return {f"{names.OURS}{key}": value for key, value in config.labels.items()}


def priority_class_of(config: PodConfig, launch: LaunchSettings) -> str | None:
    """Return the name of a pod's WorkloadPriorityClass; None: the queue's default."""
    if launch.priority_class:
        return launch.priority_class
    return f"tpukit-priority-{config.priority}" if config.priority else None


def selector_of(config: PodConfig, launch: LaunchSettings) -> dict[str, str]:
    """Return the labels that a node must have.

    Raises:
        ConfigError: GKE does not offer the slice, or not on these terms.
    """
    where = config.slice
    if where.gke_accelerator is None:
        raise ConfigError(
            f"GKE offers no {where.chip.title}; take v4 or later, or provider: gcp for {where}."
        )
    if where.num_slices > 1 and where.hosts == where.num_slices:
        raise ConfigError(
            f"{where} is {where.num_slices} slices of one host each, and GKE joins only slices of "
            "several hosts; take one larger slice, or larger slices."
        )
    wanted = {names.ACCELERATOR: where.gke_accelerator, names.TOPOLOGY: where.gke_topology}
    if config.zones:
        wanted[names.ZONE] = config.zones[0]
    if config.tier is Tier.SPOT:
        wanted[names.SPOT] = "true"
    if config.tier is Tier.RESERVED:
        if config.reservation is None:
            raise ConfigError("On GKE a reservation is found by its name; set launch.reservation.")
        wanted[names.RESERVATION] = config.reservation
    if launch.flex_start:
        if config.tier is not Tier.ON_DEMAND:
            raise ConfigError(
                f"launch: says flex_start and {config.tier.value}; a pod is one or the other."
            )
        wanted[names.FLEX_START] = "true"
    return wanted


def literal(text: str) -> str:
    """Return text for an argument or a variable in which Kubernetes replaces nothing.

    It replaces `$(NAME)`, and `$$` by `$`.
    """
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _queue_labels(config: PodConfig, launch: LaunchSettings) -> dict[str, str]:
    if not launch.queue:
        return {}
    chosen = priority_class_of(config, launch)
    return {names.QUEUE: launch.queue} | ({names.PRIORITY_CLASS: chosen} if chosen else {})


def _annotations(work: JobSetSource) -> dict[str, str]:
    said = {
        names.EXCLUSIVE: names.NODE_POOL,
        names.SLICE: str(work.slice),
        names.TIER: work.config.tier.value,
    }
    if work.config.zones:
        said[names.ZONE_ASKED] = work.config.zones[0]
    if work.launch.flex_start and work.launch.queue:
        said[names.MAX_RUN] = str(LONGEST_FLEX_START_S)
    return said


def _pod_spec(work: JobSetSource) -> Document:
    launch, config = work.launch, work.config
    if launch.image is None:
        raise ConfigError(
            "On GKE a job runs in a container: set launch.image to one that holds Python, jax and "
            "what the job imports, by its digest or a fixed tag."
        )
    selector = selector_of(config, launch)
    tainted = (names.CHIPS, *(key for key in (names.SPOT, names.FLEX_START) if key in selector))
    container: Document = {
        "name": CONTAINER,
        "image": launch.image,
        "command": ["python3", "-c", literal(PROGRAM)],
        "args": [literal(word) for word in (work.command.argv if work.command else IDLE)],
        "ports": [{"containerPort": METRICS_PORT}],
        "resources": {"limits": {names.CHIPS: work.slice.chips_per_host}},
        "env": [*_rank(work), *_variables(work)],
    }
    spec: Document = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": SPOT_GRACE_S if config.tier is Tier.SPOT else GRACE_S,
        "nodeSelector": selector,
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in tainted
        ],
        "containers": [container],
    }
    if launch.service_account:
        spec["serviceAccountName"] = launch.service_account
    if work.bundle:
        container["volumeMounts"] = [{"name": "bundle", "mountPath": BUNDLE_FOLDER}]
        spec["volumes"] = [{"name": "bundle", "configMap": {"name": work.bundle}}]
    return spec


def _rank(work: JobSetSource) -> list[Document]:
    """Say which process of the job this is, anew for each attempt.

    Everything is stated: what GKE would inject may be stale after a slice was replaced.
    """
    slices = work.slice.num_slices
    first_host = f"{hostname_of(work.name, 0, 0)}.{work.name}"
    variables = [
        _variable("TPUKIT_NUM_HOSTS", str(work.slice.hosts)),
        _variable("TPUKIT_HOSTS_PER_SLICE", str(work.slice.hosts // slices)),
        _variable("TPUKIT_COORDINATOR_HOST", first_host),
        _label("TPUKIT_SLICE_ID", names.JOB_INDEX),
        _label("TPUKIT_ATTEMPT", names.RESTART_ATTEMPT),
        _variable(PROGRESS, WANTED),
        _variable("PYTHONUNBUFFERED", "1"),
    ]
    if slices > 1:
        variables += [
            _variable("MEGASCALE_NUM_SLICES", str(slices)),
            _variable("MEGASCALE_SLICE_ID", "$(TPUKIT_SLICE_ID)"),
            _variable("MEGASCALE_COORDINATOR_ADDRESS", first_host),
        ]
    return variables


def _variables(work: JobSetSource) -> list[Document]:
    variables: list[Document] = []
    if work.command:
        variables.append(_variable("TPUKIT_HEARTBEAT_S", str(work.command.heartbeat_s)))
    if work.command and work.command.setup:
        steps = json.dumps([list(step) for step in work.command.setup])
        variables.append(_variable("TPUKIT_SETUP", literal(steps)))
    if work.bundle:
        variables.append(_variable("TPUKIT_BUNDLE", f"{BUNDLE_FOLDER}/{BUNDLE_FILE}"))
    for key in work.secret_keys:
        source = {"secretKeyRef": {"name": work.secret, "key": key}}
        variables.append({"name": key, "valueFrom": source})
    return variables


def _variable(name: str, value: str) -> Document:
    return {"name": name, "value": value}


def _label(name: str, label: str) -> Document:
    source = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    return {"name": name, "valueFrom": source}
