"""The objects of a cluster, with the rules of its API: versions, generations, deletion, history.

Objects in the store are never changed in place: every write puts a new one there. Who reads gets
the object itself and must not touch it.
"""

import copy
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from tpukit.pods.manifests.reading import at, sequence

from ..clock import Clock
from .kinds import Kind
from .refusal import Refusal, already_there, conflict, not_found

Object = dict[str, Any]
Key = tuple[str, str]  # namespace ("" for cluster-wide objects) and name
Part = Literal["main", "status"]

FOREGROUND = "foregroundDeletion"
PROPAGATION = ("Background", "Foreground", "Orphan")


@dataclass(frozen=True)
class Change:
    """Something that happened to an object.

    Attributes:
        object: As it is now; of a deletion, as it was last.
        before: As it was, or None where it was made.
    """

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    kind: Kind
    object: Object
    before: Object | None


class Store:
    """All objects of a cluster. Every method may be called from any thread.

    Args:
        clock: Whose time stands in the objects.
        history: How many changes watches can go back; one that asks for more is told 410.
    """

    def __init__(self, clock: Clock, *, history: int = 4096) -> None:
        self.clock = clock
        # Held while anything changes and while listeners hear of it.
        self.lock = threading.RLock()
        self._objects: dict[Kind, dict[Key, Object]] = {}
        self._dependents: dict[str, set[tuple[Kind, Key]]] = {}  # by the owner's uid
        self._version = 1
        self._history: deque[Change] = deque(maxlen=history)
        self._listeners: list[Callable[[Change], object]] = []

    # Reading.

    @property
    def version(self) -> int:
        """The version of the newest change."""
        return self._version

    def listen(self, listener: Callable[[Change], object]) -> Callable[[], None]:
        """Call `listener` with every change, and return how to stop; it may wait for nothing."""
        with self.lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self.lock:
                self._listeners.remove(listener)

        return stop

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return an object.

        Raises:
            Refusal: There is none.
        """
        found = self.find(kind, namespace, name)
        if found is None:
            raise not_found(kind, name)
        return found

    def find(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Return an object, or None."""
        key = (namespace if kind.is_namespaced else "", name)
        return self._objects.get(kind, {}).get(key)

    def items(self, kind: Kind, namespace: str | None = None) -> list[Object]:
        """Return all objects of a kind, in all namespaces or in one, by name."""
        with self.lock:
            objects = sorted(self._objects.get(kind, {}).items())
        return [one for (space, _), one in objects if namespace in (None, space)]

    def has(self, kind: Kind) -> bool:
        """Whether there is any object of a kind."""
        return bool(self._objects.get(kind))

    def dependents(self, owner: Object, kind: Kind | None = None) -> list[Object]:
        """Return the objects that belong to another one."""
        with self.lock:
            found = sorted(
                self._dependents.get(owner["metadata"]["uid"], ()),
                key=lambda one: (one[0].plural, one[1]),
            )
            return [self._objects[one][key] for one, key in found if kind in (None, one)]

    def since(self, version: int) -> list[Change]:
        """Return the changes after a version.

        Raises:
            Refusal: They are no longer kept (410).
        """
        with self.lock:
            oldest = self._history[0].version if self._history else self._version + 1
            if version < oldest - 1 and version < self._version:
                raise Refusal(
                    410, f"too old resource version: {version} ({oldest - 1})", reason="Expired"
                )
            return [one for one in self._history if one.version > version]

    def forget_history(self) -> None:
        """Let every watch from an earlier version fail with 410, as after a compaction."""
        with self.lock:
            self._history.clear()
            self._version += 1

    # Writing.

    def create(self, kind: Kind, content: Object) -> Object:
        """Add an object.

        Raises:
            Refusal: There is one of that name.
        """
        with self.lock:
            made = copy.deepcopy(content)
            metadata = made.setdefault("metadata", {})
            if not metadata.get("name"):
                metadata["name"] = f"{metadata.get('generateName', '')}{uuid.uuid4().hex[:5]}"
            key = (metadata.get("namespace", "") if kind.is_namespaced else "", metadata["name"])
            if key in self._objects.get(kind, {}):
                raise already_there(kind, key[1])
            made |= {"apiVersion": kind.api_version, "kind": kind.name}
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.stamp()}
            metadata.pop("deletionTimestamp", None)
            if "spec" in made:
                metadata["generation"] = 1
            self._put(kind, key, made, None)
            return made

    def write(
        self, kind: Kind, namespace: str, name: str, new: Object, *, part: Part = "main"
    ) -> Object:
        """Replace an object's main part, or its status.

        Raises:
            Refusal: There is none, or it has changed since `new` was read.
        """
        with self.lock:
            before = self.get(kind, namespace, name)
            version = at(new, "metadata", "resourceVersion")
            if version and version != before["metadata"]["resourceVersion"]:
                raise conflict(kind, name)
            after = copy.deepcopy(before if part == "status" else new)
            if part == "status":
                after["status"] = copy.deepcopy(new.get("status", {}))
            else:
                kept = {key: before["metadata"].get(key) for key in _FIXED}
                after["metadata"] |= {key: one for key, one in kept.items() if one is not None}
                after |= {"apiVersion": kind.api_version, "kind": kind.name}
                if kind.has_status and "status" in before:
                    after["status"] = before["status"]
            return self._replace(kind, before, after)

    def change(self, kind: Kind, one: Object, edit: Callable[[Object], object]) -> Object | None:
        """Edit an object as a controller does: any part of it. Return it, or None if it is gone."""
        with self.lock:
            metadata = one["metadata"]
            before = self.find(kind, metadata.get("namespace", ""), metadata["name"])
            if before is None or before["metadata"]["uid"] != metadata["uid"]:
                return None
            after = copy.deepcopy(before)
            edit(after)
            return self._replace(kind, before, after)

    def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        propagation: str = "Background",
        grace_s: int | None = None,
    ) -> Object:
        """Begin to remove an object; it goes at once where nothing holds it.

        Args:
            kind: Of the object.
            namespace: Of the object.
            name: Of the object.
            propagation: When what belongs to it goes: after it, before it, or never.
            grace_s: How long its processes have to end; only Pods have some.
        """
        with self.lock:
            before = self.get(kind, namespace, name)
            after = copy.deepcopy(before)
            metadata = after["metadata"]
            if propagation == "Foreground" and not metadata.get("deletionTimestamp"):
                metadata.setdefault("finalizers", []).append(FOREGROUND)
            if propagation == "Orphan":
                self._orphan(before)
            is_running = at(after, "spec", "nodeName") and at(after, "status", "phase") in (
                "Pending",
                "Running",
            )
            wait_s = grace_s if grace_s is not None else _grace_of(kind, after)
            if not metadata.get("deletionTimestamp"):
                metadata["deletionTimestamp"] = self.stamp()
                metadata["deletionGracePeriodSeconds"] = wait_s
            elif wait_s < metadata.get("deletionGracePeriodSeconds", 0):
                metadata["deletionGracePeriodSeconds"] = wait_s
            if is_running and wait_s > 0:
                return self._replace(kind, before, after)
            return self._end(kind, before, after)

    def finish(
        self, kind: Kind, one: Object, edit: Callable[[Object], object] | None = None
    ) -> None:
        """Remove an object whose deletion has begun, unless a finalizer holds it."""
        with self.lock:
            metadata = one["metadata"]
            before = self.find(kind, metadata.get("namespace", ""), metadata["name"])
            if before is None or before["metadata"]["uid"] != metadata["uid"]:
                return
            after = copy.deepcopy(before)
            if edit is not None:
                edit(after)
            self._end(kind, before, after)

    def stamp(self, seconds: float | None = None) -> str:
        """Return a time as objects state it; now, where none is given."""
        at_s = self.clock.now() if seconds is None else seconds
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # Inner parts.

    def _replace(self, kind: Kind, before: Object, after: Object) -> Object:
        if after == before:
            return before
        metadata = after["metadata"]
        if after.get("spec") != before.get("spec"):
            metadata["generation"] = before["metadata"].get("generation", 0) + 1
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            running = kind.name == "Pod" and at(after, "status", "phase") in ("Pending", "Running")
            if not (running and at(after, "spec", "nodeName")):
                return self._end(kind, before, after)
        self._put(kind, (metadata.get("namespace", ""), metadata["name"]), after, before)
        return after

    def _end(self, kind: Kind, before: Object, after: Object) -> Object:
        metadata = after["metadata"]
        key = (metadata.get("namespace", ""), metadata["name"])
        if metadata.get("finalizers"):
            if after != before:
                self._put(kind, key, after, before)
            return after
        del self._objects[kind][key]
        for reference in sequence(metadata.get("ownerReferences")):
            self._dependents.get(reference["uid"], set()).discard((kind, key))
        self._tell("DELETED", kind, after, before)
        return after

    def _put(self, kind: Kind, key: Key, after: Object, before: Object | None) -> None:
        self._objects.setdefault(kind, {})[key] = after
        for reference in sequence(after["metadata"].get("ownerReferences")):
            self._dependents.setdefault(reference["uid"], set()).add((kind, key))
        self._tell("ADDED" if before is None else "MODIFIED", kind, after, before)

    def _tell(
        self,
        type_: Literal["ADDED", "MODIFIED", "DELETED"],
        kind: Kind,
        after: Object,
        before: Object | None,
    ) -> None:
        self._version += 1
        after["metadata"]["resourceVersion"] = str(self._version)
        change = Change(self._version, type_, kind, after, before)
        self._history.append(change)
        for listener in list(self._listeners):
            listener(change)

    def _orphan(self, owner: Object) -> None:
        uid = owner["metadata"]["uid"]
        for kind, key in list(self._dependents.pop(uid, ())):
            one = self._objects[kind][key]
            self.change(kind, one, lambda after: _drop_owner(after, uid))


