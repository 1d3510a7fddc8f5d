"""The two passes of flash attention, each chosen by platform, and the result alone without them."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ...partition.splits import Splits
from ...registry.gradient import Passes, dispatch_with_gradient, recomputed
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, find_implementation
from . import pallas_tpu, reference, xla
from .problem import Residuals

OP_NAME = "flash_attention"
PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward, pallas_tpu.result),
    XLA: Passes(xla.forward, xla.backward),
    REFERENCE: recomputed(reference.attention),
}
_ARGUMENTS = (
    *("b q h d", "b k h d", "b k h v"),
    *(("b q", "b k"), ("b p half", "b p half"), "b h q k", "h"),
)
SPLITS = Splits(
    free="b h",
    arguments=_ARGUMENTS,
    shared="h",
    result="b q h v",
    residuals=(*_ARGUMENTS, "b q h v", "b h q"),
)


def attend_with_gradient(*arrays: Any, **choice: Any) -> jax.Array:
    """`dispatch` with a gradient, which costs nothing where nobody asks for it.

    Args:
        *arrays: q, k, v, segment ids, RoPE tables, a boolean for every score, and sinks.
        **choice: The keyword arguments of `dispatch`.
    """
    # The reference keeps its arguments alone.
    keep = None if choice.get("implementation") == REFERENCE else _named
    return dispatch_with_gradient(OP_NAME, PASSES, *arrays, splits=SPLITS, keep=keep, **choice)


def implementation(name: str) -> Callable[..., jax.Array]:
    """One implementation as a function `f(*arrays, **options)` with its gradient."""
    find_implementation(OP_NAME, PASSES, name)

    def call(*arrays: Any, **options: Any) -> jax.Array:
        return attend_with_gradient(*arrays, implementation=name, options=options)

    return call


def _named(out: jax.Array, residuals: Residuals) -> tuple[jax.Array, Residuals]:
    """The result and its sums under the name by which a remat policy keeps them."""
    out, lse = (checkpoint_name(x, pallas_tpu.KEPT_NAME) for x in (out, residuals.lse))
    return out, residuals._replace(out=out, lse=lse)
