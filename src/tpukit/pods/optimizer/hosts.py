"""Measure the speed of each host, and divide examples by it."""

import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ...annotations import Device
from ...errors import TPUValidationError

ROUNDS = 5
WIDTH = 256


def probe_hosts(mesh: Mesh, *, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return seconds per round of the same work, per process, or per device of a single process.

    Every process of the job must call this function.
    """
    own = [
        device for device in mesh.devices.reshape(-1) if device.process_index == jax.process_index()
    ]
    timed = [[_seconds(device) for device in own] for _ in range(rounds + 1)][1:]  # 1st compiles
    if jax.process_count() == 1:
        return {
            f"device {device.id}": [turn[at] for turn in timed] for at, device in enumerate(own)
        }
    slowest = np.asarray([max(turn) for turn in timed], np.float32)
    every = np.asarray(multihost_utils.process_allgather(slowest))
    return {
        f"host {number}": [float(seconds) for seconds in row] for number, row in enumerate(every)
    }


def _seconds(device: Device) -> float:
    with jax.default_device(device):
        square = jnp.ones((WIDTH, WIDTH), jnp.float32)
        began = time.perf_counter()
        _work(square).block_until_ready()
        return time.perf_counter() - began


@jax.jit
def _work(square: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 8, lambda _, product: product @ square / WIDTH, square)


def balance_examples(
    step_times_s: Mapping[str, float], examples: int, *, now: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the number of examples per host with which all hosts finish together.

    Each further example goes to the host that would finish it first, so no other division finishes
    earlier. Weight gradients by these numbers: `step_synchronized(gradients, weights=…)`.

    Args:
        step_times_s: Step time of each host with its present examples.
        examples: Number of examples to divide.
        now: Present number of examples per host; by default the same for all.

    Raises:
        TPUValidationError: A time or a number is not positive, or there are too few examples.
    """
    held = {host: 1 if now is None else now[host] for host in step_times_s}
    if any(seconds <= 0 for seconds in step_times_s.values()) or min(held.values()) <= 0:
        raise TPUValidationError("Every host needs a step time and a number of examples above 0.")
    if examples < len(held):
        raise TPUValidationError(
            f"{examples} examples are too few for {len(held)} hosts; each needs at least one."
        )
    each_s = {host: step_times_s[host] / held[host] for host in held}
    shares = dict.fromkeys(held, 1)
    left = examples - len(held)
    # Most examples are divided in proportion, the rest one by one.
    speed = sum(1 / seconds for seconds in each_s.values())
    for host, seconds in each_s.items():
        more = max(0, int(examples / (seconds * speed)) - 1)
        shares[host] += min(more, left)
        left -= min(more, left)
    for _ in range(left):
        first = min(shares, key=lambda host: (shares[host] + 1) * each_s[host])
        shares[first] += 1
    return shares
