"""The pods of this machine as files, so that every process sees the same ones.

Whoever reads or changes them holds a lock for that long; a file is written whole or not at all.
"""

import fcntl
import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ....runtime.files import private_folder, write_json
from ...pod import Pod, PodState

PROCESSES_GONE = "its processes are gone, and nobody has said why; delete it, or start it again"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A pod, its place in the queue and the agents that run on it.

    Attributes:
        avoid: Names of hosts that it must not get, where hosts have names of their own.
        agents: Process ids with the time each was started: an id alone may be another's by now.
    """

    pod: Pod
    priority: int = 0
    avoid: tuple[str, ...] = ()
    agents: tuple[tuple[int, float], ...] = ()

    def living_agents(self) -> list[psutil.Process]:
        """Return the agents that still run."""
        found: list[psutil.Process] = []
        for pid, started in self.agents:
            try:
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def seen(self) -> Pod:
        """Return the pod as it is to be shown: one whose processes are gone says so."""
        if self.pod.state is PodState.READY and self.agents and not self.living_agents():
            return self.pod.in_state(PodState.READY, PROCESSES_GONE)
        return self.pod

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        agents = [list(agent) for agent in self.agents]
        return {
            "pod": self.pod.to_dict(),
            "priority": self.priority,
            "avoid": list(self.avoid),
            "agents": agents,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Entry":
        """Read what `to_dict` wrote."""
        return cls(
            pod=Pod.from_dict(values["pod"]),
            priority=values["priority"],
            avoid=tuple(values["avoid"]),
            agents=tuple((pid, started) for pid, started in values["agents"]),
        )


class Book:
    """The entries of one folder, by zone and name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def held(self) -> Generator[None]:
        """Keep every other process from reading or changing entries."""
        private_folder(self._folder)
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def entries(self) -> list[Entry]:
        """Return all entries."""
        return [self._read(path) for path in sorted(self._folder.glob("*/*.json"))]

    def get(self, name: str, zone: str) -> Entry | None:
        """Return one entry."""
        path = self._path(name, zone)
        return self._read(path) if path.exists() else None

    def put(self, entry: Entry) -> None:
        """Write an entry, instead of one with the same zone and name."""
        path = self._path(entry.pod.name, entry.pod.zone)
        path.parent.mkdir(exist_ok=True)
        write_json(path, entry.to_dict())

    def remove(self, name: str, zone: str) -> None:
        """Remove an entry and the folders of its hosts."""
        self._path(name, zone).unlink(missing_ok=True)
        shutil.rmtree(self.files_of(name, zone), ignore_errors=True)

    def files_of(self, name: str, zone: str) -> Path:
        """Return the folder in which the hosts of a pod have theirs."""
        return self._path(name, zone).with_suffix("")

    def _path(self, name: str, zone: str) -> Path:
        return self._folder / zone / f"{name}.json"

    def _read(self, path: Path) -> Entry:
        return Entry.from_dict(json.loads(path.read_text()))
