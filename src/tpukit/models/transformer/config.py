"""What a decoder-only transformer is, as plain data that needs no jax to read."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ...errors import TPUModelError, did_you_mean
from ...hardware.formats import BFLOAT16, FLOAT8_E4M3FN, INT8, NumberFormat, spelled_as
from ...rotary import RopeScaling as RopeScaling
from ...shown import Shown
from .accounting import (
    FlopsPerToken,
    ParameterCount,
    count_flops_per_token,
    count_parameters,
)
from .field_types import MOST_LAYERS
from .layer_config import LAYER_FIELDS, LayerConfig
from .layer_pattern import kinds_of_layers
from .shapes import parameter_shapes

MatmulFormat = Literal[
    "dtype", "float8", "float8_static", "float8_channels", "int8", "int8_throughout"
]
# What products round their operands to, by `matmul`; with "dtype" they are as wide as activations.
OPERANDS: dict[str, NumberFormat] = {
    "float8": FLOAT8_E4M3FN,
    "float8_static": FLOAT8_E4M3FN,
    "float8_channels": FLOAT8_E4M3FN,
    "int8": INT8,
    "int8_throughout": INT8,
}
ONLY_KIND = "layer"  # what the layers are called where all are of one kind


def operand_format(matmul: str) -> NumberFormat:
    """What products round their operands to; bfloat16 stands for all that are as activations."""
    return OPERANDS.get(matmul, BFLOAT16)


_CHOICES: dict[str, tuple[str, ...]] = {
    "matmul": ("dtype", *OPERANDS),
    "embedding_lookup": ("rows", "one_hot"),
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "param_dtype": ("float32", "bfloat16", "float16", "float64"),
}
_POSITIVE = ("n_layers", "d_model", "vocab_size", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Shown, LayerConfig):
    """The dimensions and options of one decoder-only transformer.

    What a layer is, its own fields say (see `LayerConfig`). Where layers differ, `layer_kinds`
    names the kinds, each with the fields in which it differs from these, and `layer_pattern` says
    in which order they come: `layer_kinds={"local": {"sliding_window": 1024}, "global": {}}` with
    `layer_pattern="5 local, global"`.

    With `matmul` "float8" or "int8" the products of attention and dense MLP round their operands
    to eight bits, forward and backward; with "int8" all but those that give gradients of weights,
    with "int8_throughout" those as well. "float8_static" rounds those of experts too, as published
    runs do: constant scales by which `float8_bound` becomes the largest value. `matmul_rules` say
    it for modules by path, the last one that matches: {".*/experts": "dtype"}.
    With `embedding_lookup` "one_hot" embeddings, and their gradients, are products with a matrix
    of zeros and ones: more FLOPs, but no rows scattered over each other. `wide_gradients` stacks
    gradients of layers in `param_dtype`, as other trainers do, where ours are as narrow as `dtype`;
    the weights of all layers are then rounded before the first one runs.

    `mtp_layers` more layers, like the last one, learn which tokens come after the next (multi-token
    prediction); the mean of their losses is weighed with `mtp_weight`.
    """

    n_layers: int
    d_model: int
    vocab_size: int
    max_seq_len: int = 2048
    name: str = "custom"
    layer_kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any], hash=False)
    layer_pattern: str = ""

    tied_embeddings: bool = False
    scale_embeddings: bool = False
    logit_soft_cap: float | None = None
    router_balance_weight: float = 0.01
    mtp_layers: int = 0
    mtp_weight: float = 0.3

    matmul: MatmulFormat = "dtype"
    matmul_rules: tuple[tuple[str, str], ...] = ()
    float8_bound: float = 224.0
    embedding_lookup: Literal["rows", "one_hot"] = "rows"
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    wide_gradients: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_dim:
            if self.n_heads <= 0 or self.d_model % self.n_heads:
                raise TPUModelError(
                    f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}; "
                    "set head_dim, or choose a head count that divides d_model."
                )
            object.__setattr__(self, "head_dim", self.d_model // self.n_heads)
        for name in ("dtype", "param_dtype"):
            given = str(getattr(self, name))
            object.__setattr__(self, name, spelled_as(given, _CHOICES[name]) or given)
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise TPUModelError(f"{name}={getattr(self, name)}; it must be at least 1.")
        if max(self.n_layers, self.mtp_layers) > MOST_LAYERS:
            raise TPUModelError(
                f"n_layers={self.n_layers} and mtp_layers={self.mtp_layers}; at most "
                f"{MOST_LAYERS:,} layers are read."
            )
        if isinstance(self.matmul_rules, Mapping):
            object.__setattr__(self, "matmul_rules", tuple(self.matmul_rules.items()))
        if self.mtp_layers < 0 or self.mtp_weight < 0:
            raise TPUModelError(
                f"mtp_layers={self.mtp_layers} with mtp_weight={self.mtp_weight}; neither may be "
                "below 0."
            )
        if self.float8_bound <= 0:
            raise TPUModelError(f"float8_bound={self.float8_bound}; it must be above 0.")
        self._check_choices()
        if bool(self.layer_kinds) != bool(self.layer_pattern):
            raise TPUModelError(
                "layer_kinds and layer_pattern belong together: the one says which kinds of "
                "layers there are, the other in which order they come."
            )
        for kind, layer in self.kinds.items():
            layer.check(f"layer_kinds.{kind}: " if self.layer_kinds else "")
        # Only what differs, so that one transformer is described in one way.
        differing = {
            kind: {
                name: _plain(getattr(self.kinds[kind], name))
                for name in sorted(changes)
                if getattr(self.kinds[kind], name) != getattr(self, name)
            }
            for kind, changes in self.layer_kinds.items()
        }
        object.__setattr__(self, "layer_kinds", differing)
        counts = {layer.n_experts for layer in self.kinds.values()} - {0}
        if len(counts) > 1:
            raise TPUModelError(
                f"kinds of layers have {' and '.join(map(str, sorted(counts)))} experts; all that "
                "have any must have as many, for their routers are judged together."
            )
        self._check_shared_keys()

    def _check_choices(self) -> None:
        for name, choices in _CHOICES.items():
            seen = getattr(self, name)
            if seen not in choices:
                raise TPUModelError(
                    f"{name}='{seen}' is not one of {', '.join(choices)}."
                    + did_you_mean(str(seen), choices)
                )
        for pattern, format in self.matmul_rules:
            if format not in _CHOICES["matmul"]:
                raise TPUModelError(
                    f"the rule {pattern!r} of matmul_rules asks for '{format}'; expected one of "
                    f"{', '.join(_CHOICES['matmul'])}.{did_you_mean(format, _CHOICES['matmul'])}"
                )

    def _check_shared_keys(self) -> None:
        for kind, donor in self.key_donors.items():
            shared = self.kinds[kind]
            if donor is None:
                raise TPUModelError(
                    f"layer_kinds.{kind} takes keys and values of '{shared.shares_keys_of}', and "
                    "no layer of that kind comes before it; name a kind that does."
                )
            given = self.layer(donor)
            if (given.n_kv_heads, given.head_dim) != (shared.n_kv_heads, shared.head_dim):
                raise TPUModelError(
                    f"layer_kinds.{kind} has {shared.n_kv_heads} key heads of {shared.head_dim} "
                    f"and takes those of '{shared.shares_keys_of}', {given.n_kv_heads} of "
                    f"{given.head_dim}; make them alike."
                )

    @cached_property
    def kinds(self) -> dict[str, LayerConfig]:
        """What each kind of layer is, all its fields filled in."""
        own = {name: getattr(self, name) for name in LAYER_FIELDS}
        if not self.layer_kinds:
            return {ONLY_KIND: LayerConfig(**own)}
        found: dict[str, LayerConfig] = {}
        for kind, changes in self.layer_kinds.items():
            for key in changes:
                if key not in own:
                    raise TPUModelError(
                        f"layer_kinds.{kind} sets '{key}', which is not a field of a layer."
                        + did_you_mean(key, own)
                    )
            # A kind of another width has as many keys as queries only if it says so.
            found[kind] = LayerConfig(**{**own, **changes})
        return found

    @cached_property
    def layer_order(self) -> tuple[str, ...]:
        """The kind of every layer."""
        pattern = self.layer_pattern or ONLY_KIND
        return kinds_of_layers(pattern, self.n_layers, known=tuple(self.kinds))

    def layer(self, number: int) -> LayerConfig:
        """What layer `number` is."""
        return self.kinds[self.layer_order[number]]

    @cached_property
    def key_donors(self) -> dict[str, int | None]:
        """For each kind that takes another's keys, the layer they come from; None if none does."""
        donors: dict[str, int | None] = {}
        for kind, layer in self.kinds.items():
            if layer.shares_keys_of and kind in self.layer_order:
                before = self.layer_order[: self.layer_order.index(kind)]
                found = [n for n, name in enumerate(before) if name == layer.shares_keys_of]
                donors[kind] = found[-1] if found else None
        return donors

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return self.most_experts > 0

    @property
    def most_experts(self) -> int:
        """Experts of the layers that have the most."""
        return max(self.kinds[kind].n_experts for kind in self.layer_order)

    @property
    def learned_positions(self) -> bool:
        """Whether tokens are given an embedding of their position."""
        return self.positions == "learned"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TransformerConfig":
        """Build from plain data; an unknown key is refused with the nearest known one."""
        known = {entry.name for entry in dataclasses.fields(cls)}
        for key in data:
            if key not in known:
                raise TPUModelError(
                    f"'{key}' is not a field of TransformerConfig.{did_you_mean(key, known)}"
                )
        return cls(**data)

    @classmethod
    def from_huggingface(cls, config_json: Mapping[str, Any]) -> "TransformerConfig":
        """Build from the content of a Hugging Face `config.json`."""
        from ..huggingface.config import config_from_huggingface

        return config_from_huggingface(config_json)

    def replace(self, **changes: Any) -> "TransformerConfig":
        """The same transformer with some fields changed."""
        return TransformerConfig.from_dict({**self._fields(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back."""
        fields = {name: _plain(value) for name, value in self._fields().items()}
        fields["matmul_rules"] = dict(self.matmul_rules)
        return {**fields, "layer_kinds": {kind: dict(of) for kind, of in self.layer_kinds.items()}}

    def _fields(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def layers(self) -> Iterator[tuple[str, LayerConfig]]:
        """The kind of every layer, and what it is."""
        return ((kind, self.kinds[kind]) for kind in self.layer_order)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by its path; those of layers are stacked."""
        return parameter_shapes(self)

    def parameter_count(self) -> ParameterCount:
        """How many parameters there are, and how many one token touches."""
        return count_parameters(self)

    def flops_per_token(self, sequence_length: int, *, causal: bool = True) -> FlopsPerToken:
        """Training FLOPs (forward and backward) for one token of a `sequence_length` sequence."""
        return count_flops_per_token(self, sequence_length, causal=causal)


def _plain(value: Any) -> Any:
    """A part of a layer as the table that a file writes; anything else as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
