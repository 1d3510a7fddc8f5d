"""Live changes as server-sent events; the files are checked once for all viewers."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

from .answers import encoded
from .library import POLL_S

BEAT_S = 10.0
RECONNECT_MS = 2000
_BEAT = b"event: beat\ndata: {}\n\n"

Look = Callable[[], Mapping[str, bytes]]


class Pulse:
    """Checks for changes at intervals while there are viewers, and sends them to all viewers.

    Args:
        look: Returns JSON by name. Called in a thread.
        every_s: Seconds between two checks.
        beat_s: Seconds without a change after which a viewer gets a heartbeat.

    Attributes:
        viewers: Number of viewers.
        looks: Number of checks.
    """

    def __init__(self, look: Look, *, every_s: float = POLL_S, beat_s: float = BEAT_S) -> None:
        self._look, self._every_s, self._beat_s = look, every_s, beat_s
        self._seen: dict[str, bytes] = {}
        self._change = b""
        self._number = 0
        self._told = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.viewers = 0
        self.looks = 0

    async def follow(self) -> AsyncGenerator[bytes]:
        """Yield messages for one viewer: all runs first, then changes and heartbeats.

        A viewer that missed a change gets all runs again.
        """
        self.viewers += 1
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._go_on_looking())
                await self._update()
            yield f"retry: {RECONNECT_MS}\n\n".encode()
            number, changed = self._number, self._told
            yield self._everything()
            while True:
                try:
                    await asyncio.wait_for(changed.wait(), self._beat_s)
                except TimeoutError:
                    yield _BEAT
                    continue
                missed = self._number - number - 1
                number, changed = self._number, self._told
                yield self._everything() if missed else self._change
        finally:
            self.viewers -= 1

    async def _go_on_looking(self) -> None:
        while self.viewers:
            await asyncio.sleep(self._every_s)
            await self._update()

    async def _update(self) -> None:
        seen = dict(await asyncio.to_thread(self._look))
        self.looks += 1
        changed = [value for name, value in seen.items() if self._seen.get(name) != value]
        gone = [name for name in self._seen if name not in seen]
        self._seen = seen
        if changed or gone:
            self._number += 1
            self._change = self._message(changed, gone, whole=False)
            before, self._told = self._told, asyncio.Event()
            before.set()

    def _everything(self) -> bytes:
        return self._message(self._seen.values(), [], whole=True)

    def _message(self, runs: Iterable[bytes], gone: list[str], *, whole: bool) -> bytes:
        rest = b',"gone":%s,"whole":%s}' % (encoded(gone), encoded(whole))
        return b'id: %d\nevent: runs\ndata: {"runs":[%s]%s\n\n' % (
            self._number,
            b",".join(runs),
            rest,
        )
