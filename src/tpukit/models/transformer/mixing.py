"""How a layer's queries meet keys: over whole sequences here, over a cache in generation."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

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
    """What latent attention makes keys and values of, and all that a cache of it holds.

    Attributes:
        latent: (B, S, kv_rank), normed.
        rope_key: (B, S, rope_dim), rotated; of all heads.
    """

    latent: jax.Array
    rope_key: jax.Array


class LatentWeights(Protocol):
    """The projection from latents to keys and values."""

    def expand(self, latents: Latents) -> SharedKeys:
        """Keys and values of every head."""
        ...

    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """(kv_rank, H, nope_dim) and (kv_rank, H, v_dim)."""
        ...


class DeltaInputs(NamedTuple):
    """One layer's inputs of the gated delta rule; see `gated_delta`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array


class Mixing(Protocol):
    """What a layer calls to mix tokens; one object serves one layer of one trace."""

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> tuple[jax.Array, SharedKeys]:
        """Causal attention, and the keys for layers that share them."""
        ...

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> jax.Array:
        """Causal attention over another layer's keys, as its `attend` returned them."""
        ...

    def attend_latent(
        self,
        layer: LayerConfig,
        q: tuple[jax.Array, jax.Array],
        latents: Latents,
        weights: LatentWeights,
    ) -> jax.Array:
        """Latent attention of queries without and with positions -> (B, S, H, v_dim)."""
        ...

    def convolve(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """A short causal convolution over tokens; a layer's convolutions have different names."""
        ...

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        """The gated delta rule -> (B, S, HV, DV)."""
        ...


def attention_options(layer: LayerConfig, sinks: jax.Array | None = None) -> dict[str, Any]:
    """What a layer's attention differs in from plain causal attention."""
    options = {
        "window": layer.sliding_window,
        "chunk": layer.attention_chunk,
        "scale": layer.attention_scale,
        "soft_cap": layer.attention_soft_cap,
        "sinks": sinks,
    }
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class WholeSequences:
    """Tokens meet all of their own sequence, and nothing is kept: training."""

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
        attend: Any = get_attention(self.execution.attention)
        options = attention_options(layer, sinks)
        return attend(q, keys.k, keys.v, segment_ids=self.segment_ids, **options)

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
