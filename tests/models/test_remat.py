"""Remat changes what is remembered and never what is computed."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from tpukit.errors import TPUModelError
from tpukit.models.adapters import TransformerAdapter, Variables
from tpukit.models.execution import Execution
from tpukit.models.presets import get_preset
from tpukit.models.remat.gradient_checkpointing import saved_residual_bytes
from tpukit.models.remat.policy import TENSOR_NAMES, RematPolicy

CONFIG = get_preset("tiny", n_layers=4, d_ff=256)
TOKENS = jnp.zeros((2, 64), jnp.int32)
PLAIN = ("none", "everything", "full", "nothing_saveable", "minimal", "dots")


def loss(params, remat):
    execution = Execution(remat=RematPolicy.parse(remat))
    batch = {"inputs": TOKENS}
    applied = TransformerAdapter(CONFIG).apply(
        Variables(params, {}), batch, rng=jax.random.key(0), execution=execution
    )
    return jnp.mean(jnp.square(applied.outputs))


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(TransformerAdapter(CONFIG).init, jax.random.key(0)).params
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.5, 0.2, leaf.shape), "f4"), shapes)


@pytest.fixture(scope="module")
def compiled(params):
    @cache
    def step(remat):
        lowered = jax.jit(jax.value_and_grad(lambda p: loss(p, remat))).lower(params)
        return lowered.compile()

    return step


@pytest.mark.parametrize(
    "remat", ["full every=2", pytest.param("save=out_proj,qkv_proj", marks=pytest.mark.slow)]
)
def test_gradients_are_the_same(params, compiled, remat):
    value, gradients = compiled(remat)(params)
    expected_value, expected = compiled("none")(params)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradients, expected
    )


def test_the_compiled_step_needs_less_memory(compiled):
    none, full = (
        compiled(remat).memory_analysis().temp_size_in_bytes for remat in ("none", "full every=2")
    )
    assert full < 0.6 * none


def kept(params, remat):
    return saved_residual_bytes(lambda p: loss(p, remat), params)


def test_policies_keep_less_in_the_order_they_promise(params):
    sizes = [kept(params, remat) for remat in ("none", "dots", "minimal", "full", "full every=2")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes), sizes


def test_full_keeps_one_activation_for_each_segment(params):
    one = TOKENS.size * CONFIG.d_model * 4
    every_layer, every_second = kept(params, "full"), kept(params, "full every=2")
    assert every_layer - every_second == pytest.approx(2 * one, abs=one // 4)


def test_a_named_tensor_costs_exactly_its_size(params):
    more = kept(params, "save=decoder_layer_input,out_proj") - kept(
        params, "save=decoder_layer_input"
    )
    assert more == CONFIG.n_layers * TOKENS.size * CONFIG.d_model * 4


def test_offload_goes_to_the_host_when_lowered_for_tpu(params):
    step = jax.jit(jax.grad(lambda p: loss(p, "offload=decoder_layer_input,qkv_proj")))
    text = step.trace(params).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("pinned_host") >= 4
    plain = jax.jit(jax.grad(lambda p: loss(p, "full"))).trace(params)
    assert "pinned_host" not in plain.lower(lowering_platforms=("tpu",)).as_text()


names = st.lists(st.sampled_from(sorted(TENSOR_NAMES)), unique=True, min_size=1)


@given(st.sampled_from(PLAIN[1:]), st.integers(1, 9))
def test_policies_read_back(policy, every):
    remat = RematPolicy(policy=policy, every_n_layers=every)
    assert RematPolicy.parse(str(remat)) == remat == RematPolicy.parse(remat.to_dict())


@given(names, st.integers(0, 9))
def test_named_policies_read_back(chosen, cut):
    remat = RematPolicy(policy="names", save=tuple(chosen[:cut]), offload=tuple(chosen[cut:]))
    assert RematPolicy.parse(str(remat)) == remat == RematPolicy.parse(remat.to_dict())


def test_nothing_means_no_remat():
    assert RematPolicy.parse(None) == RematPolicy.parse("none") == RematPolicy()
    assert not RematPolicy().active
    assert RematPolicy.parse({"offload": ["mlpwo"]}).policy == "names"


def test_a_users_own_name_is_kept():
    def function(x):
        return jnp.sin(checkpoint_name(jnp.sin(x), "mine"))

    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    named = saved_residual_bytes(RematPolicy.parse("save=mine").wrap(function), x)
    assert named - saved_residual_bytes(RematPolicy.parse("full").wrap(function), x) == 256


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ful", "remat policy 'ful' is not one of .* Did you mean 'full'"),
        ("full every=two", "every=two is not a whole number"),
        ("full keep=x", "'keep' is not a setting"),
        ({"polcy": "full"}, "'polcy' is not a remat setting.* Did you mean 'policy'"),
        ("none every=2", "policy 'none' makes no segments"),
        ("full every=0", "every_n_layers=0; expected at least 1"),
        ("full save=mlpwo", "policy 'names' needs tensor names"),
        ("names", "policy 'names' needs tensor names"),
        ("save=mlpwo offload=mlpwo", "mlpwo is both saved and offloaded"),
    ],
)
def test_errors_teach(spec, message):
    with pytest.raises(TPUModelError, match=message):
        RematPolicy.parse(spec)


def test_no_remat_has_no_jax_policy():
    with pytest.raises(TPUModelError, match="policy 'none' has no jax counterpart"):
        RematPolicy().jax_policy()
