"""What a family of Hugging Face models is: how its files are read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ....errors import TPUModelError
from ...transformer.config import TransformerConfig
from ...transformer.field_types import MOST_LAYERS, MOST_SIZE
from ...transformer.layer_config import LayerConfig
from ..slots import usual_slots
from ..tensors import LayerSlots, Slot

Json = Mapping[str, Any]
_NEEDED = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "vocab_size"),
)
_COUNTS = (
    *_NEEDED,
    *("decoder_sparse_step", "interleave_moe_layer_step", "full_attention_interval"),
    *("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"),
)
ACTIVATIONS = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_tanh": "gelu",
    "relu": "relu",
}


def _slots(layer: LayerConfig, d_model: int, data: Json) -> dict[str, Slot]:
    return usual_slots(layer, d_model)


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    Attributes:
        model_type: As `config.json` has it.
        architecture: The class that transformers makes of it.
        read: The fields of a `TransformerConfig` that a `config.json` describes.
        write: The entries of `config.json` that `read` needs beside the usual ones.
        slots: Where the parameters of a layer lie in a checkpoint.
        also: Other names of it: that of a model whose text part it is, or of a copy.
        prediction: Where a depth of multi-token prediction has what is beside its layer; those
            depths are stored as layers after the last.
    """

    model_type: str
    architecture: str
    read: Callable[[Json], dict[str, Any]]
    write: Callable[[TransformerConfig], dict[str, Any]]
    slots: Callable[[LayerConfig, int, Json], dict[str, Slot]] = _slots
    also: tuple[str, ...] = ()
    prediction: Mapping[str, Slot] = field(default_factory=dict[str, Slot])

    def slots_of(self, config: TransformerConfig, data: Json) -> LayerSlots:
        """Where everything of the layers lies in a checkpoint."""
        kinds = {
            kind: self.slots(layer, config.d_model, data) for kind, layer in config.kinds.items()
        }
        return LayerSlots(kinds, self.prediction)

    def config(self, data: Json) -> TransformerConfig:
        """The transformer that a `config.json` describes.

        Raises:
            TPUModelError: An entry is missing, or says what is not known here.
        """
        _check_counts(data, self.model_type)
        try:
            return TransformerConfig(**{**usual_fields(data), **self.read(data)})
        except KeyError as missing:
            raise TPUModelError(
                f"config.json of model_type '{self.model_type}' has no {missing}; it is not a "
                "complete Hugging Face configuration."
            ) from None
        except (TypeError, AttributeError, ArithmeticError, IndexError, ValueError) as wrong:
            empty = ", ".join(key for key, value in data.items() if value is None) or "none"
            raise TPUModelError(
                f"config.json of model_type '{self.model_type}' has an entry of another type than "
                f"its model needs ({wrong}); those that are null: {empty}."
            ) from None

    def json(self, config: TransformerConfig) -> dict[str, Any]:
        """The `config.json` that `config` reads back."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **usual_entries(config),
            **self.write(config),
        }


def _check_counts(data: Json, model_type: str) -> None:
    """Refuse counts that no list of layers can be made of."""
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


def usual_fields(data: Json) -> dict[str, Any]:
    """What almost every `config.json` says in the same words."""
    return {
        "name": str(data.get("_name_or_path") or data.get("model_type")),
        "n_layers": data["num_hidden_layers"],
        "d_model": data["hidden_size"],
        "d_ff": data["intermediate_size"],
        "n_heads": data["num_attention_heads"],
        "n_kv_heads": data.get("num_key_value_heads") or data["num_attention_heads"],
        "head_dim": data.get("head_dim") or 0,
        "vocab_size": data["vocab_size"],
        "max_seq_len": data.get("max_position_embeddings", 2048),
        "norm_eps": data.get("rms_norm_eps", 1e-6),
        "activation": read_activation(data),
        "tied_embeddings": bool(data.get("tie_word_embeddings", False)),
        "attention_bias": "qkvo" if data.get("attention_bias") else None,
        "mlp_bias": bool(data.get("mlp_bias", False)),
    }


def usual_entries(config: TransformerConfig) -> dict[str, Any]:
    """What `usual_fields` reads back."""
    c = config
    return {
        "num_hidden_layers": c.n_layers,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_seq_len,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": write_activation(c.activation),
        "tie_word_embeddings": c.tied_embeddings,
        "attention_bias": c.attention_bias == "qkvo",
        "mlp_bias": c.mlp_bias,
    }


def read_activation(data: Json) -> str:
    """Our name of the activation.

    Raises:
        TPUModelError: It is not one that layers here have.
    """
    given = data.get("hidden_activation") or data.get("hidden_act") or "silu"
    if given not in ACTIVATIONS:
        raise TPUModelError(
            f"hidden_act '{given}' is not supported; supported are {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[given]


def write_activation(activation: str) -> str:
    """Their name of it; what it has none for is a matter of the family."""
    return next((name for name, ours in ACTIVATIONS.items() if ours == activation), "silu")


def kind_of_types(data: Json, names: Mapping[str, str], *, default: str) -> list[str]:
    """For each layer the kind we call it, by the types that `config.json` lists."""
    listed = data.get("layer_types") or [default] * data["num_hidden_layers"]
    unknown = [one for one in listed if one not in names]
    if unknown:
        raise TPUModelError(
            f"layer_types has '{unknown[0]}', which is not known here; known are "
            f"{', '.join(names)}."
        )
    return [names[one] for one in listed[: data["num_hidden_layers"]]]
