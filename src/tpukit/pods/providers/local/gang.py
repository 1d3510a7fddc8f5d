"""The processes of a local pod, with the spares that take over from them."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ...gang.ports import free_port
from ...gang.process_gang import ProcessGang
from ...gang.transport import WorkerProcess
from ...pod import Host
from ..protocol import Command, GangEvent, StepCompleted
from .spares import SparePool, start_agent

LOOPBACK = "127.0.0.1"


class LocalTransport:
    """Starts agents as children of this process.

    Args:
        files: Where each host has a folder of its own, into which the bundle goes; None: all run
            in the current folder, as there is nothing to unpack.
        spares: Taken first.

    Attributes:
        agents: Those it has started.
    """

    unreachable_code = None

    def __init__(self, files: Path | None, spares: SparePool | None) -> None:
        self._files, self._spares = files, spares
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host) -> WorkerProcess:
        """Start an agent that waits for its order."""
        spare = None if self._spares is None else self._spares.take()
        self.agents.append(spare or start_agent())
        return self.agents[-1]

    def folder(self, host: Host) -> str:
        """Return where a bundle is unpacked and the command runs."""
        return str(Path.cwd() if self._files is None else self._files / host.name)

    def coordinator(self, hosts: Sequence[Host]) -> str:
        """Return a port of this machine that nobody listens on."""
        return f"{LOOPBACK}:{free_port(LOOPBACK)}"


class LocalGang(ProcessGang):
    """A gang that has spares made once its own start is over, as they would slow it down."""

    def __init__(
        self,
        hosts: Sequence[Host],
        command: Command,
        transport: LocalTransport,
        *,
        attempt: int,
        spares: SparePool | None,
        on_close: Callable[[], None],
    ) -> None:
        self._spares, self._on_close = spares, on_close
        super().__init__(hosts, command, transport, attempt=attempt)

    def wait(self, timeout_s: float) -> list[GangEvent]:
        """Return what happened, as soon as something has; nothing after `timeout_s`."""
        events = super().wait(timeout_s)
        if self._spares is not None and any(isinstance(event, StepCompleted) for event in events):
            self._spares.keep(len(self.hosts))
        return events

    def close(self) -> None:
        """End everything at once and release it; may be called again."""
        super().close()
        self._on_close()
