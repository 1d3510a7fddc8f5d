"""How many parameters a transformer has and how many FLOPs a token costs, by arithmetic."""

import dataclasses
import math
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


def parameter_shapes(config: "TransformerConfig") -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its path, by the same rules the modules are built by.

    Those of the layers are stacked: their first dimension counts layers.
    """
    c = config
    d, heads, keys = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer = {
        **_norm("input_norm", d, c),
        **_linear("self_attention/q_proj", d, heads, bias=c.use_bias),
        **_linear("self_attention/k_proj", d, keys, bias=c.use_bias),
        **_linear("self_attention/v_proj", d, keys, bias=c.use_bias),
        **_linear("self_attention/o_proj", heads, d, bias=c.use_bias),
        **({} if c.parallel_block else _norm("mlp_norm", d, c)),
        **_feed_forward(c),
    }
    if c.qk_norm:
        layer |= _norm("self_attention/q_norm", c.head_dim, c)
        layer |= _norm("self_attention/k_norm", c.head_dim, c)
    if c.post_norms:
        layer |= {**_norm("post_attention_norm", d, c), **_norm("post_mlp_norm", d, c)}
    shapes = {f"layers/{path}": (c.n_layers, *shape) for path, shape in layer.items()}
    shapes |= {"embed/embedding": (c.vocab_size, d), **_norm("final_norm", d, c)}
    if c.positions == "learned":
        shapes["position_embed/embedding"] = (c.max_seq_len, d)
    if not c.tied_embeddings:
        shapes["lm_head/kernel"] = (d, c.vocab_size)
    return shapes


def count_parameters(config: "TransformerConfig") -> ParameterCount:
    """Count what `parameter_shapes` lists."""
    c = config
    total = sum(math.prod(shape) for shape in parameter_shapes(c).values())
    idle = c.n_layers * (c.n_experts - c.experts_per_token) * _expert_weights(c)
    embedding = c.vocab_size * c.d_model
    attention = 2 * c.d_model * c.head_dim * (c.n_heads + c.n_kv_heads)
    feed_forward = max(1, c.experts_per_token) * _expert_weights(c) + c.d_model * c.n_experts
    return ParameterCount(
        total=total,
        active=total - idle,
        embedding=embedding + (c.max_seq_len * c.d_model if c.positions == "learned" else 0),
        # Tied or not, the unembedding is one product with as many weights as the embedding.
        matmul_active=c.n_layers * (attention + feed_forward) + embedding,
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


def _expert_weights(c: "TransformerConfig") -> int:
    """Weights of one feed-forward block."""
    return c.d_model * c.d_ff * (3 if c.gated_mlp else 2)


def _feed_forward(c: "TransformerConfig") -> dict[str, tuple[int, ...]]:
    if c.n_experts:
        widen, narrow = (c.n_experts, c.d_model, c.d_ff), (c.n_experts, c.d_ff, c.d_model)
        return {
            **_linear("mlp/router", c.d_model, c.n_experts, bias=False),
            "mlp/experts/gate_proj": widen,
            "mlp/experts/up_proj": widen,
            "mlp/experts/down_proj": narrow,
        }
    gate = _linear("mlp/gate_proj", c.d_model, c.d_ff, bias=c.use_bias) if c.gated_mlp else {}
    return {
        **gate,
        **_linear("mlp/up_proj", c.d_model, c.d_ff, bias=c.use_bias),
        **_linear("mlp/down_proj", c.d_ff, c.d_model, bias=c.use_bias),
    }


def _linear(path: str, inputs: int, outputs: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    kernel: dict[str, tuple[int, ...]] = {f"{path}/kernel": (inputs, outputs)}
    return {**kernel, f"{path}/bias": (outputs,)} if bias else kernel


def _norm(path: str, width: int, c: "TransformerConfig") -> dict[str, tuple[int, ...]]:
    scale: dict[str, tuple[int, ...]] = {f"{path}/scale": (width,)}
    return {**scale, f"{path}/bias": (width,)} if c.norm == "layernorm" else scale
