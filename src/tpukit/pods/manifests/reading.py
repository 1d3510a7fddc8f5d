"""Read manifests that may be malformed: a value of the wrong type counts as missing."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ...errors import ConfigError
from . import names
from .documents import Fields, read_files

Taint = Fields


@dataclass(frozen=True, kw_only=True)
class NodePool:
    """Identical nodes.

    Attributes:
        chips: Chips per node.
    """

    name: str
    nodes: int
    chips: int
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    taints: tuple[Taint, ...] = ()

    def why_not(
        self, selector: Mapping[str, str], tolerations: Sequence[Any], chips: int
    ) -> str | None:
        """Return why a Pod cannot run on these nodes, or None."""
        for key, wanted in selector.items():
            if (here := self.labels.get(key)) != wanted:
                return f"{key} is {here or 'not set'} there, not {wanted}"
        for taint in self.taints:
            if not tolerates(tolerations, taint):
                return f"the taint {taint.get('key')} is not tolerated"
        if chips > self.chips:
            return f"a node has {self.chips} chips, but a Pod requests {chips}"
        return None


def tolerates(tolerations: Iterable[Any], taint: Taint) -> bool:
    """Return whether a Pod with these tolerations may run on a node with this taint."""
    if taint.get("effect") == "PreferNoSchedule":
        return True
    for toleration in tolerations:
        fields = mapping(toleration)
        key, effect = fields.get("key"), fields.get("effect")
        if key and key != taint.get("key"):
            continue
        if effect and effect != taint.get("effect"):
            continue
        if fields.get("operator", "Equal") == "Exists":
            return True
        if key and (fields.get("value") or "") == (taint.get("value") or ""):
            return True
    return False


def pools_of(nodes: Iterable[Fields]) -> list[NodePool]:
    """Group Node objects into pools."""
    grouped: dict[str, list[Fields]] = {}
    for node in nodes:
        labels = texts(at(node, "metadata", "labels"))
        name = labels.get(names.NODE_POOL) or str(at(node, "metadata", "name"))
        grouped.setdefault(name, []).append(node)
    return [_pool(name, members) for name, members in grouped.items()]


def read_pools(path: Path) -> list[NodePool]:
    """Return a cluster's pools, from the output of `kubectl get nodes -o yaml` (or json).

    Raises:
        ConfigError: The file cannot be read, or contains no nodes.
    """
    nodes = [document for document in read_files(path) if document.get("kind") == "Node"]
    if not nodes:
        raise ConfigError(f"{path} contains no Node; write it with `kubectl get nodes -o yaml`.")
    return pools_of(nodes)


def _pool(name: str, members: Sequence[Fields]) -> NodePool:
    labels = [texts(at(node, "metadata", "labels")) for node in members]
    shared = {
        key: value
        for key, value in labels[0].items()
        if all(other.get(key) == value for other in labels)
    }
    chips = [quantity(at(node, "status", "allocatable", names.CHIPS)) or 0 for node in members]
    taints = sequence(at(members[0], "spec", "taints"))
    return NodePool(
        name=name, nodes=len(members), chips=min(chips), labels=shared, taints=tuple(taints)
    )


_QUANTITY = re.compile(r"(\d{1,15})([kMGTPE]i?)?")
_SUFFIXES = {"": 1} | {
    f"{letter}{kind}": base ** (power + 1)
    for kind, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kMGTPE")
}


def mapping(value: object) -> Fields:
    """Return the value if it is an object, else an empty one."""
    return cast("Fields", value) if isinstance(value, dict) else {}


def sequence(value: object) -> Sequence[Any]:
    """Return the value if it is a list, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else ()


def at(value: object, *keys: str) -> Any:
    """Return the value at a path of keys, or None."""
    for key in keys:
        value = mapping(value).get(key)
    return value


def count(value: object, default: int) -> int:
    """Return the value if it is a whole number, else `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def quantity(value: object) -> int | None:
    """Return a whole quantity (4, "4", "2Gi"), or None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) * _SUFFIXES[match[2] or ""] if match else None


