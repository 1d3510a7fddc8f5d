"""Answers that go on: watches and the logs of containers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from typing import Any

from tpukit.pods.manifests.reading import at, sequence

from ..cluster import Cluster
from ..kinds import POD, Kind
from ..refusal import Refusal
from ..store import Change, Object
from .requests import Call

LOOK_S = 0.05
LONGEST_WATCH_S = 1800


def watch(
    cluster: Cluster,
    call: Call,
    test: Callable[[Object], bool],
    show: Callable[[Object], Any],
    *,
    bookmark_s: float,
) -> AsyncGenerator[bytes]:
    """Return what happens to the objects that match, one JSON line each, until the time is over.

    Raises:
        Refusal: It asks for a form of watch that is not offered (422).
    """
    if call.is_set("sendInitialEvents"):
        raise Refusal(422, "sendInitialEvents is forbidden: WatchList is not enabled")
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Change] = asyncio.Queue()
    store = cluster.store
    with store.lock:
        stated = call.options.get("resourceVersion", "")
        try:
            if stated in ("", "0"):
                first = [_line("ADDED", show(one)) for one in store.items(call.kind) if test(one)]
            else:
                seen = [
                    _seen(change, call.kind, test, show) for change in store.since(_version(stated))
                ]
                first = [line for line in seen if line is not None]
        except Refusal as refusal:
            if refusal.code != 410:
                raise
            return _only(_line("ERROR", refusal.to_status()))
        version = store.version
        stop = store.listen(lambda change: loop.call_soon_threadsafe(queue.put_nowait, change))
    ends_at = loop.time() + (call.number("timeoutSeconds") or LONGEST_WATCH_S)
    marks = call.is_set("allowWatchBookmarks")

    async def lines() -> AsyncGenerator[bytes]:
        nonlocal version
        try:
            for line in first:
                yield line
            while (left_s := ends_at - loop.time()) > 0:
                try:
                    change = await asyncio.wait_for(queue.get(), min(left_s, bookmark_s))
                except TimeoutError:
                    if marks:
                        yield _bookmark(call.kind, version)
                    continue
                version = change.version
                if line := _seen(change, call.kind, test, show):
                    yield line
            if marks:
                yield _bookmark(call.kind, version)
        finally:
            stop()

    return lines()


async def _only(line: bytes) -> AsyncGenerator[bytes]:
    yield line


def _version(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise Refusal(400, f"resourceVersion {text!r} is not valid")
    return int(text)


def _seen(
    change: Change, kind: Kind, test: Callable[[Object], bool], show: Callable[[Object], Any]
) -> bytes | None:
    """Return a change as whoever selects some objects sees it."""
    if change.kind is not kind:
        return None
    was = change.before is not None and test(change.before)
    is_ = change.type != "DELETED" and test(change.object)
    if is_:
        return _line("MODIFIED" if was else "ADDED", show(change.object))
    if was:
        return _line("DELETED", show(change.object))
    return None


def _line(type_: str, shown: Any) -> bytes:
    return json.dumps({"type": type_, "object": shown}).encode() + b"\n"


def _bookmark(kind: Kind, version: int) -> bytes:
    return _line(
        "BOOKMARK",
        {
            "kind": kind.name,
            "apiVersion": kind.api_version,
            "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
        },
    )


def log(cluster: Cluster, call: Call, pod: Object) -> AsyncGenerator[bytes]:
    """Return a container's output, and go on until it ends where that is asked.

    Raises:
        Refusal: The container has not started, or there is none of that name.
    """
    containers = [one["name"] for one in sequence(at(pod, "spec", "containers"))]
    container = call.options.get("container") or (containers[0] if len(containers) == 1 else "")
    name = pod["metadata"]["name"]
    if container not in containers:
        raise Refusal(
            400, f"a container name must be specified for pod {name}, choose one of: {containers}"
        )
    state = next(
        (
            one["state"]
            for one in sequence(at(pod, "status", "containerStatuses"))
            if one["name"] == container
        ),
        {"waiting": {"reason": "ContainerCreating"}},
    )
    if "waiting" in state:
        why = state["waiting"]["reason"]
        raise Refusal(400, f'container "{container}" in pod "{name}" is waiting to start: {why}')
    return _log_lines(cluster, call, pod, container, _since(call), call.number("tailLines"))


async def _log_lines(
    cluster: Cluster, call: Call, pod: Object, container: str, since: str, tail: int | None
) -> AsyncGenerator[bytes]:
    follow, rest = call.is_set("follow"), b""
    try:
        # Kept open: the file goes with its Pod, and whoever reads it reads it to the end.
        file = cluster.kubelet.log_of(pod, container).open("rb")
    except FileNotFoundError:
        return
    with file:
        while True:
            # Asked before the file is read: what was written by then is in it.
            over = not follow or _is_over(cluster, pod, container)
            *lines, rest = (rest + file.read()).split(b"\n")
            shown = [line for line in lines if line[:26].decode() >= since]
            if tail is not None:
                shown, tail = shown[len(shown) - min(tail, len(shown)) :], None
            if shown:
                yield b"".join(_show(line, call.is_set("timestamps")) for line in shown)
            if over:
                return
            await asyncio.sleep(LOOK_S)


def _show(line: bytes, timestamps: bool) -> bytes:
    time, _, _, text = line.split(b" ", 3)
    return (time + b" " if timestamps else b"") + text + b"\n"


def _since(call: Call) -> str:
    text = call.options.get("sinceTime", "")
    if not text:
        return ""
    moment, _, fraction = text.rstrip("Z").partition(".")
    try:
        datetime.strptime(moment, "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        raise Refusal(400, f"sinceTime {text!r} is not a time") from None
    return f"{moment}.{fraction[:6].ljust(6, '0')}"


def _is_over(cluster: Cluster, pod: Object, container: str) -> bool:
    metadata = pod["metadata"]
    now = cluster.store.find(POD, metadata["namespace"], metadata["name"])
    if now is None or now["metadata"]["uid"] != metadata["uid"]:
        return True
    return any(
        one["name"] == container and "terminated" in one["state"]
        for one in sequence(at(now, "status", "containerStatuses"))
    )
