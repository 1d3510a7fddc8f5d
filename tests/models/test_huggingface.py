"""Hugging Face weights in and out: the right tensor in the right place, to the bit."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tpukit.errors import TPUModelError
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.huggingface.weights import (
    ImportedModel,
    export_huggingface,
    import_huggingface,
)
from tpukit.models.presets import get_preset, list_presets
from tpukit.models.transformer.config import TransformerConfig
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step.workload import Workload

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
KINDS = {
    "llama": LLAMA,
    "tied llama": {**LLAMA, "tie_word_embeddings": True},
    "biased llama": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 3},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "mixtral": {
        **LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}
TOKENS = np.random.default_rng(1).integers(0, 32, (2, 7))


def tensors_of(config, dtype=np.float32):
    """What Hugging Face would have saved for this config.json; torch keeps (out, in)."""
    rng = np.random.default_rng(0)
    width, hidden, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    depth = config.get("head_dim") or width // config["num_attention_heads"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * depth for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (width,)
        linear = {
            "self_attn.q_proj": (heads, width),
            "self_attn.k_proj": (kv_heads, width),
            "self_attn.v_proj": (kv_heads, width),
            "self_attn.o_proj": (width, heads),
        }
        if config["model_type"] == "mixtral":
            linear["block_sparse_moe.gate"] = (config["num_local_experts"], width)
            for expert in range(config["num_local_experts"]):
                for name in ("w1", "w3"):
                    linear[f"block_sparse_moe.experts.{expert}.{name}"] = (hidden, width)
                linear[f"block_sparse_moe.experts.{expert}.w2"] = (width, hidden)
        else:
            linear |= {f"mlp.{name}_proj": (hidden, width) for name in ("gate", "up")}
            linear["mlp.down_proj"] = (width, hidden)
        for name, shape in linear.items():
            shapes[f"{at}.{name}.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"{at}.{name}.bias"] = shape[:1]
        if config["model_type"] == "qwen3":
            shapes[f"{at}.self_attn.q_norm.weight"] = (depth,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (depth,)
    return {
        name: (rng.normal("norm" in name, 0.3, shape)).astype(dtype)
        for name, shape in shapes.items()
    }


def write(folder, config, tensors, *, files=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {name: f"part-{place % files}.safetensors" for place, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def llama_by_definition(config, tensors, tokens):
    """Llama as Hugging Face defines it, from its own tensor names, in float64."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads = config["num_attention_heads"]
    groups = heads // config["num_key_value_heads"]
    depth = config.get("head_dim") or config["hidden_size"] // heads

    def norm(x, name):
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return x / scale * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def rotate_half(x):
        first, second = np.split(x, 2, -1)
        return np.concatenate([-second, first], -1)

    length = tokens.shape[1]
    frequencies = config["rope_theta"] ** (-np.arange(0, depth, 2) / depth)
    angles = np.outer(np.arange(length), np.concatenate([frequencies, frequencies]))
    hidden = weights["model.embed_tokens.weight"][tokens]
    window = config.get("sliding_window") or length
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = norm(hidden, f"{at}.input_layernorm")

        def split(x, name, at=at):
            x = linear(x, f"{at}.self_attn.{name}_proj")
            x = x.reshape(*x.shape[:2], -1, depth).swapaxes(1, 2)  # (B, H, S, D)
            if config["model_type"] == "qwen3" and name != "v":
                x = norm(x, f"{at}.self_attn.{name}_norm")
            if name == "v":
                return x
            return x * np.cos(angles) + rotate_half(x) * np.sin(angles)

        q, k, v = (split(x, name) for name in "qkv")
        k, v = (np.repeat(part, groups, axis=1) for part in (k, v))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(depth)
        scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        mixed = mixed.swapaxes(1, 2).reshape(*tokens.shape, -1)
        hidden = hidden + linear(mixed, f"{at}.self_attn.o_proj")
        x = norm(hidden, f"{at}.post_attention_layernorm")
        hidden = hidden + feed_forward(config, linear, x, at)
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return norm(hidden, "model.norm") @ weights[f"{head}.weight"].T


