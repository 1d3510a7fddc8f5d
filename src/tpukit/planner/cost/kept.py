"""What a remat policy keeps of a layer: the bytes that stay, and the products that run again."""

from dataclasses import dataclass
from functools import cache

from ...errors import ConfigError
from ...models.remat.policy import TENSOR_NAMES, RematPolicy
from .layer_shape import DOWN, GATE, KEYS, OUT, QUERIES, UP, VALUES, LayerShape

LAYER_INPUT, ATTENTION, EXPERT_ROWS = "decoder_layer_input", "attention", "expert_rows"
# Results of products with weights, which "minimal" keeps; the last one's is rarely read again.
PRODUCTS = (QUERIES, KEYS, VALUES, OUT, GATE, UP)
# Tensors of whose channels a device along `tensor` has a share; the others it has whole.
SPLIT_BY_TENSOR = (QUERIES, KEYS, VALUES, "context", ATTENTION, GATE, UP)


@dataclass(frozen=True)
class Kept:
    """Tensors of a layer by where they wait for the backward pass.

    Attributes:
        everything: Nothing is computed again, and the names say nothing.
        products: Results of products are kept as such, before norms and rotations change them.
    """

    device: frozenset[str]
    host: frozenset[str]
    everything: bool = False
    products: bool = False

    @property
    def names(self) -> frozenset[str]:
        """All of them, wherever they are."""
        return self.device | self.host

    @property
    def attention_again(self) -> bool:
        """Whether the backward pass runs the forward kernel once more."""
        return not self.everything and ATTENTION not in self.names

    def recomputed_weights(self, layer: LayerShape) -> tuple[float, float, float]:
        """Weights a token meets again in the backward pass: of attention, dense, of experts.

        A product runs again when something reads its result and it was not kept. The last one of
        a layer is only added to the stream, unless a norm or a router's weight comes after it.
        """
        k = layer
        if self.everything:
            return 0.0, 0.0, 0.0
        # Gradients of routers' weights read the last product of experts, the only one with a name.
        is_read = k.post_norms or not k.weighs_inputs
        matrices = k.hidden_matrices - (EXPERT_ROWS in self.names or not is_read)
        experts = float(matrices * k.d_model * k.chosen_width)
        if self.products:  # the policy does not know those of experts
            return 0.0, 0.0, experts
        kept = self.names
        # A name is given after the norm, which reads what was before it.
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
    """Channels of one token in each tensor that can be kept."""
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
    """What a policy keeps, as job files spell it.

    Raises:
        ConfigError: Which products the policy keeps, nothing here knows.
    """
    policy = RematPolicy.parse(remat)
    layer_input = frozenset({LAYER_INPUT})
    if policy.policy in ("none", "everything"):
        return Kept(layer_input, frozenset(), everything=True)
    if policy.policy == "minimal":
        return Kept(layer_input | set(PRODUCTS), frozenset(), products=True)
    if policy.policy in ("full", "nothing_saveable"):
        return Kept(layer_input, frozenset())
    if policy.policy != "names":
        raise ConfigError(
            f"remat '{remat}' cannot be weighed without compiling; use none, minimal, full, or "
            "save= and offload= with names of tensors."
        )
    save, offload = (
        frozenset(tensor for name in names for tensor in TENSOR_NAMES.get(name, (name,)))
        for names in (policy.save, policy.offload)
    )
    return Kept((save | layer_input) - offload, offload)
