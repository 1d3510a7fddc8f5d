"""Follow objects and logs of the cluster: list, watch, and start again when a watch breaks.

Updates are complete and in order. After a gap, objects that disappeared in between are reported as
gone.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from kubernetes.client.exceptions import ApiException

from ....errors import ProviderError
from ...manifests.reading import at, sequence
from .api import CORE, ClusterApi, Object, Stream

PAUSE_S = 0.2
BUSY = frozenset({429, 500, 502, 503, 504})
"""HTTP status codes after which a retry may succeed."""


class LogStream:
    """Reads a container's output in its own thread.

    Args:
        api: The cluster.
        pod: The Kubernetes Pod.
        container: Its container.
        take: Called with every line.
        after: Stream that must end first, so that lines keep the order of attempts.
    """

    def __init__(
        self,
        api: ClusterApi,
        pod: Object,
        container: str,
        take: Callable[[str], object],
        *,
        after: threading.Thread | None = None,
    ) -> None:
        metadata = pod["metadata"]
        self._api, self._take, self._after = api, take, after
        self._path = f"{CORE}/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self._uid, self._container = metadata["uid"], container
        self._last, self._seen_at_last = "", 0
        self._stopped = threading.Event()
        self._stream: Stream | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"tpukit-log-{metadata['name']}", daemon=True
        )
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until everything is read."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Stop reading."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.interrupt()

    def _run(self) -> None:
        if self._after is not None:
            self._after.join()
        while not self._stopped.is_set():
            ended = self._has_ended()
            try:
                self._read(follow=not ended)
            except ProviderError:  # the cluster is unreachable, but the output is still there
                ended = False
            except ApiException as error:  # the container has not started, or the server is busy
                ended = error.status not in BUSY and self._has_ended()
            if ended:
                return
            self._stopped.wait(PAUSE_S)

    def _read(self, *, follow: bool) -> None:
        query = {"container": self._container, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if self._last:
            query["sinceTime"] = f"{self._last[:19]}Z"
        stream = self._stream = self._api.stream(f"{self._path}/log", **query)
        if self._stopped.is_set():
            stream.close()
            return
        # After reconnecting, lines of the last second are repeated; this many are skipped.
        before, again = self._last, 0
        for line in stream.lines():
            time, _, text = line.partition(" ")
            if time < before:
                continue
            if time == before:
                again += 1
                if again <= self._seen_at_last:
                    continue
            self._seen_at_last = self._seen_at_last + 1 if time == self._last else 1
            self._last = time
            self._take(text)

    def _has_ended(self) -> bool:
        """Return whether the container will print no more: it has ended, or its Pod is gone."""
        try:
            pod = self._api.get(self._path)
        except ProviderError:
            return False
        if pod is None or pod["metadata"]["uid"] != self._uid:
            return True
        if at(pod, "status", "phase") in ("Succeeded", "Failed"):
            return True
        return any(
            at(status, "name") == self._container and at(status, "state", "terminated")
            for status in sequence(at(pod, "status", "containerStatuses"))
        )


logger = logging.getLogger(__name__)

WATCH_S = 300
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

Report = Callable[[Object, bool], None]


class Follower:
    """Reports every object under a path, from its own thread.

    Args:
        api: The cluster.
        path: Path of a list.
        query: Selectors of the query.
        told: Called with an object, and whether it still exists.
    """

    def __init__(self, api: ClusterApi, path: str, query: dict[str, str], report: Report) -> None:
        self._api, self._path, self._query, self._told = api, path, query, report
        self._known: dict[str, Object] = {}
        self._stopped = threading.Event()
        self._stream: Stream | None = None
        self.silent_since: float | None = None
        self.has_listed = False
        self._thread = threading.Thread(target=self._run, name=f"tpukit-follow-{path}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reporting."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def unreachable_s(self) -> float:
        """Seconds for which the cluster has not answered."""
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopped.is_set():
            try:
                version = self._list()
                self.silent_since = None
                pause_s = FIRST_PAUSE_S
                while version and not self._stopped.is_set():
                    version = self._watch(version)
            except (ProviderError, ApiException) as error:
                logger.debug("Retrying the cluster: %s", error)
                if self.silent_since is None:
                    self.silent_since = time.monotonic()
                self._stopped.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _list(self) -> str:
        objects, version = self._api.list(self._path, **self._query)
        now = {item["metadata"]["uid"]: item for item in objects}
        for uid, item in list(self._known.items()):
            if uid not in now:
                self._report(item, is_there=False)
        for item in objects:
            self._report(item, is_there=True)
        self.has_listed = True
        return version

    def _watch(self, version: str) -> str:
        """Report changes after a version; return the last version, or "" to list again."""
        stream = self._stream = self._api.stream(
            self._path,
            watch="true",
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(WATCH_S),
            **self._query,
        )
        if self._stopped.is_set():
            stream.close()
            return ""
        for line in stream.lines():
            if self._stopped.is_set():
                return ""
            try:
                event = cast("dict[str, Any]", json.loads(line))
            except ValueError:
                return ""
            if event["type"] == "ERROR":  # usually 410: the server no longer has these changes
                return ""
            item = cast("Object", event["object"])
            version = str(item["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK":
                self._report(item, is_there=event["type"] != "DELETED")
        return version

    def _report(self, item: Object, *, is_there: bool) -> None:
        uid = item["metadata"]["uid"]
        if is_there:
            self._known[uid] = item
        else:
            self._known.pop(uid, None)
        if not self._stopped.is_set():
            self._told(item, is_there)
