"""What happens to the Pods of a node that is tainted, or gone."""

from collections.abc import Sequence

from tpukit.pods.manifests.reading import at, mapping, sequence, tolerates

from ...clock import Clock
from ..kinds import NODE, POD
from ..kubelet.kubelet import Kubelet
from ..store import Change, Key, Object, Store, set_condition
from .work import no_keys

# As the admission plugin DefaultTolerationSeconds adds it to every Pod.
TOLERATED_S = 300.0
_TOLERATED = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")


class NodeLifecycle:
    """Evicts Pods from tainted nodes, and clears away those of nodes that are gone.

    Args:
        store: Of the cluster.
        clock: Of the cluster.
        kubelet: Runs the Pods.
        node_gone_s: How long a Pod of a node that is gone is left alone (20 s + 40 s in real).
    """

    def __init__(self, store: Store, clock: Clock, kubelet: Kubelet, node_gone_s: float) -> None:
        self._store = store
        self._clock = clock
        self._kubelet = kubelet
        self._node_gone_s = node_gone_s

    def wants(self, change: Change) -> Sequence[Key]:
        """Look at nodes that changed, and at Pods that are deleted before they have a node."""
        metadata = change.object["metadata"]
        if change.kind is NODE:
            if change.type == "DELETED":
                self._lose(metadata["name"])
                return no_keys()
            return [("", metadata["name"])]
        if change.kind is POD and change.type != "DELETED":
            if metadata.get("deletionTimestamp") and not at(change.object, "spec", "nodeName"):
                return [(metadata["namespace"], metadata["name"])]
            if change.before is not None and not at(change.before, "spec", "nodeName"):
                return [("", str(at(change.object, "spec", "nodeName")))]
        return no_keys()

    def reconcile(self, key: Key) -> None:
        """Evict what may not stay."""
        namespace, name = key
        if namespace:
            pod = self._store.find(POD, namespace, name)
            if pod and pod["metadata"].get("deletionTimestamp"):
                self._store.change(POD, pod, _fail)
            return
        node = self._store.find(NODE, "", name)
        for pod in self._store.items(POD):
            if at(pod, "spec", "nodeName") != name or _is_over(pod):
                continue
            for taint in sequence(at(node, "spec", "taints")):
                if taint.get("effect") == "NoExecute":
                    self._evict_tainted(pod, taint)

    def _lose(self, node: str) -> None:
        """End what runs on a node that is gone; its Pods are cleared away later."""
        self._kubelet.lose(node)
        for pod in self._store.items(POD):
            if at(pod, "spec", "nodeName") == node and not _is_over(pod):
                self._clock.call_later(self._node_gone_s, lambda pod=pod: self._clear(pod))

    def _evict_tainted(self, pod: Object, taint: Object) -> None:
        tolerations = sequence(at(pod, "spec", "tolerations"))
        wait_s = 0.0
        if tolerates(tolerations, taint):
            limits = [
                mapping(one).get("tolerationSeconds")
                for one in tolerations
                if tolerates([one], taint)
            ]
            if None in limits:
                return
            wait_s = float(min(one for one in limits if one is not None))
        elif taint["key"] in _TOLERATED:
            wait_s = TOLERATED_S
        if wait_s:
            self._clock.call_later(wait_s, lambda: self._evict_if_still(pod, taint))
        else:
            self._evict(pod, taint)

    def _evict_if_still(self, pod: Object, taint: Object) -> None:
        node = self._store.find(NODE, "", str(at(pod, "spec", "nodeName")))
        if taint in sequence(at(node, "spec", "taints")):
            self._evict(pod, taint)

    def _evict(self, pod: Object, taint: Object) -> None:
        said = f"Taint manager: deleting due to NoExecute taint {taint['key']}"
        disrupt(self._store, pod, "DeletionByTaintManager", said)
        delete_pod(self._store, pod)

    def _clear(self, pod: Object) -> None:
        with self._store.lock:
            disrupt(self._store, pod, "DeletionByPodGC", "PodGC: node no longer exists")
            if failed := self._store.change(POD, pod, _fail):
                delete_pod(self._store, failed, grace_s=0)


def disrupt(store: Store, pod: Object, reason: str, message: str) -> None:
    """Say on a Pod that it is about to be ended, and by whom."""
    store.change(
        POD,
        pod,
        lambda one: set_condition(one, "DisruptionTarget", "True", reason, message, store.stamp()),
    )


def delete_pod(store: Store, pod: Object, *, grace_s: int | None = None) -> None:
    """Delete a Pod, unless that has begun or it is gone."""
    metadata = pod["metadata"]
    with store.lock:
        found = store.find(POD, metadata["namespace"], metadata["name"])
        if found is None or found["metadata"]["uid"] != metadata["uid"]:
            return
        if not found["metadata"].get("deletionTimestamp") or grace_s is not None:
            store.delete(POD, metadata["namespace"], metadata["name"], grace_s=grace_s)


def _fail(pod: Object) -> None:
    if not _is_over(pod):
        pod["status"]["phase"] = "Failed"


def _is_over(pod: Object) -> bool:
    return at(pod, "status", "phase") in ("Succeeded", "Failed")
