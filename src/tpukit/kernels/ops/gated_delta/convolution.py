"""The short convolution before linear attention: a few tokens back, each channel on its own."""

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ..gated_mlp import get_activation
from .api import document_starts


def short_convolution(
    x: jax.Array,
    weight: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    activation: str | None = "silu",
) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel's last K tokens, and apply the activation, in float32.

    It is a sum of K shifted arrays, which XLA computes in one pass over x.

    Args:
        x: (B, S, C).
        weight: (C, K), the last column for the token itself: torch's depthwise `conv1d` weight (C,
            1, K) without its middle axis.
        initial_state: (B, K - 1, C) of the tokens before the first; None is zeros.
        segment_ids: (B, S) document numbers of packed sequences; a token uses only its own
            document. `initial_state` belongs to the first token's document.
        activation: "silu", "gelu" (the tanh form), "relu" or None.

    Returns:
        The result (B, S, C), and the state (B, K - 1, C) after the last token, which is the last
        K - 1 inputs with zeros for those of an earlier document.

    Raises:
        TPUKernelError: Shapes do not match, or there is no such activation.
    """
    channels, taps = _check(x, weight, rank=3)
    batch, tokens, _ = x.shape
    reach = taps - 1
    state = jnp.zeros((batch, reach, channels), x.dtype) if initial_state is None else initial_state
    _check_state(x, state, reach)
    with jax.named_scope("short_convolution"):
        past = jnp.concatenate([state.astype(x.dtype), x], axis=1)
        starts = document_starts(segment_ids, x)
        if starts is None:
            shifted = [past[:, tap : tap + tokens] for tap in range(taps)]
            return _weigh(shifted, weight, activation), past[:, tokens:]
        # Tokens of one document have the same count of starts before them; those before the call
        # have zero.
        document = jnp.pad(jnp.cumsum(starts, axis=1), [(0, 0), (reach, 0)])[..., None]
        shifted = [
            jnp.where(
                document[:, tap : tap + tokens] == document[:, reach:],
                past[:, tap : tap + tokens],
                0,
            )
            for tap in range(taps)
        ]
        last = jnp.where(document[:, tokens:] == document[:, -1:], past[:, tokens:], 0)
        return _weigh(shifted, weight, activation), last


def short_convolution_step(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    *,
    activation: str | None = "silu",
) -> tuple[jax.Array, jax.Array]:
    """Return one token of `short_convolution`, for decoding: x (B, C), state (B, K - 1, C).

    Raises:
        TPUKernelError: Shapes do not match, or there is no such activation.
    """
    _, taps = _check(x, weight, rank=2)
    _check_state(x, state, taps - 1)
    with jax.named_scope("short_convolution_step"):
        past = jnp.concatenate([state.astype(x.dtype), x[:, None]], axis=1)
        return _weigh([past[:, tap] for tap in range(taps)], weight, activation), past[:, 1:]


def _weigh(shifted: list[jax.Array], weight: jax.Array, activation: str | None) -> jax.Array:
    narrow = shifted[0].dtype
    wide = jnp.promote_types(narrow, jnp.float32)
    columns = weight.astype(wide).T
    total = sum(x.astype(wide) * column for x, column in zip(shifted, columns, strict=True))
    total = jnp.asarray(total)
    return (total if activation is None else get_activation(activation)(total)).astype(narrow)


def _check(x: jax.Array, weight: jax.Array, *, rank: int) -> tuple[int, int]:
    if x.ndim != rank or weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        shape = "(B, S, C)" if rank == 3 else "(B, C)"
        raise TPUKernelError(
            f"short_convolution takes x {shape} and weight (C, K), but got {x.shape} and "
            f"{weight.shape}; torch's weight is (C, 1, K): leave its middle axis out."
        )
    channels, taps = weight.shape
    return channels, taps


def _check_state(x: jax.Array, state: jax.Array, reach: int) -> None:
    expected = (x.shape[0], reach, x.shape[-1])
    if state.shape != expected:
        raise TPUKernelError(
            f"the state is {state.shape}; expected (B, K - 1, C) = {expected} here."
        )
