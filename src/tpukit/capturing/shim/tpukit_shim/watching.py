"""Observe a captured program's written files and connections through Python's audit events.

If the parent gave the program its own network namespace, the program is offline anyway. Otherwise
these events stop connections that Python code opens.
"""

import os
import socket
import sys
from typing import Any

SETTINGS_VARIABLE = "TPUKIT_CAPTURE"
OFFLINE_VARIABLE = "TPUKIT_CAPTURE_OFFLINE"
written: dict[str, None] = {}
refused: dict[str, None] = {}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
_QUIET = ("/dev/", "/proc/")


def watch_process() -> None:
    """Start to observe this process; an audit hook stays until the process ends."""
    folder = os.path.dirname(os.environ[SETTINGS_VARIABLE])
    offline = os.environ.get(OFFLINE_VARIABLE) == "1"

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[2] and args[2] & _WRITES:
            path = os.path.abspath(args[0])
            if not path.startswith((folder, *_QUIET)) and "__pycache__" not in path:
                written[path] = None
        elif event == "socket.connect" and offline:
            _refuse_outside(args[0], args[1])

    sys.addaudithook(audit)


def _refuse_outside(connection: Any, address: Any) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    host = str(address[0])
    if host in ("localhost", "::1", "") or host.startswith("127."):
        return
    refused[f"{host}:{address[1]}"] = None
    raise PermissionError(f"a captured program is offline, but asked for {host}; see --network.")
