"""How many parameters a transformer has and how many FLOPs a token costs, by arithmetic."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...hardware import Figure

if TYPE_CHECKING:
    from .config import TransformerConfig

BACKWARD_AND_FORWARD = 3  # the backward pass of a matrix product is two of the same size
FLOPS_PER_MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a transformer; `active` is what one token touches (MoE: k experts)."""

    total: int
    active: int
    embedding: int
    matmul_active: int

    def to_dict(self) -> dict[str, int]:
        """Plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """Training FLOPs for one token, and the convention they were counted by."""

    matmul: float
    attention: float
    seq_len: int
    causal: bool

    @property
    def total(self) -> float:
        """Matrix products with weights plus attention scores and values."""
        return self.matmul + self.attention

    @property
    def convention(self) -> str:
        """How the attention part was counted, in words."""
        keys = "keys before the query only" if self.causal else "all keys, masked or not"
        return (
            f"6 x matmul weights a token touches (one unembedding) + attention over {keys}; "
            "recomputation is not counted"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the total and the convention."""
        return {
            **dataclasses.asdict(self),
            "total": self.total,
            "convention": self.convention,
            "origin": "model",
        }


def count_parameters(config: "TransformerConfig") -> ParameterCount:
    """Count by the same rules the modules are built by (a test holds the two together)."""
    c = config
    norm = c.d_model * (2 if c.norm == "layernorm" else 1)
    norms_per_layer = (1 if c.parallel_block else 2) + (2 if c.post_norms else 0)
    qk_norms = 2 * c.head_dim if c.qk_norm else 0
    attention_bias = (c.n_heads + 2 * c.n_kv_heads) * c.head_dim + c.d_model if c.use_bias else 0
    mlp_bias = c.d_ff * (2 if c.gated_mlp else 1) + c.d_model if c.use_bias else 0
    if c.n_experts:
        mlp_bias = 0
    small = norms_per_layer * norm + qk_norms + attention_bias + mlp_bias
    layer = _attention_weights(c) + _mlp_weights(c, experts=c.n_experts or 1) + small
    layer_active = _attention_weights(c) + _mlp_weights(c, experts=c.experts_per_token or 1) + small
    embedding = c.vocab_size * c.d_model
    positions = c.max_seq_len * c.d_model if c.positions == "learned" else 0
    unembedding = 0 if c.tied_embeddings else embedding
    outside = embedding + positions + unembedding + norm
    return ParameterCount(
        total=c.n_layers * layer + outside,
        active=c.n_layers * layer_active + outside,
        embedding=embedding + positions,
        matmul_active=c.n_layers
        * (_attention_weights(c) + _mlp_weights(c, experts=c.experts_per_token or 1))
        + embedding,  # tied or not, the unembedding is one product with this many weights
    )


def count_flops_per_token(
    config: "TransformerConfig", seq_len: int, *, causal: bool = True
) -> FlopsPerToken:
    """Count the FLOPs of one training token; see `FlopsPerToken.convention`."""
    per_key = 2 * FLOPS_PER_MULTIPLY_ADD * BACKWARD_AND_FORWARD * config.n_heads * config.head_dim
    keys = sum(
        _mean_keys(config.window_of_layer(layer), seq_len, causal=causal)
        for layer in range(config.n_layers)
    )
    matmul = FLOPS_PER_MULTIPLY_ADD * BACKWARD_AND_FORWARD * config.parameter_count().matmul_active
    return FlopsPerToken(
        matmul=float(matmul), attention=per_key * keys, seq_len=seq_len, causal=causal
    )


def count_flops_per_step(
    config: "TransformerConfig | None", *, sequence_length: int | None, tokens_per_step: int | None
) -> Figure:
    """Training FLOPs of a step over all devices, as MFU counts them; missing for other models."""
    if config is None or sequence_length is None or tokens_per_step is None:
        return Figure.missing("FLOP", "FLOPs are counted for the reference transformers only")
    per_token = count_flops_per_token(config, sequence_length)
    return Figure(per_token.total * tokens_per_step, "FLOP", "model", per_token.convention)


def _mean_keys(window: int | None, seq_len: int, *, causal: bool) -> float:
    if not causal:
        return float(seq_len)
    reach = min(window or seq_len, seq_len)
    return reach * (1 - reach / (2 * seq_len))


def _attention_weights(c: "TransformerConfig") -> int:
    return c.d_model * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)


def _mlp_weights(c: "TransformerConfig", *, experts: int) -> int:
    router = c.d_model * c.n_experts
    return experts * c.d_model * c.d_ff * (3 if c.gated_mlp else 2) + router
