"""What a decoder-only transformer is, as plain data that needs no jax to read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import TPUModelError, did_you_mean
from ...hardware.formats import BFLOAT16, FLOAT8_E4M3FN, INT8, NumberFormat, spelled_as
from .accounting import (
    FlopsPerToken,
    ParameterCount,
    count_flops_per_token,
    count_parameters,
    parameter_shapes,
)

Activation = Literal["silu", "gelu", "relu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned"]
RoutingName = Literal["dropless", "capacity"]
MatmulFormat = Literal["dtype", "float8", "int8", "int8_throughout"]
# What products round their operands to, by `matmul`; with "dtype" they are as wide as activations.
OPERANDS: dict[str, NumberFormat] = {
    "float8": FLOAT8_E4M3FN,
    "int8": INT8,
    "int8_throughout": INT8,
}


def operand_format(matmul: str) -> NumberFormat:
    """What products round their operands to; bfloat16 stands for all that are as activations."""
    return OPERANDS.get(matmul, BFLOAT16)


_CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ("silu", "gelu", "relu"),
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rope", "learned"),
    "routing": ("dropless", "capacity"),
    "matmul": ("dtype", *OPERANDS),
    "embedding_lookup": ("rows", "one_hot"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "param_dtype": ("float32", "bfloat16", "float16", "float64"),
}
_POSITIVE = (
    "n_layers",
    "d_model",
    "d_ff",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "vocab_size",
    "max_seq_len",
)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context than the model was trained on.

    `linear` divides every frequency by `factor`; `llama3` leaves wavelengths shorter than
    `original_max_seq_len / high_freq_factor` alone and blends up to `low_freq_factor`.
    """

    kind: Literal["linear", "llama3"] = "linear"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise TPUModelError(
                f"rope scaling '{self.kind}' is not known; use 'linear' or 'llama3'."
                + did_you_mean(self.kind, ("linear", "llama3"))
            )
        if self.factor <= 0:
            raise TPUModelError(f"rope scaling factor is {self.factor}; it must be above 0.")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The dimensions and options of one decoder-only transformer.

    Left out, `n_kv_heads` equals `n_heads` and `head_dim` equals `d_model / n_heads`.
    With a `sliding_window`, every layer is local unless `global_every` is set: then each
    `global_every`-th layer attends to everything before it. `gelu` is the tanh form. With
    `matmul` "float8" or "int8" the products of attention and dense MLP round their operands to
    eight bits, forward and backward; with "int8" all but those that give gradients of weights,
    with "int8_throughout" those as well.
    With `embedding_lookup` "one_hot" embeddings, and their gradients, are products with a matrix
    of zeros and ones: more FLOPs, but no rows scattered over each other. `wide_gradients` stacks
    gradients of layers in `param_dtype`, as other trainers do, where ours are as narrow as `dtype`;
    the weights of all layers are then rounded before the first one runs.
    """

    n_layers: int
    d_model: int
    d_ff: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int = 0
    head_dim: int = 0
    max_seq_len: int = 2048
    name: str = "custom"

    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated_mlp: bool = True
    use_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    parallel_block: bool = False
    tied_embeddings: bool = False
    scale_embeddings: bool = False

    positions: Positions = "rope"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    global_every: int | None = None

    n_experts: int = 0
    experts_per_token: int = 0
    routing: RoutingName = "dropless"
    capacity_factor: float = 1.25
    router_balance_weight: float = 0.01

    matmul: MatmulFormat = "dtype"
    embedding_lookup: Literal["rows", "one_hot"] = "rows"
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    wide_gradients: bool = False

    def __post_init__(self) -> None:
        if not self.n_kv_heads:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        if not self.head_dim:
            if self.n_heads <= 0 or self.d_model % self.n_heads:
                raise TPUModelError(
                    f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}; "
                    "set head_dim, or choose a head count that divides d_model."
                )
            object.__setattr__(self, "head_dim", self.d_model // self.n_heads)
        for field in ("dtype", "param_dtype"):
            given = str(getattr(self, field))
            object.__setattr__(self, field, spelled_as(given, _CHOICES[field]) or given)
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        self._check_numbers()
        self._check_choices()

    def _check_numbers(self) -> None:
        for field in _POSITIVE:
            if getattr(self, field) <= 0:
                raise TPUModelError(f"{field}={getattr(self, field)}; it must be at least 1.")
        if self.n_heads % self.n_kv_heads:
            raise TPUModelError(
                f"n_kv_heads={self.n_kv_heads} does not divide n_heads={self.n_heads}; every "
                "key/value head serves the same number of query heads, so use a divisor."
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise TPUModelError(
                f"head_dim={self.head_dim} is odd; rotary positions rotate pairs of channels, "
                "so head_dim must be even (or set positions='learned')."
            )
        if self.n_experts and not 1 <= self.experts_per_token <= self.n_experts:
            raise TPUModelError(
                f"experts_per_token={self.experts_per_token} with n_experts={self.n_experts}; "
                "each token goes to between 1 and n_experts experts."
            )
        if self.experts_per_token and not self.n_experts:
            raise TPUModelError("experts_per_token is set but n_experts is 0; set n_experts too.")
        if self.global_every is not None and self.sliding_window is None:
            raise TPUModelError(
                f"global_every={self.global_every} needs a sliding_window for the other layers."
            )
        for field in ("sliding_window", "global_every"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise TPUModelError(f"{field}={value}; it must be at least 1, or None.")

    def _check_choices(self) -> None:
        for field, choices in _CHOICES.items():
            seen = getattr(self, field)
            if seen not in choices:
                raise TPUModelError(
                    f"{field}='{seen}' is not one of {', '.join(choices)}."
                    + did_you_mean(str(seen), choices)
                )
        if self.n_experts and not self.gated_mlp:
            raise TPUModelError("experts are gated MLPs here; leave gated_mlp=True with n_experts.")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransformerConfig":
        """Build from plain data; an unknown key is refused with the nearest known one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in data:
            if key not in known:
                raise TPUModelError(
                    f"'{key}' is not a field of TransformerConfig.{did_you_mean(key, known)}"
                )
        return cls(**data)

    @classmethod
    def from_huggingface(cls, config_json: Mapping[str, Any]) -> "TransformerConfig":
        """Build from the content of a Hugging Face `config.json` (Llama family)."""
        from ..huggingface.config import config_from_huggingface

        return config_from_huggingface(config_json)

    def replace(self, **changes: Any) -> "TransformerConfig":
        """The same transformer with some fields changed."""
        return TransformerConfig.from_dict({**self._fields(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        fields = self._fields()
        if self.rope_scaling is not None:
            fields["rope_scaling"] = dataclasses.asdict(self.rope_scaling)
        return fields

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def window_of_layer(self, layer: int) -> int | None:
        """The sliding window of layer `layer`, or None where it attends to everything."""
        if self.global_every is not None and (layer + 1) % self.global_every == 0:
            return None
        return self.sliding_window

    @property
    def layer_period(self) -> int:
        """The number of layers after which the pattern of local and global ones repeats."""
        return self.global_every or 1

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its path; those of layers are stacked."""
        return parameter_shapes(self)

    def parameter_count(self) -> ParameterCount:
        """How many parameters there are, and how many one token touches."""
        return count_parameters(self)

    def flops_per_token(self, seq_len: int, *, causal: bool = True) -> FlopsPerToken:
        """Training FLOPs (forward and backward) for one token of a `seq_len` sequence."""
        return count_flops_per_token(self, seq_len, causal=causal)
