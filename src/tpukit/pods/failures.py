"""Errors of a step on a pod, translated so that each states what to do next."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import CommunicationTimeout, PodUnavailable, TPUDistributedError, XLARuntimeError
from ..runtime.ranges import SECONDS
from ..training.debugging import explained
from .causes import Cause

T = TypeVar("T")
_PEER_GONE = ("Gloo", "Connection closed by peer", "Connection reset by peer")


@contextmanager
def pod_errors(what: str) -> Generator[None]:
    """Translate jax's errors inside the block to pod errors.

    Raises:
        PodUnavailable: Another process of the pod is gone, or its runtime cannot be reached.
        CommunicationTimeout: A collective was not completed in time.
        TPUOutOfMemoryError: The devices do not have enough memory.
        XLARuntimeError: The program failed for another reason.
    """
    try:
        with explained(what):
            yield
    except CommunicationTimeout:
        raise
    except TPUDistributedError as error:
        raise PodUnavailable(str(error), cause=Cause.PEER_LOST.value) from error
    except XLARuntimeError as error:
        text = str(error)
        if "DEADLINE_EXCEEDED" in text:
            raise CommunicationTimeout(text) from error
        if "UNAVAILABLE" in text:
            raise PodUnavailable(text, cause=Cause.UNREACHABLE.value) from error
        raise
    except ValueError as error:  # jax's CPU backend raises some Gloo errors as ValueError
        if not any(sign in str(error) for sign in _PEER_GONE):
            raise
        first = str(error).strip().splitlines()[0]
        raise PodUnavailable(
            f"{what}: another process is gone ({first}).", cause=Cause.PEER_LOST.value
        ) from error


def within(call: Callable[[], T], seconds: float | timedelta | None, *, what: str) -> T:
    """Run a call with a time limit, even if the call never returns.

    A collective that waits for a lost peer cannot be interrupted. Its thread is abandoned, so the
    process should end soon.

    Raises:
        CommunicationTimeout: The call did not return in time.
    """
    if seconds is None:
        return call()
    limit = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
    limit = SECONDS.check("timeout", limit, unit="seconds")
    outcome: dict[str, Any] = {}
    done = threading.Event()

    def run() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            outcome["error"] = error
        finally:
            done.set()

    threading.Thread(target=run, daemon=True, name=what).start()
    if not done.wait(limit):
        raise CommunicationTimeout(
            f"{what} was not completed within {limit:g} s: a pod is slow, hung or lost. Check its "
            "health, allow more time, or make the step smaller (reduce_batch_size())."
        )
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
