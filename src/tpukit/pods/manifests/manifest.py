"""Everything that a pod needs in a cluster, as documents that `kubectl apply -f` takes."""

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
from .documents import Document, to_yaml
from .jobset import BUNDLE_FILE, JobSetSource, jobset, owner_labels
from .queue import priority_document

# Kubernetes refuses a ConfigMap of more than 1 MiB; what is in it is base64.
LARGEST_CONFIG_MAP_BYTES = 1 << 20
LARGEST_BUNDLE_BYTES = LARGEST_CONFIG_MAP_BYTES * 3 // 4 - 4096


@dataclass(frozen=True, kw_only=True)
class Manifest(Shown):
    """The documents of one pod. Secret values are beside them, never in them.

    Attributes:
        documents: In the order in which they are to be made; the JobSet is the last.
        secret: Variables whose values only the cluster's Secret `secret_name` may hold.
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
        """The Secret, for the API only; None where nothing is secret."""
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
        """The documents as one file, without the secret values."""
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
        """Write the documents to `NAME.yaml` in a folder; return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.yaml"
        write_text(path, self.to_yaml())
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the secret values."""
        return {"documents": list(self.documents), "secret": sorted(self.secret)}

    def __rich__(self) -> str:
        kinds = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in self.documents)
        return f"{kinds} (needs Secret {self.secret_name})" if self.secret_name else kinds


def build_manifest(
    name: str, config: PodConfig, launch: LaunchSettings, command: Command | None = None
) -> Manifest:
    """Return the documents of a pod that runs a command on each of its hosts.

    Variables of the job (`launch.environment`) may be secret, so they travel in a Secret. The
    command's files travel in a ConfigMap.

    Raises:
        ConfigError: Something is missing, does not fit, or GKE does not offer it.
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
        bundle=files["metadata"]["name"] if files else None,
    )
    last = jobset(work)
    first = (priority_document(config, launch), files)
    return Manifest(
        documents=(*(one for one in first if one is not None), last),
        secret_name=work.secret,
        secret=secret,
    )


def _bundle(
    name: str, config: PodConfig, launch: LaunchSettings, command: Command | None
) -> Document | None:
    if command is None or command.bundle is None:
        return None
    packed = command.bundle.read_bytes()
    if packed[:2] != b"\x1f\x8b":
        packed = gzip.compress(packed, mtime=0)
    if len(packed) > LARGEST_BUNDLE_BYTES:
        raise ConfigError(
            f"The files of the job are {len(packed):,} bytes compressed, and a ConfigMap holds "
            f"{LARGEST_BUNDLE_BYTES:,}; put them into launch.image or a bucket, or shorten "
            "launch.include."
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{name}-files",
            "namespace": launch.namespace,
            "labels": owner_labels(config),
        },
        "binaryData": {BUNDLE_FILE: base64.b64encode(packed).decode()},
    }


def _check_variable(key: str) -> None:
    if not key.isascii() or not key.replace("_", "a").isidentifier():
        raise ConfigError(
            f"{key!r} cannot name a variable in a container: letters, digits and '_', not "
            "beginning with a digit."
        )
