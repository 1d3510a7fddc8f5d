"""The weights that every program starts from: those `TPUTrainer` makes from its seed, 0."""

import jax
from shapes import HEAD, SEQUENCE, SHAPES, VOCABULARY

from tpukit.models import TransformerConfig
from tpukit.models.adapters import TransformerAdapter


def config_of(name):
    """The model as tpukit describes it."""
    s = SHAPES[name]
    return TransformerConfig(
        name=name,
        vocab_size=VOCABULARY,
        max_seq_len=SEQUENCE,
        n_layers=s.layers,
        d_model=s.width,
        n_heads=s.heads,
        n_kv_heads=s.kv_heads,
        head_dim=HEAD,
        d_ff=s.hidden,
        param_dtype="float32",
        **({"n_experts": s.experts, "experts_per_token": 2} if s.experts else {}),
    )


def weights_of(name):
    """A dense model's arrays by name, matrices as (inputs, outputs), layers on a leading axis."""
    config = config_of(name)
    given = jax.jit(lambda key: TransformerAdapter(config).init(key).params)(jax.random.key(0))
    layers = given["layers"]
    mlp, attention = layers["mlp"], layers["self_attention"]
    matrices = {**attention, **mlp}
    stacked = {
        short: matrices[f"{short}_proj"]["kernel"]
        for short in ("q", "k", "v", "o", "gate", "up", "down")
    }
    norms = {"norm": layers["input_norm"]["scale"], "mlp_norm": layers["mlp_norm"]["scale"]}
    return {
        "layers": stacked | norms,
        "embed": given["embed"]["embedding"],
        "norm": given["final_norm"]["scale"],
        "head": given["lm_head"]["kernel"],
    }
