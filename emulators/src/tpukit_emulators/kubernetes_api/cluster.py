"""A cluster without its API: objects, controllers, nodes and the processes on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpukit.hardware import Slice
from tpukit.pods.manifests.reading import NodePool

from ..clock import Clock
from . import well_known
from .admission import Admission
from .controllers.garbage import GarbageCollector
from .controllers.job import JobController
from .controllers.jobset import JobSetController
from .controllers.kueue import Kueue
from .controllers.nodes import NodeLifecycle
from .controllers.scheduler import Scheduler
from .controllers.work import Worker
from .kinds import NAMESPACE, NODE, Installed
from .kubelet.kubelet import Kubelet
from .mishaps import Mishaps
from .store import Object, Store

TPU_TAINT = {"key": well_known.CHIPS, "value": "present", "effect": "NoSchedule"}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long things take in the cluster, in seconds of its clock.

    Attributes:
        shutdown_grace_s: What a spot node leaves its Pods.
        node_gone_s: From the loss of a node to the end of its Pods (60 s in real).
    """

    shutdown_grace_s: float = 15.0
    node_gone_s: float = 1.0


class Cluster:
    """Everything of an emulated cluster that is not HTTP.

    Args:
        pools: Its node pools at first.
        clock: What its time is.
        folder: Where its processes work and log; removed at the end.
        pace: How long things take.
        installed: Versions of its extensions; by default the newest.
        history: How many changes a watch can go back.
    """

    def __init__(
        self,
        pools: Sequence[NodePool],
        *,
        clock: Clock,
        folder: Path,
        pace: Pace | None = None,
        installed: Installed | None = None,
        history: int = 4096,
    ) -> None:
        pace = pace or Pace()
        self.clock = clock
        self.store = Store(clock, history=history)
        self.installed = installed or Installed()
        self.admission = Admission(self.store, self.installed)
        self.kubelet = Kubelet(self.store, clock, folder)
        self.scheduler = Scheduler(self.store)
        self.kueue = Kueue(self.store)
        jobs = JobController(self.store, clock, self.admission)
        nodes = NodeLifecycle(self.store, clock, self.kubelet, pace.node_gone_s)
        self.worker = Worker(
            self.store,
            [
                GarbageCollector(self.store),
                jobs,
                JobSetController(self.store, clock),
                self.kueue,
                nodes,
                self.scheduler,
                self.kubelet,
            ],
        )
        jobs.worker = self.kubelet.worker = self.worker
        self.mishaps = Mishaps(self.store, clock, self.kubelet, self.kueue, pace.shutdown_grace_s)
        for name in ("default", "kube-system"):
            self.add_namespace(name)
        for pool in pools:
            self.add_pool(pool)

    def add_namespace(self, name: str) -> None:
        """Add a namespace."""
        self.store.create(NAMESPACE, {"metadata": {"name": name}, "status": {"phase": "Active"}})

    def add_pool(self, pool: NodePool) -> None:
        """Add the nodes of a pool; those that are there already stay."""
        for index in range(pool.nodes):
            node = node_of(pool, index)
            if self.store.find(NODE, "", node["metadata"]["name"]) is None:
                made = self.store.create(NODE, node)
                now = self.store.stamp()
                ready = {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "message": "",
                    "lastTransitionTime": now,
                }
                self.store.change(
                    NODE, made, lambda one, ready=ready: one["status"].update(conditions=[ready])
                )

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until no controller has anything to do; return whether that came."""
        return self.worker.settle(timeout_s)

    def close(self) -> None:
        """End controllers and processes."""
        self.worker.close()
        self.kubelet.close()
        self.clock.close()


def node_of(pool: NodePool, index: int) -> Object:
    """Return the Node object of one node of a pool."""
    name = f"gke-{pool.name}-{index}"
    capacity = {well_known.CHIPS: str(pool.chips), "cpu": "100", "memory": "400Gi", "pods": "110"}
    spec: dict[str, Any] = {"taints": [dict(one) for one in pool.taints]} if pool.taints else {}
    return {
        "metadata": {
            "name": name,
            "labels": {
                **pool.labels,
                well_known.NODE_POOL: pool.name,
                "kubernetes.io/hostname": name,
            },
        },
        "spec": spec,
        "status": {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        },
    }


def tpu_pool(
    slice_name: str, *, name: str, spot: bool = False, zone: str = "us-central1-a", **labels: str
) -> NodePool:
    """Return the node pool that GKE makes for one slice.

    Args:
        slice_name: Any name of one slice.
        name: Of the pool.
        spot: Whether it may be taken away.
        zone: Where it is.
        **labels: Further labels of its nodes.
    """
    where = Slice.parse(slice_name)
    own = {
        well_known.ACCELERATOR: str(where.gke_accelerator),
        well_known.TOPOLOGY: where.gke_topology,
        well_known.ZONE: zone,
    }
    machine = next(
        (one for one in where.chip.gke_machine_types if one.endswith(f"-{where.chips_per_host}t")),
        None,
    )
    if machine:
        own[well_known.INSTANCE_TYPE] = machine
    taints = [TPU_TAINT]
    if spot:
        own[well_known.SPOT] = "true"
        taints.append({"key": well_known.SPOT, "value": "true", "effect": "NoSchedule"})
    return NodePool(
        name=name,
        nodes=where.hosts,
        chips=where.chips_per_host,
        labels=own | labels,
        taints=tuple(taints),
    )
