"""Experts: the same numbers on one device, on a mesh, and wherever the experts are placed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tpukit.errors import MeshError, ShardingError, TPUValidationError
from tpukit.kernels.ops.grouped_matmul.api import IMPLEMENTATIONS
from tpukit.parallel.experts.feed_forward import ExpertBiases
from tpukit.parallel.experts.layer import moe_ffn, place_experts

E, D, F, K = 4, 8, 16, 2
AXES = ("data", "expert", "model")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 2, 2), AXES)


@pytest.fixture(scope="module")
def arrays():
    random = np.random.default_rng(0)
    shapes = [(8, 4, D), (D, E), (E, D, F), (E, D, F), (E, F, D)]
    scales = [1, 1, 0.3, 0.3, 0.3]
    return [
        jnp.asarray(random.normal(size=shape) * scale, jnp.float32)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def every_expert_on_every_token(x, router_w, w_gate, w_up, w_down):
    """The dense computation: all experts see all tokens, unchosen ones count zero."""
    p = jax.nn.softmax(x @ router_w)
    best, chosen = jax.lax.top_k(p, K)
    share = (jax.nn.one_hot(chosen, E) * (best / best.sum(-1, keepdims=True))[..., None]).sum(-2)
    hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, w_gate))
    hidden = hidden * jnp.einsum("bsd,edf->bsef", x, w_up)
    return jnp.einsum("bsef,efd,bse->bsd", hidden, w_down, share)


def value_and_grads(layer, arrays):
    def loss(*arrays):
        return jnp.sin(layer(*arrays)).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=range(5)))(*arrays)


@pytest.fixture(scope="module")
def dense(arrays):
    return value_and_grads(every_expert_on_every_token, arrays)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one-device", "mesh"])
@pytest.mark.parametrize("routing", ["capacity", "dropless"])
def test_values_and_gradients_equal_the_dense_computation(arrays, dense, mesh, routing, on_mesh):
    def layer(*arrays):
        return moe_ffn(
            *arrays, k=K, routing=routing, capacity_factor=E, mesh=mesh if on_mesh else None
        )[0]

    for ours, theirs in zip(
        jax.tree.leaves(value_and_grads(layer, arrays)), jax.tree.leaves(dense), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def dropped_by_hand(x, router_w, groups, capacity):
    """Pairs that find their expert full when tokens of each group queue up in order."""
    p = np.asarray(x.reshape(-1, D) @ router_w)
    chosen = np.argsort(-p, axis=-1)[:, :K].reshape(groups, -1)
    counts = np.stack([np.bincount(group, minlength=E) for group in chosen])
    return np.maximum(counts - capacity, 0).sum(0)


def test_drops_do_not_depend_on_the_mesh_when_groups_are_fixed(arrays, mesh):
    settings = {"k": K, "capacity_factor": 1.0, "groups": 4}
    alone, alone_stats = jax.jit(functools.partial(moe_ffn, **settings))(*arrays)
    spread, stats = jax.jit(functools.partial(moe_ffn, **settings, mesh=mesh))(*arrays)
    np.testing.assert_allclose(spread, alone, atol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(stats), jax.tree.leaves(alone_stats), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_array_equal(
        stats.dropped_tokens, dropped_by_hand(arrays[0], arrays[1], groups=4, capacity=4)
    )
    assert 0 < float(stats.dropped_fraction) < 0.5


@pytest.mark.parametrize("x_spec", [None, P("data", "expert")], ids=["examples", "sequences-too"])
def test_without_an_expert_axis_every_device_routes_its_own_tokens(arrays, dense, mesh, x_spec):
    def loss(*arrays):
        y, _ = moe_ffn(*arrays, k=K, routing="dropless", mesh=mesh, axis=None, x_spec=x_spec)
        return jnp.sin(y).mean()

    compiled = jax.jit(jax.value_and_grad(loss, argnums=range(5))).lower(*arrays).compile()
    for ours, theirs in zip(
        jax.tree.leaves(compiled(*arrays)), jax.tree.leaves(dense), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    # 32 tokens choose 2 experts each, and 4 devices share them.
    sizes = set(re.findall(r"s32\[(\d+)\]", compiled.as_text()))
    assert "16" in sizes
    assert not {"32", "64"} & sizes, "nobody holds the choices of all tokens"


def test_without_an_expert_axis_fixed_groups_drop_the_same_tokens(arrays, mesh):
    settings = {"k": K, "capacity_factor": 1.0, "groups": 4}
    alone, alone_stats = jax.jit(functools.partial(moe_ffn, **settings))(*arrays)
    layer = functools.partial(moe_ffn, **settings, mesh=mesh, axis=None)
    spread, stats = jax.jit(layer)(*arrays)
    np.testing.assert_allclose(spread, alone, atol=1e-5)
    np.testing.assert_array_equal(stats.dropped_tokens, alone_stats.dropped_tokens)


def test_tensor_parallel_axes_split_the_hidden_dimension(arrays, mesh):
    tensor_only = Mesh(mesh.devices[0, 0], ("model",))
    layer = functools.partial(moe_ffn, k=K, axis=None)
    split = f"f32[{E},{D},{F // 2}]"
    assert split in str(jax.make_jaxpr(functools.partial(layer, mesh=tensor_only))(*arrays))
    odd = [array[..., : F - 1] if array.shape[-1] == F else array for array in arrays]
    odd[-1] = odd[-1][:, : F - 1]
    whole = str(jax.make_jaxpr(functools.partial(layer, mesh=tensor_only))(*odd))
    assert "shard_map" not in whole, "what does not divide is left to the partitioner"


def test_the_kernels_give_what_the_dense_computation_gives(arrays, dense, mesh, monkeypatch):
    interpreted = functools.partial(IMPLEMENTATIONS["pallas_tpu"], interpret=True)
    chosen = []

    def kernel(*operands, implementation, expected_rows):
        assert expected_rows in (None, 16), "32 tokens take 2 experts each, on 4 devices"
        chosen.append(implementation)
        return interpreted(*operands)

    monkeypatch.setattr("tpukit.parallel.experts.dispatch.grouped_matmul", kernel)
    layer = functools.partial(moe_ffn, k=K, routing="dropless", mesh=mesh)
    seen = value_and_grads(lambda *arrays: layer(*arrays)[0], arrays)
    assert chosen
    assert set(chosen) == {None}
    for ours, theirs in zip(jax.tree.leaves(seen), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_dropped_token_adds_nothing(arrays):
    # One expert wanted by all, with room for a single token: only the first gets an answer.
    x, _, *weights = arrays
    router_w = jnp.zeros((D, E)).at[0, 1].set(100.0)
    layer = jax.jit(functools.partial(moe_ffn, k=1, capacity_factor=0.01))
    y, stats = layer(jnp.abs(x[0]), router_w, *weights)
    assert float(jnp.abs(y[0]).max()) > 0
    np.testing.assert_array_equal(y[1:], 0)
    np.testing.assert_array_equal(stats.dropped_tokens, [0, 3, 0, 0])


@pytest.mark.parametrize("routing", ["capacity", "dropless"])
def test_placement_changes_nothing(arrays, mesh, routing):
    x, router_w, *weights = arrays

    @jax.jit
    def layer(placement):
        placed = [place_experts(weight, placement) for weight in weights]
        return moe_ffn(
            x, router_w, *placed, k=K, routing=routing, capacity_factor=1.0,
            placement=placement, mesh=mesh,
        )  # fmt: skip

    home, home_stats = layer(jnp.arange(E))
    moved, moved_stats = layer(jnp.asarray([3, 1, 0, 2]))
    np.testing.assert_allclose(moved, home, atol=1e-6)
    np.testing.assert_array_equal(moved_stats.expert_tokens, home_stats.expert_tokens)
    np.testing.assert_array_equal(moved_stats.dropped_tokens, home_stats.dropped_tokens)


def test_experts_without_a_gate_and_with_a_router_bias(arrays, mesh):
    x, router_w, _, w_up, w_down = arrays
    y, stats = jax.jit(
        lambda bias: moe_ffn(
            x, router_w, None, w_up, w_down, k=1, routing="dropless", activation="relu",
            normalize=True, router_bias=bias, mesh=mesh,
        )
    )(jnp.asarray([0.0, 0, 9, 0]))  # fmt: skip
    np.testing.assert_allclose(y, jax.nn.relu(x @ w_up[2]) @ w_down[2], atol=1e-5)
    np.testing.assert_array_equal(stats.expert_tokens, [0, 0, 32, 0])


def test_bfloat16_on_a_mesh(arrays, mesh):
    halves = [array.astype(jnp.bfloat16) for array in arrays]

    def loss(*arrays):
        y, stats = moe_ffn(*arrays, k=K, mesh=mesh, capacity_factor=E)
        return y.astype(jnp.float32).sum() + 0.01 * stats.balance_loss, y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(1, 3), has_aux=True))(*halves)
    assert y.dtype == grads[0].dtype == grads[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        y.astype(jnp.float32), every_expert_on_every_token(*arrays), atol=0.15
    )


def for_tpu(layer, arrays):
    """The program of a layer and its gradient, as it is handed to the TPU's compiler."""
    loss = jax.grad(lambda *arrays: layer(*arrays)[0].sum(), argnums=range(5))
    return jax.jit(loss).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("routing", "collective"), [("capacity", "all_to_all"), ("dropless", "ragged_all_to_all")]
)
def test_lowers_for_tpu_without_devices(arrays, routing, collective):
    mesh = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)

    def layer(x, router_w, *weights):
        biases = ExpertBiases(*(weight.sum(1) for weight in weights))
        how = {"routing": routing, "mesh": mesh, "activation": "clamped_swiglu"}
        return moe_ffn(x, router_w, *weights, k=K, biases=biases, **how)

    text = for_tpu(layer, arrays)
    assert len(re.findall(rf"[.@]\"?{collective}\b", text)) == 4  # there and back, twice
    assert "ragged_dot" not in text
    assert ("tpu_custom_call" in text) == (routing == "dropless")
    scattered = re.findall(r"stablehlo\.scatter.*?-> tensor<(\S*?)>", text, flags=re.DOTALL)
    assert scattered
    assert not [shape for shape in scattered if shape.endswith(f"x{D}xf32")], "rows are taken"


