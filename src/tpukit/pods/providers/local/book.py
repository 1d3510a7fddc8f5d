"""The pods of this machine as files that all processes share.

Reading and changing them requires a lock. Files are written atomically.
"""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from ....runtime.files import private_folder, write_json
from ....shown import Facts
from ...pod import Pod, PodState

PROCESSES_GONE = "its processes are gone for an unknown reason; delete it, or start it again"


@dataclass(frozen=True, kw_only=True)
class Entry(Facts):
    """A pod, its place in the queue and the agents that run on it.

    Attributes:
        avoid: Names of hosts that it must not get, if hosts are named.
        agents: Process ids with start times, because ids are reused.
    """

    pod: Pod
    priority: int = 0
    avoid: tuple[str, ...] = ()
    agents: tuple[tuple[int, float], ...] = ()

    def living_agents(self) -> list[psutil.Process]:
        """Return the agents that still run."""
        agents: list[psutil.Process] = []
        for pid, started in self.agents:
            try:
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    agents.append(process)
            except psutil.NoSuchProcess:
                continue
        return agents

    def seen(self) -> Pod:
        """Return the pod with its present state, which shows if its processes are gone."""
        if self.pod.state is PodState.READY and self.agents and not self.living_agents():
            return self.pod.in_state(PodState.READY, PROCESSES_GONE)
        return self.pod

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
        """Lock the entries against all other processes."""
        private_folder(self._folder)
        with FileLock(self._folder / ".lock", mode=0o600):
            yield

    def entries(self) -> list[Entry]:
        """Return all entries."""
        return [self._read(path) for path in sorted(self._folder.glob("*/*.json"))]

    def get(self, name: str, zone: str) -> Entry | None:
        """Return one entry."""
        path = self._path(name, zone)
        return self._read(path) if path.exists() else None

    def put(self, entry: Entry) -> None:
        """Write an entry, replacing one with the same zone and name."""
        path = self._path(entry.pod.name, entry.pod.zone)
        path.parent.mkdir(exist_ok=True)
        write_json(path, entry.to_dict())

    def remove(self, name: str, zone: str) -> None:
        """Remove an entry and the folders of its hosts."""
        self._path(name, zone).unlink(missing_ok=True)
        shutil.rmtree(self.files_of(name, zone), ignore_errors=True)

    def files_of(self, name: str, zone: str) -> Path:
        """Return the folder that contains the host folders of a pod."""
        return self._path(name, zone).with_suffix("")

    def _path(self, name: str, zone: str) -> Path:
        return self._folder / zone / f"{name}.json"

    def _read(self, path: Path) -> Entry:
        return Entry.from_dict(json.loads(path.read_text()))
