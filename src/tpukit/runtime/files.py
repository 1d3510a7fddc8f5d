"""Write files and folders atomically: create them beside their place, then rename them.

Output paths that a user names are tested before the work starts. Testing is the only reliable way,
because permissions, read-only disks and full disks differ by user and file system. Files that can
be created again are in one cache folder, and all others in one state folder.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Literal

from ..errors import TPUCacheError, TPUCheckpointError, TPUValidationError
from .interruption import undone_if_interrupted, whole_or_not_begun

PARTIAL = ".partial"
"""How the name of a file that is being written ends; it starts with a dot."""
_REMOVALS = 20
# A zip archive, and pickles of protocol 2 and later.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_NAME_KEPT = 80  # letters of the final name in the other one: a name has at most 255
Kept = Literal[
    "compiles",
    "errors",
    "fetched",
    "flags",
    "locks",
    "products",
    "runs",
    "tokens",
    "toolchains",
    "xla",
]
"""What is kept: compiled programs, tracebacks of unexpected errors, data fetched for the moment,
registries of flags, locked requirements and the uv of hosts, timed matmuls of cuBLAS, copies of
runs in object stores, tokens made of text, environments of other versions of jax, and jax's own
compilation cache."""


@contextmanager
def whole_file(path: Path, *, durable: bool = False, private: bool = False) -> Generator[IO[bytes]]:
    """Open a file that appears at `path` when the block ends without an error.

    Readers and concurrent writers see the old file or the complete new one, never a part.

    Args:
        path: The final path; its folder must exist.
        durable: Whether it must survive a power cut, which means waiting for the disk.
        private: Whether only this user may read it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as file:  # a device or a pipe, which has to stay what it is
            yield file
        return
    partial = path.with_name(f".{path.name[:_NAME_KEPT]}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        opener = open_private if private else None
        with undone_if_interrupted(partial.unlink), open(partial, "xb", opener=opener) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:  # Ctrl-C and a full disk alike: leave nothing behind
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        _wait_for_disk(path.parent)


def private_folder(path: Path) -> Path:
    """Create a folder and its missing parents, accessible to this user only.

    Its contents (logs, arguments, metrics) may contain text that others must not read.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path


def unguessable_folder() -> Path:
    """Create a private temporary folder; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix="tpukit-"))


def open_private(path: str | Path, flags: int) -> int:
    """Opener for `open(opener=…)`: a new file is accessible to this user only."""
    return os.open(path, flags, 0o600)


