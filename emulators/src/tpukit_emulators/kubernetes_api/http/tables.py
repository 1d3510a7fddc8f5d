"""Tables, as `kubectl get` asks the server for them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tpukit.pods.manifests.reading import at, mapping, sequence

from ..kinds import Kind
from ..store import Object


def table(kind: Kind, objects: Sequence[Object], *, version: str, now: float) -> dict[str, Any]:
    """Return objects as rows."""
    titles = ["Name", *(title for title, _ in kind.columns), "Age"]
    rows = [
        {
            "cells": [
                one["metadata"]["name"],
                *(_cell(one, path) for _, path in kind.columns),
                _age(one, now),
            ],
            "object": {
                "kind": "PartialObjectMetadata",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": one["metadata"],
            },
        }
        for one in objects
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": [
            {
                "name": title,
                "type": "string",
                "format": "name" if title == "Name" else "",
                "description": "",
                "priority": 0,
            }
            for title in titles
        ],
        "rows": rows,
    }


def _cell(one: Object, path: str) -> str:
    """Return the value at a path; labels and conditions are found by what follows their list."""
    for start in ("metadata.labels.", "status.allocatable.", "status.conditions."):
        if path.startswith(start):
            keys, last = start.split(".")[:2], path[len(start) :]
            value = at(one, *keys)
            if keys[1] == "conditions":
                found = [entry["status"] for entry in sequence(value) if entry["type"] == last]
                return found[0] if found else ""
            return str(mapping(value).get(last, ""))
    value = at(one, *path.split("."))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _age(one: Object, now: float) -> str:
    made = datetime.strptime(one["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ")
    seconds = max(0, int(now - made.replace(tzinfo=UTC).timestamp()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
