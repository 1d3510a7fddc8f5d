"""`gated_mlp`: the gated feed-forward block, computed by XLA on every platform."""

from collections.abc import Callable
from functools import partial

import jax

from ...errors import TPUKernelError, did_you_mean
from ..registry.dispatch import recomputed, with_backward

Activation = Callable[[jax.Array], jax.Array]
ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,  # the tanh form
    "relu": jax.nn.relu,
}


def gated_mlp(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    activation: str = "silu",
) -> jax.Array:
    """Return `(act(x @ w_gate) * (x @ w_up)) @ w_down`; the gradient recomputes the projections.

    Args:
        x: (…, width).
        w_gate: (width, hidden).
        w_up: (width, hidden).
        w_down: (hidden, width of the result).
        activation: "silu", "gelu" (the tanh form) or "relu".

    Raises:
        TPUKernelError: The shapes do not match, or there is no such activation.
    """
    act = get_activation(activation)
    width, hidden = x.shape[-1], w_gate.shape[-1]
    if (w_gate.shape, w_up.shape) != ((width, hidden),) * 2 or w_down.shape[0] != hidden:
        raise TPUKernelError(
            f"gated_mlp of x {x.shape} takes w_gate and w_up of ({width}, hidden) and w_down of "
            f"(hidden, …), but got {w_gate.shape}, {w_up.shape} and {w_down.shape}."
        )
    passes = recomputed(partial(_multiply, act))
    with jax.named_scope("gated_mlp"):
        return with_backward(passes.forward, passes.backward, x, w_gate, w_up, w_down)


def get_activation(name: str) -> Activation:
    """Return the activation of that name.

    Raises:
        TPUKernelError: There is none.
    """
    if name not in ACTIVATIONS:
        raise TPUKernelError(
            f"{name!r} is not an activation of a gate; expected one of {', '.join(ACTIVATIONS)}."
            + did_you_mean(name, ACTIVATIONS)
        )
    return ACTIVATIONS[name]


def _multiply(
    act: Activation, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    return (act(x @ w_gate) * (x @ w_up)) @ w_down
