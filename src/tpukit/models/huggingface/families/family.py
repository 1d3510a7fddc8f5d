"""A family of Hugging Face models: tables that map `config.json` to our fields and back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....errors import TPUModelError
from ....plain_data import JsonMapping, JsonObject
from ...transformer.config import TransformerConfig
from ...transformer.field_types import MOST_LAYERS, MOST_SIZE
from ...transformer.layer_config import LayerConfig
from ..tensors import LayerTensors, TensorSlice, usual_tensors

Json = JsonMapping
_NEEDED = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "vocab_size"),
)
_COUNTS = (
    *_NEEDED,
    *("decoder_sparse_step", "interleave_moe_layer_step", "full_attention_interval"),
    *("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"),
)
_ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_tanh": "gelu",
    "relu": "relu",
}
_REQUIRED = object()


@dataclass(frozen=True)
class ConfigEntry:
    """One of our fields and its entry in `config.json`.

    Attributes:
        field: The name of our field.
        key: The name of the entry.
        default: The value of a missing entry; without one a missing entry is an error.
        read: Converts the entry to our value.
        write: Converts our value to the entry.
    """

    field: str
    key: str
    default: Any = _REQUIRED
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


Table = tuple[ConfigEntry, ...]


def read_entries(table: Table, data: Json) -> JsonObject:
    """Return our fields from the entries of a `config.json`.

    Raises:
        KeyError: An entry without a default is missing.
    """
    return {
        entry.field: entry.read(
            data[entry.key] if entry.default is _REQUIRED else data.get(entry.key, entry.default)
        )
        for entry in table
    }


def write_entries(table: Table, source: object) -> JsonObject:
    """Return the entries that `read_entries` turns back into the fields of `source`."""
    return {entry.key: entry.write(getattr(source, entry.field)) for entry in table}


# Entries that almost every family has.
USUAL: Table = (
    ConfigEntry("n_layers", "num_hidden_layers"),
    ConfigEntry("d_model", "hidden_size"),
    ConfigEntry("d_ff", "intermediate_size"),
    ConfigEntry("n_heads", "num_attention_heads"),
    ConfigEntry("head_dim", "head_dim", 0, read=lambda value: value or 0),
    ConfigEntry("vocab_size", "vocab_size"),
    ConfigEntry("max_seq_len", "max_position_embeddings", 2048),
    ConfigEntry("norm_eps", "rms_norm_eps", 1e-6),
    ConfigEntry("tied_embeddings", "tie_word_embeddings", False, read=bool),
    ConfigEntry(
        "attention_bias",
        "attention_bias",
        False,
        read=lambda value: "qkvo" if value else None,
        write=lambda value: value == "qkvo",
    ),
    ConfigEntry("mlp_bias", "mlp_bias", False, read=bool),
)


def balance_weight(default: float) -> ConfigEntry:
    """Return the entry of the router's balance loss."""
    return ConfigEntry("router_balance_weight", "router_aux_loss_coef", default)


