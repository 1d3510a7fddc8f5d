"""Patches of objects: merge, strategic merge, JSON patch, and server-side apply."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

from .refusal import Refusal

Object = dict[str, Any]

# By what entries of a list are known in a strategic merge, tried in this order; lists with none of
# these (arguments, tolerations) are replaced as a whole.
_LIST_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "conditions": "type",
    "taints": "key",
    "ownerReferences": "uid",
    "finalizers": "",
}


def merge(target: Any, patch: Any) -> Any:
    """Return the target after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result: Object = dict(cast("Object", target)) if isinstance(target, dict) else {}
    for key, value in cast("Object", patch).items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic_merge(target: Any, patch: Any, field: str = "") -> Any:
    """Return the target after a strategic merge patch: lists of named entries are merged."""
    if isinstance(patch, list):
        return _merge_lists(target, cast("list[Any]", patch), field)
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result: Object = dict(cast("Object", target)) if isinstance(target, dict) else {}
    for key, value in cast("Object", patch).items():
        if key == "$patch" or key.startswith(("$setElementOrder/", "$retainKeys")):
            continue
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [one for one in result.get(name, []) if one not in value]
        elif value is None:
            result.pop(key, None)
        else:
            result[key] = strategic_merge(result.get(key), value, key)
    return result


def _merge_lists(target: Any, patch: list[Any], field: str) -> list[Any]:
    key = _LIST_KEYS.get(field)
    if key is None or not isinstance(target, list):
        return copy.deepcopy([one for one in patch if not _is_deletion(one)])
    before = cast("list[Any]", target)
    if not key:
        return [*before, *(one for one in patch if one not in before)]
    merged = {one.get(key): one for one in before if isinstance(one, dict)}
    for one in patch:
        if _is_deletion(one):
            merged.pop(one.get(key), None)
        else:
            merged[one.get(key)] = strategic_merge(merged.get(one.get(key)), one)
    return list(merged.values())


def _is_deletion(value: Any) -> bool:
    return isinstance(value, dict) and cast("Object", value).get("$patch") == "delete"


def json_patch(target: Object, operations: list[Any]) -> Object:
    """Return the target after a JSON patch (RFC 6902).

    Raises:
        Refusal: An operation cannot be carried out.
    """
    result = copy.deepcopy(target)
    for one in operations:
        operation, path = str(one["op"]), _pointer(str(one["path"]))
        try:
            if operation == "test":
                if _at(result, path) != one.get("value"):
                    raise Refusal(422, f"the test of {one['path']} failed")
            elif operation in ("move", "copy"):
                value = copy.deepcopy(_at(result, _pointer(one["from"])))
                if operation == "move":
                    _remove(result, _pointer(one["from"]))
                _add(result, path, value)
            elif operation == "remove":
                _remove(result, path)
            elif operation in ("add", "replace"):
                if operation == "replace":
                    _remove(result, path)
                _add(result, path, one.get("value"))
            else:
                raise Refusal(400, f"there is no operation {operation!r}")
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise Refusal(422, f"the operation {one} cannot be carried out: {error}") from None
    return result


def _pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _at(value: Any, path: list[str]) -> Any:
    for key in path:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def _add(value: Any, path: list[str], new: Any) -> None:
    parent = _at(value, path[:-1])
    if isinstance(parent, list):
        entries = cast("list[Any]", parent)
        entries.insert(len(entries) if path[-1] == "-" else int(path[-1]), new)
    else:
        parent[path[-1]] = new


def _remove(value: Any, path: list[str]) -> None:
    parent = _at(value, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]


# By the content type of a PATCH. An apply is a merge here: fields that its manager no longer states
# are not removed, as no managers are kept.
PATCHES: Mapping[str, Callable[[Any, Any], Any]] = {
    "application/merge-patch+json": merge,
    "application/strategic-merge-patch+json": strategic_merge,
    "application/json-patch+json": json_patch,
    "application/apply-patch+yaml": strategic_merge,
}
