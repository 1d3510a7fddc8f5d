"""Environments of toolchains, created on first use in the cache folder.

An environment is created beside its place and renamed when it is complete, so one that Ctrl-C, a
full disk or a missing package cut short is never used. A process that creates or uses one holds a
lock that ends with the process. A second process waits for the first and uses its environment, and
no environment is replaced while a command runs with it.

A moved environment works through its interpreter (`bin/python -m pip …`), but the scripts beside it
still name the folder in which it was created.
"""

import fcntl
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ...errors import TPUNotAvailableError
from ..files import cache_folder, finish_folder, folder_beside, private_folder, write_json
from ..progress import Progress, silent
from ..versions import installed_requirements
from .running import outside_environment, run_followed
from .toolchain import Toolchain, find_interpreter

_RECORD = "toolchain.json"
_TOLD_OF_PIP = ("Downloading ", "Building ", "Installing collected")
_LINES_SHOWN = 6
_PIP = (
    "-m",
    "pip",
    "install",
    "--no-input",
    "--progress-bar",
    "off",
    "--disable-pip-version-check",
)


class ToolchainError(TPUNotAvailableError):
    """A toolchain's environment could not be created."""


@contextmanager
def environment(toolchain: Toolchain, *, progress: Progress = silent) -> Generator[Path]:
    """Yield the interpreter of a toolchain, creating its environment if necessary.

    The environment stays unchanged until the block ends.

    Raises:
        ToolchainError: There is no such Python here, or pip cannot install the packages.
    """
    if toolchain.is_running:
        yield Path(sys.executable)
        return
    place = _place(toolchain)
    while True:
        with _lock(place, fcntl.LOCK_SH, progress):
            if is_made(toolchain):
                yield _python_in(place)
                return
        with _lock(place, fcntl.LOCK_EX, progress):
            if not is_made(toolchain):  # by whoever held the lock before
                _make(toolchain, place, progress)


def is_made(toolchain: Toolchain) -> bool:
    """Return whether a complete environment exists that meets the toolchain's requirements."""
    place = _place(toolchain)
    try:
        record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
        made_of = set(record["requirements"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    # Python itself may have been removed or replaced since.
    return made_of >= set(_requirements(toolchain)) and _python_in(place).exists()


def _make(toolchain: Toolchain, place: Path, progress: Progress) -> None:
    base = find_interpreter(toolchain.python)
    if base is None:
        raise ToolchainError(
            f"{toolchain.name} needs Python {toolchain.python}, but neither the PATH nor pyenv has "
            f"it; install it (pyenv install {toolchain.python}), or name another toolchain."
        )
    wanted = _requirements(toolchain)
    progress(f"{toolchain.name}: making an environment in {place}; it takes 1 to 2 GB")
    with folder_beside(place) as made:
        _run(toolchain, [base, "-m", "venv", made], progress)
        _run(toolchain, [_python_in(made), *_PIP, *wanted], progress)
        write_json(made / _RECORD, {"name": toolchain.name, "requirements": wanted})
        finish_folder(made, place)
    progress(f"{toolchain.name}: made")


def _run(toolchain: Toolchain, command: list[str | Path], progress: Progress) -> None:
    def tell(line: str) -> None:
        if line.strip().startswith(_TOLD_OF_PIP):
            progress(f"{toolchain.name}: {_short(line)}")

    ended = run_followed(command, environment=outside_environment(), follow="output", progress=tell)
    if ended.code:
        said = [line for line in (ended.output + ended.errors).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said[-_LINES_SHOWN:]
        raise ToolchainError(
            f"the environment of {toolchain.name} could not be created: "
            f"{' '.join(errors[:_LINES_SHOWN]) or f'exit code {ended.code}'}; see that pip can "
            "reach its index, that the disk has room, and that there is such a version."
        )


def _requirements(toolchain: Toolchain) -> list[str]:
    """Return pip's requirements: tpukit's dependencies without extras, and the toolchain's own."""
    dependencies = [line for line in installed_requirements("tpukit") if "extra ==" not in line]
    return [*dependencies, *toolchain.requirements]


def _short(line: str) -> str:
    """Return a line of pip's output without addresses and long lists."""
    words = line.split()
    if words[0] == "Downloading":
        return " ".join(["downloading", words[1].rsplit("/", 1)[-1], *words[2:]])
    if words[0] == "Installing":
        return f"installing {len(words) - 3} packages"
    return line.strip().lower()


def _place(toolchain: Toolchain) -> Path:
    return cache_folder("toolchains") / toolchain.folder_name


def _python_in(folder: Path) -> Path:
    return folder / "bin" / "python"


@contextmanager
def _lock(place: Path, kind: int, progress: Progress) -> Generator[None]:
    private_folder(place.parent)
    # Children do not inherit it, so that nothing left behind can hold it.
    descriptor = os.open(place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"{place.name}: waiting for another process that makes or uses it")
            fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)
