"""Norm, linear and embedding layers that store parameters in one dtype and compute in another.

Rotary positions have no parameters; XLA fuses them into neighbouring operations on any mesh.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...hardware.target import on_one_gpu
from ...kernels.ops.embedding_rows import embedding_rows
from ...kernels.ops.layer_norm.api import plain_layer_norm as layer_norm
from ...kernels.ops.residual_norm import residual_norm
from ...kernels.ops.rms_norm.api import plain_rms_norm as rms_norm
from ...kernels.ops.rope import rope_frequencies, rotate, tables_at
from ...parallel.sharding.activations import constrain
from ...rotary import RopeScaling
from ..lora.low_rank import LowRank
from ..matmul.eight_bit import is_held
from ..matmul.matmul_format import matmul_in_format
from .config import TransformerConfig
from .layer_config import LayerConfig

EMBEDDING_STDDEV = 0.02


def compute_dtype(config: TransformerConfig) -> jnp.dtype:
    """Return the dtype of activations."""
    return jnp.dtype(config.dtype)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, computed in at least float32."""

    def __init__(self, width: int, layer: LayerConfig, *, param_dtype: str) -> None:
        self.eps = layer.norm_eps
        self.centred = layer.norm == "layernorm"
        self.offset = 1.0 if layer.norm_offset else 0.0
        start = jnp.full((width,), 1.0 - self.offset, param_dtype)
        self.scale = nnx.Param(start)
        self.bias = nnx.Param(jnp.zeros((width,), param_dtype)) if self.centred else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last axis."""
        # No kernel, because XLA shards norms on any mesh and fuses them into their neighbours.
        if self.bias is None:
            return rms_norm(x, self._scale(), eps=self.eps)
        return layer_norm(x, self._scale(), self.bias[...], eps=self.eps)

    def after(
        self, x: jax.Array, delta: jax.Array | None, *, gpu_kernels: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Add `delta` to the residual stream `x`; return the stream and its norm."""
        # Added outside the kernel, because cuBLAS accumulates onto x in the matmul of delta.
        x = x if delta is None else x + delta
        if gpu_kernels and not self.centred:
            return residual_norm(x, None, self._scale(), eps=self.eps)
        return x, self(x)

    def _scale(self) -> jax.Array:
        scale = self.scale[...]
        wide = jnp.promote_types(scale.dtype, jnp.float32)
        return scale.astype(wide) + self.offset if self.offset else scale


def unscaled_norm(x: jax.Array, *, eps: float) -> jax.Array:
    """Return the RMSNorm over the last axis without learned parameters."""
    return rms_norm(x, jnp.ones((x.shape[-1],), x.dtype), eps=eps)


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, the kernel stored as (inputs, outputs)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        config: TransformerConfig,
        *,
        rngs: nnx.Rngs,
        bias: bool = False,
    ) -> None:
        param_dtype = jnp.dtype(config.param_dtype)
        init = nnx.initializers.lecun_normal()
        self.dtype = compute_dtype(config)
        self.matmul = config.matmul
        self.float8_bound = config.float8_bound
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), param_dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), param_dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output (..., outputs) for x (..., inputs)."""
        low = self.low_rank
        matrix = self.matrix() if low is None else low.base.astype(self.dtype)
        y = self.multiply(x, matrix)
        y = y if low is None else y + low.update(x)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)

    def multiply(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        """Return `x @ matrix` in the configured matmul format."""
        return matmul_in_format(self.matmul, x, matrix, bound=self.float8_bound)

    @property
    def low_rank(self) -> LowRank | None:
        """The kernel with its LoRA matrices, or None without LoRA."""
        value: Any = self.kernel.get_value()
        return value if isinstance(value, LowRank) else None

    def matrix(self) -> jax.Array:
        """Return the kernel in the activations' dtype, or in e4m3 where it is stored so."""
        kernel = self.kernel[...]
        held = self.matmul == "float8_static" and is_held(kernel)
        return kernel if held else kernel.astype(self.dtype)


def joined_linear(layers: Sequence[Linear], x: jax.Array) -> jax.Array:
    """Return the outputs of several layers, concatenated on the last axis, from one matmul."""
    has_lora = any(layer.low_rank is not None for layer in layers)
    if has_lora or len({layer.matmul for layer in layers}) > 1:
        return jnp.concatenate([layer(x) for layer in layers], axis=-1)
    # Casting to the activations' dtype copies the matrices anyway, so concatenation is free.
    matrices = jnp.concatenate([layer.matrix() for layer in layers], axis=1)
    y = layers[0].multiply(x, matrices)
    biases = [layer.bias[...] for layer in layers if layer.bias is not None]
    return y + jnp.concatenate(biases).astype(y.dtype) if biases else y


class Embedding(nnx.Module):
    """A table of rows by token id; `head` is the same table as an unembedding."""

    def __init__(self, rows: int, width: int, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(EMBEDDING_STDDEV)
        self.dtype = compute_dtype(config)
        self.lookup = config.embedding_lookup
        self.embedding = nnx.Param(
            init(rngs.params(), (rows, width), jnp.dtype(config.param_dtype))
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Return the rows of `ids`."""
        # Gathered over an fsdp axis, as every weight is before use. A lookup in shards of the
        # width would require moving activations from width to batch sharding.
        table = constrain(self.embedding[...].astype(self.dtype), "vocab", None)
        if self.lookup == "rows":
            return embedding_rows(table, ids) if on_one_gpu() else table[ids]
        return (ids[..., None] == jnp.arange(table.shape[0])).astype(self.dtype) @ table

    def head(self) -> jax.Array:
        """Return the transposed table (width, rows), which maps activations to logits."""
        return self.embedding[...].astype(self.dtype).T


def layer_frequencies(layer: LayerConfig, *, length: int) -> np.ndarray:
    """Return radians per position for each rotated pair of channels of a layer's heads.

    Args:
        layer: The layer.
        length: The longest sequence, which some scalings depend on.
    """
    frequencies = rope_frequencies(
        layer.rope_dim, theta=layer.rope_theta, scaling=layer.rope_scaling, length=length
    )
    if layer.rope_spread:
        frequencies[int(layer.rope_share * layer.head_dim // 2) :] = 0.0
    return frequencies


def apply_rope(
    x: jax.Array, positions: jax.Array, frequencies: np.ndarray, *, table_scale: float = 1.0
) -> jax.Array:
    """Return x (B, S, H, D) with channel pairs (i, i + half) rotated by their position's angle.

    Args:
        x: Heads.
        positions: (B, S).
        frequencies: Radians per position; with fewer than D / 2, the last channels are unchanged.
        table_scale: Factor of sines and cosines.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rotated = 2 * len(frequencies)
    tables = tables_at(positions, frequencies, dtype=wide)
    if table_scale != 1.0:
        tables = tuple(table_scale * table for table in tables)
    if rotated == x.shape[-1]:
        return rotate(x, *tables)
    front = rotate(x[..., :rotated], *tables)
    return jnp.concatenate([front, x[..., rotated:]], axis=-1)


def rope_table_scale(scaling: RopeScaling | None) -> float:
    """Return the factor of a layer's sines and cosines."""
    return 1.0 if scaling is None else scaling.table_scale
