"""The scheduler: gives Pods nodes with free chips, by selector, taints and exclusive placement."""

from collections import Counter
from collections.abc import Sequence

from tpukit.pods.manifests.reading import at, mapping, quantity, sequence, texts, tolerates

from .. import well_known
from ..admission import chips_of
from ..kinds import NODE, POD
from ..recording import record
from ..store import Change, Key, Object, Store, has_condition, set_condition
from .work import no_keys

ALL: Key = ("", "")


class Scheduler:
    """Binds Pods to nodes.

    Attributes:
        is_stopped: Whether it binds nothing: what is admitted is then never placed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_stopped = False

    def wants(self, change: Change) -> Sequence[Key]:
        """Look again whenever a node changed, a Pod came, or one ended."""
        if change.kind is NODE:
            return [ALL]
        if change.kind is POD:
            placed = at(change.object, "spec", "nodeName")
            if placed and (change.type == "DELETED" or _is_over(change.object)):
                return [ALL]
            is_free = not sequence(at(change.object, "spec", "schedulingGates"))
            was_gated = bool(sequence(at(change.before, "spec", "schedulingGates")))
            if not placed and (change.type == "ADDED" or (is_free and was_gated)):
                metadata = change.object["metadata"]
                return [(metadata["namespace"], metadata["name"])]
        return no_keys()

    def reconcile(self, key: Key) -> None:
        """Bind one Pod, or all that can be bound."""
        if self.is_stopped:
            return
        pods = self._store.items(POD)
        one = None if key == ALL else self._store.find(POD, *key)
        waiting = [pod for pod in (pods if key == ALL else [one]) if pod and _waits(pod)]
        if not waiting:
            return
        nodes = self._store.items(NODE)
        used: Counter[str] = Counter()
        domains: dict[tuple[str, str], str] = {}  # a topology domain and who has it alone
        for pod in pods:
            if (name := at(pod, "spec", "nodeName")) and not _is_over(pod):
                used[name] += chips_of(pod)
                node = self._store.find(NODE, "", name)
                if (domain := _domain(pod)) and node:
                    labels = texts(at(node, "metadata", "labels"))
                    domains[domain, labels.get(domain, "")] = _job_key(pod)
        for pod in sorted(waiting, key=lambda one: one["metadata"]["creationTimestamp"]):
            if sequence(at(pod, "spec", "schedulingGates")):
                self._say(
                    pod,
                    "SchedulingGated",
                    "Scheduling is blocked due to non-empty scheduling gates",
                )
                continue
            reasons: Counter[str] = Counter()
            for node in nodes:
                why = _why_not(pod, node, used, domains)
                if why is None:
                    self._bind(pod, node)
                    used[node["metadata"]["name"]] += chips_of(pod)
                    if domain := _domain(pod):
                        labels = texts(at(node, "metadata", "labels"))
                        domains[domain, labels.get(domain, "")] = _job_key(pod)
                    break
                reasons[why] += 1
            else:
                said = ", ".join(f"{many} {why}" for why, many in sorted(reasons.items()))
                message = f"0/{len(nodes)} nodes are available: {said or 'no nodes'}."
                self._say(pod, "Unschedulable", message)

    def _bind(self, pod: Object, node: Object) -> None:
        name = node["metadata"]["name"]

        def edit(after: Object) -> None:
            after["spec"]["nodeName"] = name
            set_condition(after, "PodScheduled", "True", "", "", self._store.stamp())

        self._store.change(POD, pod, edit)
        said = f"Successfully assigned {pod['metadata']['name']} to {name}"
        record(self._store, pod, "Scheduled", said, component="default-scheduler")

    def _say(self, pod: Object, reason: str, message: str) -> None:
        if has_condition(pod, "PodScheduled", "False"):
            said = next(one for one in pod["status"]["conditions"] if one["type"] == "PodScheduled")
            if (said["reason"], said["message"]) == (reason, message):
                return
        self._store.change(
            POD,
            pod,
            lambda after: set_condition(
                after, "PodScheduled", "False", reason, message, self._store.stamp()
            ),
        )
        record(
            self._store,
            pod,
            "FailedScheduling",
            message,
            type_="Warning",
            component="default-scheduler",
        )


def _waits(pod: Object) -> bool:
    return (
        not at(pod, "spec", "nodeName")
        and not pod["metadata"].get("deletionTimestamp")
        and not _is_over(pod)
    )


def _is_over(pod: Object) -> bool:
    return at(pod, "status", "phase") in ("Succeeded", "Failed")


def _domain(pod: Object) -> str | None:
    return mapping(pod["metadata"].get("annotations")).get(well_known.EXCLUSIVE)


def _job_key(pod: Object) -> str:
    return str(at(pod, "metadata", "labels", well_known.JOB_KEY))


def _why_not(
    pod: Object, node: Object, used: Counter[str], domains: dict[tuple[str, str], str]
) -> str | None:
    """Return why a Pod cannot run on a node, in the scheduler's words; None where it can."""
    if node["metadata"].get("deletionTimestamp") or has_condition(node, "Ready", "False"):
        return "node(s) were not ready"
    if at(node, "spec", "unschedulable") is True:
        return "node(s) were unschedulable"
    labels = texts(at(node, "metadata", "labels"))
    selector = texts(at(pod, "spec", "nodeSelector"))
    if any(labels.get(key) != value for key, value in selector.items()):
        return "node(s) didn't match Pod's node affinity/selector"
    for taint in sequence(at(node, "spec", "taints")):
        if not tolerates(sequence(at(pod, "spec", "tolerations")), taint):
            said = f"{taint['key']}: {taint.get('value', '')}"
            return f"node(s) had untolerated taint {{{said}}}"
    if domain := _domain(pod):
        holder = domains.get((domain, labels.get(domain, "")))
        if holder is not None and holder != _job_key(pod):
            return "node(s) didn't match pod anti-affinity rules"
    free = quantity(at(node, "status", "allocatable", well_known.CHIPS)) or 0
    if chips_of(pod) > free - used[node["metadata"]["name"]]:
        return f"Insufficient {well_known.CHIPS}"
    return None
