"""The gated feed-forward block in plain jnp, and the activations its gate can have."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError, did_you_mean

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
    """`(act(x @ w_gate) * (x @ w_up)) @ w_down`."""
    return (get_activation(activation)(x @ w_gate) * (x @ w_up)) @ w_down


def get_activation(name: str) -> Activation:
    """The activation of that name.

    Raises:
        TPUKernelError: There is none.
    """
    if name not in ACTIVATIONS:
        raise TPUKernelError(
            f"{name!r} is not an activation of a gate; expected one of {', '.join(ACTIVATIONS)}."
            + did_you_mean(name, ACTIVATIONS)
        )
    return ACTIVATIONS[name]


def activation_and_slope(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The activation of `x` and its derivative there."""
    return jax.jvp(get_activation(name), (x,), (jnp.ones_like(x),))
