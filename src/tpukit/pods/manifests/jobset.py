"""A JobSet that runs one process on every host of a pod's slices, and restarts all together."""

import json
from dataclasses import dataclass

from ...errors import ConfigError
from ...exit_codes import ExitCode
from ...hardware import Slice
from ...job.sections import LaunchSettings
from ...records.reporting import VARIABLE as PROGRESS
from ...records.reporting import WANTED
from ..config import PodConfig
from ..pod import Tier, check_name
from ..providers.protocol import Command
from . import names
from .documents import Document
from .names import MESSAGE_PATTERNS, NEWEST, ClusterVersions
from .pod_template import merge_pod_template

# Survivors of a preempted host end with these, so they are not charged to `max_restarts`.
RESTARTED_FREE = (int(ExitCode.ABORTED), int(ExitCode.TERMINATED), int(ExitCode.PEER_LOST))
# The same would happen again.
PERMANENT = (
    int(ExitCode.FAILED),
    int(ExitCode.BAD_INPUT),
    int(ExitCode.DIVERGED),
    int(ExitCode.OUT_OF_MEMORY),
)

FREE_RULE, PERMANENT_RULE = "disruption", "permanent"


def failure_policy(max_restarts: int, versions: ClusterVersions) -> Document:
    """Return the JobSet's reaction to a failed Job; the first rule that matches applies.

    Without message patterns, a permanent failure cannot be told from another one. It is restarted
    too, and charged to `max_restarts`.
    """
    free: Document = {
        "name": FREE_RULE,
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    rules = [free]
    if versions.has_message_patterns:
        codes = "|".join(str(code) for code in RESTARTED_FREE)
        free[MESSAGE_PATTERNS] = ["condition DisruptionTarget", f"exit code ({codes}) "]
        rules.append(
            {
                "name": PERMANENT_RULE,
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        )
    return {
        "maxRestarts": max_restarts,
        # New processes start only after all old ones are gone.
        "restartStrategy": "BlockingRecreate",
        "rules": rules,
    }


def pod_failure_policy(container: str, versions: ClusterVersions) -> Document:
    """Return the rules that fail a Job with a reason which the JobSet's rules can match."""
    codes = sorted((*RESTARTED_FREE, *(PERMANENT if versions.has_message_patterns else ())))
    # Kubernetes before 1.35, and with it JobSet before 0.11, requires `status`.
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            {"action": "FailJob", "onPodConditions": [disrupted]},
            {
                "action": "FailJob",
                "onExitCodes": {"containerName": container, "operator": "In", "values": codes},
            },
        ]
    }


# Later attempts use other ports, because an earlier process may still have its own. The first is
# `runtime.multihost.DEFAULT_PORT`. A process that lost its peer ends some seconds later, because a
# Job reacts to the Pod that it sees first, and that should be the one to blame.
PROGRAM = """\
import io, json, os, signal, subprocess, sys, tarfile, tempfile, time
env, told, running = os.environ, [], []
def forward(number, frame):
    told.append(number)
    for process in running:
        process.send_signal(number)
signal.signal(signal.SIGTERM, forward)
attempt = int(env.get("TPUKIT_ATTEMPT") or 0)
first = int(env.get("TPUKIT_SLICE_ID") or 0) * int(env["TPUKIT_HOSTS_PER_SLICE"])
env["TPUKIT_HOST_ID"] = str(first + int(env.get("JOB_COMPLETION_INDEX") or 0))
env["TPUKIT_COORDINATOR"] = env["TPUKIT_COORDINATOR_HOST"] + ":" + str(8482 + attempt % 16)
if env.get("TPUKIT_BUNDLE"):
    parts = sorted(name for name in os.listdir(env["TPUKIT_BUNDLE"]) if name[0] != ".")
    parts = [open(os.path.join(env["TPUKIT_BUNDLE"], name), "rb").read() for name in parts]
    os.chdir(tempfile.mkdtemp(prefix="tpukit-"))
    with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as files:
        files.extractall(filter="data")
for step in json.loads(env.get("TPUKIT_SETUP") or "[]"):
    subprocess.run(step, check=True)
if told:
    sys.exit(143)
running.append(subprocess.Popen(sys.argv[1:]))
if told:
    running[0].send_signal(signal.SIGTERM)
status = running[0].wait()
last = time.monotonic() + 5 * (status in (-6, 134, 201))
while not told and time.monotonic() < last:
    time.sleep(0.1)
sys.exit(143 if told and status == 0 else status if status >= 0 else 128 - status)
"""

