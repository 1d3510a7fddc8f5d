"""Everything that takes a Pod away, one method a kind, with the signals that a real cluster gives.

Which conditions and reasons: docs/emulators.md, with their sources.
"""

import signal

from tpukit.pods.manifests.reading import at

from ..clock import Clock
from . import well_known
from .controllers.kueue import Kueue
from .controllers.nodes import delete_pod, disrupt
from .kinds import JOBSET, NODE, POD, WORKLOAD
from .kubelet.kubelet import Kubelet
from .store import Object, Store, has_condition, set_condition


class Mishaps:
    """Takes Pods and nodes away."""

    def __init__(
        self, store: Store, clock: Clock, kubelet: Kubelet, kueue: Kueue, shutdown_grace_s: float
    ) -> None:
        self._store = store
        self._clock = clock
        self._kubelet = kubelet
        self._kueue = kueue
        self._shutdown_grace_s = shutdown_grace_s

    def pods_of(self, jobset: str, namespace: str = "default") -> list[Object]:
        """Return the running Pods of a JobSet, by name."""
        return [
            pod
            for pod in self._store.items(POD, namespace)
            if at(pod, "metadata", "labels", well_known.JOBSET_NAME) == jobset
            and at(pod, "status", "phase") == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        ]

    # Nodes.

    def shut_down(self, node: str, *, back_after_s: float | None = 0.0) -> None:
        """Preempt a spot node: its Pods get a notice, then it is gone.

        Args:
            node: Its name.
            back_after_s: When a new one of the same name comes; None: never.
        """
        with self._store.lock:
            found = self._store.get(NODE, "", node)
            now = self._store.stamp()

            def stop(one: Object) -> None:
                one["spec"].setdefault("taints", []).append(
                    {"key": well_known.IMPENDING_TERMINATION, "value": "", "effect": "NoSchedule"}
                )
                said = "node is shutting down"
                set_condition(one, "Ready", "False", "KubeletNotReady", said, now)

            self._store.change(NODE, found, stop)
            for pod in self._pods_on(node):
                grace_s = min(
                    self._shutdown_grace_s, at(pod, "spec", "terminationGracePeriodSeconds") or 0
                )
                self._kubelet.stop(
                    pod,
                    grace_s=grace_s,
                    verdict=lambda one: _terminated(
                        one,
                        "Terminated",
                        "Pod was terminated in response to imminent node shutdown.",
                        self._store.stamp(),
                    ),
                )
            self._clock.call_later(
                self._shutdown_grace_s + 0.5, lambda: self._replace(found, back_after_s)
            )

    def remove(self, node: str, *, back_after_s: float | None = None) -> None:
        """Let a node disappear at once, with no notice to anyone."""
        with self._store.lock:
            self._replace(self._store.get(NODE, "", node), back_after_s)

    def taint(self, node: str, key: str = "tpukit.dev/emulated") -> None:
        """Taint a node so that its Pods must leave; `untaint` ends it."""
        taint = {"key": key, "value": "true", "effect": "NoExecute"}
        self._store.change(
            NODE,
            self._store.get(NODE, "", node),
            lambda one: one["spec"].setdefault("taints", []).append(taint),
        )

    def untaint(self, node: str, key: str = "tpukit.dev/emulated") -> None:
        """Take a taint away."""

        def edit(one: Object) -> None:
            one["spec"]["taints"] = [each for each in one["spec"]["taints"] if each["key"] != key]

        self._store.change(NODE, self._store.get(NODE, "", node), edit)

    def drain(self, node: str) -> None:
        """Drain a node as `kubectl drain` does; `uncordon` ends it."""
        self._cordon(node, is_cordoned=True)
        for pod in self._pods_on(node):
            self.evict(pod)

    def uncordon(self, node: str) -> None:
        """Let Pods run on a node again."""
        self._cordon(node, is_cordoned=False)

    def maintain(self, node: str) -> None:
        """Take a node down for maintenance: it is labelled, and its Pods are evicted."""
        label = {well_known.MAINTENANCE: "ONGOING"}
        self._store.change(
            NODE,
            self._store.get(NODE, "", node),
            lambda one: one["metadata"]["labels"].update(label),
        )
        self.drain(node)

    # Pods.

    def evict(self, pod: Object) -> None:
        """Evict a Pod through the Eviction API."""
        said = "Eviction API: evicting"
        disrupt(self._store, pod, "EvictionByEvictionAPI", said)
        delete_pod(self._store, pod)

    def preempt_by_scheduler(self, pod: Object) -> None:
        """Give a Pod's node to another one of higher priority."""
        said = "default-scheduler: preempting to accommodate a higher priority pod"
        disrupt(self._store, pod, "PreemptionByScheduler", said)
        delete_pod(self._store, pod)

    def preempt_in_queue(self, jobset: str, namespace: str = "default") -> None:
        """Give a JobSet's quota to another one of higher priority."""
        with self._store.lock:
            found = self._store.get(JOBSET, namespace, jobset)
            for workload in self._store.dependents(found, WORKLOAD):
                if has_condition(workload, "QuotaReserved"):
                    self._kueue.evict(workload, preempted="InClusterQueue")

    def starve(self, pod: Object) -> None:
        """Evict a Pod because its node is short of memory."""
        self._kubelet.stop(
            pod,
            grace_s=0,
            verdict=lambda one: _terminated(
                one, "Evicted", "The node was low on resource: memory.", self._store.stamp()
            ),
        )

    def preempt_for_critical(self, pod: Object) -> None:
        """End a Pod so that a critical one of the system can start on its node."""

        def verdict(one: Object) -> None:
            one["status"] |= {"phase": "Failed", "reason": "Preempting"}
            one["status"]["message"] = "Preempted in order to admit critical pod"

        self._kubelet.stop(pod, grace_s=0, verdict=verdict)

    def out_of_memory(self, pod: Object) -> None:
        """Let a Pod's process exceed its memory limit."""
        self._kubelet.stop(pod, grace_s=0, oom=True)

    def kill(self, pod: Object, number: int = signal.SIGKILL) -> None:
        """Send a signal to a Pod's processes, with nobody to say why."""
        if number == signal.SIGKILL:
            self._kubelet.stop(pod, grace_s=0)
        else:
            self._kubelet.send_signal(pod, number)

    def vanish(self, pod: Object) -> None:
        """Remove a Pod's object and its processes at once: nothing says what happened."""
        with self._store.lock:
            self._store.change(POD, pod, lambda one: one["metadata"].update(finalizers=[]))
            delete_pod(self._store, pod, grace_s=0)

    # Inner parts.

    def _pods_on(self, node: str) -> list[Object]:
        return [
            pod
            for pod in self._store.items(POD)
            if at(pod, "spec", "nodeName") == node
            and at(pod, "status", "phase") in ("Pending", "Running")
        ]

    def _cordon(self, node: str, *, is_cordoned: bool) -> None:
        self._store.change(
            NODE,
            self._store.get(NODE, "", node),
            lambda one: one["spec"].update(unschedulable=is_cordoned),
        )

    def _replace(self, node: Object, back_after_s: float | None) -> None:
        with self._store.lock:
            name = node["metadata"]["name"]
            if self._store.find(NODE, "", name):
                self._store.delete(NODE, "", name)
            if back_after_s is not None:
                fresh = {key: node[key] for key in ("spec", "status")}
                fresh["metadata"] = {key: node["metadata"][key] for key in ("name", "labels")}
                self._clock.call_later(back_after_s, lambda: self._bring(fresh))

    def _bring(self, node: Object) -> None:
        with self._store.lock:
            if self._store.find(NODE, "", node["metadata"]["name"]) is None:
                self._store.create(NODE, node)


def _terminated(pod: Object, reason: str, message: str, now: str) -> None:
    """Say on a Pod that its kubelet ended it."""
    pod["status"] |= {"phase": "Failed", "reason": reason, "message": message}
    set_condition(pod, "DisruptionTarget", "True", "TerminationByKubelet", message, now)
