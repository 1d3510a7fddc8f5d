"""The agent of one host, which starts a job's process and never lets it outlive the order.

It reads an order from standard input (format: `tpukit.pods.worker.order`), asks for the files that
this host does not have, runs the command and exits with its exit code, or 128 + n if signal n ended
it. When the input ends, the command's process group is killed at once, so nothing stays on a host
after its supervisor or connection is gone.

ssh also runs this file on hosts without tpukit, so it needs only the standard library of
Python 3.8, and its text never depends on a job.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from typing import Any

DIRTY_HOST, SETUP_FAILED, NOT_STARTED = 202, 203, 204  # as in tpukit.exit_codes
SIGNALLED = 128
LOCK = "/tmp/libtpu_lockfile"  # libtpu's lock file, which a killed process leaves behind
RELEASE_S = 30.0  # time for a killed process to give the TPU back
AGENT_MARK = ".tpukit-agent"
DEVICES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
SETUP_MARK = ".tpukit-setup"
ENVIRONMENT_MARK = ".tpukit-environment"
WANTS = "@tpukit-wants "
"""Begins the line that names the files to send, by digest."""
UNUSED_S = 14 * 86400.0
_PR_SET_PDEATHSIG = 1


class SenderGone(Exception):
    """The standard input ended, so the sender is gone."""


class OrderRefused(Exception):
    """The order cannot be carried out here; the exit code tells why."""

    def __init__(self, code: int, why: str) -> None:
        self.code = code
        super().__init__(why)


class Inbox(io.RawIOBase):
    """Unbuffered standard input, so that `select` sees all unread bytes."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._left = b""
        self._archive_left = 0

    def readable(self) -> bool:
        """Return True: `read` returns the archive's bytes."""
        return True

    def next_line(self) -> bytes:
        """Wait for the next line, and return it."""
        while b"\n" not in self._left:
            self._left += self._more()
        line, _, self._left = self._left.partition(b"\n")
        return line

    def received_lines(self) -> list[bytes]:
        """Return the lines that have arrived; call it when `select` reports input."""
        self._left += self._more()
        *lines, self._left = self._left.split(b"\n")
        return lines

    def begin_archive(self, length: int) -> None:
        """Let `read` return the next `length` bytes, and then the end of file."""
        self._archive_left = length

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the archive."""
        wanted = min(len(buffer), self._archive_left)
        if wanted and not self._left:
            self._left = self._more()
        taken, self._left = self._left[:wanted], self._left[wanted:]
        buffer[: len(taken)] = taken
        self._archive_left -= len(taken)
        return len(taken)

    def _more(self) -> bytes:
        got = os.read(self.descriptor, 1 << 16)
        if not got:
            raise SenderGone
        return got


class Wakeups:
    """Signals of this process as a file that `select` can wait for."""

    def __init__(self) -> None:
        self.arriving, telling = os.pipe()
        os.set_blocking(telling, False)
        os.set_blocking(self.arriving, False)
        signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)

    def seen(self) -> set[int]:
        """Return the signals that arrived since the last call."""
        try:
            return set(os.read(self.arriving, 1024))
        except BlockingIOError:
            return set()


def main(arguments: list[str]) -> int:
    """Carry out one order, and return the exit code.

    Arguments are modules that a spare interpreter imports while it waits for the order.
    """
    inbox, wakeups = Inbox(0), Wakeups()
    spare = start_spare(arguments) if arguments else None
    running: list[subprocess.Popen[bytes]] = [] if spare is None else [spare]
    try:
        order = json.loads(inbox.next_line())
        if not order["shares_files"]:
            replace_agent(order)
        if order["environment"].get("JAX_PLATFORMS") != "cpu":
            remove_stale_lock()
            refuse_dirty_host(wait_s=RELEASE_S)
        files = receive_files(order, inbox)
        folder = prepare_folder(order, files)
        environment = {**os.environ, **order["environment"]}
        if order["python"] is not None:
            running.append(start(environment_command(order, files, folder), folder, environment))
            code = watch(running[-1], inbox, wakeups)
            if code:  # it has written why
                return code
            environment = activated(environment, folder)
        for command in setup_to_do(order, folder):
            running.append(start(command, folder, environment))
            code = watch(running[-1], inbox, wakeups)
            if code:
                raise OrderRefused(SETUP_FAILED, f"setup: {command[0]} ended with exit code {code}")
        mark_setup(order, folder)
        if spare is not None and takes_over(spare, order, folder):
            child = spare
        else:
            child = start(order["argv"], folder, environment)
            running.append(child)
        return watch(child, inbox, wakeups)
    except SenderGone:
        return SIGNALLED + signal.SIGKILL
    except OrderRefused as refused:
        sys.stderr.write(f"worker: {refused}\n")
        return refused.code
    finally:
        for process in running:
            kill_group(process)


def start(argv: list[str], folder: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command as leader of a process group that ends with this agent."""
    try:
        return subprocess.Popen(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=_lead_a_group,
        )
    except OSError as error:
        raise OrderRefused(NOT_STARTED, f"{argv[0]} cannot be started: {error.strerror}") from None


