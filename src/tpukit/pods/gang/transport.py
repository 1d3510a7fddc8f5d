"""How workers are started on hosts: here as a child, elsewhere through ssh.

A transport starts the agent of `tpukit.pods.worker` on a host and returns a process of this
machine that stands for it: what is written to its standard input reaches the agent, what the
command prints comes back, and it exits with the agent's exit code. For ssh that process is `ssh`
itself:

```python
subprocess.Popen(["ssh", address, shlex.join(bootstrap())], stdin=PIPE, stdout=PIPE, stderr=PIPE)
```

The gang writes the order; closing the standard input ends the agent and all it started, so nobody
needs to send signals over a network.
"""

from collections.abc import Sequence
from typing import IO, Protocol

from ..pod import Host


class WorkerProcess(Protocol):
    """An agent, here or at the other end of a connection. `subprocess.Popen[bytes]` is one.

    Attributes:
        stdin: Takes the order, then signals; closing it ends the worker.
        stdout: What the command prints; must be a real file, so that it can be waited for.
        stderr: The same for its errors.
    """

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    @property
    def pid(self) -> int:
        """The process on this machine."""
        ...

    def poll(self) -> int | None:
        """Return the exit code (-n for signal n) once it has ended."""
        ...

    def kill(self) -> None:
        """End it, whatever it does."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended."""
        ...


class Transport(Protocol):
    """Starts workers on hosts."""

    @property
    def unreachable_code(self) -> int | None:
        """The exit code that means the host was not reached or the connection broke (ssh: 255)."""
        ...

    def start(self, host: Host) -> WorkerProcess:
        """Start an agent that waits for its order; returns at once."""
        ...

    def folder(self, host: Host) -> str:
        """Return where on the host a bundle is unpacked and the command runs."""
        ...

    def coordinator(self, hosts: Sequence[Host]) -> str:
        """Return `host:port` for jax's coordinator on the first host: another port each time."""
        ...
