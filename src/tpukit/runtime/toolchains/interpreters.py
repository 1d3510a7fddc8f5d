"""Where on this machine a version of Python is."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_SAYS_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
_PATIENCE_S = 20.0


@cache
def find_interpreter(minor: str) -> Path | None:
    """Return an interpreter of a minor version of Python, such as "3.13", or None.

    Looked at are the running one, `python3.13` on the PATH and what pyenv installed. Each has to
    say its version: a name on the PATH may be a shim for something that is not there.
    """
    return next((path for path in _candidates(minor) if _version_of(path) == minor), None)


def _candidates(minor: str) -> Iterator[Path]:
    # Not the link in a virtual environment, which would lead to that environment's packages.
    yield Path(getattr(sys, "_base_executable", sys.executable))
    on_path = shutil.which(f"python{minor}")
    if on_path:
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    yield from sorted(pyenv.glob(f"versions/{minor}.*/bin/python{minor}"), reverse=True)


def _version_of(path: Path) -> str:
    try:
        asked = subprocess.run(
            [path, "-I", "-c", _SAYS_VERSION],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()
