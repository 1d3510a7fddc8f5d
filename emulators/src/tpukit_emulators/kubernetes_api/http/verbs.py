"""What requests do to the objects of a cluster."""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tpukit.pods.manifests.reading import at, count, mapping, texts

from ..cluster import Cluster
from ..kinds import POD, SECRET
from ..patches import PATCHES
from ..refusal import Refusal
from ..selectors import field_selector, label_selector
from ..store import PROPAGATION, Object
from .requests import Call


class Verbs:
    """Carries out calls on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._store = cluster.store

    def matching(self, call: Call) -> Callable[[Object], bool]:
        """Return the test that a call's selectors and namespace are.

        Raises:
            Refusal: A selector cannot be read.
        """
        labels = label_selector(call.options.get("labelSelector", ""))
        fields = field_selector(call.options.get("fieldSelector", ""))
        space = call.namespace if call.kind.is_namespaced else None

        def test(one: Object) -> bool:
            is_here = space is None or one["metadata"].get("namespace") == space
            is_named = call.name is None or one["metadata"]["name"] == call.name
            return is_here and is_named and labels(one) and fields(one)

        return test

    def get(self, call: Call) -> Object:
        """Return one object."""
        return self._store.get(call.kind, call.namespace or "", call.name or "")

    def list(self, call: Call) -> tuple[list[Object], dict[str, Any]]:
        """Return the objects that match, with the list's metadata; in pages, where asked."""
        test = self.matching(call)
        with self._store.lock:
            version = str(self._store.version)
            found = [one for one in self._store.items(call.kind) if test(one)]
        start = _offset(call.options.get("continue", ""))
        limit = call.number("limit") or len(found) or 1
        metadata: dict[str, Any] = {"resourceVersion": version}
        if start + limit < len(found):
            token = json.dumps({"offset": start + limit}).encode()
            metadata["continue"] = base64.urlsafe_b64encode(token).decode()
            metadata["remainingItemCount"] = len(found) - start - limit
        return found[start : start + limit], metadata

    def create(self, call: Call, body: Object) -> Object:
        """Add an object, or evict a Pod."""
        if call.part == "eviction" and call.kind is POD:
            self._cluster.mishaps.evict(self.get(call))
            return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}
        if call.part or call.name:
            raise Refusal(405, "the server does not allow this method on the requested resource")
        _check_kind(call, body)
        metadata = body.setdefault("metadata", {})
        if call.kind.is_namespaced:
            stated = metadata.setdefault("namespace", call.namespace or "default")
            if stated != call.namespace:
                raise Refusal(
                    400, "the namespace of the provided object does not match the request"
                )
        _encode_secret(call, body)
        strict = call.options.get("fieldValidation") == "Strict"
        with self._store.lock:
            admitted = self._cluster.admission.admit(call.kind, body, strict=strict)
            if call.options.get("dryRun"):
                return admitted
            return self._store.create(call.kind, admitted)

    def update(self, call: Call, body: Object) -> Object:
        """Replace an object, or its status."""
        _check_kind(call, body)
        _encode_secret(call, body)
        return self._write(call, self.get(call), body)

    def patch(self, call: Call, content_type: str, patch: Any) -> Object:
        """Change an object, or its status; an apply may make it.

        Raises:
            Refusal: The kind of patch is not known.
        """
        apply = PATCHES.get(content_type)
        if apply is None:
            raise Refusal(
                415,
                f"the body of the request was in an unknown format - accepted media types "
                f"include: {', '.join(PATCHES)}",
            )
        with self._store.lock:
            before = self._store.find(call.kind, call.namespace or "", call.name or "")
            if before is None:
                if content_type != "application/apply-patch+yaml":
                    return self.get(call)  # which refuses
                inside = replace(call, verb="create", name=None, part="")
                return self.create(inside, patch)
            after = apply(before, patch)
            _encode_secret(call, after)
            if not at(patch if isinstance(patch, dict) else {}, "metadata", "resourceVersion"):
                after["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
            return self._write(call, before, after)

    def delete(self, call: Call, options: Object) -> Object:
        """Remove an object."""
        wanted = mapping(options.get("preconditions")).get("uid")
        with self._store.lock:
            before = self.get(call)
            if wanted and wanted != before["metadata"]["uid"]:
                raise Refusal(409, "Precondition failed: UID in precondition does not match")
            return self._store.delete(
                call.kind,
                call.namespace or "",
                call.name or "",
                propagation=_propagation(call, options),
                grace_s=_grace(call, options),
            )

    def delete_all(self, call: Call, options: Object) -> Sequence[Object]:
        """Remove all objects that match."""
        found, _ = self.list(call)
        for one in found:
            metadata = one["metadata"]
            self._store.delete(
                call.kind,
                metadata.get("namespace", ""),
                metadata["name"],
                propagation=_propagation(call, options),
                grace_s=_grace(call, options),
            )
        return found

    def _write(self, call: Call, before: Object, after: Object) -> Object:
        if call.part not in ("", "status"):
            raise Refusal(404, "the server could not find the requested resource")
        strict = call.options.get("fieldValidation") == "Strict"
        if not call.part:
            self._cluster.admission.admit_change(call.kind, before, after, strict=strict)
        if call.options.get("dryRun"):
            return after
        return self._store.write(
            call.kind,
            call.namespace or "",
            call.name or "",
            after,
            part="status" if call.part else "main",
        )


def _check_kind(call: Call, body: Object) -> None:
    stated = body.get("apiVersion"), body.get("kind")
    for one, expected in zip(stated, (call.api_version, call.kind.name), strict=True):
        if one not in (None, expected):
            raise Refusal(
                400, f"the object provided is unrecognized (is {stated}, not {call.kind.name})"
            )
    named = at(body, "metadata", "name")
    if call.name and named and named != call.name:
        raise Refusal(400, f"the name of the object ({named}) does not match the URL ({call.name})")


def _encode_secret(call: Call, body: Object) -> None:
    if call.kind is SECRET and (plain := texts(body.pop("stringData", None))):
        encoded = {key: base64.b64encode(one.encode()).decode() for key, one in plain.items()}
        body["data"] = {**texts(body.get("data")), **encoded}


def _offset(token: str) -> int:
    if not token:
        return 0
    try:
        return count(json.loads(base64.urlsafe_b64decode(token)).get("offset"), 0)
    except (ValueError, AttributeError):
        raise Refusal(400, "continue key is not valid") from None


def _propagation(call: Call, options: Object) -> str:
    stated = options.get("propagationPolicy") or call.options.get("propagationPolicy")
    if stated is None:
        return "Orphan" if options.get("orphanDependents") is True else "Background"
    if stated not in PROPAGATION:
        raise Refusal(422, f"propagationPolicy {stated!r} is none of {', '.join(PROPAGATION)}")
    return str(stated)


def _grace(call: Call, options: Object) -> int | None:
    stated = options.get("gracePeriodSeconds")
    return stated if isinstance(stated, int) else call.number("gracePeriodSeconds")
