"""Ports on loopback that nobody uses."""

import contextlib
import random
import socket


def free_port():
    """Return a port below the kernel's ephemeral range, which no connection of a test takes.

    It is not drawn by `random`, which pytest-randomly seeds alike in every worker.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are in use")
