"""libtpu's monitoring SDK: what the metrics service does not offer, asked for in a child.

`get_metric` loads libtpu, which blocks for over a minute where there is no TPU. So it is asked only
where the PCI bus has one, in a process that is killed when it takes too long, and seldom: a child
costs seconds. Readings between two children are those of the last.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import TPUBackendError
from ...hardware.detect import detect_accelerators
from ...runtime.child import run_child
from ...runtime.environment import jax_state
from ..readings import Reading, ReadingBuilder

# The SDK's name of each.
ASKED = {
    "tensorcore_utilization": "tensorcore_util",
    "ici_link_health": "ici_link_health",
    "throttle_score": "tpu_throttle_score",
}
CHILD = "tpukit.observe.sources.libtpu_sdk_child"
TIMEOUT_S = 30.0
EVERY_S = 60.0
_LINK = re.compile(r"chip(\d+)")


class LibtpuSdkSource:
    """Asks `libtpu.sdk.tpumonitoring` now and then, and answers from what it said last.

    Args:
        every_s: Seconds between two children.
        timeout_s: After this long a child is killed.
        root: Root of the file system whose PCI bus is looked at; another than "/" is for tests.
        process: Index of the process of the run.
        clock: Seconds that only go forward.
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
        """Return what the SDK said last, and ask anew in the background when that is due."""
        if detect_accelerators(root=self._root).kind != "tpu":
            self._newest, self._asked_at = None, None
            return self._lacking("this host has no TPU on its PCI bus")
        if jax_state() == "imported":
            return self._lacking(
                "libtpu's SDK is asked once jax has opened its devices here, so that it cannot "
                "get in the way"
            )
        now = self._clock()
        due = self._asked_at is None or now - self._asked_at >= self._every_s
        if due and not self.is_asking:
            self._asked_at = now
            # A daemon: the end of the program waits for no answer, and its child ends with it.
            self._worker = threading.Thread(target=self._ask, name="libtpu sdk", daemon=True)
            self._worker.start()
        return self._newest or self._lacking("libtpu's SDK is being asked for the first time")

    @property
    def is_asking(self) -> bool:
        """Whether a child is at work."""
        return self._worker is not None and self._worker.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the child that is at work, if any, has answered."""
        if self._worker is not None:
            self._worker.join(timeout_s)

    def close(self) -> None:
        """Forget what was said; a child at work ends by its time-out."""
        self._newest, self._asked_at = None, None

    def _ask(self) -> None:
        try:
            answer = run_child(
                CHILD,
                {"metrics": sorted(ASKED.values())},
                timeout_s=self._timeout_s,
                # Not the offline one: there are chips to find, though another process has them.
                environment={**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
            )
        except TPUBackendError as error:
            self._newest = self._lacking(f"libtpu's SDK: {str(error).splitlines()[0]}")
            return
        self._newest = read_answer(answer, process=self._process)

    def _lacking(self, reason: str) -> Reading:
        return ReadingBuilder(self.name, ASKED, process=self._process).build(otherwise=reason)


def read_answer(answer: dict[str, dict[str, list[str] | str]], *, process: int = 0) -> Reading:
    """Turn what the child said of each metric, rows of text or an error, into a reading.

    A row is a number, in order of the chips, or ends in one: "tray1.chip3.ici0.int: 0".
    """
    found = ReadingBuilder(LibtpuSdkSource.name, ASKED, process=process)
    for metric, asked in ASKED.items():
        said = answer.get(asked, {})
        if "error" in said:
            found.lack(metric, f"libtpu's SDK: {said['error']}")
            continue
        rows = said.get("rows", [])
        if not rows:
            found.lack(metric, "libtpu's SDK gave no values: no program runs on the chips")
        for index, row in enumerate(rows):
            where, _, number = row.rpartition(":")
            try:
                value = float(number)
            except ValueError:
                found.lack(metric, f"libtpu's SDK gave {row!r}, which is no number")
                continue
            chip = _LINK.search(where)
            found.add(
                metric,
                value / 100 if metric == "tensorcore_utilization" else value,
                chip=int(chip.group(1)) if chip else index,
                labels={"link": where.strip()} if where else {},
            )
    return found.build()
