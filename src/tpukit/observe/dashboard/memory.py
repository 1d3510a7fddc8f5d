"""What the dashboard keeps in memory: answers and files that were read, a bounded number of bytes.

Two hundred runs of 10⁵ steps are two gigabytes of numbers. Few of them are looked at, so only those
that were asked for last are kept, and a run that was dropped is read again when it is asked for.
"""

import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from ..runs import Run
from .answers import encoded

MOST_ANSWER_BYTES = 32 << 20
MOST_RUN_BYTES = 96 << 20


class AnswerMemory:
    """Keeps what was used last, shared by all runs of a library.

    Args:
        answer_bytes: The most that answers may take.
        run_bytes: The most that runs may take that are read as a whole; the last one always stays.
    """

    def __init__(
        self, *, answer_bytes: int = MOST_ANSWER_BYTES, run_bytes: int = MOST_RUN_BYTES
    ) -> None:
        self._answer_bytes, self._run_bytes = answer_bytes, run_bytes
        self._lock = threading.Lock()
        # In both, what was not used longest is first.
        self._answers: dict[Hashable, tuple[Hashable, bytes]] = {}
        self._answered = 0
        self._loaded: dict[Reader, int] = {}

    def find(self, what: Hashable, version: Hashable) -> bytes | None:
        """Return the answer that was kept for a version; None if there is none."""
        with self._lock:
            kept = self._answers.get(what)
            if kept is None or kept[0] != version:
                return None
            self._answers[what] = self._answers.pop(what)
            return kept[1]

    def keep(self, what: Hashable, version: Hashable, answer: bytes) -> None:
        """Keep an answer instead of the one for an older version."""
        with self._lock:
            self._forget(what)
            self._answers[what] = version, answer
            self._answered += len(answer)
            while self._answered > self._answer_bytes:
                self._forget(next(iter(self._answers)))

    def note(self, reader: "Reader") -> None:
        """Note that a run was read, and drop those that were not asked for longest."""
        with self._lock:
            self._loaded.pop(reader, None)
            if size := reader.run.loaded_bytes:
                self._loaded[reader] = size
            for other in list(self._loaded):
                if other is reader or sum(self._loaded.values()) <= self._run_bytes:
                    return
                if other.drop():
                    del self._loaded[other]

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the runs that are kept."""
        with self._lock:
            return sum(self._loaded.values())

    def _forget(self, what: Hashable) -> None:
        if what in self._answers:
            self._answered -= len(self._answers.pop(what)[1])


class Reader:
    """A run that is read by one thread at a time, and whose answers are kept.

    Args:
        path: The run directory.
        memory: What keeps answers and says which runs to drop.
    """

    def __init__(self, path: Path, memory: AnswerMemory) -> None:
        self.run = Run(path)
        self.lock = threading.Lock()
        self._memory = memory

    def answer(self, what: Hashable, version: Hashable, make: Callable[[Run], Any]) -> bytes:
        """Return an answer about the run as JSON, made once for each version of its files."""
        key = (self, what)
        with self.lock:
            kept = self._memory.find(key, version)
            if kept is not None:
                return kept
            made = encoded(make(self.run))
        self._memory.keep(key, version, made)
        self._memory.note(self)
        return made

    def load(self) -> None:
        """Read all files of the run."""
        with self.lock:
            self.run.metrics()
        self._memory.note(self)

    def drop(self) -> bool:
        """Forget what was read, unless a thread is reading; return whether it was forgotten."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.run.unload()
        finally:
            self.lock.release()
        return True
