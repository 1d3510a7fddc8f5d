"""One kind of decoder layer as plain data: its attention, feed-forward block and norms.

Reading it needs no jax.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ...errors import TPUModelError, did_you_mean
from ...rotary import RopeScaling
from .field_types import check_types

Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention with keys and values from one short latent per token (MLA, DeepSeek V2).

    Attributes:
        kv_rank: Channels of the latent of keys and values. A cache keeps the latent and the
            rotated key.
        q_rank: Channels of the latent of queries; 0 for queries without a latent.
        nope_dim: Channels of a query or key head without rotary positions.
        rope_dim: Rotated channels; all heads share one rotated key.
        v_dim: Channels of a value head.
    """

    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "latent", ("kv_rank", "nope_dim", "rope_dim", "v_dim"))
        if self.rope_dim % 2:
            raise TPUModelError(f"latent.rope_dim={self.rope_dim} is odd; expected an even number.")

    @property
    def qk_dim(self) -> int:
        """Channels of a query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Linear attention by the gated delta rule (Qwen3-Next), with a state instead of a cache.

    Attributes:
        key_heads: Heads of queries and keys.
        value_heads: Heads of values, a multiple of `key_heads`.
        key_dim: Channels of a query or key head.
        value_dim: Channels of a value head.
        convolution: Tokens of the short convolution's window, the newest included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: int = 4

    def __post_init__(self) -> None:
        _check_positive(
            self, "delta", ("key_heads", "value_heads", "key_dim", "value_dim", "convolution")
        )
        if self.value_heads % self.key_heads:
            raise TPUModelError(
                f"delta.value_heads={self.value_heads} is not a multiple of "
                f"delta.key_heads={self.key_heads}; every key head serves as many value heads."
            )


def read_part(kind: type[Part], given: Any, field: str) -> Part | None:
    """Return the dataclass of a table in a file, or None for an empty table.

    Raises:
        TPUModelError: A key is unknown, or one is missing.
    """
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TPUModelError(f"{field}={given!r}; expected a table of settings, or leave it out.")
    table: dict[str, Any] = dict(given)  # pyright: ignore[reportUnknownArgumentType]  from a file
    known = {f.name: f for f in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    for key in table:
        if key not in known:
            raise TPUModelError(
                f"'{key}' is not a setting of {field}; expected {', '.join(known)}."
                + did_you_mean(str(key), known)
            )
    missing = [f.name for f in known.values() if f.default is dataclasses.MISSING]
    absent = [name for name in missing if name not in table]
    if table and absent:
        raise TPUModelError(f"{field} has no {', '.join(absent)}; set every dimension.")
    check_types(kind, table, where=f"{field}.")
    return kind(**table) if table else None


def _check_positive(part: object, field: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(part, name) < 1:
            raise TPUModelError(f"{field}.{name}={getattr(part, name)}; it must be at least 1.")


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

    By default `n_kv_heads` equals `n_heads`, `head_dim` equals `d_model / n_heads` and
    `expert_d_ff` equals `d_ff`. `gelu` is the tanh form, `clamped_swiglu` the one of GPT-OSS.

    Attributes:
        sliding_window: Keys that a query attends to, itself included.
        attention_chunk: Tokens per chunk; a query attends to keys of its own chunk only.
        attention_scale: Scale of the scores; `head_dim ** -0.5` by default.
        attention_soft_cap: Scores are limited to ± this by a tanh.
        attention_sinks: Each query head has a learned logit in the softmax's denominator.
        attention_bias: The projections of attention with a bias.
        attention_gate: The query projection also computes a sigmoid gate of attention's output.
        qk_norm: "head" norms each head of queries and keys, "across_heads" all heads together,
            "after_rope" each rotated head without learned parameters.
        v_norm: Values are normed, without learned parameters.
        keys_as_values: Values are the keys before their norm and rotation, from one projection.
        shares_keys_of: The kind of layer whose last layer before this one provides keys and values.
        temperature_scale: Queries are scaled by
            `1 + this * log(1 + floor((position + 1) / temperature_floor))`.
        temperature_floor: See `temperature_scale`.
        rope_share: The share of a head's channels that is rotated.
        rope_spread: Rotated channels have the fastest frequencies of the whole head, not the
            frequencies of a smaller head.
        latent: Multi-head latent attention instead of plain attention.
        delta: The gated delta rule instead of attention.
        pre_norms: Blocks read the normed residual stream.
        post_norms: The outputs of blocks are normed before they are added to the stream.
        norm_offset: Norms store their scale minus 1.
        layer_scalar: The layer's output is multiplied by one learned number.
        per_layer_width: Channels of the per-layer embedding of tokens; 0 for none.
        expert_d_ff: Hidden channels of an expert.
        shared_d_ff: Hidden channels of the shared expert for every token; 0 for none.
        shared_gate: The shared expert's output is multiplied by a sigmoid of the token.
        dense_beside_experts: A dense MLP of `d_ff` runs beside the experts, both with own norms.
        router_score: The function from logits to scores.
        router_normalize: Whether the weights of a token's experts are normalised to sum to 1.
        router_scale: Scale of the weights of a token's experts.
        router_bias: Logits have a bias.
        router_choice_bias: Scores have a bias for choosing experts, which does not change weights.
        router_groups: Groups of experts; only the best `router_groups_kept` groups are candidates.
            A group's score is the sum of its `router_group_top` best experts.
        router_norm: The router has its own norm of the stream, and experts have a learned scale.
        weigh_inputs: Weights multiply the experts' inputs, not their outputs.
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
                "dynamic rope scaling is not supported, because its angles depend on the sequence "
                "length and keys could not be cached; use linear, llama3, yarn or longrope."
            )
        if isinstance(self.qk_norm, bool):  # True is the usual norm
            object.__setattr__(self, "qk_norm", "head" if self.qk_norm else None)
        if not self.n_kv_heads:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if self.n_experts and not self.expert_d_ff:
            object.__setattr__(self, "expert_d_ff", self.d_ff)

    @property
    def mixer(self) -> Literal["attention", "latent", "delta"]:
        """The token mixer of the layer."""
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
        """Channels of a head that have rotary frequencies."""
        if self.latent:
            return self.latent.rope_dim
        return self.head_dim if self.rope_spread else int(self.head_dim * self.rope_share)

    def reach(self, sequence_length: int) -> int | None:
        """Return the most keys that a query attends to, or None for every key before it."""
        bounds = [
            b for b in (self.sliding_window, self.attention_chunk) if b and b < sequence_length
        ]
        return min(bounds, default=None)

    def check(self, where: str) -> None:
        """Check that dimensions and options do not contradict each other.

        Args:
            where: Prefix of messages that names the layer.

        Raises:
            TPUModelError: An option is invalid or contradicts another.
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
    """Return (whether it applies, message with the fix) for every possible contradiction."""
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
            f"head_dim={c.head_dim} gives {c.rope_dim} rotated channels, but rotary positions "
            "need an even number; change head_dim, or set positions='learned'.",
        ),
        (not 0 < c.rope_share <= 1, f"rope_share={c.rope_share}; expected above 0 and at most 1."),
        (
            bool(c.n_experts) and not 1 <= c.experts_per_token <= c.n_experts,
            f"experts_per_token={c.experts_per_token} with n_experts={c.n_experts}; "
            "expected between 1 and n_experts.",
        ),
        (
            bool(c.experts_per_token) and not c.n_experts,
            "experts_per_token is set but n_experts is 0; set n_experts too.",
        ),
        (
            bool(c.n_experts) and not c.gated_mlp,
            "experts are always gated MLPs; leave gated_mlp=True with n_experts.",
        ),
        (
            bool(c.router_groups)
            and (
                c.n_experts % max(1, c.router_groups) > 0
                or not 0 < c.router_groups_kept <= c.router_groups
            ),
            f"router_groups={c.router_groups} and router_groups_kept={c.router_groups_kept} with "
            f"{c.n_experts} experts; groups must divide the experts, and at least one is kept.",
        ),
        (
            (c.dense_beside_experts or bool(c.shared_d_ff)) and not c.n_experts,
            "shared_d_ff and dense_beside_experts need experts, but n_experts is 0; use d_ff for "
            "a layer without experts.",
        ),
        (c.shared_gate and not c.shared_d_ff, "shared_gate needs shared_d_ff; set it too."),
        (
            bool(c.latent and c.delta),
            "latent and delta are both set, but a kind of layer has one token mixer; use one.",
        ),
        (
            c.mixer != "attention" and bool(only_attention),
            f"{only_attention and only_attention[0]} is an option of plain attention, but this "
            f"layer has mixer '{c.mixer}'; leave it out.",
        ),
        (
            not (c.pre_norms or c.post_norms),
            "pre_norms and post_norms are both off, and a layer without norms does not train; set "
            "one.",
        ),
        (
            c.parallel_block and (not c.pre_norms or c.dense_beside_experts),
            "parallel_block needs pre_norms and does not support dense_beside_experts; change "
            "these, or leave parallel_block out.",
        ),
        (
            bool(c.sliding_window and c.attention_chunk),
            "sliding_window and attention_chunk are both set, but a layer has one limit; use one.",
        ),
        (
            c.keys_as_values and c.qk_norm == "across_heads",
            "keys_as_values does not support qk_norm='across_heads'; use qk_norm='head'.",
        ),
    ]


LAYER_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(LayerConfig))
