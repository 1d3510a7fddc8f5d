"""The order for a worker, sent as lines of JSON on its standard input.

The first line is the order, followed by the bytes of the bundle. Each later line is a signal to
forward. When the input ends, because the sender ended or the connection broke, the worker ends with
everything it started.
"""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

AGENT = Path(__file__).with_name("agent.py")


@dataclass(frozen=True, kw_only=True)
class Order:
    """The command for one worker.

    Attributes:
        argv: An argument list; no shell is used.
        environment: Variables to set. Values may be secret, so they are sent only by standard
            input.
        folder: Folder in which the bundle is unpacked and the command runs; "~" is the host's home.
        bundle_bytes: Size of the tar archive that follows; 0 for none.
        setup: Argument lists to run once per folder before the command.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    folder: str = "."
    bundle_bytes: int = 0
    setup: tuple[tuple[str, ...], ...] = ()

    def to_line(self) -> bytes:
        """Return the order as bytes; the bundle's bytes follow it."""
        plain = {
            "argv": self.argv,
            "environment": dict(self.environment),
            "folder": self.folder,
            "bundle_bytes": self.bundle_bytes,
            "setup": self.setup,
        }
        return json.dumps(plain).encode() + b"\n"


def signal_line(number: signal.Signals) -> bytes:
    """Return the line that makes the agent send a signal to its command."""
    return json.dumps({"signal": int(number)}).encode() + b"\n"


def bootstrap() -> tuple[str, ...]:
    """Return the command that runs an agent on a host without tpukit.

    It contains the agent's source, which is constant and needs only the standard library. To pass
    it through a shell, as ssh does, quote it with `shlex.join`.
    """
    return ("python3", "-c", AGENT.read_text(encoding="utf-8"))