_FIXED = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "name", "namespace")


def _drop_owner(one: Object, uid: str) -> None:
    kept = [entry for entry in one["metadata"]["ownerReferences"] if entry["uid"] != uid]
    one["metadata"]["ownerReferences"] = kept


def _grace_of(kind: Kind, one: Object) -> int:
    if kind.name != "Pod":
        return 0
    stated = at(one, "spec", "terminationGracePeriodSeconds")
    return 30 if stated is None else int(stated)


def conditions(one: Object) -> Iterator[dict[str, Any]]:
    """Return an object's conditions."""
    yield from sequence(at(one, "status", "conditions"))


def has_condition(one: Object, type_: str, status: str = "True") -> bool:
    """Whether an object has a condition with that status."""
    return any(entry["type"] == type_ and entry["status"] == status for entry in conditions(one))


def condition_of(one: Object, type_: str) -> dict[str, Any]:
    """Return a condition that an object has."""
    return next(entry for entry in conditions(one) if entry["type"] == type_)


def set_condition(
    one: Object, type_: str, status: str, reason: str, message: str, now: str
) -> None:
    """Set a condition of an object that is being edited."""
    entries = one.setdefault("status", {}).setdefault("conditions", [])
    before = next((entry for entry in entries if entry["type"] == type_), None)
    entry = {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now,
    }
    if before is None:
        entries.append(entry)
    elif {**before, "lastTransitionTime": now} != entry:
        if before["status"] == status:
            entry["lastTransitionTime"] = before["lastTransitionTime"]
        entries[entries.index(before)] = entry
