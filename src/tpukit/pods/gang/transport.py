"""How workers are started on hosts: as child processes here, through ssh elsewhere.

A transport starts the agent of `tpukit.pods.worker` on a host, and returns a local process that
stands for it. Bytes written to that process's standard input reach the agent, the command's output
comes back, and the process exits with the agent's exit code. For ssh it is the `ssh` process
itself:

```python
subprocess.Popen(["ssh", address, shlex.join(bootstrap())], stdin=PIPE, stdout=PIPE, stderr=PIPE)
```

The gang writes the order. Closing the standard input ends the agent and all its processes, so no
signals need to cross the network.
"""

import contextlib
import random
import socket
from collections.abc import Sequence
from typing import IO, Protocol

from ...errors import TPUDistributedError
from ..pod import Host

# Below the range from which Linux assigns ports to outgoing connections.
LOWEST, HIGHEST = 20_000, 32_000
_TRIES = 100


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of this machine on which no process listens.

    Raises:
        TPUDistributedError: A hundred ports were in use.
    """
    for port in random.sample(range(LOWEST, HIGHEST), _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise TPUDistributedError(
        f"{_TRIES} ports of {address} between {LOWEST} and {HIGHEST} are all in use; end the "
        "processes that use them."
    )


def any_port() -> int:
    """Return a port for another machine without testing it; a busy one costs an attempt."""
    return random.randrange(LOWEST, HIGHEST)


class WorkerProcess(Protocol):
    """An agent, local or remote. `subprocess.Popen[bytes]` implements this.

    Attributes:
        stdin: Takes the order, then signals. Closing it ends the worker.
        stdout: The command's output; a real file, so that it can be polled.
        stderr: The command's error output; a real file too.
    """

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @property
    def pid(self) -> int:
        """Id of the process on this machine."""
        ...

    def poll(self) -> int | None:
        """Return the exit code (-n for signal n), or None while the process runs."""
        ...

    def kill(self) -> None:
        """Kill the process."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended."""
        ...


class Transport(Protocol):
    """Starts workers on hosts.

    Attributes:
        shares_files: Whether hosts can open this machine's files.
        connect_s: How long a host may refuse connections.
    """

    shares_files: bool
    connect_s: float

    @property
    def unreachable_code(self) -> int | None:
        """The exit code for an unreachable host or a broken connection (ssh: 255)."""
        ...

    def start(self, host: Host) -> WorkerProcess:
        """Start an agent that waits for its order; do not wait for the agent."""
        ...

    def is_worth_retrying(self, last_words: str) -> bool:
        """Return whether a host that refused a connection may accept one later."""
        ...

    def folder(self, host: Host) -> str:
        """Return the host's folder in which a bundle is unpacked and the command runs."""
        ...

    def coordinator(self, hosts: Sequence[Host]) -> str:
        """Return `host:port` for jax's coordinator on the first host, with a new port each time."""
        ...
