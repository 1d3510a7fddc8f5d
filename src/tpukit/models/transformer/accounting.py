"""How many parameters a transformer has and how many FLOPs a token costs, by arithmetic."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...hardware import Figure
from ...shown import Shown
from .layer_config import LayerConfig
from .shapes import layer_shapes, parameter_shapes

if TYPE_CHECKING:
    from .config import TransformerConfig

BACKWARD_AND_FORWARD = 3  # the backward pass of a matrix product is two of the same size
FLOPS_PER_MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class ParameterCount(Shown):
    """Parameters of a transformer; `active` is what one token touches (MoE: k experts)."""

    total: int
    active: int
    embedding: int
    matmul_active: int

    def to_dict(self) -> dict[str, int]:
        """Plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken(Shown):
    """Training FLOPs for one token, and the convention they were counted by."""

    matmul: float
    attention: float
    sequence_length: int
    causal: bool
    frozen: bool = False

    @property
    def total(self) -> float:
        """Matrix products with weights plus attention scores and values."""
        return self.matmul + self.attention

    @property
    def convention(self) -> str:
        """How the attention part was counted, in words."""
        keys = "keys before the query only" if self.causal else "all keys, masked or not"
        weights = "matmul weights a token touches (one unembedding)"
        each = (
            f"4 x {weights}, which are not trained, 6 x thin ones"
            if self.frozen
            else f"6 x {weights}"
        )
        return f"{each} + attention over {keys}; recomputation is not counted"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the total and the convention."""
        return {
            **dataclasses.asdict(self),
            "total": self.total,
            "convention": self.convention,
            "origin": "model",
        }


def count_parameters(config: "TransformerConfig") -> ParameterCount:
    """Count what `parameter_shapes` lists."""
    c = config
    total = sum(math.prod(shape) for shape in parameter_shapes(c).values())
    kinds = _layers_run(c)
    idle = sum(
        count * (layer.n_experts - layer.experts_per_token) * expert_weights(layer, c.d_model)
        for layer, count in ((c.kinds[kind], count) for kind, count in kinds.items())
    )
    embedding = c.vocab_size * c.d_model
    tables = c.max_seq_len * c.d_model if c.learned_positions else 0
    tables += c.vocab_size * c.n_layers * c.per_layer_width
    in_layers = sum(n * matmul_weights(c.kinds[kind], c.d_model) for kind, n in kinds.items())
    beside = c.d_model * c.n_layers * c.per_layer_width
    # Each depth of multi-token prediction projects two vectors to one and unembeds once more.
    beside += c.mtp_layers * (2 * c.d_model**2 + embedding)
    return ParameterCount(
        total=total,
        active=total - idle,
        embedding=embedding + tables,
        # Tied or not, the unembedding is one product with as many weights as the embedding.
        matmul_active=in_layers + beside + embedding,
    )


def _layers_run(config: "TransformerConfig") -> Counter[str]:
    """How many layers of each kind a training step runs, those of multi-token prediction too."""
    kinds = Counter(config.layer_order)
    kinds[config.layer_order[-1]] += config.mtp_layers
    return kinds


def matmul_weights(layer: LayerConfig, d_model: int) -> int:
    """Weights of one layer that a token is multiplied with."""
    matrices = {
        path: math.prod(shape)
        for path, shape in layer_shapes(layer, d_model).items()
        if path.endswith("/kernel") and not path.endswith("_conv/kernel")
    }
    return sum(matrices.values()) + layer.experts_per_token * expert_weights(layer, d_model)


def expert_weights(layer: LayerConfig, d_model: int) -> int:
    """Weights of one expert's matrices."""
    return 3 * d_model * layer.expert_d_ff


def count_flops_per_token(
    config: "TransformerConfig",
    sequence_length: int,
    *,
    causal: bool = True,
    thin_products: float | None = None,
) -> FlopsPerToken:
    """Count the FLOPs of one training token; see `FlopsPerToken.convention`.

    Args:
        config: The model.
        sequence_length: Tokens in a sequence.
        causal: Whether only keys before a query are counted.
        thin_products: Multiply-adds of a token with thin matrices that alone are trained (LoRA);
            None where the model's own are.
    """
    each = FLOPS_PER_MULTIPLY_ADD * BACKWARD_AND_FORWARD
    attention = sum(
        count * each * _mixing_products(config.kinds[kind], sequence_length, causal=causal)
        for kind, count in _layers_run(config).items()
    )
    matmul = each * config.parameter_count().matmul_active
    frozen = thin_products is not None
    if thin_products is not None:  # gradients of the others are not made
        matmul = matmul * 2 / 3 + each * thin_products
    return FlopsPerToken(
        matmul=float(matmul),
        attention=float(attention),
        sequence_length=sequence_length,
        causal=causal,
        frozen=frozen,
    )


def _mixing_products(layer: LayerConfig, sequence_length: int, *, causal: bool) -> float:
    """Multiply-adds of one token that no weight has part in: scores and values, or the state's."""
    if layer.delta is not None:
        # The state is read for the key, changed, and read for the query.
        d = layer.delta
        return 3 * d.value_heads * d.key_dim * d.value_dim
    keys = mean_keys(layer, sequence_length, causal=causal)
    return layer.n_heads * (layer.qk_dim + layer.v_dim) * keys


def mean_keys(layer: LayerConfig, sequence_length: int, *, causal: bool = True) -> float:
    """Keys that a query attends to, on average over a sequence."""
    if not causal:
        return float(sequence_length)
    if layer.attention_chunk and layer.attention_chunk < sequence_length:
        return layer.attention_chunk / 2
    window = min(layer.sliding_window or sequence_length, sequence_length)
    return window * (1 - window / (2 * sequence_length))


def count_flops_per_step(
    config: "TransformerConfig | None",
    *,
    sequence_length: int | None,
    tokens_per_step: int | None,
    thin_products: float | None = None,
) -> Figure:
    """Training FLOPs of a step over all devices, as MFU counts them; missing for other models."""
    if config is None or sequence_length is None or tokens_per_step is None:
        return Figure.missing("FLOP", "FLOPs are counted for the reference transformers only")
    per_token = count_flops_per_token(config, sequence_length, thin_products=thin_products)
    return Figure(per_token.total * tokens_per_step, "FLOP", "model", per_token.convention)
