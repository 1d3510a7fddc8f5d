"""Attributes of jax that are replaced while a program is captured, and put back afterwards."""

from collections.abc import Callable
from typing import Any

_undo: list[Callable[[], None]] = []
_MISSING = object()


def replace(owner: Any, name: str, value: Any) -> Any:
    """Set an attribute until `restore`, and return the value that it had."""
    own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
    before = getattr(owner, name, None)

    def undo() -> None:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    setattr(owner, name, value)
    _undo.append(undo)
    return before


def restore() -> None:
    """Put every replaced attribute back."""
    while _undo:
        _undo.pop()()
