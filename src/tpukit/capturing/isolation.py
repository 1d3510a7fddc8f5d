"""Start a command without a network: `python isolation.py COMMAND …`.

The command gets its own network namespace, which has only loopback. If the kernel does not allow
that, a variable makes the capture refuse connections from Python code instead.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1
REFUSE_IN_PYTHON = "TPUKIT_CAPTURE_OFFLINE"


def leave_network() -> bool:
    """Move this process into its own network namespace; return whether that was allowed."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        kinds = _NEW_NETWORK if user == 0 else _NEW_NETWORK | _NEW_USER
        if library.unshare(kinds) != 0:
            return False
        if user != 0:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{user} {user} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))
    except (OSError, AttributeError):
        return False
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def main() -> None:
    """Leave the network, then replace this process by the command."""
    command = sys.argv[1:]
    if not leave_network():
        os.environ[REFUSE_IN_PYTHON] = "1"
    with contextlib.suppress(FileNotFoundError):
        os.execvpe(command[0], command, os.environ)
    sys.exit(f"{command[0]}: command not found")


if __name__ == "__main__":
    main()
