"""How layers mix tokens with a cache: a whole prompt that fills it, or one token on top of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ...kernels.ops.gated_delta.api import gated_delta, gated_delta_step
from ...kernels.ops.gated_delta.convolution import short_convolution, short_convolution_step
from ...parallel.sharding.activations import constrain
from ..attention.choice import get_attention
from ..execution import Execution
from ..transformer.layer_config import LayerConfig
from ..transformer.mixing import DeltaInputs, Latents, LatentWeights, SharedKeys, attention_options
from .cache import DeltaCache, KeyCache, LatentCache
from .slot_kernel import SlotKernel
from .slots import Turn, as_it_is, attend_latents, attend_slots


class PromptMixing:
    """Causal attention over whole prompts, which leaves what their layer keeps in `cache`.

    Prompts are padded at their ends, where no token of theirs looks.

    Args:
        cache: Of the layer's kind, or None where it takes another's keys.
        index: The layer's place in it.
        lengths: (rows,) tokens of each prompt.
        execution: Which attention it is.
        turn: What channels go through before they are kept.
    """

    def __init__(
        self,
        cache: Any,
        index: Any,
        lengths: jax.Array,
        execution: Execution,
        turn: Turn = as_it_is,
    ) -> None:
        self.cache, self._index, self._lengths, self._turn = cache, index, lengths, turn
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
        """See `Mixing`; keeps the last tokens of each row's own, not of the padding."""
        count = weight.shape[1] - 1
        places = self._lengths[:, None] - count + jnp.arange(count)
        last = jnp.take_along_axis(x, jnp.maximum(places, 0)[..., None], axis=1)
        self._write(**{name: jnp.where((places >= 0)[..., None], last, 0)})
        return short_convolution(x, weight)[0]

    def delta(self, inputs: DeltaInputs) -> jax.Array:
        """See `Mixing`; padding neither decays the state nor writes to it."""
        padding = jnp.arange(inputs.q.shape[1]) >= self._lengths[:, None]
        decay = jnp.where(padding[..., None], 0, inputs.decay)
        beta = jnp.where(padding[..., None], 0, inputs.beta)
        out, state = gated_delta(inputs.q, inputs.k, inputs.v, decay, beta)
        self._write(state=state)
        return out

    def _keep(self, **tokens: jax.Array) -> None:
        """Write what the slots hold after each prompt, of arrays (rows, tokens, units, width)."""
        filled = {
            name: getattr(self.cache, name).fill(self._index, self._turn(array), self._lengths)
            for name, array in tokens.items()
        }
        self.cache = dataclasses.replace(self.cache, **filled)

    def _write(self, **new: jax.Array) -> None:
        self.cache = _with(self.cache, self._index, new)


class TokenMixing:
    """Attention of one new token a row over the cache, to which it is added first.

    Args:
        cache: Of the layer's kind, or None where it takes another's keys.
        index: The layer's place in it.
        positions: (rows,) of the new tokens.
        turn: What kept channels went through, and queries must; twice, it changes nothing.
        kernel: What attends and adds at once where it can; None leaves both to XLA.
    """

    def __init__(
        self,
        cache: Any,
        index: Any,
        positions: jax.Array,
        turn: Turn = as_it_is,
        kernel: SlotKernel | None = None,
    ) -> None:
        self.cache, self._index, self._positions, self._turn = cache, index, positions, turn
        self._kernel = kernel

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> tuple[jax.Array, SharedKeys]:
        """See `Mixing`; other layers read the slots, in which channels are turned."""
        if self._kernel is not None and self._kernel.takes(q, self.cache, sinks):
            new = SharedKeys(self._turn(keys.k), self._turn(keys.v))
            out, self.cache = self._kernel.attend(
                layer, self._turn(q), new, self.cache, self._index, self._positions
            )
            return self._turn(out), self._keys(keys.k.dtype)
        self._put(keys=keys.k, values=keys.v)
        held = self._keys(keys.k.dtype)
        return self.attend_shared(layer, q, held, sinks), held

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: SharedKeys, sinks: jax.Array | None
    ) -> jax.Array:
        """See `Mixing`."""
        return self._turn(attend_slots(layer, self._turn(q), keys, self._positions, sinks=sinks))

    def attend_latent(
        self,
        layer: LayerConfig,
        q: tuple[jax.Array, jax.Array],
        latents: Latents,
        weights: LatentWeights,
    ) -> jax.Array:
        """See `Mixing`; queries meet latents, and no key or value is made of them."""
        self._put(latent=latents.latent[:, :, None], rope_key=latents.rope_key[:, :, None])
        dtype = latents.latent.dtype
        held = Latents(*(self._read(name, dtype)[:, :, 0] for name in ("latent", "rope_key")))
        return attend_latents(layer, q, held, weights.matrices(), self._positions, turn=self._turn)

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
        """The layer's slots of keys and values."""
        found = (self._read(name, dtype) for name in ("keys", "values"))
        return SharedKeys(*(constrain(one, "batch", None, "kv_heads", "head_dim") for one in found))

    def _put(self, **tokens: jax.Array) -> None:
        """Write the new tokens' units (rows, 1, units, width)."""
        added = {
            name: getattr(self.cache, name).put(
                self._index, self._turn(token)[:, 0], self._positions
            )
            for name, token in tokens.items()
        }
        self.cache = dataclasses.replace(self.cache, **added)

    def _read(self, name: str, dtype: Any) -> jax.Array:
        """The layer's slots (rows, slots, units, width)."""
        return getattr(self.cache, name).read(self._index, self._positions, dtype)


def _with(cache: Any, index: Any, new: dict[str, jax.Array]) -> Any:
    """The cache with one layer's part of some arrays replaced."""
    written = {
        name: jax.lax.dynamic_update_index_in_dim(
            getattr(cache, name), value.astype(getattr(cache, name).dtype), index, axis=0
        )
        for name, value in new.items()
    }
    return dataclasses.replace(cache, **written)
