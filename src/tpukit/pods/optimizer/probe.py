"""How fast each host is by itself: the same small work on its own devices, timed."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ...annotations import Device

ROUNDS = 5
WIDTH = 256


def probe_hosts(mesh: Mesh, *, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return seconds of some rounds of work for each process, or each device of a single one.

    Every process of the job must call it.
    """
    own = [
        device for device in mesh.devices.reshape(-1) if device.process_index == jax.process_index()
    ]
    timed = [[_seconds(device) for device in own] for _ in range(rounds + 1)][1:]  # one compiles
    if jax.process_count() == 1:
        return {
            f"device {device.id}": [turn[at] for turn in timed] for at, device in enumerate(own)
        }
    slowest = np.asarray([max(turn) for turn in timed], np.float32)
    every = np.asarray(multihost_utils.process_allgather(slowest))
    return {f"host {number}": [float(one) for one in row] for number, row in enumerate(every)}


def _seconds(device: Device) -> float:
    with jax.default_device(device):
        square = jnp.ones((WIDTH, WIDTH), jnp.float32)
        began = time.perf_counter()
        _work(square).block_until_ready()
        return time.perf_counter() - began


@jax.jit
def _work(square: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 8, lambda _, one: one @ square / WIDTH, square)
