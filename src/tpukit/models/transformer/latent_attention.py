"""Multi-head latent attention: keys and values are made of one short vector a token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ...parallel.sharding.activations import constrain
from .config import TransformerConfig
from .context import LayerContext
from .layer_config import LayerConfig
from .layers import Linear, Norm, apply_rope, layer_frequencies, rope_table_scale
from .mixing import Latents, SharedKeys


class LatentSelfAttention(nnx.Module):
    """Causal self-attention over latents (DeepSeek V2, V3, Kimi K2)."""

    def __init__(self, config: TransformerConfig, layer: LayerConfig, *, rngs: nnx.Rngs) -> None:
        assert layer.latent is not None
        latent, heads, d = layer.latent, layer.n_heads, config.d_model
        self.layer, self.latent = layer, layer.latent
        queries = heads * latent.qk_dim
        ranked = latent.q_rank > 0
        dtype = config.param_dtype
        self.q_proj = None if ranked else Linear(d, queries, config, rngs=rngs)
        self.q_a_proj = Linear(d, latent.q_rank, config, rngs=rngs) if ranked else None
        self.q_a_norm = Norm(latent.q_rank, layer, param_dtype=dtype) if ranked else None
        self.q_b_proj = Linear(latent.q_rank, queries, config, rngs=rngs) if ranked else None
        self.kv_a_proj = Linear(d, latent.kv_rank + latent.rope_dim, config, rngs=rngs)
        self.kv_a_norm = Norm(latent.kv_rank, layer, param_dtype=dtype)
        values = heads * (latent.nope_dim + latent.v_dim)
        self.kv_b_proj = Linear(latent.kv_rank, values, config, rngs=rngs)
        self.o_proj = Linear(heads * latent.v_dim, d, config, rngs=rngs)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, None]:
        """(B, S, d_model) -> (B, S, d_model); no other layer can read its keys."""
        latent = self.latent
        q = self._queries(x).reshape(*x.shape[:2], self.layer.n_heads, latent.qk_dim)
        q = constrain(checkpoint_name(q, "query_proj"), "batch", "sequence", "heads", "head_dim")
        q_nope, q_rope = q[..., : latent.nope_dim], q[..., latent.nope_dim :]
        both = checkpoint_name(self.kv_a_proj(x), "key_proj")
        latents = Latents(
            self.kv_a_norm(both[..., : latent.kv_rank]),
            self._rotated(both[..., None, latent.kv_rank :], context)[:, :, 0],
        )
        rotated = self._rotated(q_rope, context)
        out = context.mixing.attend_latent(self.layer, (q_nope, rotated), latents, self)
        out = constrain(checkpoint_name(out, "context"), "batch", "sequence", "heads", "head_dim")
        return self.o_proj(out.reshape(*x.shape[:2], -1)), None

    def expand(self, latents: Latents) -> SharedKeys:
        """Keys and values of every head."""
        heads, nope = self.layer.n_heads, self.latent.nope_dim
        both = checkpoint_name(self.kv_b_proj(latents.latent), "value_proj")
        both = both.reshape(*both.shape[:2], heads, -1)
        both = constrain(both, "batch", "sequence", "heads", "head_dim")
        shape = (*both.shape[:3], self.latent.rope_dim)
        rope = jnp.broadcast_to(latents.rope_key[:, :, None], shape)
        return SharedKeys(jnp.concatenate([both[..., :nope], rope], axis=-1), both[..., nope:])

    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """(kv_rank, H, nope_dim) and (kv_rank, H, v_dim)."""
        nope = self.latent.nope_dim
        both = self.kv_b_proj.matrix().reshape(self.latent.kv_rank, self.layer.n_heads, -1)
        return both[..., :nope], both[..., nope:]

    def _queries(self, x: jax.Array) -> jax.Array:
        if self.q_proj is not None:
            return self.q_proj(x)
        assert self.q_a_proj is not None
        assert self.q_a_norm is not None
        assert self.q_b_proj is not None
        return self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))

    def _rotated(self, heads: jax.Array, context: LayerContext) -> jax.Array:
        c = self.layer
        frequencies = layer_frequencies(c, length=context.length)
        scale = rope_table_scale(c.rope_scaling)
        return apply_rope(heads, context.positions, frequencies, table_scale=scale)
