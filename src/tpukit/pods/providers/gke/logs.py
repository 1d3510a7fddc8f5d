"""The output of one Pod, line by line, whatever becomes of the connection.

Lines are asked for with their times. After a break the log is asked for from the second of the
last line, and what was seen is left out: no line is lost or doubled while the Pod is there.
"""

import threading
from collections.abc import Callable

from kubernetes.client.exceptions import ApiException

from ....errors import ProviderError
from ...manifests.reading import at, sequence
from .api import CORE, ClusterApi, Object, Stream

PAUSE_S = 0.2
BUSY = frozenset({429, 500, 502, 503, 504})
"""Answers after which the same question may be answered well."""


class LogStream:
    """Reads a container's output in a thread of its own.

    Args:
        api: The cluster.
        pod: The Kubernetes Pod.
        container: Its container.
        take: Called with every line.
        after: What must have ended first, so that lines come in the order of attempts.
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
        """Wait until everything was read."""
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
            except ProviderError:  # not reachable: whatever it has printed is still to be read
                ended = False
            except ApiException as error:  # not started, or the server is not able to just now
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
        # How many lines of the last moment come again: they are left out.
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
        """Whether the container will print nothing more: it has ended, or its Pod is gone."""
        try:
            pod = self._api.get(self._path)
        except ProviderError:
            return False
        if pod is None or pod["metadata"]["uid"] != self._uid:
            return True
        if at(pod, "status", "phase") in ("Succeeded", "Failed"):
            return True
        return any(
            at(one, "name") == self._container and at(one, "state", "terminated")
            for one in sequence(at(pod, "status", "containerStatuses"))
        )
