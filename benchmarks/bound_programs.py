"""Four programs, each made to be bound by one thing: arithmetic, memory, other devices, the host.

A profiler that tells them apart finds the same on a CPU, a GPU and a TPU; only sizes differ.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Of a CPU, then of anything faster.
WIDTH, ELEMENTS = {"cpu": 512}, {"cpu": 4_000_000}
FAST_WIDTH, FAST_ELEMENTS = 8192, 256_000_000
DEPTH, ROUNDS = 6, 8


def programs() -> dict[str, Callable[[], object]]:
    """One step of each program by what bounds it, compiled and warm."""
    made = {"compute": compute_step(), "memory": memory_step(), "input": input_step()}
    if jax.device_count() > 1:
        made["communication"] = communication_step()
    for step in made.values():
        jax.block_until_ready(step())
    return made


def compute_step() -> Callable[[], object]:
    """A chain of matrix products."""
    width = WIDTH.get(jax.default_backend(), FAST_WIDTH)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    x = jnp.full((width, width), 1 / width, dtype)

    @jax.jit
    def products(x):
        y = x
        for _ in range(DEPTH):
            y = y @ x
        return y

    return lambda: products(x)


def memory_step() -> Callable[[], object]:
    """Sums of large arrays: twelve bytes moved for each addition."""
    elements = ELEMENTS.get(jax.default_backend(), FAST_ELEMENTS)
    x = jnp.ones((elements,), jnp.float32)

    @jax.jit
    def sums(x, y):
        return x + y

    return lambda: sums(sums(x, x), x)


def communication_step() -> Callable[[], object]:
    """Sums over all devices and exchanges among them, with next to nothing between."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    elements = jax.device_count() * (1 << 15)
    whole = NamedSharding(mesh, PartitionSpec("all"))
    x = jax.device_put(jnp.ones((jax.device_count() * elements,), jnp.float32), whole)

    def exchange(x):
        for _ in range(ROUNDS):
            x = jax.lax.psum(x, "all") / jax.device_count()
            x = jax.lax.all_to_all(x, "all", 0, 0, tiled=True)
        return x

    spec = PartitionSpec("all")
    run = jax.jit(
        jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    return lambda: run(x)


def input_step(seconds: float = 0.03) -> Callable[[], object]:
    """A small product that waits for a slow reader and a copy to the device each time."""
    weights = jnp.ones((256, 256), jnp.float32)
    batch = np.ones((256, 256), np.float32)

    def next_batch():
        time.sleep(seconds)
        return jax.device_put(batch)

    product = jax.jit(lambda w, x: w @ x)
    return lambda: product(weights, next_batch())