def test_an_axis_left_to_the_partitioner_leaves_it_the_grouped_products_too(arrays):
    names = ("data", "stage")
    mesh = AbstractMesh((2, 2), names, axis_types=(AxisType.Auto,) * 2)
    layer = functools.partial(moe_ffn, k=K, routing="dropless", mesh=mesh, axis=None)
    text = for_tpu(layer, arrays)
    assert "ragged_dot" in text
    assert "tpu_custom_call" not in text


def test_errors_name_the_fix(arrays, mesh):
    x, router_w, *weights = arrays
    layer = functools.partial(moe_ffn, x, router_w, *weights, k=K)
    with pytest.raises(MeshError, match=r"axis 'experts', but the mesh has data=2, expert=2"):
        layer(mesh=mesh, axis="experts")
    with pytest.raises(TPUValidationError, match=r"'droples' is unknown.*Did you mean 'dropless'"):
        layer(routing="droples")
    with pytest.raises(TPUValidationError, match=r"Activation 'swish' is unknown; known are silu"):
        layer(activation="swish")
    with pytest.raises(ShardingError, match=r"x_spec=.* does not split the tokens over 'expert'"):
        layer(mesh=mesh, x_spec=P("data"))
    with pytest.raises(ShardingError, match=r"groups=6 .* use a multiple of 4"):
        layer(mesh=mesh, groups=6)
    with pytest.raises(ShardingError, match=r"32 tokens .* per shard .*: 1, 2, 4, 8, 16, 32"):
        layer(groups=5)
    with pytest.raises(ShardingError, match=r"Dimension 0 of x has 6 rows.*multiple of 4"):
        moe_ffn(x[:6], router_w, *weights, k=K, mesh=mesh)
    three = [weight[:3] for weight in weights]
    with pytest.raises(ShardingError, match=r"3 experts .* 'expert'=2; .* divide them: 1, 3"):
        moe_ffn(x, router_w[:, :3], *three, k=K, mesh=mesh)
    with pytest.raises(TPUValidationError, match=r"w_gate has 3 experts, but the router 4"):
        moe_ffn(x, router_w, *three, k=K)


