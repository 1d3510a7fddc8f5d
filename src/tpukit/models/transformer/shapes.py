"""Parameter shapes of a transformer, by the same rules as its modules. Loads no jax."""

from functools import lru_cache
from typing import TYPE_CHECKING

from .layer_config import LayerConfig

if TYPE_CHECKING:
    from .config import TransformerConfig

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: "TransformerConfig") -> Shapes:
    """Return the shape of every parameter by its path.

    Parameters of layers are stacked, with layers as the first dimension. Kinds of layers with
    different parameters have separate stacks under `layers`.
    """
    c = config
    shapes: Shapes = {}
    for stack, kinds in kinds_of_stacks(c).items():
        count = sum(kind in kinds for kind in c.layer_order)
        for path, shape in layer_shapes(c.kinds[kinds[0]], c.d_model).items():
            shapes["/".join(filter(None, ("layers", stack, path)))] = (count, *shape)
    shapes |= {"embed/embedding": (c.vocab_size, c.d_model), **_norm("final_norm", c.d_model, c)}
    if c.learned_positions:
        shapes["position_embed/embedding"] = (c.max_seq_len, c.d_model)
    if c.per_layer_width:
        width = c.n_layers * c.per_layer_width
        shapes["per_layer/embed/embedding"] = (c.vocab_size, width)
        shapes["per_layer/proj/kernel"] = (c.d_model, width)
        shapes |= _norm("per_layer/norm", c.per_layer_width, c)
    if not c.tied_embeddings:
        shapes["lm_head/kernel"] = (c.d_model, c.vocab_size)
    if c.mtp_layers:
        for path, shape in prediction_shapes(c).items():
            shapes[f"mtp/layers/{path}"] = (c.mtp_layers, *shape)
    return shapes


def prediction_shapes(config: "TransformerConfig") -> Shapes:
    """Return the shape of every parameter of one depth of multi-token prediction."""
    c, d = config, config.d_model
    shapes: Shapes = {}
    for name in ("embed_norm", "hidden_norm", "final_norm"):
        shapes |= _norm(name, d, c)
    shapes |= _linear("proj", 2 * d, d)
    block = layer_shapes(c.kinds[c.layer_order[-1]], d)
    return shapes | {f"block/{path}": shape for path, shape in block.items()}


def kinds_of_stacks(config: "TransformerConfig") -> dict[str, tuple[str, ...]]:
    """Return the kinds that share a stack, because their parameters have equal shapes.

    A stack is named after its first kind. A single stack has the name "".
    """
    by_shape: dict[tuple[tuple[str, tuple[int, ...]], ...], list[str]] = {}
    for kind in dict.fromkeys(config.layer_order):
        shapes = layer_shapes(config.kinds[kind], config.d_model)
        by_shape.setdefault(tuple(shapes.items()), []).append(kind)
    if len(by_shape) == 1:
        return {"": tuple(*by_shape.values())}
    return {kinds[0]: tuple(kinds) for kinds in by_shape.values()}