IDLE = ("sleep", "infinity")


CONTAINER = "train"
REPLICATED_JOB = "slice"
BUNDLE_FOLDER = "/etc/tpukit"

# A spot node leaves its Pods 15 s of its 30 s; a longer grace period has no effect.
SPOT_GRACE_S = 15
GRACE_S = 120
LONGEST_FLEX_START_S = 7 * 24 * 3600
METRICS_PORT = 8431
KEPT_FINISHED_S = 14 * 24 * 3600
"""How long the cluster keeps a finished JobSet that no tpukit has read and deleted."""


@dataclass(frozen=True, kw_only=True)
class JobSetSource:
    """The inputs of a JobSet.

    Attributes:
        name: Name of the pod, and prefix of all its objects in the cluster.
        command: The command for every host; None runs nothing until the pod is deleted.
        secret: Name of the Secret with the variables `secret_keys`.
        bundle: Names of the ConfigMaps with the job's files, in order.
        versions: What the cluster offers.
    """

    name: str
    config: PodConfig
    launch: LaunchSettings
    command: Command | None = None
    secret: str | None = None
    secret_keys: tuple[str, ...] = ()
    bundle: tuple[str, ...] = ()
    versions: ClusterVersions = NEWEST

    @property
    def hosts_per_slice(self) -> int:
        """Hosts of one slice, each with one Pod."""
        return self.slice.hosts // self.slice.num_slices

    @property
    def slice(self) -> Slice:
        """The requested slice."""
        return self.config.slice


def jobset(work: JobSetSource) -> Document:
    """Return the JobSet of a pod.

    Raises:
        ConfigError: A setting is missing or contradicts another, or GKE does not offer the slice.
    """
    hosts = work.hosts_per_slice
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
            "failurePolicy": failure_policy(work.launch.max_restarts, work.versions),
            "ttlSecondsAfterFinished": KEPT_FINISHED_S,
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
                            "podFailurePolicy": pod_failure_policy(CONTAINER, work.versions),
                            "template": merge_pod_template(
                                {
                                    "metadata": {"labels": owner_labels(work.config)},
                                    "spec": _pod_spec(work),
                                },
                                work.launch.pod_template,
                            ),
                        }
                    },
                }
            ],
        },
    }


def hostname_of(name: str, slice_index: int, worker_id: int) -> str:
    """Return a host's hostname in the JobSet. The Pod's name adds a random suffix."""
    return f"{name}-{REPLICATED_JOB}-{slice_index}-{worker_id}"


def owner_labels(config: PodConfig) -> dict[str, str]:
    """Return a pod's labels for all its objects in the cluster."""
    return {f"{names.OURS}{key}": value for key, value in config.labels.items()}


def priority_class_of(config: PodConfig, launch: LaunchSettings) -> str | None:
    """Return the pod's WorkloadPriorityClass; None for the queue's default."""
    if launch.priority_class:
        return launch.priority_class
    return f"tpukit-priority-{config.priority}" if config.priority else None


