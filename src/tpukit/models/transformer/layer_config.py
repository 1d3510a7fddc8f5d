"""What one kind of decoder layer is: its attention, its feed-forward block and its norms."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import TPUModelError, did_you_mean
from ...rotary import RopeScaling
from .field_types import check_types
from .parts import GatedDelta, LatentAttention, read_part

Activation = Literal["silu", "gelu", "relu", "clamped_swiglu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned", "none"]
RoutingName = Literal["dropless", "capacity"]
QKNorm = Literal["head", "across_heads", "after_rope"]
AttentionBias = Literal["qkv", "qkvo"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ("silu", "gelu", "relu", "clamped_swiglu"),
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rope", "learned", "none"),
    "routing": ("dropless", "capacity"),
    "qk_norm": ("head", "across_heads", "after_rope"),
    "attention_bias": ("qkv", "qkvo"),
    "router_score": ("softmax", "sigmoid"),
}
_OPTIONAL = ("qk_norm", "attention_bias")
_COUNTS = (
    *("per_layer_width", "n_experts", "experts_per_token", "expert_d_ff", "shared_d_ff"),
    *("router_groups", "router_groups_kept", "router_group_top", "temperature_floor"),
)
_PARTS: dict[str, type[Any]] = {
    "rope_scaling": RopeScaling,
    "latent": LatentAttention,
    "delta": GatedDelta,
}


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The dimensions and options of one kind of layer; a `TransformerConfig` has one or several.

    Left out, `n_kv_heads` equals `n_heads`, `head_dim` equals `d_model / n_heads` and
    `expert_d_ff` equals `d_ff`. `gelu` is the tanh form; `clamped_swiglu` that of GPT-OSS.

    Attributes:
        sliding_window: Keys that a query attends to, itself included.
        attention_chunk: A query attends to keys of its own chunk of so many tokens only.
        attention_scale: Of the scores; `head_dim ** -0.5` by default.
        attention_soft_cap: Scores are bent by a tanh to stay within ± this.
        attention_sinks: Each query head has a learned logit that takes weight and gives nothing.
        attention_bias: Which projections of attention have a bias.
        attention_gate: The query projection also gives a sigmoid gate on attention's output.
        qk_norm: "head" norms each head of queries and keys, "across_heads" all of them together,
            "after_rope" each head once it is rotated and with nothing learned.
        v_norm: Values are normed, with nothing learned.
        keys_as_values: Values are the keys before their norm and rotation: one projection.
        shares_keys_of: The kind of layer from whose last one this layer takes keys and values.
        temperature_scale: Queries grow by `1 + this * log(1 + floor((position + 1) / floor))`.
        temperature_floor: Tokens before they do.
        rope_share: The share of a head's channels that is rotated.
        rope_spread: Rotated channels are the fastest of the whole head's, not a head of their own.
        latent: Multi-head latent attention instead of keys and values of their own.
        delta: The gated delta rule instead of attention.
        pre_norms: Blocks read the normed stream.
        post_norms: What blocks add to the stream is normed.
        norm_offset: Norms store their scale less 1.
        layer_scalar: The layer's output is multiplied by one learned number.
        per_layer_width: Channels of the embedding that every token has for this layer alone.
        expert_d_ff: Hidden channels of an expert.
        shared_d_ff: Hidden channels of the expert that every token passes; 0 for none.
        shared_gate: That expert's output is weighed by a sigmoid of the token.
        dense_beside_experts: A dense block of `d_ff` runs beside the experts, each with norms.
        router_score: How logits become scores.
        router_normalize: Whether weights of a token's experts are made to add up to 1.
        router_scale: Of those weights.
        router_bias: Logits have a bias.
        router_choice_bias: Scores have a bias for the choice, and not for the weights.
        router_groups: Groups of experts, of which only the best `router_groups_kept` stand for
            choice; a group counts as its `router_group_top` best experts.
        router_norm: The router reads the stream normed for itself, and experts have a factor.
        weigh_inputs: A weight multiplies its expert's input, not its output.
        expert_bias: Experts' projections have a bias.
    """

    d_ff: int
    n_heads: int
    n_kv_heads: int = 0
    head_dim: int = 0

    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel_block: bool = False
    layer_scalar: bool = False
    per_layer_width: int = 0

    sliding_window: int | None = None
    attention_chunk: int | None = None
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    attention_bias: AttentionBias | None = None
    attention_gate: bool = False
    qk_norm: QKNorm | bool | None = None
    v_norm: bool = False
    keys_as_values: bool = False
    shares_keys_of: str | None = None
    temperature_scale: float = 0.0
    temperature_floor: int = 8192
    latent: LatentAttention | None = None
    delta: GatedDelta | None = None

    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_share: float = 1.0
    rope_spread: bool = False

    activation: Activation = "silu"
    gated_mlp: bool = True
    mlp_bias: bool = False

    n_experts: int = 0
    experts_per_token: int = 0
    expert_d_ff: int = 0
    shared_d_ff: int = 0
    shared_gate: bool = False
    dense_beside_experts: bool = False
    expert_bias: bool = False
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalize: bool = True
    router_scale: float = 1.0
    router_bias: bool = False
    router_choice_bias: bool = False
    router_groups: int = 0
    router_groups_kept: int = 0
    router_group_top: int = 2
    router_norm: bool = False
    weigh_inputs: bool = False
    routing: RoutingName = "dropless"
    capacity_factor: float = 1.25

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        for field, kind in _PARTS.items():
            object.__setattr__(self, field, read_part(kind, getattr(self, field), field))
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic":
            raise TPUModelError(
                "dynamic rope scaling turns tokens by the length of their sequence, so no cache "
                "could keep their keys; use linear, llama3, yarn or longrope."
            )
        if isinstance(self.qk_norm, bool):  # yes or no: the usual one, or none
            object.__setattr__(self, "qk_norm", "head" if self.qk_norm else None)
        if not self.n_kv_heads:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.n_experts and not self.expert_d_ff:
            object.__setattr__(self, "expert_d_ff", self.d_ff)

    @property
    def mixer(self) -> Literal["attention", "latent", "delta"]:
        """How the layer mixes tokens."""
        return "latent" if self.latent else "delta" if self.delta else "attention"

    @property
    def qk_dim(self) -> int:
        """Channels of a query or key head."""
        return self.latent.qk_dim if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        """Channels of a value head."""
        return self.latent.v_dim if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Channels of a head that frequencies are computed for."""
        if self.latent:
            return self.latent.rope_dim
        return self.head_dim if self.rope_spread else int(self.head_dim * self.rope_share)

    def reach(self, sequence_length: int) -> int | None:
        """Keys that a query can attend to, or None where that is every key before it."""
        bounds = [
            b for b in (self.sliding_window, self.attention_chunk) if b and b < sequence_length
        ]
        return min(bounds, default=None)

    def check(self, where: str) -> None:
        """Raise TPUModelError where dimensions or options cannot stand together.

        Args:
            where: What the layer is called in the message.
        """
        for field, choices in _CHOICES.items():
            seen = getattr(self, field)
            if seen not in choices and not (seen is None and field in _OPTIONAL):
                raise TPUModelError(
                    f"{where}{field}='{seen}' is not one of {', '.join(choices)}."
                    + did_you_mean(str(seen), choices)
                )
        for wrong, reason in _contradictions(self):
            if wrong:
                raise TPUModelError(f"{where}{reason}")


def _contradictions(c: LayerConfig) -> list[tuple[bool, str]]:
    """(whether it is so, what is wrong and the way out) for everything that cannot be."""
    small = [f for f in ("d_ff", "n_heads", "n_kv_heads", "head_dim") if getattr(c, f) <= 0]
    negative = [f for f in _COUNTS if getattr(c, f) < 0]
    small += [
        f
        for f in ("sliding_window", "attention_chunk")
        if (bound := getattr(c, f)) is not None and bound < 1
    ]
    first_small = small[0] if small else ""
    only_attention = [
        f
        for f in (
            *("sliding_window", "attention_chunk", "attention_soft_cap", "attention_sinks"),
            *("attention_gate", "v_norm", "keys_as_values", "shares_keys_of"),
        )
        if getattr(c, f)
    ]
    return [
        (bool(small), f"{first_small}={getattr(c, first_small, None)}; it must be at least 1."),
        (bool(negative), f"{', '.join(negative)} must not be below 0."),
        (
            bool(c.n_kv_heads and c.n_heads % c.n_kv_heads),
            f"n_kv_heads={c.n_kv_heads} does not divide n_heads={c.n_heads}; every "
            "key/value head serves the same number of query heads, so use a divisor.",
        ),
        (
            c.positions == "rope" and c.mixer == "attention" and bool(c.rope_dim % 2),
            f"head_dim={c.head_dim} gives {c.rope_dim} rotated channels, which is odd; rotary "
            "positions rotate pairs, so make it even (or set positions='learned').",
        ),
        (not 0 < c.rope_share <= 1, f"rope_share={c.rope_share}; a share is above 0, at most 1."),
        (
            bool(c.n_experts) and not 1 <= c.experts_per_token <= c.n_experts,
            f"experts_per_token={c.experts_per_token} with n_experts={c.n_experts}; "
            "each token goes to between 1 and n_experts experts.",
        ),
        (
            bool(c.experts_per_token) and not c.n_experts,
            "experts_per_token is set but n_experts is 0; set n_experts too.",
        ),
        (
            bool(c.n_experts) and not c.gated_mlp,
            "experts are gated MLPs here; leave gated_mlp=True with n_experts.",
        ),
        (
            bool(c.router_groups)
            and (
                c.n_experts % max(1, c.router_groups) > 0
                or not 0 < c.router_groups_kept <= c.router_groups
            ),
            f"router_groups={c.router_groups} of which {c.router_groups_kept} are kept, with "
            f"{c.n_experts} experts; groups must divide the experts, and at least one is kept.",
        ),
        (
            (c.dense_beside_experts or bool(c.shared_d_ff)) and not c.n_experts,
            "shared_d_ff and dense_beside_experts stand beside experts, and n_experts is 0; "
            "a layer without experts has d_ff.",
        ),
        (c.shared_gate and not c.shared_d_ff, "shared_gate needs a shared_d_ff to weigh."),
        (
            bool(c.latent and c.delta),
            "latent and delta are two ways to mix tokens; a kind of layer has one of them.",
        ),
        (
            c.mixer != "attention" and bool(only_attention),
            f"{only_attention and only_attention[0]} is an option of plain attention, and this "
            f"layer has {c.mixer}; leave it out.",
        ),
        (
            not (c.pre_norms or c.post_norms),
            "a layer without norms does not train; set pre_norms or post_norms.",
        ),
        (
            c.parallel_block and (not c.pre_norms or c.dense_beside_experts),
            "parallel_block reads attention and MLP from one norm before both; leave pre_norms "
            "as it is, and dense_beside_experts out.",
        ),
        (
            bool(c.sliding_window and c.attention_chunk),
            "sliding_window and attention_chunk both bound what a query attends to; use one.",
        ),
        (
            c.keys_as_values and c.qk_norm == "across_heads",
            "keys_as_values with qk_norm='across_heads' is in no model; norm each head.",
        ),
    ]


LAYER_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(LayerConfig))
