"""What a remat policy runs again, against the products in the program that jax makes of it."""

import math

import jax
import pytest

from tpukit import Workload
from tpukit.errors import ConfigError
from tpukit.models import get_preset
from tpukit.planner.cost.kept import kept_by
from tpukit.planner.cost.model_shape import shape_of

EXAMPLES, LENGTH = 2, 64
REMATS = (
    "minimal",
    "full",
    "save=qkv_proj,out_proj,mlpwo",
    "save=out_proj,mlpwi_1 offload=decoder_layer_input",
)
KINDS = (
    {},
    {"post_norms": True, "qk_norm": True},
    {"gated_mlp": False, "parallel_block": True},
    {  # two sizes of heads, of which one has its keys for values
        "n_layers": 3,
        "layer_pattern": "2 local, wide",
        "layer_kinds": {
            "local": {"sliding_window": 32},
            "wide": {"head_dim": 32, "n_kv_heads": 1, "keys_as_values": True, "d_ff": 96},
        },
    },
)


def product_flops(jaxpr, times=1):
    """FLOPs of every product of a program, loops counted through."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += times * 2 * math.prod(out) * math.prod(left[axis] for axis in summed)
        turns = times * equation.params.get("length", 1)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                body = getattr(inner, "jaxpr", inner)
                total += product_flops(body, turns) if hasattr(body, "eqns") else 0
    return total


def step_flops(config, remat):
    work = Workload(
        config, batch_size=EXAMPLES, sequence_length=LENGTH, remat=remat, attention="xla"
    )
    program = jax.make_jaxpr(work.train_step)(work.state_shapes(), work.batch_shapes())
    return product_flops(program.jaxpr)


@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: ",".join(changes))
def test_what_runs_again_is_what_the_program_multiplies_again(changes):
    config = get_preset("tiny", **{"n_layers": 2, **changes})
    kinds = shape_of(config).kinds
    kept_all = step_flops(config, "none")
    for remat in REMATS:
        again = sum(
            layer.count
            * (
                sum(kept_by(remat).recomputed_weights(layer))
                + layer.heads * (layer.qk_dim + layer.v_dim) * LENGTH
            )
            for layer in kinds
        )
        assert step_flops(config, remat) - kept_all == 2 * EXAMPLES * LENGTH * again, remat


@pytest.mark.parametrize("changes", KINDS, ids=lambda changes: ",".join(changes))
def test_what_is_multiplied_at_all_is_counted_to_the_weight(changes):
    config = get_preset("tiny", **{"n_layers": 2, **changes})
    shape = shape_of(config)
    weights = shape.vocab * shape.d_model + shape.beside_layers
    scores = 0
    for layer in shape.kinds:
        hidden = layer.hidden_matrices * layer.d_model * layer.hidden_width
        weights += layer.count * (layer.mixing_weights + hidden)
        scores += layer.count * layer.heads * (layer.qk_dim + layer.v_dim) * LENGTH
    assert step_flops(config, "none") == 3 * 2 * EXAMPLES * LENGTH * (weights + scores)


def test_only_the_kernels_own_result_spares_running_it_again():
    assert kept_by("save=context").attention_again
    assert not kept_by("save=attention").attention_again
    assert not kept_by("offload=attention").attention_again
    assert not kept_by("none").attention_again


def test_a_policy_that_says_no_names_is_refused():
    with pytest.raises(ConfigError, match="'dots' cannot be weighed without compiling"):
        kept_by("dots")


SMALL = {"n_layers": 4, "d_model": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 128}
SMALL |= {"d_ff": 1024, "vocab_size": 512}
EXPERTS = {"n_experts": 8, "experts_per_token": 2}
LATENT = {
    "latent": {"q_rank": 32, "kv_rank": 64, "nope_dim": 128, "rope_dim": 64, "v_dim": 128},
    "n_kv_heads": 4,
    "head_dim": 192,
}


@pytest.mark.parametrize(
    ("remat", "changes", "attention", "hidden"),
    [
        # Of 256 channels: to 512 of queries, 256 of keys and of values, and from 512 back.
        ("full", {}, 256 * (512 + 256 + 256 + 512), 2 * 256 * 1024),
        ("none", {}, 0, 0),
        ("minimal", {}, 0, 0),
        ("save=qkv_proj", {}, 256 * 512, 2 * 256 * 1024),
        ("save=query_proj,out_proj", {}, 256 * (256 + 256), 2 * 256 * 1024),
        ("offload=qkv_proj save=mlpwi", {}, 256 * 512, 0),
        # A norm reads what comes before its name is given.
        ("save=qkv_proj", {"qk_norm": True}, 256 * (512 + 256 + 512), 2 * 256 * 1024),
        ("save=out_proj,mlpwo,mlpwi", {"post_norms": True}, 256 * 1536, 256 * 1024),
        ("full", {"post_norms": True}, 256 * 1536, 3 * 256 * 1024),
        # Side by side, what attention gives is only added.
        ("full", {"parallel_block": True}, 256 * 1024, 2 * 256 * 1024),
        ("full", {"parallel_block": True, "post_norms": True}, 256 * 1536, 3 * 256 * 1024),
        ("full", {"gated_mlp": False}, 256 * 1536, 256 * 1024),
        # Two experts a token, whose last product the router weighs.
        ("full", EXPERTS, 256 * (1536 + 8), 3 * 256 * 2048),
        # Only the last product has a name; with weighed inputs nothing reads it.
        ("save=mlpwi,mlpwo", EXPERTS, 256 * (1536 + 8), 3 * 256 * 2048),
        ("save=expert_rows", EXPERTS, 256 * (1536 + 8), 2 * 256 * 2048),
        ("full", {**EXPERTS, "weigh_inputs": True}, 256 * (1536 + 8), 2 * 256 * 2048),
        ("minimal", EXPERTS, 0, 3 * 256 * 2048),
        # An expert that every token passes, and a router of 8 columns.
        ("full", {**EXPERTS, "shared_d_ff": 128}, 256 * 1544, 3 * 256 * 2048 + 2 * 256 * 128),
        ("save=mlpwi", {**EXPERTS, "shared_d_ff": 128}, 256 * 1544, 3 * 256 * 2048),
        # A short vector of queries has no name; that of keys and values is kept as keys.
        ("full", LATENT, 256 * 32 + 32 * 768 + 256 * 128 + 64 * 1024 + 512 * 256, 2 * 256 * 1024),
        ("save=qkv_proj", LATENT, 256 * 32 + 512 * 256, 2 * 256 * 1024),
    ],
)
def test_weights_that_a_token_meets_again_by_hand(remat, changes, attention, hidden):
    (layer,) = shape_of(get_preset("tiny", **{**SMALL, **changes})).kinds
    mixing, dense, experts = kept_by(remat).recomputed_weights(layer)
    assert (mixing, dense + experts) == (attention, hidden)
