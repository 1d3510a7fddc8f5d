"""Small random models of every Hugging Face type that is read here, as transformers makes them."""

import numpy as np
import torch
import transformers

VOCABULARY = 64
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    **_EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
    "mscale_all_dim": 0.7, "rope_theta": 1e4,
}  # fmt: skip
_GEMMA4 = {
    "sliding_window": 8, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0,
    "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
}  # fmt: skip
_LLAMA4 = {"num_local_experts": 4, "intermediate_size_mlp": 24, "attention_chunk_size": 8}
_LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75, "original_max_position_embeddings": 16, "rope_theta": 1e4,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {"attention_bias": True}),
    "llama 3.1": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 5e5}}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 4, "mlp_only_layers": [1]}),
    "gemma2": ("Gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3Text", {"sliding_window": 8, "query_pre_attn_scalar": 8,
                              "num_hidden_layers": 6}),
    "gemma4 dense": ("Gemma4Text", _GEMMA4),
    "gemma4 experts": ("Gemma4Text", {**_GEMMA4, "enable_moe_block": True, "num_experts": 4,
                                      "top_k_experts": 2, "moe_intermediate_size": 16}),
    "gemma4 shared keys": ("Gemma4Text", {
        **_GEMMA4, "num_hidden_layers": 9, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "attention_k_eq_v": False,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "rope_parameters": _YARN}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 12, "n_group": 2, "topk_group": 1,
                                   "rope_parameters": _YARN}),
    "llama4 scout": ("Llama4Text", {**_LLAMA4, "interleave_moe_layer_step": 1, "floor_scale": 8}),
    "llama4 maverick": ("Llama4Text", {**_LLAMA4, "interleave_moe_layer_step": 2,
                                       "use_qk_norm": False}),
    "qwen3_next": ("Qwen3Next", {
        **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 8}),
    "phi3": ("Phi3", {}),
    "phi4-mini": ("Phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 16}),
}  # fmt: skip


def make_model(name: str) -> transformers.PreTrainedModel:
    """The model called so, with weights that let every part of it matter."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_COMMON, **options})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    learned = dict(model.named_parameters())
    # Buffers of the architecture that training changes.
    learned |= {
        path: buffer
        for path, buffer in model.named_buffers()
        if path.endswith(("layer_scalar", "e_score_correction_bias"))
    }
    with torch.no_grad():
        for path, weight in learned.items():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight + 0.1 * noise if weight.ndim < 2 else 0.1 * noise)
            # Scores that no scale divides are kept of the size that training gives them: where a
            # softmax is sharp, float32 alone makes a difference of 1e-4.
            if kind == "Gemma4Text" and path.endswith("q_norm.weight"):
                weight.mul_(weight.shape[-1] ** -0.5)
    return model.eval()


def logits_of(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """What the model gives for tokens (rows, length)."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def greedy_tokens(
    model: transformers.PreTrainedModel, prompt: np.ndarray, count: int
) -> tuple[int, ...]:
    """Transformers' own greedy generation, with no cache that could be wrong."""
    given = torch.from_numpy(prompt[None])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return tuple(out[0, len(prompt) :].tolist())