@lru_cache(maxsize=256)
def _layer_shapes(layer: LayerConfig, d_model: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    c, d = layer, d_model
    shapes: Shapes = {**(_norm("input_norm", d, c) if c.pre_norms else {})}
    shapes |= {"attention": _attention, "latent": _latent, "delta": _delta}[c.mixer](c, d)
    if c.pre_norms and not c.parallel_block:
        shapes |= _norm("mlp_norm", d, c)
    shapes |= _feed_forward(c, d)
    if c.post_norms:
        shapes |= {**_norm("post_attention_norm", d, c), **_norm("post_mlp_norm", d, c)}
    if c.per_layer_width:
        shapes |= _linear("per_layer_gate", d, c.per_layer_width)
        shapes |= _linear("per_layer_proj", c.per_layer_width, d)
        shapes |= _norm("per_layer_norm", d, c)
    if c.layer_scalar:
        shapes["layer_scalar"] = (1,)
    return tuple(shapes.items())


def layer_shapes(layer: LayerConfig, d_model: int) -> Shapes:
    """Return the shape of every parameter of one layer."""
    return dict(_layer_shapes(layer, d_model))


def _attention(c: LayerConfig, d: int) -> Shapes:
    heads, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    biased = c.attention_bias is not None
    own_keys = c.shares_keys_of is None
    shapes = _linear("self_attention/q_proj", d, heads, bias=biased)
    if c.attention_gate:
        shapes |= _linear("self_attention/g_proj", d, heads, bias=biased)
    if own_keys:
        shapes |= _linear("self_attention/k_proj", d, keys, bias=biased)
    if own_keys and not c.keys_as_values:
        shapes |= _linear("self_attention/v_proj", d, keys, bias=biased)
    shapes |= _linear("self_attention/o_proj", heads, d, bias=c.attention_bias == "qkvo")
    if c.qk_norm in ("head", "across_heads"):
        widths = (heads, keys) if c.qk_norm == "across_heads" else (c.head_dim, c.head_dim)
        shapes |= _norm("self_attention/q_norm", widths[0], c)
        shapes |= _norm("self_attention/k_norm", widths[1], c) if own_keys else {}
    if c.attention_sinks:
        shapes["self_attention/sinks"] = (c.n_heads,)
    return shapes


def _latent(c: LayerConfig, d: int) -> Shapes:
    latent = c.latent
    assert latent is not None
    queries = c.n_heads * latent.qk_dim
    shapes: Shapes = {}
    if latent.q_rank:
        shapes |= _linear("self_attention/q_a_proj", d, latent.q_rank)
        shapes |= _norm("self_attention/q_a_norm", latent.q_rank, c)
        shapes |= _linear("self_attention/q_b_proj", latent.q_rank, queries)
    else:
        shapes |= _linear("self_attention/q_proj", d, queries)
    shapes |= _linear("self_attention/kv_a_proj", d, latent.kv_rank + latent.rope_dim)
    shapes |= _norm("self_attention/kv_a_norm", latent.kv_rank, c)
    values = c.n_heads * (latent.nope_dim + latent.v_dim)
    shapes |= _linear("self_attention/kv_b_proj", latent.kv_rank, values)
    return shapes | _linear("self_attention/o_proj", c.n_heads * latent.v_dim, d)


def _delta(c: LayerConfig, d: int) -> Shapes:
    delta = c.delta
    assert delta is not None
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    shapes: Shapes = {}
    for name, width in (("q", keys), ("k", keys), ("v", values)):
        shapes |= _linear(f"delta_attention/{name}_proj", d, width)
        shapes[f"delta_attention/{name}_conv/kernel"] = (width, delta.convolution)
    shapes |= _linear("delta_attention/z_proj", d, values)
    shapes |= _linear("delta_attention/a_proj", d, delta.value_heads)
    shapes |= _linear("delta_attention/b_proj", d, delta.value_heads)
    shapes["delta_attention/a_log"] = shapes["delta_attention/dt_bias"] = (delta.value_heads,)
    shapes["delta_attention/norm/scale"] = (delta.value_dim,)
    return shapes | _linear("delta_attention/o_proj", values, d)


def _feed_forward(c: LayerConfig, d: int) -> Shapes:
    if not c.n_experts:
        return _mlp("mlp", d, c.d_ff, c)
    widen, narrow = (c.n_experts, d, c.expert_d_ff), (c.n_experts, c.expert_d_ff, d)
    shapes = {
        **_linear("mlp/router", d, c.n_experts, bias=c.router_bias),
        "mlp/experts/gate_proj": widen,
        "mlp/experts/up_proj": widen,
        "mlp/experts/down_proj": narrow,
    }
    if c.expert_bias:
        shapes |= {
            f"mlp/experts/{name}_bias": (c.n_experts, c.expert_d_ff) for name in ("gate", "up")
        }
        shapes["mlp/experts/down_bias"] = (c.n_experts, d)
    if c.router_choice_bias:
        shapes["mlp/router/choice_bias"] = (c.n_experts,)
    if c.router_norm:
        shapes |= {"mlp/router/scale": (d,), "mlp/router/expert_scale": (c.n_experts,)}
    if c.shared_d_ff:
        shapes |= _mlp("mlp/shared", d, c.shared_d_ff, c)
    if c.shared_gate:
        shapes |= _linear("mlp/shared_gate", d, 1)
    if c.dense_beside_experts:
        shapes |= _mlp("mlp/dense", d, c.d_ff, c)
        for name in ("dense_norm", "experts_input_norm", "experts_norm"):
            shapes |= _norm(f"mlp/{name}", d, c)
    return shapes


def _mlp(path: str, d: int, width: int, c: LayerConfig) -> Shapes:
    gate = _linear(f"{path}/gate_proj", d, width, bias=c.mlp_bias) if c.gated_mlp else {}
    return {
        **gate,
        **_linear(f"{path}/up_proj", d, width, bias=c.mlp_bias),
        **_linear(f"{path}/down_proj", width, d, bias=c.mlp_bias),
    }


def _linear(path: str, inputs: int, outputs: int, *, bias: bool = False) -> Shapes:
    kernel: Shapes = {f"{path}/kernel": (inputs, outputs)}
    return {**kernel, f"{path}/bias": (outputs,)} if bias else kernel


def _norm(path: str, width: int, c: LayerConfig) -> Shapes:
    scale: Shapes = {f"{path}/scale": (width,)}
    return {**scale, f"{path}/bias": (width,)} if c.norm == "layernorm" else scale
