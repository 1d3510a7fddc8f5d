"""Node pools, and whether a Pod can run on their nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from . import names
from .documents import read_files
from .reading import at, mapping, quantity, sequence, texts

Taint = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class NodePool:
    """Nodes that are all alike.

    Attributes:
        chips: Of one node.
    """

    name: str
    nodes: int
    chips: int
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    taints: tuple[Taint, ...] = ()

    def why_not(
        self, selector: Mapping[str, str], tolerations: Sequence[Any], chips: int
    ) -> str | None:
        """Return why a Pod cannot run on these nodes, or None where it can."""
        for key, wanted in selector.items():
            if (here := self.labels.get(key)) != wanted:
                return f"{key} is {here or 'not set'} there, not {wanted}"
        for taint in self.taints:
            if not tolerates(tolerations, taint):
                return f"the taint {taint.get('key')} is not tolerated"
        if chips > self.chips:
            return f"a node has {self.chips} chips, and a Pod asks for {chips}"
        return None


def tolerates(tolerations: Iterable[Any], taint: Taint) -> bool:
    """Whether a Pod with these tolerations may run on a node with this taint."""
    if taint.get("effect") == "PreferNoSchedule":
        return True
    for one in tolerations:
        said = mapping(one)
        key, effect = said.get("key"), said.get("effect")
        if key and key != taint.get("key"):
            continue
        if effect and effect != taint.get("effect"):
            continue
        if said.get("operator", "Equal") == "Exists":
            return True
        if key and (said.get("value") or "") == (taint.get("value") or ""):
            return True
    return False


def pools_of(nodes: Iterable[Mapping[str, Any]]) -> list[NodePool]:
    """Return the pools that Node objects belong to."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        labels = texts(at(node, "metadata", "labels"))
        name = labels.get(names.NODE_POOL) or str(at(node, "metadata", "name"))
        grouped.setdefault(name, []).append(node)
    return [_pool(name, members) for name, members in grouped.items()]


def read_pools(path: Path) -> list[NodePool]:
    """Return the pools of a cluster, from what `kubectl get nodes -o yaml` (or json) printed.

    Raises:
        ConfigError: The file cannot be read, or holds no nodes.
    """
    nodes = [one for one in read_files(path) if one.get("kind") == "Node"]
    if not nodes:
        raise ConfigError(f"{path} holds no Node; write it with `kubectl get nodes -o yaml`.")
    return pools_of(nodes)


def _pool(name: str, members: Sequence[Mapping[str, Any]]) -> NodePool:
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
