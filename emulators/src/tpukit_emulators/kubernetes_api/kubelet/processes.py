"""Processes of containers: one thread reads what all of them print and sees them end.

Every process leads a group of its own, and a group ends as a whole, as a container does. Should
this process itself be killed, a small guard beside it ends all groups.
"""

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

_CHUNK = 1 << 16
_SIGNALLED = 128

# Reads "+group" and "-group" lines; when they end, so does every group that is left.
_GUARD = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


@dataclass(eq=False)
class Process:
    """A process that was started.

    Attributes:
        log: Its output, one line each: time, stream, F and the text, as container runtimes write.
            Open from the start, since its folder may go before it is read.
        end: A descriptor of the process that is readable once it has ended. Opened before anyone
            can have reaped it, when its number would mean nothing or another.
        status: How it ended, 128 + n for signal n; None while it runs.
    """

    popen: subprocess.Popen[bytes]
    log: IO[bytes]
    end: int
    on_exit: Callable[["Process"], None]
    status: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # of `status` and `end`

    def ask_to_end(self) -> None:
        """Send SIGTERM to the program alone, as a container runtime does; it is not reaped here."""
        with self.lock, suppress(ProcessLookupError):
            if self.status is None:
                signal.pidfd_send_signal(self.end, signal.SIGTERM)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all of its group; one that has ended is no error."""
        if self.status is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)


class _Follower:
    """What the thread keeps of a process."""

    def __init__(self, process: Process) -> None:
        assert process.popen.stdout is not None
        self.process = process
        self.output = process.popen.stdout.fileno()
        os.set_blocking(self.output, False)
        self._rest = b""

    def read(self) -> bool:
        """Copy what was printed to the log; return whether there may be more later."""
        while True:
            try:
                part = os.read(self.output, _CHUNK)
            except BlockingIOError:
                return True
            if not part:
                return False
            *lines, self._rest = (self._rest + part).split(b"\n")
            self._write(lines)

    def close(self) -> None:
        """Copy the rest and let go."""
        self.read()
        if self._rest:
            self._write([self._rest])
        self.process.log.close()
        os.close(self.process.end)
        assert self.process.popen.stdout is not None
        self.process.popen.stdout.close()

    def _write(self, lines: Sequence[bytes]) -> None:
        if lines:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()
            self.process.log.write(b"".join(b"%s stdout F %s\n" % (now, line) for line in lines))


class Processes:
    """Starts processes and follows them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._new: list[Process] = []
        self._lock = threading.Lock()
        self._followers: set[_Follower] = set()
        self._guard = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _GUARD],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._open = True
        self._thread = threading.Thread(target=self._run, name="emulated-kubelets", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """How many processes run."""
        return len(self._followers) + len(self._new)

    def start(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        on_exit: Callable[[Process], None],
    ) -> Process:
        """Start a process in a group of its own; `on_exit` is called in the thread.

        Raises:
            OSError: There is no such program.
        """
        output = log.open("ab", buffering=0)
        try:
            popen = subprocess.Popen(
                argv,
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException:
            output.close()
            raise
        self._tell_guard(f"+{popen.pid}\n")
        process = Process(popen, output, os.pidfd_open(popen.pid), on_exit)
        with self._lock:
            self._new.append(process)
        os.write(self._wake_write, b"x")
        return process

    def close(self) -> None:
        """End every process, and the thread."""
        self._open = False
        os.write(self._wake_write, b"x")
        self._thread.join()
        self._take_new()
        for follower in self._followers:
            follower.process.kill()
            follower.process.popen.wait()
            follower.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with self._lock:
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()

    def _run(self) -> None:
        while self._open:
            for key, _ in self._selector.select():
                follower: _Follower | None = key.data
                if follower is None:
                    os.read(self._wake_read, _CHUNK)
                    self._take_new()
                elif follower not in self._followers:
                    continue  # it ended a moment ago
                elif key.fd == follower.process.end:
                    self._end(follower)
                elif not follower.read():
                    self._selector.unregister(follower.output)

    def _take_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for process in new:
            follower = _Follower(process)
            self._followers.add(follower)
            self._selector.register(follower.output, selectors.EVENT_READ, follower)
            self._selector.register(process.end, selectors.EVENT_READ, follower)

    def _end(self, follower: _Follower) -> None:
        process = follower.process
        # Before it is reaped, so that its group's number cannot be another's yet.
        process.kill()
        code = process.popen.wait()
        self._tell_guard(f"-{process.popen.pid}\n")
        self._followers.discard(follower)
        for descriptor in (follower.output, process.end):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
        with process.lock:
            process.status = code if code >= 0 else _SIGNALLED - code
            follower.close()
        process.on_exit(process)
