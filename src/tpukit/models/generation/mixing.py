"""Token mixing with a cache: a prompt that fills it, or one new token per row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...kernels.ops.gated_delta.api import gated_delta, gated_delta_step
from ...kernels.ops.gated_delta.convolution import short_convolution, short_convolution_step
from ...parallel.sharding.activations import constrain
from ..attention.choice import get_attention
from ..execution import Execution
from ..transformer.layer_config import LayerConfig
from ..transformer.mixing import DeltaInputs, Latents, LatentWeights, SharedKeys, attention_options
from .cache import DeltaCache, KeyCache, LatentCache
from .cache_attention import SlotKernel, attend_latents, attend_slots
from .cache_slots import Rotation, unrotated


class PromptMixing:
    """Causal attention over prompts, which fills `cache`.

    Prompts are padded at the end, which the causal mask excludes.

    Args:
        cache: The cache of the layer's kind, or None where the layer shares another's keys.
        index: The layer's index in the cache.
        lengths: (rows,) tokens of each prompt.
        execution: The execution settings.
        rotate: The rotation of channels before they are cached.
    """

    def __init__(
        self,
        cache: PyTree,
        index: Any,
        lengths: jax.Array,
        execution: Execution,
        rotate: Rotation = unrotated,
    ) -> None:
        self.cache, self._index, self._lengths, self._rotate = cache, index, lengths, rotate
        self._attention = get_attention(execution.attention)

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> tuple[jax.Array, SharedKeys]:
        """See `Mixing`."""
        assert isinstance(self.cache, KeyCache)
        self._keep(keys=keys.k, values=keys.v)
        return self.attend_shared(layer, q, keys, sinks), keys

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> jax.Array:
        """See `Mixing`."""
        return self._attention(q, keys.k, keys.v, **attention_options(layer, sinks))

    def attend_latent(
        self,
        layer: LayerConfig,
        q: tuple[jax.Array, jax.Array],
        latents: Latents,
        weights: LatentWeights,
    ) -> jax.Array:
        """See `Mixing`."""
        assert isinstance(self.cache, LatentCache)
        self._keep(latent=latents.latent[:, :, None], rope_key=latents.rope_key[:, :, None])
        whole = jnp.concatenate(q, axis=-1)
        return self.attend_shared(layer, whole, weights.expand(latents), None)

    def convolve(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """See `Mixing`; caches the last tokens of each row without its padding."""
        count = weight.shape[1] - 1
        places = self._lengths[:, None] - count + jnp.arange(count)
        last = jnp.take_along_axis(x, jnp.maximum(places, 0)[..., None], axis=1)
        self._write(**{name: jnp.where((places >= 0)[..., None], last, 0)})
        return short_convolution(x, weight)[0]

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        """See `Mixing`; padding does not change the state."""
        padding = jnp.arange(inputs.q.shape[1]) >= self._lengths[:, None]
        decay = jnp.where(padding[..., None], 0, inputs.decay)
        beta = jnp.where(padding[..., None], 0, inputs.beta)
        out, state = gated_delta(inputs.q, inputs.k, inputs.v, decay, beta)
        self._write(state=state)
        return out

    def _keep(self, **tokens: jax.Array) -> None:
        """Write arrays (rows, tokens, units, width) of the prompts into the slots."""
        filled = {
            name: getattr(self.cache, name).fill(self._index, self._rotate(array), self._lengths)
            for name, array in tokens.items()
        }
        self.cache = dataclasses.replace(self.cache, **filled)

    def _write(self, **new: jax.Array) -> None:
        self.cache = _with(self.cache, self._index, new)


class TokenMixing:
    """Attention of one new token per row over the cache, after it is added to the cache.

    Args:
        cache: The cache of the layer's kind, or None where the layer shares another's keys.
        index: The layer's index in the cache.
        positions: (rows,) positions of the new tokens.
        rotate: The rotation of cached channels and of queries, which is its own inverse.
        kernel: The kernel that attends and writes the cache at once; None uses XLA.
    """

    def __init__(
        self,
        cache: PyTree,
        index: Any,
        positions: jax.Array,
        rotate: Rotation = unrotated,
        kernel: SlotKernel | None = None,
    ) -> None:
        self.cache, self._index, self._positions, self._rotate = cache, index, positions, rotate
        self._kernel = kernel

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> tuple[jax.Array, SharedKeys]:
        """See `Mixing`; other layers read the slots, whose channels are rotated."""
        if self._kernel is not None and self._kernel.takes(q, self.cache, sinks):
            new = SharedKeys(self._rotate(keys.k), self._rotate(keys.v))
            out, self.cache = self._kernel.attend(
                layer, self._rotate(q), new, self.cache, self._index, self._positions
            )
            return self._rotate(out), self._keys(keys.k.dtype)
        self._put(keys=keys.k, values=keys.v)
        held = self._keys(keys.k.dtype)
        return self.attend_shared(layer, q, held, sinks), held

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> jax.Array:
        """See `Mixing`."""
        return self._rotate(
            attend_slots(layer, self._rotate(q), keys, self._positions, sinks=sinks)
        )

    def attend_latent(
        self,
        layer: LayerConfig,
        q: tuple[jax.Array, jax.Array],
        latents: Latents,
        weights: LatentWeights,
    ) -> jax.Array:
        """See `Mixing`; attention is computed on latents without expanding keys and values."""
        self._put(latent=latents.latent[:, :, None], rope_key=latents.rope_key[:, :, None])
        dtype = latents.latent.dtype
        held = Latents(*(self._read(name, dtype)[:, :, 0] for name in ("latent", "rope_key")))
        return attend_latents(
            layer, q, held, weights.matrices(), self._positions, rotate=self._rotate
        )

    def convolve(self, name: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """See `Mixing`."""
        before = getattr(self.cache, name)[self._index]
        y, after = short_convolution_step(x[:, 0], weight, before)
        self.cache = _with(self.cache, self._index, {name: after})
        return y[:, None]

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        """See `Mixing`."""
        assert isinstance(self.cache, DeltaCache)
        one = [array[:, 0] for array in inputs]
        q, k, v, decay, beta = one
        out, state = gated_delta_step(q, k, v, decay, beta, self.cache.state[self._index])
        self.cache = _with(self.cache, self._index, {"state": state})
        return out[:, None]

    def _keys(self, dtype: Any) -> SharedKeys:
        """Return the layer's slots of keys and values."""
        found = (self._read(name, dtype) for name in ("keys", "values"))
        return SharedKeys(*(constrain(one, "batch", None, "kv_heads", "head_dim") for one in found))

    def _put(self, **tokens: jax.Array) -> None:
        """Write the new tokens' units (rows, 1, units, width)."""
        added = {
            name: getattr(self.cache, name).put(
                self._index, self._rotate(token)[:, 0], self._positions
            )
            for name, token in tokens.items()
        }
        self.cache = dataclasses.replace(self.cache, **added)

    def _read(self, name: str, dtype: Any) -> jax.Array:
        """Return the layer's slots (rows, slots, units, width)."""
        return getattr(self.cache, name).read(self._index, self._positions, dtype)


def _with(cache: PyTree, index: Any, new: dict[str, jax.Array]) -> Any:
    """Return the cache with one layer's part of some arrays replaced."""
    written = {
        name: jax.lax.dynamic_update_index_in_dim(
            getattr(cache, name), value.astype(getattr(cache, name).dtype), index, axis=0
        )
        for name, value in new.items()
    }
    return dataclasses.replace(cache, **written)
