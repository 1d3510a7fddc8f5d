"""Follows objects of the cluster: a list, then a watch, and both anew when that breaks.

What is told is complete and in order; after a gap, what has gone in between is told as gone.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from kubernetes.client.exceptions import ApiException

from ....errors import ProviderError
from .api import ClusterApi, Object, Stream

logger = logging.getLogger(__name__)

WATCH_S = 300
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

Told = Callable[[Object, bool], None]


class Follower:
    """Tells of every object under a path, in a thread of its own.

    Args:
        api: The cluster.
        path: A list of objects.
        query: Selectors.
        told: Called with an object, and whether it is still there.
    """

    def __init__(self, api: ClusterApi, path: str, query: dict[str, str], told: Told) -> None:
        self._api, self._path, self._query, self._told = api, path, query, told
        self._known: dict[str, Object] = {}
        self._stopped = threading.Event()
        self._stream: Stream | None = None
        self.silent_since: float | None = None
        self.has_listed = False
        self._thread = threading.Thread(target=self._run, name=f"tpukit-follow-{path}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop telling."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.interrupt()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def unreachable_s(self) -> float:
        """How long the cluster has not answered."""
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
                logger.debug("The cluster is asked again: %s", error)
                if self.silent_since is None:
                    self.silent_since = time.monotonic()
                self._stopped.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _list(self) -> str:
        found, version = self._api.list(self._path, **self._query)
        now = {one["metadata"]["uid"]: one for one in found}
        for uid, one in list(self._known.items()):
            if uid not in now:
                self._tell(one, is_there=False)
        for one in found:
            self._tell(one, is_there=True)
        self.has_listed = True
        return version

    def _watch(self, version: str) -> str:
        """Tell what happens after a version; return the last one seen, or "" to list again."""
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
            if event["type"] == "ERROR":  # mostly 410: what followed is no longer kept
                return ""
            one = cast("Object", event["object"])
            version = str(one["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK":
                self._tell(one, is_there=event["type"] != "DELETED")
        return version

    def _tell(self, one: Object, *, is_there: bool) -> None:
        uid = one["metadata"]["uid"]
        if is_there:
            self._known[uid] = one
        else:
            self._known.pop(uid, None)
        if not self._stopped.is_set():
            self._told(one, is_there)
