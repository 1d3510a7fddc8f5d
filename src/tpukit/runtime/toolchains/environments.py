"""Environments of toolchains: made when first wanted, kept in the cache folder, never half-made.

An environment is made beside its place and moved to it when it is whole, so one that Ctrl-C, a
full disk or an index without the package cut short is never found. Who makes one, or uses one,
holds a lock that ends with the process: a second process waits for the first and takes what it
made, and nobody replaces an environment under a command that runs with it.

An environment that was moved works by its interpreter (`bin/python -m pip …`); the scripts beside
it still name the folder it was made in.
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
from .interpreters import find_interpreter
from .running import outside_environment, run_followed
from .toolchain import Toolchain

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
    """A toolchain's environment could not be made."""


@contextmanager
def environment(toolchain: Toolchain, *, progress: Progress = silent) -> Generator[Path]:
    """Yield the interpreter of a toolchain, its environment made where it is not there yet.

    The environment stays as it is until the block ends.

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
    """Tell whether a whole environment is there that has all that the toolchain asks for."""
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
            f"{toolchain.name} needs Python {toolchain.python}, and neither the PATH nor pyenv has "
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
            f"the environment of {toolchain.name} could not be made: "
            f"{' '.join(errors[:_LINES_SHOWN]) or f'exit code {ended.code}'}; see that pip can "
            "reach its index, that the disk has room, and that there is such a version."
        )


def _requirements(toolchain: Toolchain) -> list[str]:
    """What pip is asked for: tpukit's dependencies without its extras, and the toolchain's own."""
    dependencies = [one for one in installed_requirements("tpukit") if "extra ==" not in one]
    return [*dependencies, *toolchain.requirements]


def _short(line: str) -> str:
    """A line of pip's without addresses and long lists."""
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