def feed_forward(config, linear, x, at):
    def gated(x, gate, up, down):
        gate = linear(x, gate)
        return linear(gate / (1 + np.exp(-gate)) * linear(x, up), down)

    if config["model_type"] != "mixtral":
        return gated(x, *(f"{at}.mlp.{name}_proj" for name in ("gate", "up", "down")))
    moe = f"{at}.block_sparse_moe"
    scores = np.exp(linear(x, f"{moe}.gate"))
    worst_first = np.argsort(scores, -1)
    out = np.zeros_like(x)
    for expert in range(config["num_local_experts"]):
        chosen = (worst_first[..., -config["num_experts_per_tok"] :] == expert).any(-1)
        share = np.where(chosen, scores[..., expert], 0)
        best = np.sort(scores, -1)[..., -config["num_experts_per_tok"] :].sum(-1)
        names = (f"{moe}.experts.{expert}.{name}" for name in ("w1", "w3", "w2"))
        out += (share / best)[..., None] * gated(x, *names)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_original(tmp_path, kind):
    tensors = tensors_of(KINDS[kind])
    model = import_huggingface(write(tmp_path / "model", KINDS[kind], tensors))
    module = ImportedModel(model.config.replace(dtype="float32"), model.params).module()
    logits = jax.jit(lambda tokens: module(tokens))(jnp.asarray(TOKENS))
    expected = llama_by_definition(KINDS[kind], tensors, TOKENS)
    np.testing.assert_allclose(logits, expected, atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_is_the_one_a_workload_trains(tmp_path, kind):
    model = import_huggingface(write(tmp_path / "model", KINDS[kind], tensors_of(KINDS[kind])))
    shapes = jax.eval_shape(TransformerAdapter(model.config).init, jax.random.key(0)).params
    assert jax.tree.map(np.shape, model.params) == jax.tree.map(np.shape, shapes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_round_trip_to_the_bit(tmp_path, kind, dtype):
    tensors = tensors_of(KINDS[kind], dtype)
    model = import_huggingface(write(tmp_path / "in", KINDS[kind], tensors, files=3))
    written = export_huggingface(model.params, model.config, tmp_path / "out", max_shard_bytes=4000)
    assert len(written) > 1
    back = {name: tensor for file in written for name, tensor in load_file(file).items()}
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        np.testing.assert_array_equal(back[name].view(np.uint8), tensor.view(np.uint8))
    again = import_huggingface(tmp_path / "out")
    assert again.config.replace(name="") == model.config.replace(name="")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_small_weights_are_one_file(tmp_path):
    model = import_huggingface(write(tmp_path / "in", LLAMA, tensors_of(LLAMA)))
    written = export_huggingface(model.params, model.config, tmp_path / "out")
    assert [file.name for file in written] == ["model.safetensors"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_parameters_go_straight_to_their_shards(tmp_path):
    folder = write(tmp_path / "in", LLAMA, tensors_of(LLAMA))
    config = TransformerConfig.from_huggingface(LLAMA)
    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "model"))
    work = Workload(config, batch_size=8, sequence_length=8, strategy="fsdp+megatron")
    shardings = work.layout(mesh).shardings
    model = import_huggingface(folder, dtype=jnp.float32, shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, model.params) == shardings
    whole = import_huggingface(folder).params
    jax.tree.map(np.testing.assert_array_equal, model.params, whole)


@pytest.mark.parametrize("name", [n for n in list_presets() if not n.startswith("maxtext")])
def test_configurations_read_back(name):
    from tpukit.models.huggingface.config import config_to_huggingface

    config = get_preset(name)
    if name.startswith("gpt3"):
        with pytest.raises(TPUModelError, match="cannot be written as Hugging Face weights"):
            config_to_huggingface(config)
        return
    back = TransformerConfig.from_huggingface(json.loads(json.dumps(config_to_huggingface(config))))
    balance = config.router_balance_weight  # which few files say
    assert back.replace(name=name, dtype=config.dtype, router_balance_weight=balance) == config


def test_transformers_5_keeps_rope_in_one_place():
    scaling = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
    old = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    config = TransformerConfig.from_huggingface({**old, "rope_parameters": scaling})
    assert config.rope_theta == 5e5
    assert config.rope_scaling.factor == 8.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not supported; the nearest is 'llama'"),
        ({"hidden_act": "swish2"}, "hidden_act 'swish2' is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope scaling 'dynamic' is not supported"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_unsupported_configurations_are_named(changes, message):
    data = {**LLAMA, **changes}
    data = {key: value for key, value in data.items() if value is not None}
    with pytest.raises(TPUModelError, match=message):
        TransformerConfig.from_huggingface(data)


def test_what_is_null_or_says_nothing_of_the_architecture():
    with pytest.raises(TPUModelError, match=r"'llama' has vocab_size=None; expected a whole"):
        TransformerConfig.from_huggingface({**LLAMA, "vocab_size": None})
    usual = {"use_cache": True, "id2label": {"0": "a"}, "initializer_range": 0.02}
    with pytest.raises(TPUModelError, match=r"'lama' is not .* has no some_gate, own_norm"):
        TransformerConfig.from_huggingface(
            {**LLAMA, **usual, "model_type": "lama", "some_gate": 3, "own_norm": "l3"}
        )


def break_weights(folder, how):
    tensors = tensors_of(LLAMA)
    if how == "missing tensor":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    if how == "wrong shape":
        tensors["model.norm.weight"] = np.zeros(3, np.float32)
    write(folder, LLAMA, tensors)
    if how == "no weights":
        (folder / "model.safetensors").unlink()
    if how == "no config":
        (folder / "config.json").unlink()
    if how == "bad config":
        (folder / "config.json").write_text("{")
    if how == "damaged":
        (folder / "model.safetensors").write_bytes(b"\x00" * 9)
    if how == "empty index":
        (folder / "model.safetensors.index.json").write_text("{}")
    if how == "file elsewhere":
        (folder / "model.safetensors").rename(folder.parent / "other.safetensors")
        where = {"model.norm.weight": "../other.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing tensor", "tensor 'model.layers.1.mlp.up_proj.weight' is not in"),
        ("wrong shape", r"'model.norm.weight' has shape \(3,\), but config.json requires \(16,\)"),
        ("no weights", "neither model.safetensors nor model.safetensors.index.json"),
        ("no config", "config.json does not exist"),
        ("bad config", "config.json is not JSON"),
        ("damaged", "cannot be read as safetensors"),
        ("empty index", "has no 'weight_map'"),
        ("file elsewhere", "names the file '../other.safetensors'"),
    ],
)
def test_broken_folders_are_explained(tmp_path, how, message):
    break_weights(tmp_path / "model", how)
    with pytest.raises(TPUModelError, match=message):
        import_huggingface(tmp_path / "model")


def test_exporting_the_wrong_parameters_is_refused(tmp_path):
    model = import_huggingface(write(tmp_path / "in", LLAMA, tensors_of(LLAMA)))
    with pytest.raises(TPUModelError, match="the parameters have no 'layers/self_attention/q_norm"):
        export_huggingface(model.params, model.config.replace(qk_norm=True), tmp_path / "out")
    wider = model.config.replace(d_ff=32)
    with pytest.raises(TPUModelError, match=r"requires \(16, 32\)"):
        export_huggingface(model.params, wider, tmp_path / "out")
