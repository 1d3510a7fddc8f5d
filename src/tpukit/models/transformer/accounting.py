"""Parameter counts and training FLOPs per token of a transformer, by arithmetic."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...hardware import Figure
from ...plain_data import JsonObject
from ...shown import Shown
from .layer_config import LayerConfig
from .shapes import layer_shapes, parameter_shapes

if TYPE_CHECKING:
    from .config import TransformerConfig

BACKWARD_AND_FORWARD = 3  # the backward pass of a matmul is two matmuls of the same size
FLOPS_PER_MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class ParameterCount(Shown):
    """Parameters of a transformer; `active` counts those that one token uses (MoE: k experts)."""

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
        """FLOPs of matmuls with weights and of attention."""
        return self.matmul + self.attention

    @property
    def convention(self) -> str:
        """How the attention part was counted, in words."""
        keys = "keys before the query only" if self.causal else "all keys, masked or not"
        weights = "matmul weights a token touches (one unembedding)"
        each = (
            f"4 x {weights}, which are not trained, 6 x LoRA weights"
            if self.frozen
            else f"6 x {weights}"
        )
        return f"{each} + attention over {keys}; recomputation is not counted"

    def to_dict(self) -> JsonObject:
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
        # Tied or not, the unembedding is one matmul with as many weights as the embedding.
        matmul_active=in_layers + beside + embedding,
    )


def _layers_run(config: "TransformerConfig") -> Counter[str]:
    """Return the layers of each kind in a training step, with those of multi-token prediction."""
    kinds = Counter(config.layer_order)
    kinds[config.layer_order[-1]] += config.mtp_layers
    return kinds


def matmul_weights(layer: LayerConfig, d_model: int) -> int:
    """Return the weights of one layer that a token is multiplied with."""
    matrices = {
        path: math.prod(shape)
        for path, shape in layer_shapes(layer, d_model).items()
        if path.endswith("/kernel") and not path.endswith("_conv/kernel")
    }
    return sum(matrices.values()) + layer.experts_per_token * expert_weights(layer, d_model)


def expert_weights(layer: LayerConfig, d_model: int) -> int:
    """Return the weights of one expert."""
    return 3 * d_model * layer.expert_d_ff


def count_flops_per_token(
    config: "TransformerConfig",
    sequence_length: int,
    *,
    causal: bool = True,
    lora_multiply_adds: float | None = None,
) -> FlopsPerToken:
    """Count the FLOPs of one training token; see `FlopsPerToken.convention`.

    Args:
        config: The model.
        sequence_length: Tokens in a sequence.
        causal: Whether only keys before a query are counted.
        lora_multiply_adds: Multiply-adds of a token with LoRA matrices, where only these are
            trained; None without LoRA.
    """
    each = FLOPS_PER_MULTIPLY_ADD * BACKWARD_AND_FORWARD
    attention = sum(
        count * each * _mixing_products(config.kinds[kind], sequence_length, causal=causal)
        for kind, count in _layers_run(config).items()
    )
    matmul = each * config.parameter_count().matmul_active
    frozen = lora_multiply_adds is not None
    if lora_multiply_adds is not None:  # frozen weights have no gradients
        matmul = matmul * 2 / 3 + each * lora_multiply_adds
    return FlopsPerToken(
        matmul=float(matmul),
        attention=float(attention),
        sequence_length=sequence_length,
        causal=causal,
        frozen=frozen,
    )


def _mixing_products(layer: LayerConfig, sequence_length: int, *, causal: bool) -> float:
    """Return the multiply-adds of one token without weights: scores and values, or the state."""
    if layer.delta is not None:
        # The state is read for the key, updated, and read for the query.
        d = layer.delta
        return 3 * d.value_heads * d.key_dim * d.value_dim
    keys = mean_keys(layer, sequence_length, causal=causal)
    return layer.n_heads * (layer.qk_dim + layer.v_dim) * keys


def mean_keys(layer: LayerConfig, sequence_length: int, *, causal: bool = True) -> float:
    """Return the mean number of keys that a query attends to in a sequence."""
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
    lora_multiply_adds: float | None = None,
) -> Figure:
    """Return the training FLOPs of a step over all devices, as MFU counts them.

    The figure is missing for user models.
    """
    if config is None or sequence_length is None or tokens_per_step is None:
        return Figure.missing("FLOP", "FLOPs are counted for the reference transformers only")
    per_token = count_flops_per_token(
        config, sequence_length, lora_multiply_adds=lora_multiply_adds
    )
    return Figure(per_token.total * tokens_per_step, "FLOP", "model", per_token.convention)
