"""A step that was asked for: run it plainly, with a limit of time, or await it."""

from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

from ...runtime.calls import either_way
from .result import SynchronizedStep

DEFAULT_S = 300.0


class PendingStep:
    """A step that runs when its result is asked for.

    ```python
    result = pods.step_synchronized(gradients).with_timeout(300)  # in plain code
    result = await pods.step_synchronized(gradients).with_timeout(300)  # in a coroutine
    result = await pods.step_synchronized(gradients)  # within 300 s
    ```
    """

    def __init__(self, run: Callable[[float | timedelta], SynchronizedStep]) -> None:
        self._run = run

    @either_way
    def with_timeout(self, seconds: float | timedelta) -> SynchronizedStep:
        """Run it, and give up after some time.

        Raises:
            CommunicationTimeout: It was not completed in time, and no pod is known to be lost.
            PodUnavailable: So many pods are lost that none is left, or this process lost a peer.
        """
        return self._run(seconds)

    def result(self) -> SynchronizedStep:
        """Run it with the usual limit of time."""
        return self._run(DEFAULT_S)

    def __await__(self) -> Generator[Any, None, SynchronizedStep]:
        import asyncio

        return asyncio.to_thread(self._run, DEFAULT_S).__await__()
