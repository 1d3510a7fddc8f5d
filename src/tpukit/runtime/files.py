"""Files and folders that are whole or not there: made beside their place, then moved onto it.

Outputs that a user named are tried before the work that fills them starts. Trying is the only way
to know: permissions, a read-only disk and a full one answer differently for each user and file
system. What can always be made again lies in one cache folder; what cannot, in one state folder.
"""

import contextlib
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
from typing import IO, Any, Literal

from ..errors import TPUCacheError, TPUCheckpointError, TPUValidationError
from .interruption import undone_if_interrupted, whole_or_not_begun

PARTIAL = ".partial"
"""How the name of a file that is being written ends; it starts with a dot."""
_REMOVALS = 20
# A zip archive, and pickles of protocol 2 and later.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_NAME_KEPT = 80  # letters of the final name in the other one: a name has at most 255
Kept = Literal["compiles", "errors", "fetched", "flags", "products", "tokens", "toolchains", "xla"]
"""What is kept: compiled programs, tracebacks of unexpected errors, data fetched for the moment,
registries of flags, timed products of cuBLAS, tokens made of text, environments of other versions
of jax, and jax's own compilation cache."""


@contextmanager
def whole_file(path: Path, *, durable: bool = False, private: bool = False) -> Generator[IO[bytes]]:
    """Open a file that appears at `path` when the block ends, unless it ends by an error.

    Readers see what was there before or all that is new, never a part, and so do those who write
    the same file at the same time.

    Args:
        path: Where it appears; its folder must exist.
        durable: Whether it must outlast a power cut, which takes a wait for the disk.
        private: Whether it is for this user alone.
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
    """Make a folder, and those above it that are missing, for this user alone.

    What it holds (logs, arguments, metrics) may name things that others must not read.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path


def unguessable_folder() -> Path:
    """Make a folder for this user alone in the temporary one; whoever asks removes it."""
    return Path(tempfile.mkdtemp(prefix="tpukit-"))


def open_private(path: str | Path, flags: int) -> int:
    """Open a file as `open(opener=…)` asks; one that is made is for this user alone."""
    return os.open(path, flags, 0o600)


def refuse_shared(folder: Path) -> None:
    """Refuse a folder in which other users could place programs that would be run here.

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
    """Whether a file that starts so is a pickle, or a zip archive of them, as torch.save writes.

    Nine bytes tell: a safetensors file begins with the size of its header, which may read like a
    pickle's mark, and then has a brace.
    """
    return start.startswith(_PICKLES) and start[8:9] != b"{"


def start_of_tensors(path: Path, *, instead: str) -> bytes:
    """The first nine bytes of a file that should be safetensors.

    Args:
        path: The file.
        instead: The way out where it is a pickle, as a sentence.

    Raises:
        TPUCheckpointError: It cannot be read, or is a pickle.
    """
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise TPUCheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    if looks_pickled(start):
        raise TPUCheckpointError(
            f"{path} is a pickle, which can run code of whoever wrote it, so it is not read. "
            f"{instead}"
        )
    return start


def write_bytes(
    path: Path, content: bytes, *, durable: bool = False, private: bool = False
) -> None:
    """Write a file whole or not at all."""
    with whole_file(path, durable=durable, private=private) as file:
        file.write(content)


def write_text(path: Path, text: str, *, durable: bool = False, private: bool = False) -> None:
    """Write a text file, in UTF-8, whole or not at all."""
    write_bytes(path, text.encode(), durable=durable, private=private)


def write_json(path: Path, data: Any) -> None:
    """Write plain data as JSON, whole or not at all."""
    write_text(path, json.dumps(data) + "\n")


def write_output(path: Path, content: bytes | str) -> None:
    """Write a file that the user asked for by name.

    Raises:
        TPUValidationError: It cannot be written there.
    """
    try:
        write_bytes(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TPUValidationError(
            f"{path} cannot be written ({error.strerror}); choose another place."
        ) from None


@contextmanager
def temporary_folder(prefix: str = "", *, inside: Path | None = None) -> Generator[Path]:
    """Make a folder that is gone after the block, also where Ctrl-C ends the process."""
    with ExitStack() as stack:
        with whole_or_not_begun():  # or Ctrl-C could come when it is there and nobody knows of it
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=inside)
            folder = Path(stack.enter_context(made))
            stack.enter_context(undone_if_interrupted(lambda: _remove_folder(folder)))
        yield folder


def new_folder(path: str | Path) -> Path:
    """Return the folder that `path` names, which is not there yet or holds nothing.

    Raises:
        TPUValidationError: Something is there already.
    """
    target = Path(path).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TPUValidationError(
            f"{target} is there already and is not overwritten; name a new folder, or empty it."
        )
    return target


@contextmanager
def folder_beside(target: Path) -> Generator[Path]:
    """Make an empty folder in which the content of `target` can be made; see `finish_folder`.

    It is gone after the block, unless it was moved to its place by then. Several processes may
    make the same one, each in a folder of its own. What one leaves behind when it is killed, the
    next one on the same machine removes.
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
    """Move what `folder_beside` made to its place, instead of a folder that is there."""
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
    """Remove a folder into which a thread or a child that is being killed may still write."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)


def _wait_for_disk(folder: Path) -> None:
    """Have the disk know the names in a folder, which syncing a file does not ask of it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder(kept: Kept | None = None) -> Path:
    """The folder of one kind of thing, or the one above all; it need not exist.

    `TPUKIT_CACHE_DIR`, else `$XDG_CACHE_HOME/tpukit`, else `~/.cache/tpukit`.
    """
    if chosen := os.environ.get("TPUKIT_CACHE_DIR"):
        root = Path(chosen).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tpukit"
    return root if kept is None else root / kept


def state_folder() -> Path:
    """The folder of what must be remembered between commands; it need not exist.

    `TPUKIT_STATE_DIR`, else `$XDG_STATE_HOME/tpukit`, else `~/.local/state/tpukit`.
    """
    if chosen := os.environ.get("TPUKIT_STATE_DIR"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tpukit"


def try_output_file(path: Path) -> None:
    """Refuse a path at which no file can be written; nothing is left there.

    Raises:
        TPUValidationError: It is a folder, its folder is not there, or nothing can be written.
    """
    with _refused(path):
        if path.is_dir():
            raise TPUValidationError(f"{path} is a folder, and a file is written; name one in it.")
        if not path.parent.exists():
            raise TPUValidationError(
                f"{path} cannot be written, because there is no folder {path.parent}; make it "
                "first, or choose another place."
            )
        _write_trial(path.parent, path.name)


def try_output_folder(path: Path) -> None:
    """Refuse a path at which no folder can be made or filled; nothing is left there.

    Raises:
        TPUValidationError: It is a file or below one, or nothing can be written there.
    """
    with _refused(path):
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
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
