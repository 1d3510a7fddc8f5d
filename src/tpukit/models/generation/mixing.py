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
from ..transformer.mixing import DeltaInputs, Keys, Latents, LatentWeights, attention_options
from .cache import DeltaCache, KeyCache, LatentCache
from .slot_kernel import SlotKernel
from .slots import attend_latents, attend_slots, slots_of_prompts


class PromptMixing:
    """Causal attention over whole prompts, which leaves what their layer keeps in `cache`.

    Prompts are padded at their ends, where no token of theirs looks.

    Args:
        cache: Of the layer's kind, or None where it takes another's keys.
        index: The layer's place in it.
        lengths: (rows,) tokens of each prompt.
        execution: Which attention it is.
    """

    def __init__(self, cache: Any, index: Any, lengths: jax.Array, execution: Execution) -> None:
        self.cache, self._index, self._lengths = cache, index, lengths
        self._attention = get_attention(execution.attention)

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: Keys, sinks: jax.Array | None
    ) -> tuple[jax.Array, Keys]:
        """See `Mixing`."""
        assert isinstance(self.cache, KeyCache)
        self._keep(keys=_side_by_side(keys.k), values=_side_by_side(keys.v))
        return self.attend_shared(layer, q, keys, sinks), keys

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: Keys, sinks: jax.Array | None
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
        self._keep(latent=latents.latent, rope_key=latents.rope_key)
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
        """Write what the slots hold after each prompt, of arrays (rows, tokens, …)."""
        held = next(iter(tokens)), next(iter(tokens.values()))
        slots = getattr(self.cache, held[0]).shape[2]
        self._write(
            **{n: slots_of_prompts(t, self._lengths, slots=slots) for n, t in tokens.items()}
        )

    def _write(self, **new: jax.Array) -> None:
        self.cache = _with(self.cache, self._index, new)


class TokenMixing:
    """Attention of one new token a row over the cache, to which it is added first.

    Args:
        cache: Of the layer's kind, or None where it takes another's keys.
        index: The layer's place in it.
        positions: (rows,) of the new tokens.
        kernel: What attends and adds at once where it can; None leaves both to XLA.
    """

    def __init__(
        self, cache: Any, index: Any, positions: jax.Array, kernel: SlotKernel | None = None
    ) -> None:
        self.cache, self._index, self._positions = cache, index, positions
        self._kernel = kernel

    def attend(
        self, layer: LayerConfig, q: jax.Array, keys: Keys, sinks: jax.Array | None
    ) -> tuple[jax.Array, Keys]:
        """See `Mixing`; other layers read the slots."""
        if self._kernel is not None and self._kernel.takes(q, self.cache, sinks):
            out, self.cache = self._kernel.attend(
                layer, q, keys, self.cache, self._index, self._positions
            )
            return out, Keys(self._heads("keys", keys.k), self._heads("values", keys.v))
        held = Keys(self._put_heads("keys", keys.k), self._put_heads("values", keys.v))
        return self.attend_shared(layer, q, held, sinks), held

    def attend_shared(
        self, layer: LayerConfig, q: jax.Array, keys: Keys, sinks: jax.Array | None
    ) -> jax.Array:
        """See `Mixing`."""
        return attend_slots(layer, q, keys, self._positions, sinks=sinks)

    def attend_latent(
        self,
        layer: LayerConfig,
        q: tuple[jax.Array, jax.Array],
        latents: Latents,
        weights: LatentWeights,
    ) -> jax.Array:
        """See `Mixing`; queries meet latents, and no key or value is made of them."""
        held = Latents(self._put("latent", latents.latent), self._put("rope_key", latents.rope_key))
        return attend_latents(layer, q, held, weights.matrices(), self._positions)

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

    def _put_heads(self, name: str, token: jax.Array) -> jax.Array:
        """Write heads (rows, 1, heads, channels), and return the layer's slots of heads."""
        self._put(name, _side_by_side(token))
        return self._heads(name, token)

    def _heads(self, name: str, token: jax.Array) -> jax.Array:
        """The layer's slots, with heads like those of `token`."""
        slots = getattr(self.cache, name)[self._index]
        heads = slots.reshape(*slots.shape[:2], *token.shape[2:])
        return constrain(heads, "batch", None, "kv_heads", "head_dim")

    def _put(self, name: str, token: jax.Array) -> jax.Array:
        """Write one slot of each row, and return the layer's slots."""
        whole = getattr(self.cache, name)
        rows = jnp.arange(token.shape[0])
        slots = self._positions % whole.shape[2]
        whole = whole.at[self._index, rows, slots].set(token[:, 0].astype(whole.dtype))
        self.cache = dataclasses.replace(self.cache, **{name: whole})
        return whole[self._index]


def _with(cache: Any, index: Any, new: dict[str, jax.Array]) -> Any:
    """The cache with one layer's part of some arrays replaced."""
    written = {
        name: jax.lax.dynamic_update_index_in_dim(
            getattr(cache, name), value.astype(getattr(cache, name).dtype), index, axis=0
        )
        for name, value in new.items()
    }
    return dataclasses.replace(cache, **written)


def _side_by_side(heads: jax.Array) -> jax.Array:
    """(rows, tokens, heads, channels) as a cache holds it."""
    return heads.reshape(*heads.shape[:2], -1)
