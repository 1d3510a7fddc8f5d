"""Which Python functions ran at a moment, from the calls that a profile recorded."""

import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .recording import HostEvent

SHOWN = 3
# Files of jax, numpy and this package that stand between the user's line and what it does. The
# profile keeps no folders, so they are told by their names.
_PLUMBING = frozenset(
    (
        *("pjit.py", "api.py", "profiler.py", "traceback_util.py", "api_util.py", "util.py"),
        *("array.py", "dispatch.py", "interpreters.py", "pxla.py", "core.py", "config.py"),
        *("tree_util.py", "compiler.py", "indexing.py", "array_methods.py", "tracing.py"),
        *("literals.py", "named_sharding.py", "abstract_arrays.py", "sharding_impls.py", "mlir.py"),
    )
)


@dataclass(frozen=True)
class _Thread:
    calls: list[HostEvent]
    starts: np.ndarray
    ends: np.ndarray


class CallStacks:
    """The calls of a host's threads, to be asked by moment.

    Args:
        calls: What was recorded.
        outermost: The function around all of them, which began before the recording.
    """

    def __init__(self, calls: Iterable[HostEvent], *, outermost: str = "") -> None:
        self._outermost = outermost
        by_thread: defaultdict[str, list[HostEvent]] = defaultdict(list)
        for call in calls:
            by_thread[call.thread].append(call)
        self._threads = {
            name: _Thread(
                found,
                np.array([call.start for call in found]),
                np.array([call.end for call in found]),
            )
            for name, found in by_thread.items()
        }

    def at(self, moment: float, *, thread: str | None = None) -> list[str]:
        """The functions that ran, innermost first, as "file.py:12 name".

        Args:
            moment: On the clock of the recording.
            thread: The thread to look at; any that ran Python then where it ran none.
        """
        order = [thread] if thread in self._threads else []
        for name in [*order, *self._threads]:
            found = self._threads[name or ""]
            inside = np.flatnonzero((found.starts <= moment) & (found.ends > moment))
            if inside.size:
                deepest = sorted(inside, key=lambda index: -found.starts[index])
                return [found.calls[index].name for index in deepest]
        return []

    def place(self, moment: float, *, thread: str | None = None) -> str:
        """Where the user's code was: up to three functions, innermost first; "" when unknown."""
        frames = [name for name in self.at(moment, thread=thread) if _is_users(name)]
        return " ← ".join(frames[:SHOWN]) or self._outermost


def _is_users(name: str) -> bool:
    file, colon, _ = name.partition(":")
    if not colon or not file.endswith(".py") or file in _PLUMBING:
        return False
    return file.removesuffix(".py") not in sys.stdlib_module_names
