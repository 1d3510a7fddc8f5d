"""The computation of one expert: matmuls with its weights, biases and activation."""

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
    """The biases of all experts' matmuls, in the order of the weights."""

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
        """Return the weights rounded to e4m3 with a constant scale; biases stay as they are."""
        gate, up, down = jax.tree.map(lambda weight: round_weight(weight, bound), self[:3])
        return ExpertWeights(gate, up, down, self.biases)

    def in_shares(self, shares: int) -> "ExpertWeights":
        """Return the same bytes with every matrix's rows split into `shares`: (E * shares, …)."""
        return self._regrouped(lambda shape: (shape[0] * shares, shape[1] // shares, shape[2]))

    def joined(self, shares: int) -> "ExpertWeights":
        """Undo `in_shares`."""
        return self._regrouped(lambda shape: (shape[0] // shares, shape[1] * shares, shape[2]))

    def _regrouped(self, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> "ExpertWeights":
        gate, up, down = jax.tree.map(lambda array: array.reshape(shape(array.shape)), self[:3])
        return ExpertWeights(gate, up, down, self.biases)

    def check(self, num_experts: int) -> None:
        """Raise TPUValidationError unless all arrays match the router's experts."""
        named = (("w_gate", self.gate), ("w_up", self.up), ("w_down", self.down))
        for name, weight in named:
            if weight is not None and weight.shape[0] != num_experts:
                raise TPUValidationError(
                    f"{name} has {weight.shape[0]} experts, but the router {num_experts}; "
                    "the first dimension of every expert weight must be the router's last."
                )
        if self.biases is None:
            return
        for (name, weight), bias in zip(named, self.biases, strict=True):
            expected = None if weight is None else (num_experts, weight.shape[-1])
            seen = None if bias is None else bias.shape
            if seen != expected:
                raise TPUValidationError(
                    f"The bias of {name} is {seen}, but must be {expected}: one row per expert, "
                    "as wide as the expert's output."
                )


@dataclass(frozen=True)
class Activation:
    """An expert's activation.

    Attributes:
        name: One of `ACTIVATIONS`. "clamped_swiglu" is GPT-OSS's, and needs a gate.
        limit: For "clamped_swiglu": upper bound of the gate, and ± bound of the other factor.
        alpha: For "clamped_swiglu": the slope inside its sigmoid.
    """

    name: str
    limit: float = 7.0
    alpha: float = 1.702

    def check(self, *, gated: bool) -> None:
        """Raise TPUValidationError for an unknown name, or one that needs a missing gate."""
        if self.name not in ACTIVATIONS:
            raise TPUValidationError(
                f"Activation '{self.name}' is unknown; known are {', '.join(ACTIVATIONS)}."
                f"{did_you_mean(self.name, ACTIVATIONS)}"
            )
        if self.name == CLAMPED_SWIGLU and not gated:
            raise TPUValidationError(
                f"Activation '{CLAMPED_SWIGLU}' needs a gate, but w_gate is None; give "
                f"w_gate, or use one of {', '.join(PLAIN_ACTIVATIONS)}."
            )

    def __call__(self, gate: Array | None, up: Array) -> Array:
        """Return the hidden values of both projections, or of one without a gate."""
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
    """Send every row through its expert, which `multiply` and `add_bias` select."""
    gate_bias, up_bias, down_bias = weights.biases or (None, None, None)

    def product(rows: Array, weight: ExpertWeight, bias: Array | None) -> Array:
        rows = multiply(rows, weight)
        return rows if bias is None else add_bias(rows, bias.astype(rows.dtype))

    gate = None if weights.gate is None else product(rows, weights.gate, gate_bias)
    hidden = activation(gate, product(rows, weights.up, up_bias))
    return checkpoint_name(product(hidden, weights.down, down_bias), "expert_rows")


def add_to_groups(rows: Array, bias: Array, *, counts: Array) -> Array:
    """Add an expert's bias to each of its rows: `counts[0]` rows of expert 0, and so on.

    It is a matmul with ones and zeros, and so is its gradient, because the gradient of indexing
    adds row by row on a TPU. Rows of no expert are unchanged.
    """
    expert = segment_of_row(counts, rows.shape[0])
    chosen = jax.nn.one_hot(expert, bias.shape[0], dtype=bias.dtype)
    return rows + jnp.dot(chosen, bias, precision=lax.Precision.HIGHEST)
