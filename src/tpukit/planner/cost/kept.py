"""What a remat policy keeps of a layer: bytes that stay, and matmuls that run again."""

from dataclasses import dataclass
from functools import cache

from ...errors import ConfigError
from ...models.remat.policy import FULL, MINIMAL, NAMES, NONE, TENSOR_NAMES, RematPolicy
from .model_shape import DOWN, GATE, KEYS, OUT, QUERIES, UP, VALUES, LayerShape

LAYER_INPUT, ATTENTION, EXPERT_ROWS = "decoder_layer_input", "attention", "expert_rows"
# Results of matmuls with weights, which "minimal" keeps; the last is rarely read again.
PRODUCTS = (QUERIES, KEYS, VALUES, OUT, GATE, UP)
# Tensors that are sharded along `tensor`; the others are replicated.
SPLIT_BY_TENSOR = (QUERIES, KEYS, VALUES, "context", ATTENTION, GATE, UP)


@dataclass(frozen=True)
class Kept:
    """Tensors of a layer that are kept for the backward pass, by place.

    Attributes:
        everything: All tensors are kept, so nothing is recomputed, and the names are ignored.
        products: Whether matmul results are kept before norms and rotations are applied.
    """

    device: frozenset[str]
    host: frozenset[str]
    everything: bool = False
    products: bool = False

    @property
    def names(self) -> frozenset[str]:
        """All names, on the device and on the host."""
        return self.device | self.host

    @property
    def attention_again(self) -> bool:
        """Whether the backward pass runs the forward attention kernel again."""
        return not self.everything and ATTENTION not in self.names

    def recomputed_weights(self, layer: LayerShape) -> tuple[float, float, float]:
        """Return the weights per token that the backward pass multiplies again.

        A matmul runs again if its result is needed and was not kept. The last result of a layer is
        only added to the residual stream, unless a norm or a router weight follows it.
        """
        k = layer
        if self.everything:
            return 0.0, 0.0, 0.0
        # Gradients of router weights read the last matmul of experts, the only one with a name.
        is_read = k.post_norms or not k.weighs_inputs
        matrices = k.hidden_matrices - (EXPERT_ROWS in self.names or not is_read)
        experts = float(matrices * k.d_model * k.chosen_width)
        if self.products:  # the policy does not know those of experts
            return 0.0, 0.0, experts
        kept = self.names
        # The name is given after the norm, but the norm's gradient reads its input.
        kept = kept - {QUERIES, KEYS} if k.qk_norm else kept
        kept = kept - {OUT, DOWN} if k.post_norms else kept
        kept = kept | {OUT} if k.parallel_block and not k.post_norms else kept
        attention = k.unnamed + sum(
            weights for name, weights in k.mixing.items() if name not in kept
        )
        inner = [UP, GATE] if k.hidden_matrices == 3 else [UP]
        inner += [DOWN] if k.post_norms else []
        dense = sum(name not in kept for name in inner) * k.d_model * k.dense_width
        return float(attention), float(dense), experts


def kept_channels(layer: LayerShape) -> dict[str, float]:
    """Return the channels per token of each tensor that can be kept."""
    gate = layer.dense_width if layer.hidden_matrices == 3 else 0
    return {
        LAYER_INPUT: layer.d_model,
        **{name: layer.widths.get(name, 0) for name in (QUERIES, KEYS, VALUES)},
        "context": layer.out_width,
        ATTENTION: 0 if layer.linear else layer.out_width,
        OUT: layer.d_model,
        GATE: gate,
        UP: layer.dense_width,
        DOWN: layer.d_model,
        EXPERT_ROWS: layer.experts_per_token * layer.expert_rows * layer.d_model,
    }


@cache
def kept_by(remat: str) -> Kept:
    """Return what a remat policy, as in a job file, keeps.

    Raises:
        ConfigError: The tensors that the policy keeps are unknown.
    """
    policy = RematPolicy.parse(remat)
    layer_input = frozenset({LAYER_INPUT})
    if policy.keeps_everything:
        return Kept(layer_input, frozenset(), everything=True)
    if policy.policy == MINIMAL:
        return Kept(layer_input | set(PRODUCTS), frozenset(), products=True)
    if policy.keeps_inputs_only:
        return Kept(layer_input, frozenset())
    if policy.policy != NAMES:
        raise ConfigError(
            f"remat '{remat}' cannot be weighed without compiling; use {NONE}, {MINIMAL}, {FULL}, "
            "or save= and offload= with names of tensors."
        )
    save, offload = (
        frozenset(tensor for name in names for tensor in TENSOR_NAMES.get(name, (name,)))
        for names in (policy.save, policy.offload)
    )
    return Kept((save | layer_input) - offload, offload)
