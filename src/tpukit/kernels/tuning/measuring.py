"""Time an op on the TPU that is here."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import TPUNotAvailableError
from ...hardware.target import current_target
from ..registry.op import Blocks, Direction, KernelCase, Op
from ..timing.bench import Values

RUNS = 5


def local_chip() -> str:
    """The generation of the TPU of this process.

    Raises:
        TPUNotAvailableError: There is none.
    """
    platform = jax.default_backend()
    chip = current_target() if platform == "tpu" else None
    if chip is None:
        raise TPUNotAvailableError(
            f"measuring needs a TPU and this process has {platform} devices; run it on a TPU VM, "
            "or leave --measure out and take the static estimate."
        )
    return chip


def measured_timer(
    op: Op, case: KernelCase, *, values: Values | None = None
) -> Callable[[Blocks, Direction], float]:
    """A timer that runs the op here: the median of several runs after one that compiles.

    Args:
        op: What to run.
        case: At which shapes.
        values: Of integer arguments that decide what the kernel does; by default the op's own.

    Raises:
        TPUNotAvailableError: There is no TPU here.
    """
    local_chip()
    known = values or op.values
    given = {} if known is None else known(case)
    arrays = [
        jnp.asarray(given[place]) if place in given else _filled(argument)
        for place, argument in enumerate(case.arguments)
    ]

    def timer(blocks: Blocks, direction: Direction) -> float:
        run = jax.jit(op.bind(case, blocks=blocks, direction=direction))
        jax.block_until_ready(run(*arrays))
        return statistics.median(_seconds(run, arrays) for _ in range(RUNS))

    return timer


def _seconds(run: Callable[..., Any], arrays: list[Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run(*arrays))
    return time.perf_counter() - started


def _filled(argument: jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(argument.dtype, jnp.floating):
        return jax.random.normal(jax.random.key(0), argument.shape, argument.dtype)
    return jnp.ones(argument.shape, argument.dtype)
