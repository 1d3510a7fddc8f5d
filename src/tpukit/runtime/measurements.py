"""What is being measured in this process, for rooms that stand above whoever measures it.

A monitor publishes itself while it runs; a configuration asks for its figures.
"""

import threading
from collections.abc import Callable, Mapping

from ..hardware.missing import Measured

Provider = Callable[[], Mapping[str, Measured]]
_LOCK = threading.Lock()
_PROVIDERS: list[Provider] = []


def publish(provider: Provider) -> None:
    """Offer measurements until they are withdrawn; the newest offer is the one that is asked."""
    with _LOCK:
        _PROVIDERS.append(provider)


def withdraw(provider: Provider) -> None:
    """Offer them no longer."""
    with _LOCK:
        if provider in _PROVIDERS:
            _PROVIDERS.remove(provider)


def current_measurements() -> Mapping[str, Measured] | None:
    """Return what is measured now; None while nobody measures."""
    with _LOCK:
        provider = _PROVIDERS[-1] if _PROVIDERS else None
    return None if provider is None else provider()
