"""Which Hugging Face tensor is which part of which parameter, for the Llama family."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..transformer.config import TransformerConfig

# Module of one layer there -> here. Linear kernels are stored (out, in) there, (in, out) here.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One Hugging Face tensor: row `index` of the parameter at `path`, transposed or not."""

    name: str
    path: str
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        return self.shape[::-1] if self.transposed else self.shape


def huggingface_tensors(config: TransformerConfig) -> Iterator[TensorEntry]:
    """Every tensor of the checkpoint, grouped by parameter so that one can be filled at a time."""
    c = config
    yield TensorEntry(
        name="model.embed_tokens.weight", path="embed/embedding", shape=(c.vocab_size, c.d_model)
    )
    yield TensorEntry(name="model.norm.weight", path="final_norm/scale", shape=(c.d_model,))
    if not c.tied_embeddings:
        yield TensorEntry(
            name="lm_head.weight",
            path="lm_head/kernel",
            shape=(c.d_model, c.vocab_size),
            transposed=True,
        )
    yield from _stacked("input_layernorm.weight", "input_norm/scale", (c.d_model,), c)
    yield from _stacked("post_attention_layernorm.weight", "mlp_norm/scale", (c.d_model,), c)
    heads, kv_heads = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    widths = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    for module in _ATTENTION:
        inputs, outputs = (heads, c.d_model) if module == "o_proj" else (c.d_model, widths[module])
        yield from _linear(f"self_attn.{module}", f"self_attention/{module}", (inputs, outputs), c)
    if c.qk_norm:
        for module in ("q_norm", "k_norm"):
            yield from _stacked(
                f"self_attn.{module}.weight", f"self_attention/{module}/scale", (c.head_dim,), c
            )
    if c.n_experts:
        yield from _experts(c)
        return
    for module in _MLP:
        shape = (c.d_ff, c.d_model) if module == "down_proj" else (c.d_model, c.d_ff)
        yield from _linear(f"mlp.{module}", f"mlp/{module}", shape, c)


def _stacked(
    name: str,
    path: str,
    shape: tuple[int, ...],
    config: TransformerConfig,
    *,
    transpose: bool = False,
) -> Iterator[TensorEntry]:
    for layer in range(config.n_layers):
        yield TensorEntry(
            name=f"model.layers.{layer}.{name}",
            path=f"layers/{path}",
            shape=shape,
            index=(layer,),
            transposed=transpose,
        )


def _linear(
    name: str, path: str, shape: tuple[int, int], config: TransformerConfig
) -> Iterator[TensorEntry]:
    yield from _stacked(f"{name}.weight", f"{path}/kernel", shape, config, transpose=True)
    if config.use_bias:
        yield from _stacked(f"{name}.bias", f"{path}/bias", shape[1:], config)


def _experts(c: TransformerConfig) -> Iterator[TensorEntry]:
    moe = "block_sparse_moe"
    yield from _stacked(
        f"{moe}.gate.weight", "mlp/router/kernel", (c.d_model, c.n_experts), c, transpose=True
    )
    for module, theirs in _MIXTRAL_EXPERT.items():
        shape = (c.d_ff, c.d_model) if module == "down_proj" else (c.d_model, c.d_ff)
        for layer in range(c.n_layers):
            for expert in range(c.n_experts):
                yield TensorEntry(
                    name=f"model.layers.{layer}.{moe}.experts.{expert}.{theirs}.weight",
                    path=f"layers/mlp/experts/{module}",
                    shape=shape,
                    index=(layer, expert),
                    transposed=True,
                )
