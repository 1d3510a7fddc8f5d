"""Events: what controllers say about an object, for people and for `kubectl describe`."""

import hashlib
from typing import Literal

from .kinds import EVENT
from .store import Object, Store


def record(
    store: Store,
    about: Object,
    reason: str,
    message: str,
    *,
    type_: Literal["Normal", "Warning"] = "Normal",
    component: str = "emulator",
) -> None:
    """Add an Event about an object; the same one again is counted."""
    metadata = about["metadata"]
    namespace = metadata.get("namespace") or "default"
    key = hashlib.sha1(f"{metadata['uid']} {reason} {message}".encode()).hexdigest()[:16]
    name, now = f"{metadata['name']}.{key}", store.stamp()
    if before := store.find(EVENT, namespace, name):
        store.change(EVENT, before, lambda event: event.update(_again(event, now)))
        return
    store.create(
        EVENT,
        {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "namespace": namespace,
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message,
            "type": type_,
            "source": {"component": component},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        },
    )


def _again(event: Object, now: str) -> Object:
    return {"count": event["count"] + 1, "lastTimestamp": now}


def owned_by(owner: Object) -> Object:
    """Return the reference that makes an object belong to another one."""
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
