"""A whole cluster to rehearse on: node pools of several slices, a queue, and a hand on its fate.

```
curl localhost:PORT                                          what runs where
curl localhost:PORT/preempt -d '{"name": "my-job-a1", "host": 2}'     its spot node is shut down
curl localhost:PORT/queue -d '{"name": "my-job-a1"}'                  Kueue takes the quota back
curl localhost:PORT/fault -d '{"mishap": "lost_reply", "calls": "create jobsets"}'
```

Other orders: `/drain`, `/taint`, `/remove` (the node), `/evict`, `/scheduler`, `/pressure`,
`/critical`, `/oom`, `/kill`, `/vanish` (the Pod); `/back` undoes drains and taints. kubectl works
too: `kubectl drain`, `kubectl delete pod`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpukit.job.sections import LaunchSettings
from tpukit.pods.config import PodConfig
from tpukit.pods.manifests.manifest import queue_documents
from tpukit.pods.manifests.reading import NodePool, at

from ..control import OrderPort
from ..faults import Fault, Mishap
from . import well_known
from .cluster import tpu_pool
from .emulator import KubernetesEmulator
from .kinds import BY_PATH, NODE, POD
from .store import Object

QUEUE = "tpu"
# Two of each, so that a job of two slices fits, and two jobs of one.
SLICES = ("v5e-16", "v6e-8", "v6e-16", "v5p-32", "7x:2x2x2")
QUOTA_CHIPS = 32


class ClusterRehearsal(KubernetesEmulator):
    """An emulated cluster for `tpukit pods emulate gke`.

    Args:
        folder: Where its certificate, its kubeconfig and its processes' files are.
        pools: Its node pools; by default two of several slices, on demand and spot.
        control_port: Where it is told what to do, over HTTP; 0 for any.
    """

    def __init__(
        self, folder: Path, *, pools: Sequence[NodePool] | None = None, control_port: int = 0
    ) -> None:
        super().__init__(_pools() if pools is None else pools, folder=folder)
        launch = LaunchSettings(queue=QUEUE)
        for document in queue_documents(PodConfig(tpu_type="v6e-16"), launch, chips=QUOTA_CHIPS):
            kind = next(kind for kind in BY_PATH.values() if kind.name == document["kind"])
            admitted = self.cluster.admission.admit(kind, document)
            self.cluster.store.create(kind, admitted)
        self.control = OrderPort(_Orders(self), port=control_port)

    @property
    def settings(self) -> dict[str, Any]:
        """What a job's `launch:` section says to launch here; the image is this environment."""
        return {"provider": "gke", "image": "emulated", "endpoint": self.address}

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which kubectl and the Python client find the cluster."""
        return {"KUBECONFIG": str(self.kubeconfig)}

    def close(self) -> None:
        """End it, with all that runs on it."""
        self.control.close()
        super().close()


class _Orders:
    """What can be told, by path."""

    def __init__(self, emulator: KubernetesEmulator) -> None:
        self._emulator = emulator
        mishaps = emulator.mishaps
        on_node: dict[str, Callable[[str], object]] = {
            "/preempt": mishaps.shut_down,
            "/drain": mishaps.drain,
            "/taint": mishaps.taint,
            "/remove": lambda node: mishaps.remove(node, back_after_s=0.0),
            "/maintain": mishaps.maintain,
        }
        on_pod: dict[str, Callable[[Object], object]] = {
            "/evict": mishaps.evict,
            "/scheduler": mishaps.preempt_by_scheduler,
            "/pressure": mishaps.starve,
            "/critical": mishaps.preempt_for_critical,
            "/oom": mishaps.out_of_memory,
            "/kill": mishaps.kill,
            "/vanish": mishaps.vanish,
        }
        self.by_path: dict[str, Callable[..., object]] = {
            "/queue": lambda name: mishaps.preempt_in_queue(name),
            "/fault": self._fault,
            "/back": self._back,
            **{path: self._with_node(order) for path, order in on_node.items()},
            **{path: self._with_pod(order) for path, order in on_pod.items()},
        }

    def shown(self) -> dict[str, Any]:
        """What runs where."""
        store = self._emulator.cluster.store
        return {
            "nodes": [node["metadata"]["name"] for node in store.items(NODE)],
            "pods": {
                pod["metadata"]["name"]: {
                    "job": at(pod, "metadata", "labels", well_known.JOBSET_NAME),
                    "phase": at(pod, "status", "phase"),
                    "node": at(pod, "spec", "nodeName"),
                }
                for pod in store.items(POD)
            },
        }

    def _pod(self, name: str, host: int) -> Object:
        pods = self._emulator.mishaps.pods_of(name)
        if host >= len(pods):
            raise LookupError(f"{name!r} has {len(pods)} running Pods, and none numbered {host}")
        return pods[host]

    def _with_pod(self, order: Callable[[Object], object]) -> Callable[..., object]:
        return lambda name, host=0: order(self._pod(name, host))

    def _with_node(self, order: Callable[[str], object]) -> Callable[..., object]:
        return lambda name, host=0: order(str(at(self._pod(name, host), "spec", "nodeName")))

    def _back(self, node: str) -> None:
        self._emulator.mishaps.uncordon(node)
        self._emulator.mishaps.untaint(node)

    def _fault(self, mishap: str, **rule: Any) -> None:
        self._emulator.faults.add(Fault(Mishap(mishap), **rule))


def _pools() -> list[NodePool]:
    return [
        tpu_pool(slice_name, name=f"{slice_name.replace(':', '-')}-{tier}-{number}", spot=spot)
        for slice_name in SLICES
        for spot, tier in ((False, "standard"), (True, "spot"))
        for number in range(2)
    ]
