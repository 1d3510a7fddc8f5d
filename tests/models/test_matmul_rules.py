"""Formats of products by module path: the last rule that matches, and none without effect."""

import jax
import numpy as np
import pytest
from flax import nnx

from tpukit.errors import TPUModelError
from tpukit.models import Transformer, TransformerConfig, get_preset


def formats(**changes) -> dict[str, str]:
    config = get_preset(changes.pop("preset", "tiny"), **changes)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    return {
        "/".join(map(str, path)): module.matmul
        for path, module in nnx.iter_modules(model)
        if hasattr(module, "matmul")
    }


def test_the_last_rule_that_matches_counts():
    found = formats(
        matmul="int8",
        matmul_rules={"layers/.*": "float8_static", "o_proj": "dtype", "mlp/up_proj": "float8"},
    )
    attention = "layers/self_attention"
    assert found[f"{attention}/q_proj"] == "float8_static"
    assert found[f"{attention}/o_proj"] == "dtype"
    assert found["layers/mlp/gate_proj"] == "float8_static"
    assert found["layers/mlp/up_proj"] == "float8"


def test_without_a_rule_the_format_of_the_model_counts():
    found = formats(matmul="int8", matmul_rules={"mlp/.*": "dtype"})
    assert {found[path] for path in found if "self_attention" in path} == {"int8"}
    assert {found[path] for path in found if "mlp" in path} == {"dtype"}


@pytest.mark.parametrize(
    ("matmul", "experts"),
    [("float8", "dtype"), ("int8", "dtype"), ("float8_static", "float8_static")],
)
def test_experts_and_routers(matmul, experts):
    found = formats(preset="tiny-moe", matmul=matmul)
    assert found["layers/mlp/experts"] == experts
    assert found["layers/mlp/router"] == "dtype"
    assert found["layers/self_attention/q_proj"] == matmul


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"o_prj": "int8"}, "matches no matmul of this model.*Did you mean 'o_proj'"),
        ({"experts": "float8_static"}, "matches no matmul"),
        ({"o_(proj": "int8"}, "not a regular expression"),
        ({"o_proj": "float8_statik"}, "'float8_statik'; expected.*Did you mean 'float8_static'"),
        ({"lm_head": "int8"}, "matches only lm_head, which is never quantized"),
    ],
)
def test_a_rule_without_effect_is_refused(rules, words):
    with pytest.raises(TPUModelError, match=words):
        formats(matmul_rules=rules)


def test_a_rule_for_experts_in_int8_is_refused():
    with pytest.raises(TPUModelError, match="grouped matmuls support float8_static or"):
        formats(preset="tiny-moe", matmul_rules={"experts": "int8"})


def test_rules_are_plain_data():
    config = get_preset("tiny", matmul_rules={"o_proj": "dtype"})
    assert config.to_dict()["matmul_rules"] == {"o_proj": "dtype"}
    assert TransformerConfig.from_dict(config.to_dict()) == config


def test_rules_change_the_numbers_of_their_modules_alone():
    tokens = np.arange(16).reshape(1, 16)

    def logits(**changes) -> jax.Array:
        config = get_preset("tiny", dtype="float32", **changes)
        return Transformer(config, rngs=nnx.Rngs(0))(tokens)

    every = logits(matmul="float8_static")
    none = logits(matmul="float8_static", matmul_rules={"layers/.*": "dtype"})
    np.testing.assert_array_equal(none, logits())
    some = logits(matmul_rules={"self_attention/.*": "float8_static", "mlp/.*": "float8_static"})
    np.testing.assert_array_equal(some, every)
    assert not np.array_equal(every, none)
