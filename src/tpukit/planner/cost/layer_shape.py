"""The dimensions of one kind of layer that decide its memory and time, as plain numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...models.remat.policy import TENSOR_NAMES
from ...models.transformer.shapes import layer_shapes

QUERIES, KEYS, VALUES = TENSOR_NAMES["qkv_proj"]
GATE, UP = TENSOR_NAMES["mlpwi"]
OUT, DOWN = "out_proj", "mlpwo"
# Matrices of the part that mixes tokens, by the name that remat knows their result by; keys of
# latent attention are the short vector that heads are made of, values those heads.
_MIXING = {
    "q_proj": QUERIES,
    "q_b_proj": QUERIES,
    "k_proj": KEYS,
    "kv_a_proj": KEYS,
    "v_proj": VALUES,
    "kv_b_proj": VALUES,
    "o_proj": OUT,
}
# Tokens that linear attention takes at a time: kernels/ops/gated_delta/blocks.py, which needs jax.
DELTA_CHUNK = 128
LANES = 128


def in_tiles(channels: Any, tile: int) -> Any:
    """A number of channels, or an array of them, in whole tiles."""
    return -(-channels // tile) * tile


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What arithmetic needs to know of one kind of layer.

    Attributes:
        count: Layers of this kind, those of multi-token prediction too.
        heads: Of queries; of values where attention is linear.
        qk_dim: Channels of a head of queries and keys.
        v_dim: Channels of a head of values.
        mixing: Weights of a token's products that mix tokens, by the name of their result.
        widths: Channels of those results.
        unnamed: Weights of products whose result has no name: short vectors that queries are made
            of, gates, routers, embeddings of this layer alone.
        dense_width: Hidden channels that every token passes: a dense block, shared experts, or a
            block beside the experts.
        expert_width: Hidden channels of an expert.
        hidden_matrices: Matrices of a feed-forward block: 3 when gated, 2 when not.
        window: Keys that a query attends to; None where that is every key before it.
        chunk: Tokens of the chunk within which queries attend to keys, or None.
        sorted_rows: Whether rows are grouped by expert, however many each gets.
        expert_rows: Rows an expert computes over those routed to it: more than 1 where it has a
            buffer of fixed size.
        weighs_inputs: Whether routers' weights multiply what experts read, not what they give.
        linear: Whether a state stands for the keys.
    """

    count: int
    d_model: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    mixing: Mapping[str, int]
    widths: Mapping[str, int]
    unnamed: int
    dense_width: int
    experts: int
    experts_per_token: int
    expert_width: int
    hidden_matrices: int
    qk_norm: bool
    post_norms: bool
    parallel_block: bool
    window: int | None
    chunk: int | None
    sorted_rows: bool
    expert_rows: float
    weighs_inputs: bool
    linear: bool

    @property
    def head_dim(self) -> float:
        """Channels of a head, in the mean over queries and values."""
        return (self.qk_dim + self.v_dim) / 2

    @property
    def out_width(self) -> int:
        """Channels of what attention gives for a token."""
        return self.heads * self.v_dim

    @property
    def key_width(self) -> int:
        """Channels of keys and values of one token together, as attention reads them."""
        return self.kv_heads * (self.qk_dim + self.v_dim)

    @property
    def mixing_width(self) -> int:
        """Channels of queries, keys and values of one token together."""
        if self.linear:
            return sum(self.widths[name] for name in (QUERIES, KEYS, VALUES))
        return self.heads * self.qk_dim + self.key_width

    @property
    def mixing_weights(self) -> int:
        """Weights of a token's products but those of the feed-forward block."""
        return sum(self.mixing.values()) + self.unnamed

    @property
    def chosen_width(self) -> int:
        """Hidden channels of the experts that one token passes."""
        return self.experts_per_token * self.expert_width

    @property
    def hidden_width(self) -> int:
        """Channels of the feed-forward block that one token passes through."""
        return self.dense_width + self.chosen_width

    @property
    def expert_padding(self) -> int:
        """Numbers more than its own that one matrix of an expert has room for in memory.

        Arrays lie in tiles of 8 x 128; which dimension is last is the compiler's choice.
        """
        d, f = self.d_model, self.expert_width
        return min(in_tiles(d, 8) * in_tiles(f, LANES), in_tiles(f, 8) * in_tiles(d, LANES)) - d * f

    @property
    def is_local(self) -> bool:
        """Whether its queries see a window, a chunk or a state: no ring passes keys round."""
        return self.linear or self.window is not None or self.chunk is not None


def layer_shape(layer: Any, *, d_model: int, count: int) -> LayerShape:
    """The shape of one kind of layer of a `TransformerConfig`, a `LayerConfig`."""
    matrices = {
        path.removesuffix("/kernel"): shape
        for path, shape in layer_shapes(layer, d_model).items()
        if path.endswith("/kernel") and not path.endswith("_conv/kernel")
    }
    mixing: dict[str, int] = {}
    widths: dict[str, int] = {}
    dense = unnamed = 0
    for path, shape in matrices.items():
        within, _, last = path.rpartition("/")
        name = _MIXING.get(last)
        if within.startswith("mlp") and last in ("gate_proj", "up_proj", "down_proj"):
            dense += math.prod(shape)
        elif name is None:
            unnamed += math.prod(shape)
        else:
            mixing[name], widths[name] = math.prod(shape), shape[-1]
    if layer.keys_as_values:
        widths[VALUES] = widths[KEYS]
    blocks = 3 if layer.gated_mlp else 2
    delta = layer.delta
    return LayerShape(
        count=count,
        d_model=d_model,
        heads=delta.value_heads if delta else layer.n_heads,
        kv_heads=delta.key_heads if delta else layer.n_kv_heads,
        qk_dim=delta.key_dim if delta else layer.qk_dim,
        v_dim=delta.value_dim if delta else layer.v_dim,
        mixing=mixing,
        widths=widths,
        unnamed=unnamed,
        dense_width=dense // (blocks * d_model),
        experts=layer.n_experts,
        experts_per_token=layer.experts_per_token,
        expert_width=layer.expert_d_ff if layer.n_experts else 0,
        hidden_matrices=blocks,
        qk_norm=layer.qk_norm is not None,
        post_norms=layer.post_norms,
        parallel_block=layer.parallel_block,
        window=layer.sliding_window,
        chunk=layer.attention_chunk,
        sorted_rows=bool(layer.n_experts) and layer.routing == "dropless",
        expert_rows=(
            layer.capacity_factor if layer.n_experts and layer.routing == "capacity" else 1.0
        ),
        weighs_inputs=layer.weigh_inputs,
        linear=delta is not None,
    )