def selector_of(config: PodConfig, launch: LaunchSettings) -> dict[str, str]:
    """Return the labels that nodes must have.

    Raises:
        ConfigError: GKE does not offer the slice, or not on these terms.
    """
    where = config.slice
    if where.gke_accelerator is None:
        raise ConfigError(
            f"GKE offers no {where.chip.title}; use v4 or later, or provider: gcp for {where}."
        )
    if where.num_slices > 1 and where.hosts == where.num_slices:
        raise ConfigError(
            f"{where} is {where.num_slices} slices of one host each, but GKE joins only slices of "
            "several hosts; use one larger slice, or larger slices."
        )
    wanted = {names.ACCELERATOR: where.gke_accelerator, names.TOPOLOGY: where.gke_topology}
    if config.zones:
        wanted[names.ZONE] = config.zones[0]
    if config.tier is Tier.SPOT:
        wanted[names.SPOT] = "true"
    if config.tier is Tier.RESERVED:
        if config.reservation is None:
            raise ConfigError("GKE needs the reservation's name; set launch.reservation.")
        wanted[names.RESERVATION] = config.reservation
    if launch.flex_start:
        if config.tier is not Tier.ON_DEMAND:
            raise ConfigError(
                f"launch: sets both flex_start and {config.tier.value}; set only one of them."
            )
        wanted[names.FLEX_START] = "true"
    return wanted


def literal(text: str) -> str:
    """Return text with `$` escaped, for an argument or variable in a manifest.

    Kubernetes replaces `$(NAME)`, and `$$` by `$`.
    """
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _queue_labels(config: PodConfig, launch: LaunchSettings) -> dict[str, str]:
    if not launch.queue:
        return {}
    chosen = priority_class_of(config, launch)
    return {names.QUEUE: launch.queue} | ({names.PRIORITY_CLASS: chosen} if chosen else {})


def _annotations(work: JobSetSource) -> dict[str, str]:
    variables = {
        names.SLICE: str(work.slice),
        names.TIER: work.config.tier.value,
    }
    if work.hosts_per_slice > 1:
        # A node pool of several hosts is one slice. Pools of one-host slices have many nodes, and
        # exclusive placement would leave all but one of them idle.
        variables[names.EXCLUSIVE] = names.NODE_POOL
    if work.config.zones:
        variables[names.ZONE_ASKED] = work.config.zones[0]
    if work.launch.flex_start and work.launch.queue:
        variables[names.MAX_RUN] = str(LONGEST_FLEX_START_S)
    return variables


def _pod_spec(work: JobSetSource) -> Document:
    launch, config = work.launch, work.config
    if launch.image is None:
        raise ConfigError(
            "On GKE a job runs in a container: set launch.image to an image with Python, jax and "
            "the job's imports, by digest or fixed tag."
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
        "terminationGracePeriodSeconds": SPOT_GRACE_S if config.tier is Tier.SPOT else GRACE_S,
        "nodeSelector": selector,
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in tainted
        ],
        "containers": [container],
    }
    if work.slice.num_slices > 1 and not launch.service_account:
        # Faster between slices. But Workload Identity, which service_account is for, may not reach
        # Pods on the host's network.
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if launch.service_account:
        spec["serviceAccountName"] = launch.service_account
    if work.bundle:
        container["volumeMounts"] = [{"name": "bundle", "mountPath": BUNDLE_FOLDER}]
        parts = [{"configMap": {"name": name}} for name in work.bundle]
        spec["volumes"] = [{"name": "bundle", "projected": {"sources": parts}}]
    return spec


def _rank(work: JobSetSource) -> list[Document]:
    """Return variables that identify the process, for each attempt.

    All are set explicitly, because GKE's injected values may be outdated after a slice is replaced.
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
        variables.append(_variable("TPUKIT_BUNDLE", BUNDLE_FOLDER))
    for key in work.secret_keys:
        source = {"secretKeyRef": {"name": work.secret, "key": key}}
        variables.append({"name": key, "valueFrom": source})
    return variables


def _variable(name: str, value: str) -> Document:
    return {"name": name, "value": value}


def _label(name: str, label: str) -> Document:
    source = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    return {"name": name, "valueFrom": source}
