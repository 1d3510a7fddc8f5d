"""All documents that a pod needs in a cluster, ready for `kubectl apply -f`."""

import base64
import gzip
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...job.sections import LaunchSettings
from ...runtime.files import write_text
from ...shown import Shown
from ..config import PodConfig
from ..providers.protocol import Command
from . import names
from .documents import Document, to_yaml
from .jobset import JobSetSource, jobset, owner_labels, priority_class_of, selector_of
from .names import NEWEST, ClusterVersions


def queue_documents(
    config: PodConfig,
    launch: LaunchSettings,
    *,
    chips: int | None = None,
    versions: ClusterVersions = NEWEST,
) -> list[Document]:
    """Return a ResourceFlavor, a ClusterQueue and the LocalQueue that `launch.queue` names.

    A cluster without a queue needs them once; its administrator applies them.

    Args:
        config: The request, whose slice sets the flavor's node labels.
        launch: Has the names of the queue and its namespace.
        chips: The quota; by default the chips of the pod.
        versions: What the cluster offers.
    """
    queue = launch.queue or "tpu"
    labels = selector_of(config, launch)
    flavor = "-".join(
        (queue, labels[names.ACCELERATOR], labels[names.TOPOLOGY], *_terms(labels))
    ).lower()
    quota = config.slice.chips if chips is None else chips
    return [
        _kueue("ResourceFlavor", flavor, versions, spec={"nodeLabels": labels}),
        _kueue(
            "ClusterQueue",
            queue,
            versions,
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
        _kueue(
            "LocalQueue", queue, versions, namespace=launch.namespace, spec={"clusterQueue": queue}
        ),
    ]


def priority_document(
    config: PodConfig, launch: LaunchSettings, versions: ClusterVersions = NEWEST
) -> Document | None:
    """Return the WorkloadPriorityClass of a pod's own priority, or None if it has none.

    A class named by `launch.priority_class` belongs to the cluster and is not created.
    """
    name = priority_class_of(config, launch)
    if name is None or launch.priority_class or not launch.queue:
        return None
    return _kueue("WorkloadPriorityClass", name, versions) | {"value": config.priority}


def _terms(labels: dict[str, str]) -> list[str]:
    short = {names.SPOT: "spot", names.FLEX_START: "flex", names.RESERVATION: "reserved"}
    return [word for key, word in short.items() if key in labels]


def _kueue(
    kind: str,
    name: str,
    versions: ClusterVersions,
    *,
    namespace: str | None = None,
    spec: Document | None = None,
) -> Document:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    document: Document = {"apiVersion": versions.kueue_api, "kind": kind, "metadata": metadata}
    return document | ({"spec": spec} if spec is not None else {})


# Kubernetes limits a ConfigMap to 1 MiB, in which a part of the bundle is base64.
LARGEST_CONFIG_MAP_BYTES = 1 << 20
LARGEST_PART_BYTES = LARGEST_CONFIG_MAP_BYTES * 3 // 4 - 4096
LARGEST_BUNDLE_BYTES = 32 * LARGEST_PART_BYTES


@dataclass(frozen=True, kw_only=True)
class Manifest(Shown):
    """The documents of one pod, without secret values.

    Attributes:
        documents: Documents in the order in which to create them; the JobSet is last.
        secret: Variables whose values only the cluster's Secret `secret_name` may contain.
    """

    documents: tuple[Document, ...]
    secret_name: str | None = None
    secret: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)

    @property
    def jobset(self) -> Document:
        """The JobSet."""
        return self.documents[-1]

    @property
    def name(self) -> str:
        """The pod's name."""
        return str(self.jobset["metadata"]["name"])

    @property
    def secret_document(self) -> Document | None:
        """The Secret, only for the API; None if there are no secret variables."""
        if self.secret_name is None:
            return None
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                key: value
                for key, value in self.jobset["metadata"].items()
                if key in ("namespace", "labels")
            }
            | {"name": self.secret_name},
            "stringData": dict(self.secret),
        }

    def to_yaml(self) -> str:
        """Return the documents as one YAML file, without secret values."""
        text = to_yaml(self.documents)
        if self.secret_name is None:
            return text
        namespace = self.jobset["metadata"]["namespace"]
        return (
            f"# Reads {', '.join(sorted(self.secret))} from the Secret {self.secret_name}. "
            "Make it first, from a file of NAME=value lines:\n"
            f"#   kubectl create secret generic {self.secret_name} -n {namespace} "
            f"--from-env-file=FILE\n{text}"
        )

    def write(self, folder: Path) -> Path:
        """Write the documents to `NAME.yaml` in a folder; return the path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.yaml"
        write_text(path, self.to_yaml())
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without secret values."""
        return {"documents": list(self.documents), "secret": sorted(self.secret)}

    def __rich__(self) -> str:
        kinds = ", ".join(
            f"{document['kind']} {document['metadata']['name']}" for document in self.documents
        )
        return f"{kinds} (needs Secret {self.secret_name})" if self.secret_name else kinds


def build_manifest(
    name: str,
    config: PodConfig,
    launch: LaunchSettings,
    command: Command | None = None,
    *,
    versions: ClusterVersions = NEWEST,
) -> Manifest:
    """Return the documents of a pod that runs a command on each host.

    The job's variables (`launch.environment`) may be secret, so they go into a Secret. The
    command's files go into ConfigMaps.

    Raises:
        ConfigError: A setting is missing or too large, or GKE does not offer the slice.
    """
    secret = {**launch.environment, **(command.environment if command else {})}
    for key in secret:
        _check_variable(key)
    files = _bundle(name, config, launch, command)
    work = JobSetSource(
        name=name,
        config=config,
        launch=launch,
        command=command,
        secret=f"{name}-env" if secret else None,
        secret_keys=tuple(secret),
        bundle=tuple(part["metadata"]["name"] for part in files),
        versions=versions,
    )
    last = jobset(work)
    first = (priority_document(config, launch, versions), *files)
    return Manifest(
        documents=(*(document for document in first if document is not None), last),
        secret_name=work.secret,
        secret=secret,
    )


def bundle_part_name(name: str, part: int) -> str:
    """Return the name of a ConfigMap with a part of a pod's files, counted from 0."""
    return f"{name}-files-{part}" if part else f"{name}-files"


def _bundle(
    name: str, config: PodConfig, launch: LaunchSettings, command: Command | None
) -> list[Document]:
    """Return the ConfigMaps with the command's files, which are joined in the container."""
    if command is None or command.bundle is None:
        return []
    packed = command.bundle.read_bytes()
    if packed[:2] != b"\x1f\x8b":
        packed = gzip.compress(packed, mtime=0)
    if len(packed) > LARGEST_BUNDLE_BYTES:
        raise ConfigError(
            f"The files of the job are {len(packed):,} bytes compressed, but at most "
            f"{LARGEST_BUNDLE_BYTES:,} travel to a cluster; put them into launch.image or a "
            "bucket, or shorten launch.include."
        )
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": bundle_part_name(name, part),
                "namespace": launch.namespace,
                "labels": owner_labels(config),
            },
            "binaryData": {
                f"part-{part:03}": base64.b64encode(
                    packed[part * LARGEST_PART_BYTES : (part + 1) * LARGEST_PART_BYTES]
                ).decode()
            },
        }
        for part in range(-(-len(packed) // LARGEST_PART_BYTES))
    ]


def _check_variable(key: str) -> None:
    if not key.isascii() or not key.replace("_", "a").isidentifier():
        raise ConfigError(
            f"{key!r} cannot name a variable in a container; expected letters, digits and '_', "
            "not beginning with a digit."
        )
