"""Ports on loopback that nobody uses."""

import contextlib
import random
import socket


def free_port():
    """Return one below the range the kernel hands out: no test's connection takes it meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports are in use")
