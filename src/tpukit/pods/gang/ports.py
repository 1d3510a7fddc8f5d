"""Ports for jax's coordinator: another one for each attempt.

A process of the last attempt that is still ending, or its connections, must not meet the next one.
"""

import contextlib
import random
import socket

from ...errors import TPUDistributedError

# Below the range from which Linux gives ports to outgoing connections.
LOWEST, HIGHEST = 20_000, 32_000
_TRIES = 100


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of this machine that nobody listens on.

    Raises:
        TPUDistributedError: A hundred ports were in use.
    """
    for port in random.sample(range(LOWEST, HIGHEST), _TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise TPUDistributedError(
        f"{_TRIES} ports of {address} between {LOWEST} and {HIGHEST} are all in use; end what "
        "holds them."
    )


def any_port() -> int:
    """Return a port for another machine, where nobody can try; a busy one costs an attempt."""
    return random.randrange(LOWEST, HIGHEST)