def start_spare(modules: list[str]) -> subprocess.Popen[bytes]:
    """Start an interpreter that imports a job's modules, and waits."""
    argv = [sys.executable, "-m", "tpukit.pods.worker.spare", *modules]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, preexec_fn=_lead_a_group)


def takes_over(spare: subprocess.Popen[bytes], order: dict[str, Any], folder: str) -> bool:
    """Hand the order to a spare if it is alive and the command is a Python module."""
    if order["argv"][1:2] != ["-m"] or spare.poll() is not None:
        return False
    assert spare.stdin is not None
    spare_order = {**order, "folder": folder}
    try:
        spare.stdin.write(json.dumps(spare_order).encode())
        spare.stdin.close()
    except BrokenPipeError:
        return False
    return True


def watch(child: subprocess.Popen[bytes], inbox: Inbox, wakeups: Wakeups) -> int:
    """Wait for a command, forward signals, and return its exit code as a shell counts it.

    SIGTERM goes only to the command and not to its group, because it may need its helpers to save.
    """
    while child.poll() is None:
        ready, _, _ = select.select([inbox.descriptor, wakeups.arriving], [], [])
        if inbox.descriptor in ready:
            for line in inbox.received_lines():
                child.send_signal(json.loads(line)["signal"])
        if signal.SIGTERM in wakeups.seen():
            child.send_signal(signal.SIGTERM)
    code = child.returncode
    return SIGNALLED - code if code < 0 else code


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and everything it started, including stopped processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def receive_files(order: dict[str, Any], inbox: Inbox) -> dict[str, str]:
    """Return the paths of the order's files by digest; those that are missing here are asked for.

    A file is kept below the user's home, so that it is sent to a host only once.
    """
    cache = os.path.join(os.path.expanduser(order["cache"]), "files")
    paths = {file["digest"]: file["path"] for file in order["files"]}
    sent = {file["digest"]: file["bytes"] for file in order["files"] if not file["path"]}
    if order["shares_files"]:
        return paths
    try:
        os.makedirs(cache, mode=0o700, exist_ok=True)
        remove_unused(cache)
        paths.update({digest: os.path.join(cache, digest) for digest in sent})
        missing = [digest for digest in sent if not is_kept(paths[digest])]
        sys.stderr.write(f"{WANTS}{json.dumps(missing)}\n")
        sys.stderr.flush()
        for digest in missing:
            inbox.begin_archive(sent[digest])
            store(inbox, digest, paths[digest])
    except OSError as error:
        raise OrderRefused(SETUP_FAILED, f"files cannot be stored in {cache}: {error}") from None
    return paths


def is_kept(path: str) -> bool:
    """Return whether a file is in the cache, and count this as a use of it."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def store(inbox: Inbox, digest: str, path: str) -> None:
    """Write the next file of the input to its place once all of it has arrived unchanged."""
    partial, seen = f"{path}.{os.getpid()}.partial", hashlib.sha256()
    with open(partial, "wb") as file:
        for part in iter(lambda: inbox.read(1 << 16), b""):
            seen.update(part)
            file.write(part)
    if seen.hexdigest() != digest:
        os.unlink(partial)
        raise OrderRefused(SETUP_FAILED, f"a file arrived with digest {seen.hexdigest()}")
    os.replace(partial, path)


def remove_unused(cache: str) -> None:
    """Remove files that no order has named for two weeks."""
    for name in os.listdir(cache):
        path = os.path.join(cache, name)
        with contextlib.suppress(OSError):  # another agent may have removed it
            if os.path.getmtime(path) < time.time() - UNUSED_S:
                os.unlink(path)


def prepare_folder(order: dict[str, Any], files: dict[str, str]) -> str:
    """Create the folder, and unpack the bundle in it."""
    folder = os.path.abspath(os.path.expanduser(order["folder"]))
    try:
        os.makedirs(folder, exist_ok=True)
        if order["bundle"]:
            with tarfile.open(files[order["bundle"]]) as archive:
                for entry in archive:
                    unpack(archive, entry, folder)
    except (OSError, tarfile.TarError) as error:
        raise OrderRefused(SETUP_FAILED, f"the bundle cannot be unpacked: {error}") from None
    return folder


def unpack(archive: tarfile.TarFile, entry: tarfile.TarInfo, folder: str) -> None:
    """Write a file of the bundle; bundles contain only files inside their folder.

    `extractall(filter="data")` would do, but Python has it only from 3.8.17 and 3.10.12.
    """
    path = os.path.normpath(os.path.join(folder, entry.name))
    content = archive.extractfile(entry) if entry.isreg() else None
    if content is None or not path.startswith(folder + os.sep):
        raise OrderRefused(SETUP_FAILED, f"the bundle has {entry.name}, which is outside of it")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.{os.getpid()}.partial"
    with content, open(partial, "wb") as file:
        shutil.copyfileobj(content, file)
    os.chmod(partial, entry.mode & 0o777)
    os.replace(partial, path)


def environment_command(order: dict[str, Any], files: dict[str, str], folder: str) -> list[str]:
    """Return the command that makes the job's Python environment."""
    request = {**order["python"]["request"], "cache": order["cache"]}
    for name in ("lock", "wheel", "uv"):
        request[name] = files[request[name]]
    request["result"] = os.path.join(folder, ENVIRONMENT_MARK)
    return [sys.executable, "-c", order["python"]["source"], json.dumps(request)]


