"""A gang that tpukit starts itself: one process per host, started and ended together."""

import contextlib
import mmap
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO

from ...records.reporting import VARIABLE as PROGRESS
from ...records.reporting import WANTED, read_report
from ...runtime.long_work import read_long_work
from ..causes import Cause, Ending
from ..pod import Host
from ..providers.protocol import Command, Ended, GangEvent, Line, StepCompleted
from ..worker.order import Order, OrderFile, read_wanted, signal_line
from ..worker.spare import READY
from .transport import Transport, WorkerProcess
from .verdict import ECHOES, cause_of, judge

MEGASCALE_PORT = 8080


def process_environment(
    hosts: Sequence[Host], rank: int, command: Command, *, coordinator: str, attempt: int
) -> dict[str, str]:
    """Return the environment variables that tpukit sets for the process on `hosts[rank]`.

    Args:
        hosts: All hosts, in the order of process ids.
        rank: Process id.
        command: Has variables of its own; those that identify the process override them.
        coordinator: `host:port` of jax's coordinator on the first host.
        attempt: Number of the attempt, from 1.
    """
    variables = {
        **command.environment,
        "TPUKIT_NUM_HOSTS": str(len(hosts)),
        "TPUKIT_HOST_ID": str(rank),
        "TPUKIT_COORDINATOR": coordinator,
        "TPUKIT_HEARTBEAT_S": str(command.heartbeat_s),
        "TPUKIT_ATTEMPT": str(attempt),
        PROGRESS: WANTED,
        "PYTHONUNBUFFERED": "1",
    }
    slices = 1 + max(host.slice_index for host in hosts)
    if slices > 1:
        first = coordinator.rpartition(":")[0]
        variables |= {
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(hosts[rank].slice_index),
            "MEGASCALE_COORDINATOR_ADDRESS": f"{first}:{MEGASCALE_PORT}",
        }
    return variables


LONGEST_LINE = 1 << 16  # longer output without a line end is split
_AT_ONCE = 1 << 16
_LAST_WORDS = 300


