"""The two passes of flash attention, each chosen by platform, and the result alone without them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ...registry.dispatch import Passes, dispatch, recomputed
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, find_implementation
from . import pallas_tpu, reference, xla

OP_NAME = "flash_attention"
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    XLA: Passes(xla.forward, xla.backward),
    REFERENCE: recomputed(reference.attention),
}
RESULTS: dict[str, Callable[..., jax.Array]] = {
    PALLAS_TPU: pallas_tpu.result,
    XLA: lambda *arrays, **options: xla.forward(*arrays, **options)[0],
    REFERENCE: reference.attention,
}


def attend_with_gradient(*arrays: Any, **choice: Any) -> jax.Array:
    """`dispatch` with a gradient, which costs nothing where nobody asks for it.

    Args:
        *arrays: q, k, v, segment ids and RoPE tables.
        **choice: The keyword arguments of `dispatch`.
    """
    forward = partial(dispatch, OP_NAME, {name: both.forward for name, both in PASSES.items()})
    backward = partial(dispatch, OP_NAME, {name: both.backward for name, both in PASSES.items()})
    given = len(arrays)

    @jax.custom_vjp
    def call(*arrays: Any) -> jax.Array:
        return dispatch(OP_NAME, RESULTS, *arrays, **choice)

    def keep(*arrays: Any) -> tuple[jax.Array, Any]:
        return forward(*arrays, **choice)

    def pull(residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
        return tuple(backward(residuals, cotangent, **choice))[:given]

    call.defvjp(keep, pull)
    return call(*arrays)


def implementation(name: str) -> Callable[..., jax.Array]:
    """One implementation as a function `f(*arrays, **options)` with its gradient."""
    find_implementation(OP_NAME, PASSES, name)

    def call(*arrays: Any, **options: Any) -> jax.Array:
        return attend_with_gradient(*arrays, implementation=name, options=options)

    return call
