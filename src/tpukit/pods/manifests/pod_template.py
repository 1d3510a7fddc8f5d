"""Merge `launch.pod_template` into the Pod template that tpukit writes.

The merge is Kubernetes's strategic merge: objects are merged field by field, and lists of objects
by the key that Kubernetes publishes for them, such as a container's name. A value that tpukit
itself sets cannot be changed, because the job would not run as it was planned.
"""

from collections.abc import Mapping
from typing import Any, cast

from ...errors import ConfigError
from .documents import Document

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
# Lists of which tpukit needs its own entries, and which may have more.
ADDED = ("tolerations",)
# Values of tpukit's that a user may change.
FREE = (
    "spec.terminationGracePeriodSeconds",
    "spec.hostNetwork",
    "spec.dnsPolicy",
)
PARTS: dict[str, tuple[str, ...]] = {"metadata": ("labels", "annotations"), "spec": ()}


def merge_pod_template(own: Document, added: Mapping[str, Any]) -> Document:
    """Return tpukit's Pod template with a user's fields.

    Args:
        own: The template that tpukit writes.
        added: The value of `launch.pod_template`.

    Raises:
        ConfigError: A field contradicts one of tpukit's, or cannot be part of a Pod template.
    """
    for part, content in added.items():
        if part not in PARTS or not isinstance(content, dict):
            raise ConfigError(
                f"launch.pod_template has {part!r}; expected objects named metadata and spec, as "
                "in a Pod."
            )
        known = PARTS[part]
        others = [key for key in cast("Document", content) if known and key not in known]
        if others:
            raise ConfigError(
                f"launch.pod_template.{part} has {others[0]!r}; expected only "
                f"{' and '.join(PARTS[part])}."
            )
    merged = _merge(own, dict(added), "")
    spec: Document = merged["spec"]
    if spec.get("hostNetwork") and "dnsPolicy" not in spec:
        # Otherwise the names of other hosts do not resolve.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    return merged


def _merge(own: Any, added: Any, path: str) -> Any:
    if isinstance(own, dict) and isinstance(added, dict):
        merged = dict(cast("Document", own))
        for key, value in cast("Document", added).items():
            where = f"{path}.{key}" if path else key
            merged[key] = _merge(merged[key], value, where) if key in merged else value
        return merged
    name = path.rpartition(".")[2]
    if isinstance(own, list) and isinstance(added, list):
        ours, theirs = cast("list[Any]", own), cast("list[Any]", added)
        if name in ADDED:
            return [*ours, *(entry for entry in theirs if entry not in ours)]
        if name in MERGE_KEYS:
            return _merge_by_key(ours, theirs, MERGE_KEYS[name], path)
    if own != added and path not in FREE:
        raise ConfigError(
            f"launch.pod_template sets {path} to {_short(added)}, but tpukit sets it to "
            f"{_short(own)}; remove it, or change the job's own setting."
        )
    return added


def _merge_by_key(own: list[Any], added: list[Any], key: str, path: str) -> list[Any]:
    merged: dict[Any, Any] = {entry[key]: entry for entry in own}
    for entry in added:
        named = cast("Document", entry) if isinstance(entry, dict) else {}
        if not isinstance(named.get(key), str | int):
            raise ConfigError(
                f"An entry of launch.pod_template's {path} has no {key!r}, by which it is merged; "
                "add it."
            )
        where = f"{path}[{named[key]}]"
        before = merged.get(named[key])
        merged[named[key]] = named if before is None else _merge(before, named, where)
    return list(merged.values())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
