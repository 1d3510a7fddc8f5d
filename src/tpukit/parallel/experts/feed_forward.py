"""What one expert computes: products with its weights, its biases and its activation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ...errors import TPUValidationError, did_you_mean
from .exchange import segment_of_row
from .float8 import Float8Weight, round_weight

ExpertWeight: TypeAlias = Array | Float8Weight
CLAMPED_SWIGLU = "clamped_swiglu"
PLAIN_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
ACTIVATIONS = (*PLAIN_ACTIVATIONS, CLAMPED_SWIGLU)


class ExpertBiases(NamedTuple):
    """What every expert adds to its products; ordered as the weights are placed."""

    gate: Array | None  # (E, f); None for experts without a gate
    up: Array  # (E, f)
    down: Array  # (E, d)


class ExpertWeights(NamedTuple):
    """The weights of all experts, or of those of one device."""

    gate: ExpertWeight | None  # (E, d, f); None for experts without a gate
    up: ExpertWeight  # (E, d, f)
    down: ExpertWeight  # (E, f, d)
    biases: ExpertBiases | None = None

    def in_float8(self, bound: float) -> "ExpertWeights":
        """The same, rounded to e4m3 with a constant scale; biases stay as they are."""
        gate, up, down = jax.tree.map(lambda weight: round_weight(weight, bound), self[:3])
        return ExpertWeights(gate, up, down, self.biases)

    def in_shares(self, shares: int) -> "ExpertWeights":
        """The same bytes with every matrix cut into `shares` of its rows: (E * shares, …)."""
        return self._regrouped(lambda shape: (shape[0] * shares, shape[1] // shares, shape[2]))

    def in_whole(self, shares: int) -> "ExpertWeights":
        """What `in_shares` cut, as whole matrices again."""
        return self._regrouped(lambda shape: (shape[0] // shares, shape[1] * shares, shape[2]))

    def _regrouped(self, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> "ExpertWeights":
        gate, up, down = jax.tree.map(lambda array: array.reshape(shape(array.shape)), self[:3])
        return ExpertWeights(gate, up, down, self.biases)

    def check(self, num_experts: int) -> None:
        """Raise TPUValidationError unless all arrays are of the router's experts and fit."""
        named = (("w_gate", self.gate), ("w_up", self.up), ("w_down", self.down))
        for name, weight in named:
            if weight is not None and weight.shape[0] != num_experts:
                raise TPUValidationError(
                    f"{name} has {weight.shape[0]} experts and the router {num_experts}; "
                    "the first dimension of every expert weight must be the router's last."
                )
        if self.biases is None:
            return
        for (name, weight), bias in zip(named, self.biases, strict=True):
            expected = None if weight is None else (num_experts, weight.shape[-1])
            seen = None if bias is None else bias.shape
            if seen != expected:
                raise TPUValidationError(
                    f"The bias of {name} is {seen} and must be {expected}: one row for each "
                    "expert, as wide as its product."
                )


@dataclass(frozen=True)
class Activation:
    """An expert's activation.

    Attributes:
        name: One of `ACTIVATIONS`. "clamped_swiglu" is GPT-OSS's, and needs a gate.
        limit: Of "clamped_swiglu": the gate is at most so large, the other product within ±limit.
        alpha: Of "clamped_swiglu": the slope inside its sigmoid.
    """

    name: str
    limit: float = 7.0
    alpha: float = 1.702

    def check(self, *, gated: bool) -> None:
        """Raise TPUValidationError for an unknown name, or one that needs a gate there is not."""
        if self.name not in ACTIVATIONS:
            raise TPUValidationError(
                f"Activation '{self.name}' is unknown; known are {', '.join(ACTIVATIONS)}."
                f"{did_you_mean(self.name, ACTIVATIONS)}"
            )
        if self.name == CLAMPED_SWIGLU and not gated:
            raise TPUValidationError(
                f"Activation '{CLAMPED_SWIGLU}' multiplies two products and w_gate is None; give "
                f"w_gate, or use one of {', '.join(PLAIN_ACTIVATIONS)}."
            )

    def __call__(self, gate: Array | None, up: Array) -> Array:
        """The hidden values of the two products, or of one for experts without a gate."""
        if self.name != CLAMPED_SWIGLU:
            plain = PLAIN_ACTIVATIONS[self.name]
            return plain(up) if gate is None else plain(gate) * up
        assert gate is not None
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


def feed_forward(
    rows: Array,
    weights: ExpertWeights,
    activation: Activation,
    *,
    multiply: Callable[[Array, ExpertWeight], Array],
    add_bias: Callable[[Array, Array], Array],
) -> Array:
    """Every row through its expert; `multiply` and `add_bias` know which that is."""
    gate_bias, up_bias, down_bias = weights.biases or (None, None, None)

    def product(rows: Array, weight: ExpertWeight, bias: Array | None) -> Array:
        rows = multiply(rows, weight)
        return rows if bias is None else add_bias(rows, bias.astype(rows.dtype))

    gate = None if weights.gate is None else product(rows, weights.gate, gate_bias)
    hidden = activation(gate, product(rows, weights.up, up_bias))
    return checkpoint_name(product(hidden, weights.down, down_bias), "expert_rows")


def add_to_groups(rows: Array, bias: Array, *, counts: Array) -> Array:
    """Add an expert's bias to each of its rows: `counts[0]` rows of expert 0, and so on.

    By a product with ones and zeros, whose gradient is another: that of indexing would add up row
    after row on a TPU. Rows of no expert stay as they are.
    """
    expert = segment_of_row(counts, rows.shape[0])
    chosen = jax.nn.one_hot(expert, bias.shape[0], dtype=bias.dtype)
    return rows + jnp.dot(chosen, bias, precision=lax.Precision.HIGHEST)
