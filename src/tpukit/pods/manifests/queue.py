"""Kueue's objects for one queue of one kind of slice: how many chips, and who goes first."""

from ...job.sections import LaunchSettings
from ..config import PodConfig
from . import names
from .documents import Document
from .jobset import priority_class_of, selector_of


def queue_documents(
    config: PodConfig, launch: LaunchSettings, *, chips: int | None = None
) -> list[Document]:
    """Return a ResourceFlavor, a ClusterQueue and the LocalQueue that a job's `launch.queue` names.

    For clusters that have no queue yet; who administers the cluster applies them once.

    Args:
        config: The slice whose nodes the flavor describes.
        launch: Names the queue and its namespace.
        chips: The quota; by default what the pod needs.
    """
    queue = launch.queue or "tpu"
    labels = selector_of(config, launch)
    flavor = "-".join(
        (queue, labels[names.ACCELERATOR], labels[names.TOPOLOGY], *_terms(labels))
    ).lower()
    quota = config.slice.chips if chips is None else chips
    return [
        _kueue("ResourceFlavor", flavor, spec={"nodeLabels": labels}),
        _kueue(
            "ClusterQueue",
            queue,
            spec={
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [
                    {
                        "coveredResources": [names.CHIPS],
                        "flavors": [
                            {
                                "name": flavor,
                                "resources": [{"name": names.CHIPS, "nominalQuota": quota}],
                            }
                        ],
                    }
                ],
            },
        ),
        _kueue("LocalQueue", queue, namespace=launch.namespace, spec={"clusterQueue": queue}),
    ]


def priority_document(config: PodConfig, launch: LaunchSettings) -> Document | None:
    """Return the WorkloadPriorityClass of a pod's own priority, or None where it has none.

    A class that `launch.priority_class` names is the cluster's, and not made here.
    """
    name = priority_class_of(config, launch)
    if name is None or launch.priority_class or not launch.queue:
        return None
    return _kueue("WorkloadPriorityClass", name) | {"value": config.priority}


def _terms(labels: dict[str, str]) -> list[str]:
    short = {names.SPOT: "spot", names.FLEX_START: "flex", names.RESERVATION: "reserved"}
    return [word for key, word in short.items() if key in labels]


def _kueue(
    kind: str, name: str, *, namespace: str | None = None, spec: Document | None = None
) -> Document:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    document: Document = {"apiVersion": names.KUEUE_API, "kind": kind, "metadata": metadata}
    return document | ({"spec": spec} if spec is not None else {})
