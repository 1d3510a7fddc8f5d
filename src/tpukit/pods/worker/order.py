"""What a worker is told, and how it travels: lines of JSON on its standard input.

The first line is the order, and the bytes of the bundle follow it. After that each line is a
signal to pass on. The end of the input (its sender ended, or the connection broke) ends the worker
with everything it started.
"""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

AGENT = Path(__file__).with_name("agent.py")


class AgentExit(IntEnum):
    """Exit codes of the agent itself; any other is the command's (128 + n for signal n).

    Attributes:
        DIRTY_HOST: A TPU of this host is held by another process.
        SETUP_FAILED: The order or the bundle was refused, or a command of the setup failed.
        NOT_STARTED: The command could not be started: no such program, or not permitted.
    """

    DIRTY_HOST = 202
    SETUP_FAILED = 203
    NOT_STARTED = 204


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one worker runs.

    Attributes:
        argv: An argument list; no shell reads it.
        environment: Variables to set. Values may be secret: they travel by standard input only.
        folder: Where the bundle is unpacked and the command runs; "~" is the host's home.
        bundle_bytes: Length of the archive (tar) that follows; 0 for none.
        setup: Argument lists that run before, once for each folder.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    folder: str = "."
    bundle_bytes: int = 0
    setup: tuple[tuple[str, ...], ...] = ()

    def to_line(self) -> bytes:
        """Return the order as it travels; the bundle's bytes come right after it."""
        plain = {
            "argv": self.argv,
            "environment": dict(self.environment),
            "folder": self.folder,
            "bundle_bytes": self.bundle_bytes,
            "setup": self.setup,
        }
        return json.dumps(plain).encode() + b"\n"


def signal_line(number: signal.Signals) -> bytes:
    """Return what makes the agent send a signal to its command."""
    return json.dumps({"signal": int(number)}).encode() + b"\n"


def bootstrap() -> tuple[str, ...]:
    """Return the command that is an agent on a host where tpukit is not installed.

    It is the agent's own text, constant and of the standard library alone. Whoever passes it
    through a shell, as ssh does, quotes it as a whole (`shlex.join`).
    """
    return ("python3", "-c", AGENT.read_text(encoding="utf-8"))
