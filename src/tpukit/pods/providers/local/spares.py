"""Warm spares: agents whose interpreters have imported what a job needs, and wait."""

import os
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence

from ...worker.spare import READY

# In the order in which a training process imports them.
MODULES = (
    *("jax", "optax", "flax.nnx", "orbax.checkpoint", "grain.python"),
    *("tpukit.cli.app", "tpukit.training", "tpukit.training.trainer", "tpukit.job.reading"),
)


def start_agent(
    modules: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start an agent on this machine, in a session of its own: Ctrl-C is not for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tpukit.pods.worker", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


class SparePool:
    """Keeps some spares ready.

    Args:
        environment: Variables that modules read when they are imported. What an order says later
            counts for jax all the same.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(environment or {})
        self._waiting: list[subprocess.Popen[bytes]] = []
        self._ready: set[int] = set()
        # Also where nobody calls close(): their standard input would stay open with the process.
        self._finalizer = weakref.finalize(self, _end, self._waiting)

    def keep(self, count: int) -> None:
        """Start as many as are missing to `count`; returns at once."""
        alive = [spare for spare in self._waiting if spare.poll() is None]
        _end([spare for spare in self._waiting if spare not in alive])
        missing = range(count - len(alive))
        self._waiting[:] = [*alive, *(start_agent(MODULES, self._environment) for _ in missing)]

    def take(self) -> "subprocess.Popen[bytes] | None":
        """Return a spare, the oldest first; None where there is none alive."""
        while self._waiting:
            spare = self._waiting.pop(0)
            if spare.poll() is None:
                return spare
            _end([spare])
        return None

    def count_ready(self) -> int:
        """Return how many have imported everything."""
        for spare in self._waiting:
            assert spare.stderr is not None
            os.set_blocking(spare.stderr.fileno(), False)
            if READY.encode() in (spare.stderr.read() or b""):
                self._ready.add(spare.pid)
        return sum(spare.pid in self._ready for spare in self._waiting)

    def close(self) -> None:
        """End all spares."""
        self._finalizer()


def _end(spares: "list[subprocess.Popen[bytes]]") -> None:
    for spare in spares:
        for stream in (spare.stdin, spare.stdout, spare.stderr):
            if stream is not None:
                stream.close()
    for spare in spares:
        spare.wait()
    spares.clear()