def activated(environment: dict[str, str], folder: str) -> dict[str, str]:
    """Return environment variables with the job's Python environment first in PATH."""
    with open(os.path.join(folder, ENVIRONMENT_MARK), encoding="utf-8") as mark:
        made = mark.read()
    path = os.path.join(made, "bin") + os.pathsep + environment.get("PATH", os.defpath)
    return {**environment, "VIRTUAL_ENV": made, "PATH": path}


def setup_to_do(order: dict[str, Any], folder: str) -> list[list[str]]:
    """Return the setup commands, or none if they have run in this folder."""
    try:
        with open(os.path.join(folder, SETUP_MARK), encoding="utf-8") as mark:
            return [] if mark.read() == _digest(order["setup"]) else order["setup"]
    except OSError:
        return order["setup"]


def mark_setup(order: dict[str, Any], folder: str) -> None:
    """Record that the setup has run."""
    if order["setup"]:
        with open(os.path.join(folder, SETUP_MARK), "w", encoding="utf-8") as mark:
            mark.write(_digest(order["setup"]))


def remove_stale_lock(lock: str = LOCK) -> None:
    """Remove libtpu's lock file if no living process has it open."""
    if os.path.exists(lock) and not holders([lock]):
        with contextlib.suppress(OSError):
            os.unlink(lock)


def replace_agent(order: dict[str, Any]) -> None:
    """End the agent that has an earlier order for the same folder, and what it started.

    Its connection may have broken without the host noticing, so it would go on for hours.
    """
    folder = os.path.abspath(os.path.expanduser(order["folder"]))
    mark = os.path.join(folder, AGENT_MARK)
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(mark, encoding="utf-8") as file:
            earlier = json.load(file)
        if earlier["began"] == began(earlier["pid"]):
            sys.stderr.write(f"worker: ending process {earlier['pid']} of a lost connection\n")
            for child in children(earlier["pid"]):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
            os.kill(earlier["pid"], signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(mark, "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), "began": began(os.getpid())}, file)


def began(pid: int) -> str:
    """Return when a process began, in ticks since the machine's start; "" if there is none."""
    return _status(pid)[19] if _status(pid) else ""


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, each the leader of a group."""
    others = (int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*"))
    return [other for other in others if _status(other)[1:2] == [str(pid)]]


def _status(pid: int) -> list[str]:
    """Return the fields of a process's status from its state on; empty if there is no process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def refuse_dirty_host(patterns: tuple[str, ...] = DEVICES, *, wait_s: float = 0.0) -> None:
    """Refuse a host whose TPU another process uses, because the command would hang or abort.

    Args:
        patterns: Paths of the devices.
        wait_s: Time for a process that was just killed to release them.
    """
    devices = [path for pattern in patterns for path in glob.glob(pattern)]
    deadline = time.monotonic() + wait_s
    while holders(devices) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid, path in holders(devices).items():
        raise OrderRefused(
            DIRTY_HOST, f"{path} is in use by process {pid}, which does not belong to this job"
        )


def holders(paths: list[str]) -> dict[int, str]:
    """Return the processes that have one of the files open, as far as this user can see."""
    holders_by_pid: dict[int, str] = {}
    for link in glob.glob("/proc/[0-9]*/fd/*") if paths else []:
        pid = int(link.split("/")[2])
        with contextlib.suppress(OSError):
            if pid != os.getpid() and os.readlink(link) in paths:
                holders_by_pid[pid] = os.readlink(link)
    return holders_by_pid


def _digest(commands: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps(commands).encode()).hexdigest()


def _lead_a_group() -> None:
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    if sys.platform == "linux":
        # If the agent itself is killed, the kernel ends the command.
        agent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(SIGNALLED + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