def test_options_that_do_not_fit_are_refused(arrays):
    x, router_w, _, w_up, w_down = arrays
    layer = functools.partial(moe_ffn, *arrays, k=K)
    biases = ExpertBiases(jnp.ones((E, F)), jnp.ones((E, F)), jnp.ones((E, D)))
    with pytest.raises(TPUValidationError, match=r"router_x is \(4, 8\), but x is \(8, 4, 8\)"):
        layer(router_x=x[0])
    with pytest.raises(TPUValidationError, match=r"expert_scale is \(3,\).* must be \(4,\)"):
        layer(expert_scale=jnp.ones(3))
    with pytest.raises(TPUValidationError, match=r"bias of w_down is \(4, 16\).*\(4, 8\)"):
        layer(biases=biases._replace(down=biases.up))
    with pytest.raises(TPUValidationError, match=r"bias of w_gate is \(4, 16\), but must be None"):
        moe_ffn(x, router_w, None, w_up, w_down, k=K, biases=biases)
    with pytest.raises(TPUValidationError, match=r"'clamped_swiglu' .* w_gate is None"):
        moe_ffn(x, router_w, None, w_up, w_down, k=K, activation="clamped_swiglu")
    with pytest.raises(TPUValidationError, match=r"kept_groups=2 .* expert_groups is 0"):
        layer(kept_groups=2)
    with pytest.raises(TPUValidationError, match=r"4 experts cannot be split into 3 equal groups"):
        layer(expert_groups=3, kept_groups=1)
    with pytest.raises(TPUValidationError, match=r"3 best scores .* has 2 experts"):
        layer(expert_groups=2, kept_groups=1, group_top=3)
    with pytest.raises(TPUValidationError, match=r"0 of 2 groups .* between 1 and 2 groups"):
        layer(expert_groups=2)


@pytest.mark.slow
def test_remat_that_keeps_the_load_does_not_sum_it_again(mesh, arrays):
    x, *weights = arrays

    def loss(x):
        y, stats = moe_ffn(x, *weights, k=K, routing="dropless", mesh=mesh, axis=None)
        return (y**2).sum() + stats.balance_loss_sum

    def sums(policy):
        again = jax.value_and_grad(jax.checkpoint(loss, policy=policy))
        return str(jax.make_jaxpr(again)(x)).count("= psum")

    kept = jax.checkpoint_policies.save_only_these_names("expert_tokens")
    assert sums(kept) == sums(jax.checkpoint_policies.nothing_saveable) - 1
