"""The order for a worker, sent as lines of JSON on its standard input.

The first line is the order. The worker answers with the digests of the files that its host does not
have yet, and gets their bytes in that order. Each later line is a signal to forward. When the input
ends, because the sender ended or the connection broke, the worker ends with everything it started.
"""

import hashlib
import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .agent import WANTS

AGENT = Path(__file__).with_name("agent.py")
ENVIRONMENT = Path(__file__).with_name("environment.py")
CACHE = "~/.cache/tpukit"
"""A host's folder for files and environments that later attempts use again."""


@dataclass(frozen=True)
class OrderFile:
    """A file that hosts need.

    Attributes:
        path: Its path on this machine.
        digest: SHA-256 of its content.
    """

    path: Path
    digest: str

    @classmethod
    def of(cls, path: Path) -> "OrderFile":
        """Read a file's digest."""
        with path.open("rb") as file:
            return cls(path, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, kw_only=True)
class PythonOrder:
    """A Python environment to make on hosts.

    Attributes:
        lock: Requirements file with exact versions and hashes.
        wheel: The wheel of tpukit.
        uv: uv's executable for Linux on x86_64, compressed by gzip.
        pythons: Supported Python versions, the preferred one first.
        packages: Number of packages in the lock.
        disk_bytes: Free space that a new environment needs.
    """

    lock: OrderFile
    wheel: OrderFile
    uv: OrderFile
    pythons: tuple[str, ...]
    packages: int
    disk_bytes: int

    @property
    def files(self) -> tuple[OrderFile, ...]:
        """Its files."""
        return self.lock, self.wheel, self.uv

    def to_dict(self) -> dict[str, Any]:
        """Return the program that makes the environment, and its request."""
        request = {
            "lock": self.lock.digest,
            "wheel": self.wheel.digest,
            "wheel_name": self.wheel.path.name,
            "uv": self.uv.digest,
            "pythons": self.pythons,
            "packages": self.packages,
            "disk_bytes": self.disk_bytes,
        }
        return {"source": ENVIRONMENT.read_text(encoding="utf-8"), "request": request}


@dataclass(frozen=True, kw_only=True)
class Order:
    """The command for one worker.

    Attributes:
        argv: An argument list; no shell is used.
        environment: Variables to set. Values may be secret, so they are sent only by standard
            input.
        folder: Folder in which the bundle is unpacked and the command runs; "~" is the host's home.
        bundle: A tar archive to unpack in the folder.
        python: Python environment in which the command runs; None uses the host's own.
        setup: Argument lists to run once per folder before the command.
        shares_files: Whether the worker can open this machine's files, so that none are sent.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    folder: str = "."
    bundle: OrderFile | None = None
    python: PythonOrder | None = None
    setup: tuple[tuple[str, ...], ...] = ()
    shares_files: bool = False

    @property
    def files(self) -> dict[str, OrderFile]:
        """The files that the worker needs, by digest."""
        all_files = (self.bundle, *(() if self.python is None else self.python.files))
        return {file.digest: file for file in all_files if file is not None}

    def to_line(self) -> bytes:
        """Return the order as bytes."""
        plain = {
            "argv": self.argv,
            "environment": dict(self.environment),
            "folder": self.folder,
            "cache": CACHE,
            "shares_files": self.shares_files,
            "files": [
                {
                    "digest": file.digest,
                    "bytes": file.path.stat().st_size,
                    "path": str(file.path.resolve()) if self.shares_files else "",
                }
                for file in self.files.values()
            ],
            "bundle": "" if self.bundle is None else self.bundle.digest,
            "python": None if self.python is None else self.python.to_dict(),
            "setup": self.setup,
        }
        return json.dumps(plain).encode() + b"\n"


def read_wanted(line: str) -> list[str] | None:
    """Return the digests that a worker asks for; None for any other line of output."""
    if not line.startswith(WANTS):
        return None
    try:
        digests: list[str] = json.loads(line[len(WANTS) :])
    except ValueError:
        return None
    return digests


def signal_line(number: signal.Signals) -> bytes:
    """Return the line that makes the agent send a signal to its command."""
    return json.dumps({"signal": int(number)}).encode() + b"\n"


def bootstrap() -> tuple[str, ...]:
    """Return the command that runs an agent on a host without tpukit.

    It contains the agent's source, which is constant and needs only the standard library. To pass
    it through a shell, as ssh does, quote it with `shlex.join`.
    """
    return ("python3", "-c", AGENT.read_text(encoding="utf-8"))
