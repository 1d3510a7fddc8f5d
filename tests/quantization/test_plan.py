"""Rules and skips."""

import jax
import jax.numpy as jnp
import pytest

from tpukit.errors import TPUValidationError
from tpukit.models.stored.calibration import find_matrices
from tpukit.quantization.plan import QuantPlan, make_plan, parse_rules

PARAMS = {
    "embed": {"embedding": jnp.zeros((64, 64))},
    "layers": {"up": jnp.zeros((2, 64, 64)), "router": jnp.zeros((2, 64, 64))},
    "small": jnp.zeros((4, 64)),
    "lm_head": jnp.zeros((64, 64)),
}


def apply(params, x):
    def layer(x, w):
        return x @ w["up"] @ w["router"], None

    x = jax.lax.scan(layer, x @ params["embed"]["embedding"], params["layers"])[0]
    return (x @ params["lm_head"])[:, :4] @ params["small"]


MATRICES = find_matrices(apply, PARAMS, jnp.zeros((2, 64)))


def test_sensible_skips_have_reasons():
    plan = make_plan(MATRICES, "int4")
    assert plan.quantized == ("layers/up[0]", "layers/up[1]")
    assert "embedding" in plan.reasons["embed/embedding"]
    assert "router" in plan.reasons["layers/router[0]"]
    assert "unembedding" in plan.reasons["lm_head"]
    assert "256 weights" in plan.reasons["small"]


def test_rules_overrule_skips_the_last_one_counts_and_unused_ones_are_told():
    rules = [("up", "int8"), (r"up\[1\]", "vq2"), ("router", "fp8"), ("nothing", "int4")]
    plan = make_plan(MATRICES, "int4", rules=rules)
    assert plan.formats["layers/up[0]"] == "int8"
    assert plan.formats["layers/up[1]"] == "vq2"
    assert plan.formats["layers/router[0]"] == "fp8"
    assert plan.unused_rules == ("nothing",)
    assert QuantPlan.from_dict(plan.to_dict()) == plan


def test_the_ends_of_a_model_without_an_embedding():
    params = {f"w{number}": jnp.zeros((64, 64)) for number in range(4)}

    def chain(params, x):
        for number in range(4):
            x = x @ params[f"w{number}"]
        return x

    matrices = find_matrices(chain, params, jnp.zeros((2, 64)))
    assert make_plan(matrices, "int4").quantized == ("w1", "w2")
    assert len(make_plan(matrices, "int4", skip_ends=False).quantized) == 4


def test_what_is_typed_is_checked():
    assert parse_rules(["mlp/down=int8", "a=b=skip"]) == [("mlp/down", "int8"), ("a=b", "skip")]
    for wrong in ("int8", "=int8", "x=int9", "(=int8"):
        with pytest.raises(TPUValidationError):
            parse_rules([wrong])