def texts(value: object) -> dict[str, str]:
    """Return the object's entries with text values."""
    entries: Mapping[Any, Any] = mapping(value)
    return {
        key: entry
        for key, entry in entries.items()
        if isinstance(key, str) and isinstance(entry, str)
    }


@dataclass(frozen=True)
class ReplicatedJob:
    """An entry of a JobSet's `replicatedJobs`."""

    jobset: "JobSet"
    index: int
    fields: Fields

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.fields.get("name", ""))

    @property
    def path(self) -> str:
        """Its path within the manifest, for messages."""
        return f"{self.jobset} spec.replicatedJobs[{self.index}]"

    @property
    def replicas(self) -> int:
        """Number of Jobs, one per slice."""
        return count(self.fields.get("replicas"), 1)

    @property
    def job(self) -> Fields:
        """The spec of each Job."""
        return mapping(at(self.fields, "template", "spec"))

    @property
    def template(self) -> Fields:
        """The template of each Pod."""
        return mapping(self.job.get("template"))

    @property
    def pod(self) -> Fields:
        """The spec of each Pod."""
        return mapping(self.template.get("spec"))

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of each Pod."""
        return texts(at(self.template, "metadata", "annotations"))

    @property
    def parallelism(self) -> int:
        """Number of Pods that run together, one per host."""
        return count(self.job.get("parallelism"), 1)

    @property
    def completions(self) -> int:
        """Number of Pods that must succeed."""
        return count(self.job.get("completions"), self.parallelism)

    @property
    def selector(self) -> dict[str, str]:
        """Labels that nodes must have."""
        return texts(self.pod.get("nodeSelector"))

    @property
    def containers(self) -> Sequence[Fields]:
        """The containers of each Pod."""
        return [mapping(container) for container in sequence(self.pod.get("containers"))]

    @cached_property
    def requests(self) -> dict[str, int]:
        """Requests of each Pod, by resource; a limit counts if there is no request."""
        total: dict[str, int] = {}
        for container in self.containers:
            resources = {
                **mapping(at(container, "resources", "limits")),
                **mapping(at(container, "resources", "requests")),
            }
            for resource, amount in resources.items():
                if (number := quantity(amount)) is not None:
                    total[resource] = total.get(resource, 0) + number
        return total

    @property
    def chips(self) -> int:
        """Chips per Pod."""
        return self.requests.get(names.CHIPS, 0)

    @property
    def is_tpu(self) -> bool:
        """Whether it requests TPUs, by number or by a selector."""
        return bool(self.chips or names.ACCELERATOR in self.selector)


@dataclass(frozen=True)
class JobSet:
    """A JobSet document."""

    fields: Fields

    @property
    def name(self) -> str:
        """Its name."""
        return str(at(self.fields, "metadata", "name") or "")

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return texts(at(self.fields, "metadata", "labels"))

    @property
    def annotations(self) -> dict[str, str]:
        """Its annotations."""
        return texts(at(self.fields, "metadata", "annotations"))

    @property
    def spec(self) -> Fields:
        """Its spec."""
        return mapping(self.fields.get("spec"))

    @property
    def jobs(self) -> list[ReplicatedJob]:
        """Its replicated Jobs."""
        entries = sequence(self.spec.get("replicatedJobs"))
        return [ReplicatedJob(self, index, mapping(entry)) for index, entry in enumerate(entries)]

    @property
    def tpu_jobs(self) -> list[ReplicatedJob]:
        """Replicated Jobs that request TPUs."""
        return [job for job in self.jobs if job.is_tpu]

    def __str__(self) -> str:
        return f"JobSet {self.name or '(no name)'}"


def jobsets(documents: Sequence[Fields]) -> Iterator[JobSet]:
    """Return the JobSets among documents."""
    return (JobSet(document) for document in documents if document.get("kind") == "JobSet")
