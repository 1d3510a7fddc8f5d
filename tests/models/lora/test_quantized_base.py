"""Adapters beside weights that are kept in few bits: what is learnt and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpukit import Workload, create_mesh
from tpukit.models import get_preset
from tpukit.models.lora.spec import LoraSpec
from tpukit.models.stored.parameter import is_stored
from tpukit.models.stored.running import dense_parameters
from tpukit.quantization import quantize_model
from tpukit.quantization.uniform import rounded_base
from tpukit.step.parts import TrainState

SPEC = LoraSpec(rank=4, alpha=6.0)
SMALL = {
    "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "d_ff": 64, "vocab_size": 64,
    "n_layers": 2, "dtype": "float32", "param_dtype": "float32",
}  # fmt: skip
CONFIG = get_preset("tiny", **SMALL)
SHAPE = {"batch_size": 4, "sequence_length": 16}
OPTIMIZER = optax.adam(1e-2)


@pytest.fixture(scope="module")
def dense():
    return Workload(CONFIG, **SHAPE).init(jax.random.key(0)).params


def kept_as(dense, format):
    if format != "vq2":
        batch = Workload(CONFIG, **SHAPE).batch_shapes()
        return rounded_base(CONFIG, format, batch)(dense)
    text = [np.random.default_rng(0).integers(0, 64, (4, 16)) for _ in range(2)]
    made = quantize_model(CONFIG, text, params=dense, format="vq2", codec={"refit": False})
    return made.model.params


def five_steps(base, **how):
    """The state after five steps beside parameters, and the losses."""
    work = Workload(CONFIG, **SHAPE, lora=SPEC, optimizer=OPTIMIZER, **how)
    variables = work.adapter.with_new_matrices(base, {}, jax.random.key(1))
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=variables.params,
        opt_state=OPTIMIZER.init(variables.params),
        model_state=variables.model_state,
    )
    step, batch, losses = jax.jit(work.train_step), work.example_batch(), []
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    ("format", "remat"),
    [
        ("int4", "full"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("int8", None), ("fp8", None), ("vq2", None))
        ),
    ],
)
def test_steps_beside_quantized_weights_are_those_beside_what_they_stand_for(dense, format, remat):
    base = kept_as(dense, format)
    assert any(map(is_stored, jax.tree.leaves(base, is_leaf=is_stored)))
    state, losses = five_steps(base, remat=remat)
    wide, expected = five_steps(dense_parameters(base), remat=remat)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state.params, wide.params
    )
    # The base is as it was, to the bit, and nobody keeps moments of it.
    jax.tree.map(np.testing.assert_array_equal, state.model_state["base"], base)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    assert moments == 1 + 2 * sum(leaf.size for leaf in jax.tree.leaves(state.params))


def test_no_decoded_matrix_is_kept_for_the_way_back(dense):
    """What is saved between both passes holds no array of a whole matrix in float."""
    base = kept_as(dense, "int8")
    work = Workload(CONFIG, **SHAPE, lora=SPEC, optimizer=OPTIMIZER)
    variables = work.adapter.with_new_matrices(base, {}, jax.random.key(1))

    def loss(thin):
        out = work.adapter.apply(
            variables._replace(params=thin), work.example_batch(), rng=jax.random.key(0),
            execution=work.execution,
        ).outputs  # fmt: skip
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(out))

    _, back = jax.eval_shape(lambda thin: jax.vjp(loss, thin), variables.params)
    stacks = {(2, 64, 64), (2, 64, 32)}  # up, gate, down, q, o; k, v
    kept = [x for x in jax.tree.leaves(back) if x.shape in stacks and x.dtype == jnp.float32]
    assert not kept


def test_codes_are_not_laid_side_by_side_in_a_step(dense):
    """Every layer's codes are read out of the one array that they are kept in."""
    work = Workload(
        CONFIG, **SHAPE, lora=SPEC, optimizer=OPTIMIZER,
        frozen=rounded_base(CONFIG, "int4", Workload(CONFIG, **SHAPE).batch_shapes()),
    )  # fmt: skip
    state = work.state_shapes()
    codes = {one.shape for one in jax.tree.leaves(state.model_state) if one.dtype == jnp.int32}
    assert codes == {(2, 16, 64), (2, 16, 32)}  # words of 8 rows, filled up to 128
    lowered = jax.jit(work.train_step).lower(state, work.batch_shapes()).as_text()
    made = [line for line in lowered.splitlines() if "stablehlo.concatenate" in line]
    assert not [line for line in made for shape in codes if _written(shape) in line]


def _written(shape):
    return "x".join(map(str, shape)) + "xi32"


@pytest.mark.slow
def test_quantized_bases_are_split_like_their_matrices():
    mesh = create_mesh(mesh_shape=(2, 2), axis_names=("fsdp", "tensor"), devices=jax.devices()[:4])
    batch = Workload(CONFIG, **SHAPE).batch_shapes()
    work = Workload(
        CONFIG, **SHAPE, lora=SPEC, strategy="fsdp+megatron", optimizer=OPTIMIZER,
        frozen=rounded_base(CONFIG, "int8", batch),
    )  # fmt: skip
    state = work.init_on(mesh, jax.random.key(0))
    up = state.model_state["base"]["layers"]["mlp"]["up_proj"]["kernel"]
    data = up.parts.part.data
    assert data.sharding.shard_shape(data.shape) == (2, data.shape[1] // 2, 32)
    _, metrics = work.jit_train_step(mesh)(state, work.put_batch(mesh, work.example_batch()))
    alone, expected = jax.jit(work.train_step)(work.init(jax.random.key(0)), work.example_batch())
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    assert alone.step == 1
