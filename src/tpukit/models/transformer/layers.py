"""Norm, linear and embedding layers that store parameters in one dtype and compute in another.

Rotary positions have no parameters: XLA fuses them into their neighbours under any mesh.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...hardware.target import on_one_gpu
from ...kernels.ops.embedding_rows.api import embedding_rows
from ...kernels.ops.layer_norm.reference import layer_norm
from ...kernels.ops.residual_norm.api import residual_norm
from ...kernels.ops.rms_norm.reference import rms_norm
from ...kernels.ops.rope import reference
from ...kernels.ops.rope.frequencies import rope_frequencies
from ...kernels.ops.rope.tables import tables_at
from ...parallel.sharding.activations import constrain
from ...rotary import RopeScaling
from ..lora.low_rank import LowRank
from ..products.float8_static import is_held
from ..products.matmul_format import product_in
from .config import TransformerConfig
from .layer_config import LayerConfig

EMBEDDING_STDDEV = 0.02


def compute_dtype(config: TransformerConfig) -> jnp.dtype:
    """The dtype of activations."""
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
        # Not a kernel: XLA splits these over any mesh and fuses them into their neighbours.
        if self.bias is None:
            return rms_norm(x, self._scale(), eps=self.eps)
        return layer_norm(x, self._scale(), self.bias[...], eps=self.eps)

    def after(
        self, x: jax.Array, delta: jax.Array | None, *, gpu_kernels: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Add `delta` to the residual stream `x`; return the stream and its norm."""
        # Added here and not in the kernel: cuBLAS adds as it writes the product that delta is.
        x = x if delta is None else x + delta
        if gpu_kernels and not self.centred:
            return residual_norm(x, None, self._scale(), eps=self.eps)
        return x, self(x)

    def _scale(self) -> jax.Array:
        scale = self.scale[...]
        wide = jnp.promote_types(scale.dtype, jnp.float32)
        return scale.astype(wide) + self.offset if self.offset else scale


def unscaled_norm(x: jax.Array, *, eps: float) -> jax.Array:
    """RMSNorm over the last axis with nothing learned."""
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
        """(..., inputs) -> (..., outputs)."""
        low = self.low_rank
        matrix = self.matrix() if low is None else low.base.astype(self.dtype)
        y = self.product(x, matrix)
        y = y if low is None else y + low.beside(x)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)

    def product(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        """`x @ matrix` in the format that the configuration asks for."""
        return product_in(self.matmul, x, matrix, bound=self.float8_bound)

    @property
    def low_rank(self) -> LowRank | None:
        """The kernel, where it has thin matrices beside it."""
        found: Any = self.kernel.get_value()
        return found if isinstance(found, LowRank) else None

    def matrix(self) -> jax.Array:
        """The kernel in the dtype of activations, or in eight bits where it is held rounded."""
        kernel = self.kernel[...]
        held = self.matmul == "float8_static" and is_held(kernel)
        return kernel if held else kernel.astype(self.dtype)


def side_by_side(layers: Sequence[Linear], x: jax.Array) -> jax.Array:
    """What several layers make of `x`, in one product, side by side on the last axis."""
    beside = any(layer.low_rank is not None for layer in layers)
    if beside or len({layer.matmul for layer in layers}) > 1:
        return jnp.concatenate([layer(x) for layer in layers], axis=-1)
    # The matrices are written anew in the dtype of activations: side by side costs nothing.
    matrices = jnp.concatenate([layer.matrix() for layer in layers], axis=1)
    y = layers[0].product(x, matrices)
    biases = [layer.bias[...] for layer in layers if layer.bias is not None]
    return y + jnp.concatenate(biases).astype(y.dtype) if biases else y


class Embedding(nnx.Module):
    """Rows looked up by number; `head` is the same table for the way back."""

    def __init__(self, rows: int, width: int, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(EMBEDDING_STDDEV)
        self.dtype = compute_dtype(config)
        self.lookup = config.embedding_lookup
        self.embedding = nnx.Param(
            init(rngs.params(), (rows, width), jnp.dtype(config.param_dtype))
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        """The rows of `ids`."""
        # Gathered whole over an fsdp axis, as every weight is for use: looking up in slices of
        # the width would leave activations to be moved from width to batch instead.
        table = constrain(self.embedding[...].astype(self.dtype), "vocab", None)
        if self.lookup == "rows":
            return embedding_rows(table, ids) if on_one_gpu() else table[ids]
        return (ids[..., None] == jnp.arange(table.shape[0])).astype(self.dtype) @ table

    def head(self) -> jax.Array:
        """The table transposed, (width, rows): times it, activations give logits."""
        return self.embedding[...].astype(self.dtype).T


def layer_frequencies(layer: LayerConfig, *, length: int) -> np.ndarray:
    """Radians per position for each rotated pair of channels of a layer's heads.

    Args:
        layer: Whose heads they are.
        length: The longest sequence, which some ways of scaling depend on.
    """
    found = rope_frequencies(
        layer.rope_dim, theta=layer.rope_theta, scaling=layer.rope_scaling, length=length
    )
    if layer.rope_spread:
        found[int(layer.rope_share * layer.head_dim // 2) :] = 0.0
    return found


def apply_rope(
    x: jax.Array, positions: jax.Array, frequencies: np.ndarray, *, table_scale: float = 1.0
) -> jax.Array:
    """Turn channel pairs (i, i + half) of the first channels of x (B, S, H, D) by their angle.

    Args:
        x: Heads.
        positions: (B, S).
        frequencies: Radians per position; with fewer than D / 2, the other channels stay.
        table_scale: What sines and cosines are multiplied by.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    turned = 2 * len(frequencies)
    tables = tables_at(positions, frequencies, dtype=wide)
    if table_scale != 1.0:
        tables = tuple(table_scale * table for table in tables)
    if turned == x.shape[-1]:
        return reference.rope(x, *tables)
    front = reference.rope(x[..., :turned], *tables)
    return jnp.concatenate([front, x[..., turned:]], axis=-1)


def rope_table_scale(scaling: RopeScaling | None) -> float:
    """What a layer's sines and cosines are multiplied by."""
    return 1.0 if scaling is None else scaling.table_scale