def _usual_tensors(layer: LayerConfig, d_model: int, data: Json) -> dict[str, TensorSlice]:
    return usual_tensors(layer, d_model)


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
        model_type: The value of the entry `model_type`.
        architecture: The class in transformers.
        read: Returns the fields that differ from the `USUAL` table.
        write: Returns the entries that `read` needs.
        tensors: Returns the checkpoint tensor of every parameter of a layer.
        also: Other model types that are read the same way, such as a multimodal model's.
        prediction: The tensors that multi-token prediction has beside its layers, which are
            stored after the last layer.
    """

    model_type: str
    architecture: str
    read: Callable[[Json], JsonObject]
    write: Callable[[TransformerConfig], JsonObject]
    tensors: Callable[[LayerConfig, int, Json], dict[str, TensorSlice]] = _usual_tensors
    also: tuple[str, ...] = ()
    prediction: Mapping[str, TensorSlice] = field(default_factory=dict[str, TensorSlice])

    def layer_tensors(self, config: TransformerConfig, data: Json) -> LayerTensors:
        """Return the checkpoint tensors of all kinds of layers."""
        kinds = {
            kind: self.tensors(layer, config.d_model, data) for kind, layer in config.kinds.items()
        }
        return LayerTensors(kinds, self.prediction)

    def config(self, data: Json) -> TransformerConfig:
        """Return the transformer that a `config.json` describes.

        Raises:
            TPUModelError: An entry is missing or has an unsupported value.
        """
        _check_counts(data, self.model_type)
        try:
            return TransformerConfig(**{**_usual_fields(data), **self.read(data)})
        except KeyError as missing:
            raise TPUModelError(
                f"config.json of model_type '{self.model_type}' has no {missing}; it is not a "
                "complete Hugging Face configuration."
            ) from None
        except (TypeError, AttributeError, ArithmeticError, IndexError, ValueError) as wrong:
            empty = ", ".join(key for key, value in data.items() if value is None) or "none"
            raise TPUModelError(
                f"config.json of model_type '{self.model_type}' has an entry of another type than "
                f"its model needs ({wrong}); entries that are null: {empty}."
            ) from None

    def json(self, config: TransformerConfig) -> JsonObject:
        """Return the `config.json` that `config` reads back."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **write_entries(USUAL, config),
            "num_key_value_heads": config.n_kv_heads,
            "hidden_act": write_activation(config.activation),
            **self.write(config),
        }


def _check_counts(data: Json, model_type: str) -> None:
    for name in _COUNTS:
        most = MOST_LAYERS if name == "num_hidden_layers" else MOST_SIZE
        value = data.get(name)
        if value is None and not (name in data and name in _NEEDED):
            continue
        if not (type(value) is int and 1 <= value <= most):
            raise TPUModelError(
                f"config.json of model_type '{model_type}' has {name}={value!r:.40}; expected a "
                f"whole number from 1 to {most:,}."
            )


def _usual_fields(data: Json) -> JsonObject:
    return {
        "name": str(data.get("_name_or_path") or data.get("model_type")),
        **read_entries(USUAL, data),
        "n_kv_heads": data.get("num_key_value_heads") or data["num_attention_heads"],
        "activation": _read_activation(data),
    }


def _read_activation(data: Json) -> str:
    given = data.get("hidden_activation") or data.get("hidden_act") or "silu"
    if given not in _ACTIVATIONS:
        raise TPUModelError(
            f"hidden_act '{given}' is not supported; supported are {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[given]


def write_activation(activation: str) -> str:
    """Return the name in transformers; families write activations that have none themselves."""
    return next((name for name, ours in _ACTIVATIONS.items() if ours == activation), "silu")


def kinds_by_type(data: Json, names: Mapping[str, str], *, default: str) -> list[str]:
    """Return our kind of every layer for the `layer_types` of a `config.json`.

    Raises:
        TPUModelError: A type is unknown.
    """
    listed = data.get("layer_types") or [default] * data["num_hidden_layers"]
    unknown = [layer_type for layer_type in listed if layer_type not in names]
    if unknown:
        raise TPUModelError(
            f"layer_types has '{unknown[0]}', which is not supported; supported are "
            f"{', '.join(names)}."
        )
    return [names[layer_type] for layer_type in listed[: data["num_hidden_layers"]]]


def mlp_tensors(path: str, name: str) -> dict[str, TensorSlice]:
    """Return the three matrices of a gated MLP at `path`, called `name` in the checkpoint."""
    return {
        f"{path}/{matrix}/kernel": TensorSlice(f"{name}.{matrix}.weight", transposed=True)
        for matrix in ("gate_proj", "up_proj", "down_proj")
    }


def side_by_side(
    name: str, paths: Iterable[str], width: int, *, axis: int = 0, transposed: bool = False
) -> dict[str, TensorSlice]:
    """Return parameters that one tensor holds one after the other, `width` entries each."""
    paths = list(paths)
    return {
        path: TensorSlice(
            name,
            transposed,
            axis=axis,
            part=slice(number * width, (number + 1) * width),
            axis_size=len(paths) * width,
        )
        for number, path in enumerate(paths)
    }