class Member:
    """A worker on its host. No method blocks; streams are used when they are ready.

    Attributes:
        rank: Process id in the job.
        code: Exit code, once the process has ended.
        has_answered: Whether the agent has answered the order, so that its host was reached.
        last_words: Last line of its standard error.
    """

    def __init__(self, rank: int, host: Host, process: WorkerProcess) -> None:
        self.rank, self.host = rank, host
        self.has_answered = False
        self.connect(process)

    def connect(self, process: WorkerProcess) -> None:
        """Use a new process, instead of one that could not connect."""
        self.process = process
        self._offered: dict[str, OrderFile] = {}
        self.code: int | None = None
        self.last_words = ""
        self._outbox: deque[memoryview] = deque()
        self._unfinished: dict[int, bytes] = {}
        for stream in self.streams():
            os.set_blocking(stream.fileno(), False)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

    def streams(self) -> list[IO[bytes]]:
        """Its open output streams."""
        both = (self.process.stdout, self.process.stderr)
        return [stream for stream in both if stream is not None and not stream.closed]

    def send(self, part: bytes | mmap.mmap) -> None:
        """Queue bytes to send."""
        self._outbox.append(memoryview(part))

    def send_order(self, order: Order) -> None:
        """Queue an order, and offer its files."""
        self._offered, self.has_answered = order.files, order.shares_files
        self.send(order.to_line())

    def send_wanted(self, digests: Sequence[str]) -> bool:
        """Queue the files that the worker asked for; it can ask only once, before its command."""
        if self.has_answered:
            return False
        self.has_answered = True
        for digest in digests:
            with self._offered[digest].path.open("rb") as file:
                self.send(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return True

    @property
    def inbox(self) -> IO[bytes] | None:
        """Its standard input if there are bytes to send, else None."""
        stdin = self.process.stdin
        return stdin if self._outbox and stdin is not None and not stdin.closed else None

    def write_some(self) -> None:
        """Write as many bytes as the pipe accepts now."""
        stdin = self.inbox
        if stdin is None:
            return
        try:
            while self._outbox:
                part = self._outbox[0]
                sent = os.write(stdin.fileno(), part[:_AT_ONCE])
                self._outbox[0] = part[sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:  # the process has ended, and its exit code tells why
            self._outbox.clear()

    def read_lines(self, stream: IO[bytes]) -> Iterator[str]:
        """Return the new lines of a stream, and close the stream at its end."""
        number = stream.fileno()
        held = self._unfinished.pop(number, b"")
        while True:
            try:
                got = os.read(number, _AT_ONCE)
            except BlockingIOError:
                break
            except OSError:
                got = b""
            if not got:
                stream.close()
                if held:
                    yield self._text(held, stream)
                return
            *lines, held = (held + got).split(b"\n")
            while len(held) > LONGEST_LINE:
                lines.append(held[:LONGEST_LINE])
                held = held[LONGEST_LINE:]
            for line in lines:
                yield self._text(line, stream)
        self._unfinished[number] = held

    def _text(self, line: bytes, stream: IO[bytes]) -> str:
        # Progress bars overwrite their line.
        text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        if stream is self.process.stderr and text.strip():
            self.last_words = text.strip()[:_LAST_WORDS]
        return text

    def close_input(self) -> None:
        """Close its standard input, so that the agent kills everything it started and ends."""
        self._outbox.clear()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Close all streams of a process that has ended."""
        self.close_input()
        for stream in self.streams():
            stream.close()


POLL_S = 0.05  # largest delay until an exit is noticed; output is noticed at once
ECHO_S = 0.5  # time to wait for the exit that may have caused this one
RETRY_S = 2.0  # pause before a host that refused a connection is tried again
KILL_S = 2.0  # time for an agent to end its processes before it is killed


class ProcessGang:
    """Starts a worker on every host over a transport, and ends all workers when one dies.

    Args:
        hosts: Hosts in the order of process ids.
        command: The command for every host.
        transport: Starts the workers.
        attempt: Number of the attempt, from 1, passed to processes as TPUKIT_ATTEMPT.
    """

    def __init__(
        self, hosts: Sequence[Host], command: Command, transport: Transport, *, attempt: int
    ) -> None:
        self._hosts, self._command, self._transport = tuple(hosts), command, transport
        self._events: list[GangEvent] = []
        self._selector = selectors.DefaultSelector()
        self._members: list[Member] = []
        self._over = False
        self._stopped_early = ""
        self._failed_at: float | None = None
        self._stop_by: float | None = None
        self._seen_step = False
        self._is_busy = False  # with an evaluation or a save, which take longer than a step
        bundle = None if command.bundle is None else OrderFile.of(command.bundle)
        coordinator = transport.coordinator(self._hosts)
        try:
            for rank, host in enumerate(self._hosts):
                self._members.append(Member(rank, host, transport.start(host)))
        except BaseException:
            self.close()
            raise
        self._orders = [
            Order(
                argv=command.argv,
                environment=process_environment(
                    self._hosts, rank, command, coordinator=coordinator, attempt=attempt
                ),
                folder=transport.folder(host),
                bundle=bundle,
                python=command.python,
                setup=command.setup,
                shares_files=transport.shares_files,
            )
            for rank, host in enumerate(self._hosts)
        ]
        for member in self._members:
            self._begin(member)
        self._progressed_at = time.monotonic()
        self._connect_by = self._progressed_at + transport.connect_s
        self._retries: dict[int, float] = {}

    def _begin(self, member: Member) -> None:
        """Send a member its order, and listen to it."""
        member.send_order(self._orders[member.rank])
        for stream in member.streams():
            self._selector.register(stream, selectors.EVENT_READ, member)

    @property
    def hosts(self) -> Sequence[Host]:
        """Its hosts, in the order of process ids."""
        return self._hosts

    def wait(self, timeout_s: float) -> list[GangEvent]:
        """Return new events as soon as there are any; an empty list after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._events and not self._over:
            left_s = deadline - time.monotonic()
            self._poll(max(0.0, min(left_s, POLL_S)))
            if left_s <= 0:
                break
        events, self._events = self._events, []
        return events

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM so that processes save and end, and kill those that run too long."""
        if self._stop_by is None:
            for member in self._running():
                member.send(signal_line(signal.SIGTERM))
        self._stop_by = time.monotonic() + grace_s
        while not self._over:
            self._poll(POLL_S)

    def close(self) -> None:
        """End all processes at once and release resources; repeated calls do nothing."""
        self._over = True
        self._kill()
        for member in self._members:
            member.close()
        self._selector.close()

    def _running(self) -> list[Member]:
        return [member for member in self._members if member.code is None]

    def _poll(self, timeout_s: float) -> None:
        """Wait for output or an exit, then update the gang's state."""
        self._wait_for_inboxes()
        for key, _ in self._selector.select(timeout_s):
            member: Member = key.data
            if key.events & selectors.EVENT_WRITE:
                self._selector.unregister(key.fileobj)
                member.write_some()
            else:
                self._read(member, [key.fileobj])  # pyright: ignore[reportArgumentType]
        for member in self._running():
            code = member.process.poll()
            if code is not None:
                self._read(member, member.streams())
                if not self._connects_again(member, code):
                    member.code = code
        self._decide()

    def _connects_again(self, member: Member, code: int) -> bool:
        """Return whether a host that could not be reached is tried again, now or soon.

        A new host refuses connections, and its user may not exist yet, until it has booted.
        """
        now = time.monotonic()
        if (
            member.has_answered
            or code != self._transport.unreachable_code
            or now > self._connect_by
            or self._stop_by is not None
            or not self._transport.is_worth_retrying(member.last_words)
        ):
            return False
        if now >= self._retries.setdefault(member.rank, now + RETRY_S):
            del self._retries[member.rank]
            for stream in (member.process.stdin, *member.streams()):
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(stream)  # pyright: ignore[reportArgumentType]
            member.close()
            member.connect(self._transport.start(member.host))
            self._begin(member)
        return True

    def _wait_for_inboxes(self) -> None:
        registered = self._selector.get_map()
        for member in self._running():
            inbox = member.inbox
            if inbox is not None and inbox not in registered:
                self._selector.register(inbox, selectors.EVENT_WRITE, member)

    def _read(self, member: Member, streams: Sequence[object]) -> None:
        for stream in [stream for stream in member.streams() if stream in streams]:
            number = stream.fileno()
            for text in member.read_lines(stream):
                self._take(member, text)
            if stream.closed:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(number)

    def _take(self, member: Member, text: str) -> None:
        wanted = read_wanted(text)
        if wanted is not None and member.send_wanted(wanted):
            return
        work = read_long_work(text)
        if work is not None:
            self._progressed_at, self._is_busy = time.monotonic(), bool(work)
            return
        report = read_report(text)
        if report is None:
            if text != READY:
                self._events.append(Line(member.host.name, text))
            return
        self._progressed_at, self._is_busy = time.monotonic(), False
        if report.stopped:
            self._stopped_early = report.stopped
        else:
            self._seen_step = True
            self._events.append(StepCompleted(member.host.name, report.step, report.loss))

    def _decide(self) -> None:
        """End the gang if a process failed, all are done, or a time limit has passed."""
        if self._over:
            return
        now = time.monotonic()
        codes = [member.code for member in self._members if member.code is not None]
        lost = self._transport.unreachable_code
        failed = {cause_of(code, unreachable_code=lost) for code in codes} - {Cause.DONE}
        if failed and self._failed_at is None:
            self._failed_at = now
        if len(codes) == len(self._members):
            self._end(self._judged())
        elif self._stop_by is not None:
            if now > self._stop_by:
                self._end(Ending(Cause.STOPPED, evidence="killed: it did not end in time"))
        elif failed - ECHOES or (self._failed_at is not None and now > self._failed_at + ECHO_S):
            self._end(self._judged())
        elif (limit_s := self._limit_s()) is not None and now > self._progressed_at + limit_s:
            first = "" if self._seen_step else "the first "
            self._end(Ending(Cause.HUNG, evidence=f"no report of {first}step for {limit_s:g} s"))

    def _limit_s(self) -> float | None:
        is_step = self._seen_step and not self._is_busy
        return self._command.step_s if is_step else self._command.first_step_s

    def _judged(self) -> Ending:
        ending = judge(
            self._hosts,
            {member.rank: member.code for member in self._members if member.code is not None},
            last_words={member.rank: member.last_words for member in self._members},
            stopped_early=self._stopped_early,
            heartbeat_s=self._command.heartbeat_s,
            unreachable_code=self._transport.unreachable_code,
        )
        if self._stop_by is None:
            return ending
        is_in_order = ending.cause in (Cause.DONE, Cause.NOTICE)
        return Ending(Cause.STOPPED, evidence="" if is_in_order else str(ending))

    def _end(self, ending: Ending) -> None:
        self._over = True
        self._kill()
        for member in self._members:
            self._read(member, member.streams())
        self._events.append(Ended(ending))

    def _kill(self) -> None:
        """Kill every running or stopped process, and wait until all have ended."""
        for member in self._members:
            member.close_input()
        deadline = time.monotonic() + KILL_S
        for member in self._members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