def refuse_shared(folder: Path) -> None:
    """Refuse a folder in which other users could place programs that tpukit would run.

    Raises:
        TPUCacheError: Others own it, or may write to it.
    """
    try:
        found = folder.stat()
    except OSError:
        return  # it is not there, or nothing can be read from it
    way_out = "or set TPUKIT_CACHE_DIR to a folder of your own"
    if found.st_uid not in (0, os.getuid()):
        raise TPUCacheError(
            f"The cache folder {folder} belongs to another user (uid {found.st_uid}), who could "
            f"place programs there that would run as you; expected your own. Remove it, {way_out}."
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise TPUCacheError(
            f"The cache folder {folder} may be written by other users (mode "
            f"{stat.S_IMODE(found.st_mode):o}), who could place programs there that would run as "
            f"you. Run chmod go-w {folder}, {way_out}."
        )


def looks_pickled(start: bytes) -> bool:
    """Whether the first bytes are those of a pickle, or of a zip archive as torch.save writes.

    Nine bytes are enough: a safetensors file begins with the size of its header, which may look
    like a pickle's first bytes, and then has a brace.
    """
    return start.startswith(_PICKLES) and start[8:9] != b"{"


def start_of_tensors(path: Path, *, instead: str) -> bytes:
    """Return the first nine bytes of a file that should be safetensors.

    Args:
        path: The file.
        instead: A sentence with the alternative, for a file that is a pickle.

    Raises:
        TPUCheckpointError: The file cannot be read, or is a pickle.
    """
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise TPUCheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    if looks_pickled(start):
        raise TPUCheckpointError(
            f"{path} is a pickle, which can run code of its author, so it is not read. {instead}"
        )
    return start


def write_bytes(
    path: Path, content: bytes, *, durable: bool = False, private: bool = False
) -> None:
    """Write a file atomically."""
    with whole_file(path, durable=durable, private=private) as file:
        file.write(content)


def write_text(path: Path, text: str, *, durable: bool = False, private: bool = False) -> None:
    """Write a UTF-8 text file atomically."""
    write_bytes(path, text.encode(), durable=durable, private=private)


def write_json(path: Path, data: object) -> None:
    """Write plain data as JSON, atomically."""
    write_text(path, json.dumps(data) + "\n")


def write_output(path: Path, content: bytes | str) -> None:
    """Write an output file that the user named.

    Raises:
        TPUValidationError: The file cannot be written.
    """
    try:
        write_bytes(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TPUValidationError(
            f"{path} cannot be written ({error.strerror}); choose another place."
        ) from None


@contextmanager
def temporary_folder(prefix: str = "", *, inside: Path | None = None) -> Generator[Path]:
    """Create a folder that is removed after the block, also when Ctrl-C ends the process."""
    with ExitStack() as stack:
        with whole_or_not_begun():  # or Ctrl-C could come when it is there and nobody knows of it
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=inside)
            folder = Path(stack.enter_context(made))
            stack.enter_context(undone_if_interrupted(lambda: _remove_folder(folder)))
        yield folder


def new_folder(path: str | Path) -> Path:
    """Return the folder `path`, which must not exist or must be empty.

    Raises:
        TPUValidationError: The path exists and is not an empty folder.
    """
    target = Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TPUValidationError(
            f"{target} exists already and is not overwritten; name a new folder, or empty it."
        )
    return target


@contextmanager
def folder_beside(target: Path) -> Generator[Path]:
    """Create an empty folder in which the content of `target` is prepared; see `finish_folder`.

    The folder is removed after the block unless it was moved to its place. Several processes may
    prepare the same target, each in its own folder. Remains of a killed process are removed by the
    next one on the same machine.
    """
    import psutil

    mark = f".{target.name[:_NAME_KEPT]}{PARTIAL}-{socket.gethostname()}-"
    target.parent.mkdir(parents=True, exist_ok=True)
    for entry in target.parent.iterdir():
        pid = entry.name.removeprefix(mark).split("-")[0]
        if entry.name.startswith(mark) and pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(entry, ignore_errors=True)
    made = target.with_name(f"{mark}{os.getpid()}-{secrets.token_hex(4)}")
    made.mkdir()
    try:
        with undone_if_interrupted(lambda: _remove_folder(made)):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def finish_folder(made: Path, target: Path) -> None:
    """Move a folder of `folder_beside` to its place, replacing an existing one."""
    if not target.exists():
        made.rename(target)
        return
    old = made.with_name(f"{made.name}-old")
    target.rename(old)
    try:
        made.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _remove_folder(folder: Path) -> None:
    """Remove a folder into which a dying thread or child may still write."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)


def _wait_for_disk(folder: Path) -> None:
    """Sync a folder's own entries to disk, which syncing its files does not do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder(kept: Kept | None = None) -> Path:
    """Return the cache folder for one kind of file, or its root; it need not exist.

    The root is `TPUKIT_CACHE_DIR`, else `$XDG_CACHE_HOME/tpukit`, else `~/.cache/tpukit`.
    """
    if chosen := os.environ.get("TPUKIT_CACHE_DIR"):
        root = Path(chosen).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tpukit"
    return root if kept is None else root / kept


def state_folder() -> Path:
    """Return the folder for state that persists between commands; it need not exist.

    It is `TPUKIT_STATE_DIR`, else `$XDG_STATE_HOME/tpukit`, else `~/.local/state/tpukit`.
    """
    if chosen := os.environ.get("TPUKIT_STATE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tpukit"


def try_output_file(path: Path) -> None:
    """Raise if no file can be written at a path; leave nothing there.

    Raises:
        TPUValidationError: It is a folder, its folder is not there, or nothing can be written.
    """
    with _refused(path):
        if path.is_dir():
            raise TPUValidationError(f"{path} is a folder, but a file is expected; name one in it.")
        if not path.parent.exists():
            raise TPUValidationError(
                f"{path} cannot be written, because there is no folder {path.parent}; make it "
                "first, or choose another place."
            )
        _write_trial(path.parent, path.name)


def try_output_folder(path: Path) -> None:
    """Raise if no folder can be created or filled at a path; leave nothing there.

    Raises:
        TPUValidationError: It is a file or below one, or nothing can be written there.
    """
    with _refused(path):
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise TPUValidationError(
                f"{path} cannot be a folder, because {there} is a file; choose another place."
            )
        _write_trial(there, path.name)


def _write_trial(folder: Path, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / name).lstat()  # refuses a name that is too long
    trial = folder / f".{secrets.token_hex(4)}{PARTIAL}"
    try:
        trial.write_bytes(b"a full disk makes files, and refuses what is in them")
    finally:
        trial.unlink(missing_ok=True)


@contextmanager
def _refused(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise TPUValidationError(
            f"{path} cannot be written ({error.strerror}); choose another place."
        ) from None


PASSING_ERRORS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
        *(errno.EHOSTDOWN, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    }
)
"""Errors of a place that is right. A missing permission or folder is not among them."""
