"""Removes what belongs to something that is gone, or is going and waits for it."""

from collections.abc import Sequence

from tpukit.pods.manifests.reading import sequence

from ..kinds import BY_PATH, Kind
from ..store import FOREGROUND, Change, Key, Object, Store
from .work import no_keys


class GarbageCollector:
    """Deletes the dependents of deleted owners."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._going: dict[Key, tuple[Kind, Object]] = {}

    def wants(self, change: Change) -> Sequence[Key]:
        """Look at owners that are gone or going, and at owners of what went."""
        metadata = change.object["metadata"]
        keys: list[Key] = []
        if change.type == "DELETED" or FOREGROUND in metadata.get("finalizers", ()):
            keys.append(self._remember(change.kind, change.object))
        if change.type == "DELETED":
            for reference in sequence(metadata.get("ownerReferences")):
                keys += self._owner(metadata.get("namespace", ""), reference)
        return keys or no_keys()

    def reconcile(self, key: Key) -> None:
        """Delete what belongs to a going owner, and let it go when nothing does."""
        kind, owner = self._going.pop(key, (None, None))
        if kind is None or owner is None:
            return
        metadata = owner["metadata"]
        now = self._store.find(kind, metadata.get("namespace", ""), metadata["name"])
        is_there = now is not None and now["metadata"]["uid"] == metadata["uid"]
        dependents = self._store.dependents(owner)
        for one in dependents:
            if not one["metadata"].get("deletionTimestamp"):
                self._store.delete(
                    _kind_of(one),
                    one["metadata"].get("namespace", ""),
                    one["metadata"]["name"],
                    propagation="Foreground" if is_there else "Background",
                )
        if now is not None and is_there and not dependents:
            self._store.finish(kind, now, _let_go)

    def _remember(self, kind: Kind, one: Object) -> Key:
        key = (one["metadata"]["uid"], kind.plural)
        self._going[key] = (kind, one)
        return key

    def _owner(self, namespace: str, reference: Object) -> list[Key]:
        for kind in BY_PATH.values():
            if (kind.name, kind.api_version) == (reference["kind"], reference["apiVersion"]):
                owner = self._store.find(kind, namespace, reference["name"])
                if owner and FOREGROUND in owner["metadata"].get("finalizers", ()):
                    return [self._remember(kind, owner)]
        return []


def _kind_of(one: Object) -> Kind:
    group, _, version = one["apiVersion"].rpartition("/")
    return next(
        kind
        for kind in BY_PATH.values()
        if (kind.name, kind.group, kind.version) == (one["kind"], group, version)
    )


def _let_go(owner: Object) -> None:
    finalizers = owner["metadata"].get("finalizers", [])
    owner["metadata"]["finalizers"] = [one for one in finalizers if one != FOREGROUND]
