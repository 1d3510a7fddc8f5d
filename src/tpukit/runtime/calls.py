"""Functions that can be called in plain code, `f(x)`, and awaited in a coroutine, `await f(x)`.

In a coroutine a call returns an awaitable and the work runs in a thread, so that the event loop is
not blocked. Everywhere else the call returns the result.
"""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Frames of their own inside a function (comprehensions, until Python 3.12).
_INNER = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})


def either_way(call: Callable[P, T]) -> Callable[P, T]:
    """Decorate a blocking function so that it can be awaited too.

    Type checkers see the plain form; in a coroutine the result is awaited.
    """

    @functools.wraps(call)
    def called(*arguments: P.args, **keywords: P.kwargs) -> T:
        if _is_coroutine(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]  the documented way to a caller
            return _in_thread(call, arguments, keywords)  # pyright: ignore[reportReturnType]  awaited there
        return call(*arguments, **keywords)

    return called


def _is_coroutine(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name in _INNER:
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_flags & _COROUTINE)


def _in_thread(
    call: Callable[..., T], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Coroutine[Any, Any, T]:
    return asyncio.to_thread(call, *arguments, **keywords)
