"""libtpu's monitoring SDK: metrics that the metrics service lacks, read in a child process.

`get_metric` loads libtpu, which blocks for over a minute on a machine without a TPU. So it is
called only where the PCI bus has a TPU, in a child process that is killed when it takes too long.
A child costs seconds, so it is started rarely; readings in between repeat the last answer.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import TPUBackendError
from ...hardware.detect import detect_accelerators
from ...plain_data import JsonObject
from ...runtime.child import run_child, serve_request
from ...runtime.environment import jax_state
from ..readings import Reading, ReadingBuilder

# Names of the metrics in the SDK.
ASKED = {
    "tensorcore_utilization": "tensorcore_util",
    "ici_link_health": "ici_link_health",
    "throttle_score": "tpu_throttle_score",
}
CHILD = "tpukit.observe.sources.libtpu_sdk"
TIMEOUT_S = 30.0
EVERY_S = 60.0
_LINK = re.compile(r"chip(\d+)")


class LibtpuSdkSource:
    """Reads `libtpu.sdk.tpumonitoring` in a child process now and then.

    Args:
        every_s: Seconds between two children.
        timeout_s: Seconds after which a child is killed.
        root: Root of the file system with the PCI bus; tests pass another than "/".
        process: Index of the process of the run.
        clock: A monotonic clock in seconds.
    """

    name = "libtpu sdk"

    def __init__(
        self,
        *,
        every_s: float = EVERY_S,
        timeout_s: float = TIMEOUT_S,
        root: str | Path = "/",
        process: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every_s, self._timeout_s, self._root = every_s, timeout_s, root
        self._process, self._clock = process, clock
        self._asked_at: float | None = None
        self._worker: threading.Thread | None = None
        self._newest: Reading | None = None

    def read(self) -> Reading:
        """Return the SDK's last answer, and start a child for the next when it is due."""
        if detect_accelerators(root=self._root).kind != "tpu":
            self._newest, self._asked_at = None, None
            return self._lacking("this host has no TPU on its PCI bus")
        if jax_state() == "imported":
            return self._lacking(
                "libtpu's SDK is read once jax has opened its devices here, so that it cannot "
                "interfere"
            )
        now = self._clock()
        due = self._asked_at is None or now - self._asked_at >= self._every_s
        if due and not self.is_asking:
            self._asked_at = now
            # A daemon thread, so that the program ends without the answer; its child ends with it.
            self._worker = threading.Thread(target=self._ask, name="libtpu sdk", daemon=True)
            self._worker.start()
        return self._newest or self._lacking("libtpu's SDK is being read for the first time")

    @property
    def is_asking(self) -> bool:
        """Whether a child is running."""
        return self._worker is not None and self._worker.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until a running child has answered."""
        if self._worker is not None:
            self._worker.join(timeout_s)

    def close(self) -> None:
        """Discard the last answer; a running child ends by its time-out."""
        self._newest, self._asked_at = None, None

    def _ask(self) -> None:
        try:
            answer = run_child(
                CHILD,
                {"metrics": sorted(ASKED.values())},
                timeout_s=self._timeout_s,
                # Not the offline environment, because the chips are present, if opened by another
                # process.
                environment={**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
            )
        except TPUBackendError as error:
            self._newest = self._lacking(f"libtpu's SDK: {str(error).splitlines()[0]}")
            return
        self._newest = read_answer(answer, process=self._process)

    def _lacking(self, reason: str) -> Reading:
        return ReadingBuilder(self.name, ASKED, process=self._process).build(otherwise=reason)


def read_answer(answer: dict[str, dict[str, list[str] | str]], *, process: int = 0) -> Reading:
    """Return a reading from the child's rows of text or error for each metric.

    A row is a number, in order of the chips, or ends with a number: "tray1.chip3.ici0.int: 0".
    """
    builder = ReadingBuilder(LibtpuSdkSource.name, ASKED, process=process)
    for metric, sdk_name in ASKED.items():
        entry = answer.get(sdk_name, {})
        if "error" in entry:
            builder.lack(metric, f"libtpu's SDK: {entry['error']}")
            continue
        rows = entry.get("rows", [])
        if not rows:
            builder.lack(metric, "libtpu's SDK gave no values: no program runs on the chips")
        for index, row in enumerate(rows):
            where, _, number = row.rpartition(":")
            try:
                value = float(number)
            except ValueError:
                builder.lack(metric, f"libtpu's SDK gave {row!r}, which is no number")
                continue
            chip = _LINK.search(where)
            builder.add(
                metric,
                value / 100 if metric == "tensorcore_utilization" else value,
                chip=int(chip.group(1)) if chip else index,
                labels={"link": where.strip()} if where else {},
            )
    return builder.build()


def answer(request: JsonObject) -> JsonObject:
    """Return the SDK's rows of text for each metric, or its error."""
    from libtpu.sdk import tpumonitoring  # pyright: ignore[reportMissingImports]  an extra

    answers: JsonObject = {}
    for name in request["metrics"]:
        try:
            answers[name] = {"rows": [str(row) for row in tpumonitoring.get_metric(name).data()]}
        except RuntimeError as error:
            answers[name] = {"error": str(error)}
    return answers


if __name__ == "__main__":
    serve_request(answer)
