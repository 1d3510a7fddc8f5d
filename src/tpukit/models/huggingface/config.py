"""Read and write the `config.json` of Hugging Face's Llama family."""

from collections.abc import Mapping
from typing import Any

from ...errors import TPUModelError, did_you_mean
from ..transformer.config import RopeScaling, TransformerConfig

# model_type -> the class name Hugging Face expects in "architectures".
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
_DEFAULT_THETA = 10_000.0


def config_from_huggingface(data: Mapping[str, Any]) -> TransformerConfig:
    """The transformer a `config.json` describes.

    Raises:
        TPUModelError: The architecture, or an option of it, is not one the reference model has.
    """
    model_type = data.get("model_type")
    if model_type not in ARCHITECTURES:
        raise TPUModelError(
            f"Hugging Face model_type '{model_type}' is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}.{did_you_mean(str(model_type), ARCHITECTURES)}"
        )
    activation = data.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise TPUModelError(
            f"hidden_act '{activation}' is not supported; supported are {', '.join(_ACTIVATIONS)}."
        )
    biases = {bool(data.get("attention_bias", False)), bool(data.get("mlp_bias", False))}
    if len(biases) > 1:
        raise TPUModelError(
            "attention_bias and mlp_bias differ; the reference model has biases in both or neither."
        )
    theta, scaling = _rope(data)
    try:
        experts: dict[str, Any] = {}
        if model_type == "mixtral":
            experts = {
                "n_experts": data["num_local_experts"],
                "experts_per_token": data["num_experts_per_tok"],
                "router_balance_weight": data.get("router_aux_loss_coef", 0.01),
            }
        return TransformerConfig(
            name=str(data.get("_name_or_path") or model_type),
            n_layers=data["num_hidden_layers"],
            d_model=data["hidden_size"],
            d_ff=data["intermediate_size"],
            n_heads=data["num_attention_heads"],
            n_kv_heads=data.get("num_key_value_heads") or data["num_attention_heads"],
            head_dim=data.get("head_dim") or 0,
            vocab_size=data["vocab_size"],
            max_seq_len=data.get("max_position_embeddings", 2048),
            norm_eps=data.get("rms_norm_eps", 1e-6),
            activation=_ACTIVATIONS[activation],  # pyright: ignore[reportArgumentType]  checked
            use_bias=biases.pop(),
            qk_norm=model_type == "qwen3",
            tied_embeddings=bool(data.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rope_scaling=scaling,
            sliding_window=_window(data),
            **experts,
        )
    except KeyError as missing:
        raise TPUModelError(
            f"config.json of model_type '{model_type}' has no {missing}; it is not a complete "
            "Hugging Face configuration."
        ) from None


def config_to_huggingface(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_huggingface` reads back."""
    model_type = huggingface_model_type(config)
    activation = next(name for name, ours in _ACTIVATIONS.items() if ours == config.activation)
    data: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "num_hidden_layers": config.n_layers,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": activation,
        "attention_bias": config.use_bias,
        "mlp_bias": config.use_bias,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "sliding_window": config.sliding_window,
    }
    scaling = config.rope_scaling
    if scaling is not None:
        data["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            data["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
    if config.n_experts:
        data |= {
            "num_local_experts": config.n_experts,
            "num_experts_per_tok": config.experts_per_token,
            "router_aux_loss_coef": config.router_balance_weight,
        }
    return data


def huggingface_model_type(config: TransformerConfig) -> str:
    """The Hugging Face architecture that can hold this transformer.

    Raises:
        TPUModelError: None of the supported ones can.
    """
    foreign = {
        "norm='layernorm'": config.norm != "rmsnorm",
        "positions='learned'": config.positions != "rope",
        "gated_mlp=False": not config.gated_mlp,
        "post_norms": config.post_norms,
        "parallel_block": config.parallel_block,
        "scale_embeddings": config.scale_embeddings,
        "global_every": config.global_every is not None,
        "qk_norm with experts": config.qk_norm and bool(config.n_experts),
        "qk_norm with a sliding window": config.qk_norm and config.sliding_window is not None,
    }
    for option, used in foreign.items():
        if used:
            raise TPUModelError(
                f"'{config.name}' uses {option}, which no {'/'.join(ARCHITECTURES)} model has: it "
                "cannot be written as Hugging Face weights; save it as a checkpoint instead."
            )
    if config.n_experts:
        return "mixtral"
    if config.qk_norm:
        return "qwen3"
    return "mistral" if config.sliding_window is not None else "llama"


def _rope(data: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    # transformers 5 moved theta and scaling together into "rope_parameters".
    together = data.get("rope_parameters")
    scaling = together or data.get("rope_scaling") or {}
    theta = (together or data).get("rope_theta") or _DEFAULT_THETA
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3"):
        raise TPUModelError(
            f"rope scaling '{kind}' is not supported; supported are default, linear and llama3."
        )
    return float(theta), RopeScaling(
        kind=kind,
        factor=scaling["factor"],
        low_freq_factor=scaling.get("low_freq_factor", 1.0),
        high_freq_factor=scaling.get("high_freq_factor", 4.0),
        original_max_seq_len=scaling.get("original_max_position_embeddings", 8192),
    )


def _window(data: Mapping[str, Any]) -> int | None:
    if data["model_type"] == "llama" or data.get("use_sliding_window") is False:
        return None
    return data.get("sliding_window")
