"""The transformer again, in numpy float64 by its definition: the truth models are held to."""

import jax
import numpy as np
import pytest


def norm(x, weights, config):
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weights["scale"]
    return x + weights["bias"] if "bias" in weights else x


def linear(x, weights):
    y = x @ weights["kernel"]
    return y + weights["bias"] if "bias" in weights else y


def activate(x, kind):
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "relu":
        return np.maximum(x, 0)
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rotate(x, theta, factor):
    """Complex rotation of channel i paired with channel i + half."""
    length, _, depth = x.shape
    half = depth // 2
    angle = np.arange(length)[:, None] * theta ** (-np.arange(half) / half) / factor
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None]
    return np.concatenate([turned.real, turned.imag], -1)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attend(x, weights, config, segments):
    length, window = len(x), config.sliding_window
    q = linear(x, weights["q_proj"]).reshape(length, config.n_heads, config.head_dim)
    k = linear(x, weights["k_proj"]).reshape(length, config.n_kv_heads, config.head_dim)
    v = linear(x, weights["v_proj"]).reshape(length, config.n_kv_heads, config.head_dim)
    if config.qk_norm:
        q, k = norm(q, weights["q_norm"], config), norm(k, weights["k_norm"], config)
    if config.positions == "rope":
        factor = config.rope_scaling.factor if config.rope_scaling else 1.0
        q, k = rotate(q, config.rope_theta, factor), rotate(k, config.rope_theta, factor)
    out = np.zeros_like(q)
    for head in range(config.n_heads):
        kv = head // (config.n_heads // config.n_kv_heads)
        for place in range(length):
            seen = [
                other
                for other in range(place + 1)
                if (window is None or place - other < window) and segments[other] == segments[place]
            ]
            scores = softmax(k[seen, kv] @ q[place, head] / np.sqrt(config.head_dim))
            out[place, head] = scores @ v[seen, kv]
    return linear(out.reshape(length, -1), weights["o_proj"])


def feed_forward(x, weights, config):
    if config.n_experts:
        scores = softmax(x @ weights["router"]["kernel"])
        experts = weights["experts"]
        out = np.zeros_like(x)
        for place, token in enumerate(x):
            best = np.argsort(-scores[place])[: config.experts_per_token]
            for e in best:
                hidden = activate(token @ experts["gate_proj"][e], config.activation)
                hidden = hidden * (token @ experts["up_proj"][e])
                share = scores[place, e] / scores[place, best].sum()
                out[place] += share * (hidden @ experts["down_proj"][e])
        return out
    up = linear(x, weights["up_proj"])
    if config.gated_mlp:
        hidden = activate(linear(x, weights["gate_proj"]), config.activation) * up
    else:
        hidden = activate(up, config.activation)
    return linear(hidden, weights["down_proj"])


def one_sequence(params, config, tokens, segments):
    x = params["embed"]["embedding"][tokens]
    if config.scale_embeddings:
        x = x * np.sqrt(config.d_model)
    if config.positions == "learned":
        x = x + params["position_embed"]["embedding"][: len(tokens)]
    for place in range(config.n_layers):
        layer = jax.tree.map(lambda leaf, place=place: leaf[place], params["layers"])
        normed = norm(x, layer["input_norm"], config)
        attended = attend(normed, layer["self_attention"], config.layer(place), segments)
        if config.post_norms:
            attended = norm(attended, layer["post_attention_norm"], config)
        x = x + attended
        if not config.parallel_block:
            normed = norm(x, layer["mlp_norm"], config)
        mixed = feed_forward(normed, layer["mlp"], config)
        if config.post_norms:
            mixed = norm(mixed, layer["post_mlp_norm"], config)
        x = x + mixed
    x = norm(x, params["final_norm"], config)
    if config.tied_embeddings:
        return x @ params["embed"]["embedding"].T
    return x @ params["lm_head"]["kernel"]


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    """What is compiled here runs once or twice: optimising it takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def reference_logits():
    """(parameter tree, config, tokens (B, S), segment ids or None) -> logits in float64."""

    def logits(params, config, tokens, segment_ids=None):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        segments = np.zeros_like(tokens) if segment_ids is None else segment_ids
        return np.stack(
            [
                one_sequence(params, config, *pair)
                for pair in zip(np.asarray(tokens), np.asarray(segments), strict=True)
            ]
        )

    return logits
