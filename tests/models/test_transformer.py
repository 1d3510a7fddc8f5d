"""The reference transformer computes what its definition says, for every published variant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tpukit import Workload, get_preset
from tpukit.errors import TPUModelError
from tpukit.models.adapters import TransformerAdapter
from tpukit.models.execution import Execution
from tpukit.models.remat.policy import RematPolicy
from tpukit.models.transformer.config import RopeScaling, TransformerConfig
from tpukit.models.transformer.model import Transformer

SMALL = {
    "n_layers": 3,
    "d_model": 16,
    "d_ff": 24,
    "n_heads": 4,
    "vocab_size": 32,
    "max_seq_len": 16,
    "dtype": "float32",
}
VARIANTS = {
    "llama": {"n_kv_heads": 2, "rope_theta": 500.0},
    "qwen": {"n_kv_heads": 1, "head_dim": 8, "qk_norm": True},
    "gemma": {
        "activation": "gelu",
        "sliding_window": 3,
        "layer_kinds": {
            "local": {"sliding_window": 3, "rope_theta": 100.0, "rope_scaling": {}},
            "global": {},
        },
        "layer_pattern": "local, global",
        "rope_scaling": RopeScaling(factor=4.0),
        "qk_norm": True,
        "post_norms": True,
        "tied_embeddings": True,
        "scale_embeddings": True,
    },
    "gpt": {
        "norm": "layernorm",
        "attention_bias": "qkvo",
        "mlp_bias": True,
        "positions": "learned",
        "gated_mlp": False,
        "activation": "gelu",
        "tied_embeddings": True,
    },
    "maxtext": {"gated_mlp": False, "activation": "relu", "parallel_block": True},
    "mixtral": {"n_kv_heads": 2, "n_experts": 4, "experts_per_token": 2},
}


def random_params(config):
    """Random biases and scales too, away from 0 and 1, so that leaving one out shows."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        around = 1.0 if path[-1].key == "scale" else 0.0
        spread = 0.3 if leaf.ndim > 1 else 0.1
        return jnp.asarray(rng.normal(around, spread, leaf.shape), leaf.dtype)

    shapes = jax.eval_shape(TransformerAdapter(config).init, jax.random.key(0)).params
    return jax.tree_util.tree_map_with_path(draw, shapes)


def abstract_model(config):
    return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))


def forward(config, params, tokens, *, execution=None, **options):
    module = TransformerAdapter(config).module(params, execution or Execution())
    return jax.jit(lambda: module.forward(tokens, **options))()


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(1).integers(0, 32, (2, 8)), jnp.int32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_definition(variant, tokens, reference_logits):
    config = TransformerConfig(**SMALL, **VARIANTS[variant])
    params = random_params(config)
    expected = reference_logits(params, config, tokens)
    np.testing.assert_allclose(forward(config, params, tokens).logits, expected, atol=2e-5)


@pytest.fixture(scope="module")
def gemma():
    config = TransformerConfig(**SMALL, **VARIANTS["gemma"])
    return config, random_params(config)


@pytest.mark.parametrize("remat", ["none", "full every=2"])
@pytest.mark.parametrize("scan", [True, False])
def test_scan_and_segments_change_nothing(gemma, tokens, scan, remat, reference_logits):
    # Three layers in a period of two and segments of two: a scanned group and a rest.
    config, params = gemma
    execution = Execution(scan_layers=scan, remat=RematPolicy.parse(remat))
    logits = forward(config, params, tokens, execution=execution).logits
    np.testing.assert_allclose(logits, reference_logits(params, config, tokens), atol=2e-5)


def test_packed_documents_do_not_see_each_other(tokens, reference_logits):
    config = TransformerConfig(**SMALL, n_kv_heads=2)
    params = random_params(config)
    segments = jnp.asarray([[0] * 3 + [1] * 5, [0] * 8])
    logits = forward(config, params, tokens, segment_ids=segments).logits
    expected = reference_logits(params, config, tokens, segments)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    # With positions that start again, the second document is as if it stood alone.
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))])
    packed = forward(config, params, tokens, segment_ids=segments, positions=positions).logits
    alone = forward(config, params, tokens[:1, 3:]).logits
    np.testing.assert_allclose(packed[0, 3:], alone[0], atol=2e-5)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters(tokens):
    config = TransformerConfig(**{**SMALL, "dtype": "bfloat16"})
    model = abstract_model(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    assert nnx.eval_shape(lambda model: model(tokens), model).dtype == jnp.bfloat16


def test_parameter_names_are_the_ones_strategies_know():
    model = abstract_model(TransformerConfig(**SMALL, n_experts=2, experts_per_token=1))
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
    assert {
        "embed/embedding",
        "layers/self_attention/q_proj/kernel",
        "layers/mlp/router/kernel",
        "layers/mlp/experts/gate_proj",
        "lm_head/kernel",
    } <= paths


def test_a_sequence_too_long_is_refused():
    with pytest.raises(TPUModelError, match="has 17 tokens, but 'custom' has max_seq_len=16"):
        abstract_model(TransformerConfig(**SMALL))(jnp.zeros((1, 17), jnp.int32))


def test_an_unknown_attention_names_the_nearest(tokens):
    model = abstract_model(TransformerConfig(**SMALL))
    model.execution = Execution(attention="rings")
    with pytest.raises(TPUModelError, match=r"attention 'rings' is unknown.*'ring'"):
        nnx.eval_shape(lambda model: model(tokens), model)


def test_embeddings_by_a_product_are_the_rows_and_have_their_gradients():
    by_rows = get_preset("tiny", dtype="float32")
    by_product = by_rows.replace(embedding_lookup="one_hot")
    ids = jnp.array([[3, 0, 3, 7]])

    def total(config):
        work = Workload(config, batch_size=1, sequence_length=4)
        state = work.init(jax.random.key(0))
        batch = {"inputs": ids, "targets": ids}
        return jax.jit(work.train_step)(state, batch)

    (rows, metrics), (product, others) = total(by_rows), total(by_product)
    assert float(metrics["loss"]) == pytest.approx(float(others["loss"]), rel=1e-6)
    for one, other in zip(jax.tree.leaves(rows), jax.tree.leaves(product), strict=True):
        assert jnp.allclose(one, other, atol=1e-5)
