"""One process of a gang: what is still to be sent to it, and the lines that come from it."""

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from typing import IO

from ..pod import Host
from .transport import WorkerProcess

LONGEST_LINE = 1 << 16  # of a program that never ends its line; the rest is another one
_AT_ONCE = 1 << 16
_LAST_WORDS = 300


class Member:
    """A worker on its host. Nothing here waits: streams are read and written when they are ready.

    Attributes:
        rank: Its process id in the job.
        code: Its exit code once it has been seen to end.
        last_words: The last line of its errors.
    """

    def __init__(self, rank: int, host: Host, process: WorkerProcess) -> None:
        self.rank, self.host, self.process = rank, host, process
        self.code: int | None = None
        self.last_words = ""
        self._outbox: deque[memoryview] = deque()
        self._unfinished: dict[int, bytes] = {}
        for stream in self.streams():
            os.set_blocking(stream.fileno(), False)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

    def streams(self) -> list[IO[bytes]]:
        """Its standard output and errors, as far as they are open."""
        both = (self.process.stdout, self.process.stderr)
        return [stream for stream in both if stream is not None and not stream.closed]

    def send(self, *parts: bytes) -> None:
        """Put something behind what is still to be sent."""
        self._outbox.extend(memoryview(part) for part in parts if part)

    @property
    def inbox(self) -> IO[bytes] | None:
        """Its standard input while something is to be written to it."""
        stdin = self.process.stdin
        return stdin if self._outbox and stdin is not None and not stdin.closed else None

    def write_some(self) -> None:
        """Write as much as it takes now."""
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
        except OSError:  # it has ended, and its exit code says why
            self._outbox.clear()

    def read_lines(self, stream: IO[bytes]) -> Iterator[str]:
        """Return the lines that have come on a stream; the stream is closed at its end."""
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
            *whole, held = (held + got).split(b"\n")
            while len(held) > LONGEST_LINE:
                whole.append(held[:LONGEST_LINE])
                held = held[LONGEST_LINE:]
            for line in whole:
                yield self._text(line, stream)
        self._unfinished[number] = held

    def _text(self, line: bytes, stream: IO[bytes]) -> str:
        # Progress bars write one line over the other.
        text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        if stream is self.process.stderr and text.strip():
            self.last_words = text.strip()[:_LAST_WORDS]
        return text

    def let_go(self) -> None:
        """Close its standard input: the agent kills all it started, and ends."""
        self._outbox.clear()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def close(self) -> None:
        """Close every stream; the process must have ended."""
        self.let_go()
        for stream in self.streams():
            stream.close()
