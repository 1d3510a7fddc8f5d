"""A gang of our own processes: one a host, started together, ended together."""

import contextlib
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence

from ...records.reporting import read_report
from ..causes import Cause, Ending
from ..pod import Host
from ..providers.protocol import Command, Ended, GangEvent, Line, StepCompleted
from ..worker.order import Order, signal_line
from ..worker.spare import READY
from .environment import process_environment
from .member import Member
from .transport import Transport
from .verdict import ECHOES, cause_of, judge

POLL_S = 0.05  # how late an exit is seen at most; streams wake it up at once
ECHO_S = 0.5  # how long an exit that may follow from another one waits for that one
KILL_S = 2.0  # for an agent to end what it started; then it is killed itself


class ProcessGang:
    """Starts a worker on every host over a transport, and ends all when one dies.

    Args:
        hosts: In the order of process ids.
        command: What each of them runs.
        transport: How workers are started.
        attempt: From 1; processes find it in TPUKIT_ATTEMPT.
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
        bundle = b"" if command.bundle is None else command.bundle.read_bytes()
        coordinator = transport.coordinator(self._hosts)
        try:
            for rank, host in enumerate(self._hosts):
                self._members.append(Member(rank, host, transport.start(host)))
        except BaseException:
            self.close()
            raise
        for member in self._members:
            order = Order(
                argv=command.argv,
                environment=process_environment(
                    self._hosts, member.rank, command, coordinator=coordinator, attempt=attempt
                ),
                folder=transport.folder(member.host),
                bundle_bytes=len(bundle),
                setup=command.setup,
            )
            member.send(order.to_line(), bundle)
            for stream in member.streams():
                self._selector.register(stream, selectors.EVENT_READ, member)
        self._progressed_at = time.monotonic()

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts it runs on, in the order of process ids."""
        return self._hosts

    def wait(self, timeout_s: float) -> list[GangEvent]:
        """Return what happened, as soon as something has; nothing after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._events and not self._over:
            left_s = deadline - time.monotonic()
            self._look(max(0.0, min(left_s, POLL_S)))
            if left_s <= 0:
                break
        events, self._events = self._events, []
        return events

    def stop(self, grace_s: float) -> None:
        """Tell all processes to save and end (SIGTERM), and kill those that have not by then."""
        if self._stop_by is None:
            for member in self._running():
                member.send(signal_line(signal.SIGTERM))
        self._stop_by = time.monotonic() + grace_s
        while not self._over:
            self._look(POLL_S)

    def close(self) -> None:
        """End everything at once and release it; may be called again."""
        self._over = True
        self._kill()
        for member in self._members:
            member.close()
        self._selector.close()

    def _running(self) -> list[Member]:
        return [member for member in self._members if member.code is None]

    def _look(self, timeout_s: float) -> None:
        """Wait for output or an exit, and decide what follows."""
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
                member.code = code
        self._decide()

    def _wait_for_inboxes(self) -> None:
        registered = self._selector.get_map()
        for member in self._running():
            inbox = member.inbox
            if inbox is not None and inbox not in registered:
                self._selector.register(inbox, selectors.EVENT_WRITE, member)

    def _read(self, member: Member, streams: Sequence[object]) -> None:
        for stream in [one for one in member.streams() if one in streams]:
            number = stream.fileno()
            for text in member.read_lines(stream):
                self._take(member, text)
            if stream.closed:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(number)

    def _take(self, member: Member, text: str) -> None:
        report = read_report(text)
        if report is None:
            if text != READY:
                self._events.append(Line(member.host.name, text))
            return
        self._progressed_at = time.monotonic()
        if report.stopped:
            self._stopped_early = report.stopped
        else:
            self._seen_step = True
            self._events.append(StepCompleted(member.host.name, report.step, report.loss))

    def _decide(self) -> None:
        """End the gang where a process failed, all are done, or it has taken too long."""
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
        return self._command.step_s if self._seen_step else self._command.first_step_s

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
        told = ending.cause in (Cause.DONE, Cause.NOTICE)
        return Ending(Cause.STOPPED, evidence="" if told else str(ending))

    def _end(self, ending: Ending) -> None:
        self._over = True
        self._kill()
        for member in self._members:
            self._read(member, member.streams())
        self._events.append(Ended(ending))

    def _kill(self) -> None:
        """End every process that still runs, also one that is stopped; returns when all have."""
        for member in self._members:
            member.let_go()
        deadline = time.monotonic() + KILL_S
        for member in self._members:
            try:
                member.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
