"""What a remat policy keeps of a layer: the bytes that stay, and the products that run again."""

from dataclasses import dataclass
from functools import cache

from ...errors import ConfigError
from ...models.remat.policy import TENSOR_NAMES, RematPolicy
from .model_shape import ModelShape

LAYER_INPUT, ATTENTION = "decoder_layer_input", "attention"
QUERIES, KEYS, VALUES = TENSOR_NAMES["qkv_proj"]
GATE, UP = TENSOR_NAMES["mlpwi"]
OUT, DOWN = "out_proj", "mlpwo"
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

    def recomputed_weights(self, shape: ModelShape) -> tuple[float, float]:
        """Weights a token meets again in the backward pass: of attention, of feed-forward.

        A product runs again when something reads its result and it was not kept. The last one of
        a layer is only added to the stream, unless a norm or a router's weight comes after it.
        """
        s, width, keys = shape, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        if self.everything:
            return 0.0, 0.0
        if self.products:  # the policy does not know those of experts
            inner = s.hidden_matrices * s.d_model * s.hidden_width if s.experts else 0
            return 0.0, float(inner)
        kept = self.names
        # A name is given after the norm, which reads what was before it.
        kept = kept - {QUERIES, KEYS} if s.qk_norm else kept
        kept = kept - {OUT, DOWN} if s.post_norms else kept
        again = {QUERIES: width, KEYS: keys, VALUES: keys}
        if not s.parallel_block or s.post_norms:
            again[OUT] = width
        attention = s.d_model * sum(size for name, size in again.items() if name not in kept)
        inner = [UP, GATE] if s.hidden_matrices == 3 else [UP]
        if s.post_norms or s.experts:
            inner.append(DOWN)
        missing = sum(name not in kept for name in inner)
        return float(attention), float(missing * s.d_model * s.hidden_width)


def kept_channels(shape: ModelShape) -> dict[str, float]:
    """Channels of one token in each tensor that can be kept."""
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate = shape.hidden_width if shape.hidden_matrices == 3 else 0
    return {
        LAYER_INPUT: shape.d_model,
        QUERIES: width,
        KEYS: keys,
        VALUES: keys,
        "context": width,
        ATTENTION: width,
        OUT: shape.d_model,
        GATE: gate,
        UP: shape.hidden_width,
        DOWN: shape.d_model,
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
