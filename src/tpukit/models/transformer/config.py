"""`TransformerConfig`: a decoder-only transformer as plain data. Loads no jax."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ...errors import TPUModelError, did_you_mean
from ...hardware.formats import BFLOAT16, FLOAT8_E4M3FN, INT8, NumberFormat, spelled_as
from ...plain_data import JsonMapping, JsonObject
from ...rotary import RopeScaling as RopeScaling
from ...shown import Shown
from ..defaults import TRAINING_SEQUENCE_LENGTH
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
# Operand format of matmuls by `matmul`; with "dtype" operands have the activations' dtype.
OPERANDS: dict[str, NumberFormat] = {
    "float8": FLOAT8_E4M3FN,
    "float8_static": FLOAT8_E4M3FN,
    "float8_channels": FLOAT8_E4M3FN,
    "int8": INT8,
    "int8_throughout": INT8,
}
ONLY_KIND = "layer"  # name of the layers where all are of one kind


def operand_format(matmul: str) -> NumberFormat:
    """Return the operand format of matmuls; bfloat16 where they have the activations' dtype."""
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

    The fields of `LayerConfig` describe a layer. Where layers differ, `layer_kinds` has the kinds,
    each with the fields that differ from these, and `layer_pattern` has their order:
    `layer_kinds={"local": {"sliding_window": 1024}, "global": {}}` with
    `layer_pattern="5 local, global"`.

    Attributes:
        max_seq_len: The longest sequence.
        matmul: Operand format of the matmuls of attention and dense MLPs. "float8" and "int8"
            apply to the forward and backward pass, except that "int8" leaves weight gradients
            wide; "int8_throughout" includes them. "float8_static" has constant scales with
            `float8_bound` as the largest value, as in published runs, and includes experts.
        matmul_rules: Formats by module path, such as {".*/experts": "dtype"}; the last matching
            rule counts.
        embedding_lookup: "one_hot" computes embeddings and their gradients as matmuls with a
            one-hot matrix: more FLOPs, but no scatter.
        wide_gradients: Stack gradients of layers in `param_dtype`, as other trainers do, instead of
            `dtype`. The weights of all layers are then rounded before the first layer runs.
        mtp_layers: Layers of multi-token prediction after the last layer.
        mtp_weight: Weight of the mean loss of multi-token prediction.
    """

    n_layers: int
    d_model: int
    vocab_size: int
    max_seq_len: int = TRAINING_SEQUENCE_LENGTH
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
                f"n_layers={self.n_layers} and mtp_layers={self.mtp_layers}; expected at most "
                f"{MOST_LAYERS:,} of each."
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
                "layer_kinds and layer_pattern must be set together: layer_kinds has the kinds of "
                "layers, layer_pattern their order."
            )
        for kind, layer in self.kinds.items():
            layer.check(f"layer_kinds.{kind}: " if self.layer_kinds else "")
        # Only differing fields are kept, so that equal transformers have equal configurations.
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
                f"kinds of layers have {' and '.join(map(str, sorted(counts)))} experts; all kinds "
                "with experts must have the same number, because router statistics are summed."
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
                    f"the rule {pattern!r} of matmul_rules has the format '{format}'; expected "
                    f"{', '.join(_CHOICES['matmul'])}.{did_you_mean(format, _CHOICES['matmul'])}"
                )

    def _check_shared_keys(self) -> None:
        for kind, donor in self.key_donors.items():
            shared = self.kinds[kind]
            if donor is None:
                raise TPUModelError(
                    f"layer_kinds.{kind} shares keys of '{shared.shares_keys_of}', but no layer of "
                    "that kind comes before it; use a kind that does."
                )
            given = self.layer(donor)
            if (given.n_kv_heads, given.head_dim) != (shared.n_kv_heads, shared.head_dim):
                raise TPUModelError(
                    f"layer_kinds.{kind} has {shared.n_kv_heads} key heads of {shared.head_dim}, "
                    f"but shares keys of '{shared.shares_keys_of}', which has {given.n_kv_heads} "
                    f"of {given.head_dim}; use the same shape for both."
                )

    @cached_property
    def kinds(self) -> dict[str, LayerConfig]:
        """Each kind of layer with all its fields."""
        own = {name: getattr(self, name) for name in LAYER_FIELDS}
        if not self.layer_kinds:
            return {ONLY_KIND: LayerConfig(**own)}
        kinds: dict[str, LayerConfig] = {}
        for kind, changes in self.layer_kinds.items():
            for key in changes:
                if key not in own:
                    raise TPUModelError(
                        f"layer_kinds.{kind} sets '{key}', which is not a field of a layer."
                        + did_you_mean(key, own)
                    )
            kinds[kind] = LayerConfig(**{**own, **changes})
        return kinds

    @cached_property
    def layer_order(self) -> tuple[str, ...]:
        """The kind of every layer."""
        pattern = self.layer_pattern or ONLY_KIND
        return kinds_of_layers(pattern, self.n_layers, known=tuple(self.kinds))

    def layer(self, number: int) -> LayerConfig:
        """Return the configuration of layer `number`."""
        return self.kinds[self.layer_order[number]]

    @cached_property
    def key_donors(self) -> dict[str, int | None]:
        """For each kind that shares another kind's keys, the layer they come from, or None."""
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
        """The largest number of experts of a layer."""
        return max(self.kinds[kind].n_experts for kind in self.layer_order)

    @property
    def learned_positions(self) -> bool:
        """Whether positions have learned embeddings."""
        return self.positions == "learned"

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "TransformerConfig":
        """Return the configuration of plain data.

        Raises:
            TPUModelError: A key is unknown; the message suggests the nearest.
        """
        known = {entry.name for entry in dataclasses.fields(cls)}
        for key in data:
            if key not in known:
                raise TPUModelError(
                    f"'{key}' is not a field of TransformerConfig.{did_you_mean(key, known)}"
                )
        return cls(**data)

    @classmethod
    def from_huggingface(cls, config_json: JsonMapping) -> "TransformerConfig":
        """Return the configuration of a Hugging Face `config.json`."""
        from ..huggingface.config import config_from_huggingface

        return config_from_huggingface(config_json)

    def replace(self, **changes: Any) -> "TransformerConfig":
        """Return the same transformer with some fields changed."""
        return TransformerConfig.from_dict({**self._fields(), **changes})

    def to_dict(self) -> JsonObject:
        """Return plain data that `from_dict` reads back."""
        fields = {name: _plain(value) for name, value in self._fields().items()}
        fields["matmul_rules"] = dict(self.matmul_rules)
        return {**fields, "layer_kinds": {kind: dict(of) for kind, of in self.layer_kinds.items()}}

    def _fields(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    def layers(self) -> Iterator[tuple[str, LayerConfig]]:
        """Yield the kind and configuration of every layer."""
        return ((kind, self.kinds[kind]) for kind in self.layer_order)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its path; those of layers are stacked."""
        return parameter_shapes(self)

    def parameter_count(self) -> ParameterCount:
        """Return how many parameters there are, and how many one token uses."""
        return count_parameters(self)

    def flops_per_token(self, sequence_length: int, *, causal: bool = True) -> FlopsPerToken:
        """Return the training FLOPs (forward and backward) of one token."""
        return count_flops_per_token(self, sequence_length, causal=causal)


def _plain(value: Any) -> Any:
    """Return a nested dataclass as a dict, and other values unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
