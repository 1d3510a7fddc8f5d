"""Token mixing of layers: over full sequences here, over a cache in `models.generation`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from ...kernels.ops.flash_attention.spec import AttentionOptions, AttentionSpec, causal_spec
from ...kernels.ops.gated_delta.api import gated_delta
from ...kernels.ops.gated_delta.convolution import short_convolution
from ..attention.choice import get_attention
from ..execution import Execution
from .layer_config import LayerConfig


class SharedKeys(NamedTuple):
    """Keys and values (B, S, KV, D) that another layer may read."""

    k: jax.Array
    v: jax.Array


class Latents(NamedTuple):
    """The latents of keys and values, which a cache keeps.

    Attributes:
        latent: (B, S, kv_rank), normed.
        rope_key: (B, S, rope_dim), rotated and shared by all heads.
    """

    latent: jax.Array
    rope_key: jax.Array


class LatentWeights(Protocol):
    """The projection from latents to keys and values."""

    def expand(self, latents: Latents) -> SharedKeys:
        """Return the keys and values of every head."""
        ...

    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """Return the matrices (kv_rank, H, nope_dim) and (kv_rank, H, v_dim)."""
        ...


class DeltaInputs(NamedTuple):
    """The inputs of a layer's gated delta rule; see `gated_delta`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array


class Mixing(Protocol):
    """The token mixing that a layer calls; one object serves one layer of one trace."""

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> tuple[jax.Array, SharedKeys]:
        """Return causal attention, and the keys for layers that share them."""
        ...

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> jax.Array:
        """Return causal attention over another layer's keys, as its `attend` returned them."""
        ...

    def attend_latent(
        self,
        layer: LayerConfig,
        q: tuple[jax.Array, jax.Array],
        latents: Latents,
        weights: LatentWeights,
    ) -> jax.Array:
        """Return latent attention (B, S, H, v_dim) of queries without and with positions."""
        ...

    def convolve(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return a short causal convolution over tokens; names distinguish a layer's several."""
        ...

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        """Return the result (B, S, HV, DV) of the gated delta rule."""
        ...


def attention_options(layer: LayerConfig, sinks: jax.Array | None = None) -> AttentionOptions:
    """Return the options of a layer's attention that differ from plain causal attention."""
    options: AttentionOptions = {
        "window": layer.sliding_window,
        "chunk": layer.attention_chunk,
        "scale": layer.attention_scale,
        "soft_cap": layer.attention_soft_cap,
        "sinks": sinks,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return cast("AttentionOptions", given)


def attention_spec(layer: LayerConfig, sinks: jax.Array | None = None) -> AttentionSpec:
    """Return a layer's attention as one object."""
    return causal_spec(**attention_options(layer, sinks))


@dataclass(frozen=True)
class WholeSequences:
    """Token mixing over full sequences without a cache, for training."""

    execution: Execution
    segment_ids: jax.Array | None

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> tuple[jax.Array, SharedKeys]:
        """See `Mixing`."""
        return self.attend_shared(layer, q, keys, sinks), keys

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> jax.Array:
        """See `Mixing`."""
        attend = get_attention(self.execution.attention)
        options = attention_options(layer, sinks)
        options["segment_ids"] = self.segment_ids
        return attend(q, keys.k, keys.v, **options)

    def attend_latent(
        self,
        layer: LayerConfig,
        q: tuple[jax.Array, jax.Array],
        latents: Latents,
        weights: LatentWeights,
    ) -> jax.Array:
        """See `Mixing`."""
        whole = jnp.concatenate(q, axis=-1)
        return self.attend_shared(layer, whole, weights.expand(latents), None)

    def convolve(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """See `Mixing`."""
        if self.execution.convolution is not None:
            return self.execution.convolution(x, weight, segment_ids=self.segment_ids)
        return short_convolution(x, weight, segment_ids=self.segment_ids)[0]

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        """See `Mixing`."""
        rule = self.execution.delta or gated_delta
        return rule(*inputs, segment_ids=self.segment_ids)[0]


@dataclass(frozen=True)
class LayerContext:
    """The context that the layers of one forward pass share.

    Attributes:
        positions: (B, S) index of each token in its document.
        length: The most tokens of a sequence in this pass, including its cache.
        execution: The execution settings.
        mixing: The token mixing.
        shared: Keys for layers that share them, by the kind of the layer they come from.
        per_layer: (B, S, width) the layer's own embedding of the tokens, or None.
    """

    positions: jax.Array
    length: int
    execution: Execution
    mixing: Mixing
    shared: Mapping[str, SharedKeys] = field(default_factory=dict[str, SharedKeys])
    per_layer: jax.Array | None = None

    @classmethod
    def of_training(
        cls, positions: jax.Array, segment_ids: jax.Array | None, execution: Execution
    ) -> "LayerContext":
        """Return the context of full sequences without a cache."""
        mixing = WholeSequences(execution, segment_ids)
        return cls(positions, positions.shape[1], execution, mixing)

    def replace(self, **changes: Any) -> "LayerContext":
        """Return the same context with some fields changed."""
        return dataclasses.replace(self, **changes)
