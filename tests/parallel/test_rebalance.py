"""Hot spots, the split that cools them, and experts that move without changing the model."""

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from tpukit.errors import ShardingError
from tpukit.parallel import (
    balance_experts,
    create_mesh,
    detect_hotspots,
    make_layout,
    optimize_sharding,
    reshard,
    shard_model,
    validate_sharding,
)
from tpukit.parallel.experts.placement import plan_rounds, reorder_experts

EXPERTS, EMBED, MLP = 8, 16, 32


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(0, 9), min_size=3, max_size=3), min_size=1), st.floats(0, 9))
def test_hotspots_are_what_the_document_loops_over(load, threshold):
    expected = [
        (i, j) for i, row in enumerate(load) for j, value in enumerate(row) if value > threshold
    ]
    assert detect_hotspots(np.array(load), threshold) == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_neighbours_of_a_threshold_are_told_apart(dtype):
    """As the document's own loop over a jax array tells them."""
    at = np.asarray(0.8, dtype)
    above, below = (np.nextafter(at, np.asarray(end, dtype)) for end in (1, 0))
    load = jnp.array([[at, above], [below, at]], dtype)
    expected = [(i, j) for i in range(2) for j in range(2) if load[i, j] > 0.8]
    assert detect_hotspots(load, 0.8) == expected == [(0, 1)]


def test_without_a_threshold_hot_is_a_quarter_over_the_mean():
    assert detect_hotspots(jnp.array([1.0, 1.0, 1.0, 1.5])) == [(3,)]
    assert detect_hotspots(np.ones((2, 2, 2))) == []
    assert detect_hotspots(np.zeros(4)) == []


@pytest.mark.parametrize("load", [[], [1.0, float("nan")], [float("inf")]])
def test_a_load_that_is_none_is_refused(load):
    with pytest.raises(ShardingError, match="empty or has values that are not finite"):
        detect_hotspots(load)


@pytest.mark.parametrize(
    ("load", "spec"),
    [
        (np.ones((4, 2)), P("data", "model")),
        ([[9.0, 1], [9, 1], [9, 1], [9, 1]], P(("data", "model"), None)),  # a hot column
        ([[9.0, 9], [1, 1], [1, 1], [1, 1]], P(None, ("data", "model"))),  # a hot row
    ],
)
def test_the_split_follows_the_load(load, spec):
    advice = optimize_sharding(load)
    assert advice.spec == spec
    assert advice.imbalance_after == pytest.approx(1.0)
    assert advice.imbalance_before == pytest.approx(np.max(load) / np.mean(load))
    assert advice.to_dict()["imbalance"]["as measured"]["origin"] == "measured"


def test_advice_can_be_carried_out_on_live_arrays():
    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("data", "model"))
    array = jax.device_put(
        jnp.arange(256.0).reshape(16, 16), NamedSharding(mesh, P("data", "model"))
    )
    load = np.array([[9.0, 1]] * 4)
    advice = optimize_sharding(load)
    moved = reshard(array, NamedSharding(mesh, advice.spec))
    np.testing.assert_array_equal(moved, array)
    # With the columns whole, each device now has both the hot and the cold half of its rows.
    assert {shard.data.shape for shard in moved.addressable_shards} == {(2, 16)}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(advice)
    assert "rows over data+model" in console.export_text()


def test_optimize_sharding_needs_a_grid():
    with pytest.raises(ShardingError, match=r"shape \(4,\).*For experts use balance_experts"):
        optimize_sharding(np.ones(4))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10_000), st.integers(0, 8))
def test_a_placement_is_a_permutation_that_never_makes_it_worse(devices, each, seed, most):
    load = np.random.default_rng(seed).exponential(size=devices * each)
    placement = balance_experts(load, devices)
    assert sorted(placement.order) == list(range(devices * each))
    assert placement.imbalance_after <= placement.imbalance_before + 1e-12
    by_hand = load[list(placement.order)].reshape(devices, each).sum(axis=1)
    np.testing.assert_allclose(by_hand, placement.load_after)
    careful = balance_experts(load, devices, max_moved=most)
    assert len(careful.moved) <= most
    # Whoever stays on a device stays in place.
    for place, expert in enumerate(placement.order):
        if expert not in placement.moved and placement.order[expert] == expert:
            assert place == expert


@pytest.mark.parametrize("seed", range(6))
def test_the_busiest_device_is_close_to_the_best_possible(seed):
    load = np.random.default_rng(seed).exponential(size=8)
    best = min(
        max(load[list(group)].sum(), load.sum() - load[list(group)].sum())
        for group in itertools.combinations(range(8), 4)
    )
    found = max(balance_experts(load, 2).load_after)
    assert found <= best * 1.08


def test_a_balanced_load_moves_nobody():
    placement = balance_experts([3.0, 1, 1, 3], 2)
    assert placement.order == (0, 1, 2, 3)
    assert placement.moved == ()


@pytest.mark.parametrize(
    ("load", "devices", "message"),
    [
        (np.ones((2, 2)), 2, r"load of shape \(2, 2\)"),
        ([1.0, -1.0], 2, "finite number of zero or more"),
        (np.ones(8), 3, "8 experts do not divide over 3 devices"),
    ],
)
def test_a_wrong_load_is_refused(load, devices, message):
    with pytest.raises(ShardingError, match=message):
        balance_experts(load, devices)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def moe_params():
    return {
        "moe": {
            "router": {"kernel": normal(0, EMBED, EXPERTS)},
            "experts": {
                "up": normal(1, EXPERTS, EMBED, MLP),
                "down": normal(2, EXPERTS, MLP, EMBED),
            },
        }
    }


@jax.jit
def moe(params, tokens):
    """Top-2 experts a token, gathered one by one so that the order of sums is the token's own."""
    params = params["moe"]
    weights, chosen = jax.lax.top_k(tokens @ params["router"]["kernel"], 2)
    up, down = params["experts"]["up"][chosen], params["experts"]["down"][chosen]
    hidden = jax.nn.relu(jnp.einsum("te,tkem->tkm", tokens, up))
    outputs = jnp.einsum("tkm,tkme->tke", hidden, down)
    load = jnp.zeros(EXPERTS).at[chosen].add(1.0)
    return jnp.einsum("tk,tke->te", jax.nn.softmax(weights), outputs), load


def test_experts_move_to_the_bit_and_the_model_stays_the_same():
    mesh = create_mesh(mesh_shape=(2, 4), axis_names=("data", "expert"))
    params = shard_model(moe_params(), mesh, "expert")
    state = optax.adam(1e-3).init(params)
    layout = make_layout(params, mesh, "expert")
    tokens = normal(9, 64, EMBED) + 1.0
    before, load = moe(params, tokens)
    placement = balance_experts(load, 4)
    assert placement.moved
    assert placement.imbalance_after < placement.imbalance_before

    moved = reshard(params, placement)
    order = np.array(placement.order)
    for name in ("up", "down"):
        np.testing.assert_array_equal(
            moved["moe"]["experts"][name], np.asarray(params["moe"]["experts"][name])[order]
        )
    validate_sharding(moved, mesh, layout)
    after, new_load = moe(moved, tokens)
    np.testing.assert_array_equal(new_load, np.asarray(load)[order])
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)

    # The optimizer's moments belong to experts too, and going back is exact.
    state = state[0]._replace(mu=params, nu=params)
    jax.tree.map(np.testing.assert_array_equal, reshard(state, placement).mu, moved)
    back = type(placement)(tuple(np.argsort(order).tolist()), 4, (1.0,) * 4, (1.0,) * 4)
    jax.tree.map(np.testing.assert_array_equal, reshard(moved, back), params)


@pytest.mark.parametrize("axes", [("expert",), ("data", "expert"), ()])
def test_odd_bits_survive_the_move(axes):
    mesh = create_mesh(mesh_shape=(2, 2, 2), axis_names=("data", "expert", "model"))
    bits = np.random.default_rng(0).integers(0, 2**32, (2, 16, 4), dtype=np.uint32)
    bits[0, :, 0] = 0x80000000  # -0.0, which a sum would lose
    bits[1, :, 0] = 0x7FC01234  # a NaN with something to say
    order = np.random.default_rng(1).permutation(16)
    value = jax.device_put(
        bits.view(np.float32), NamedSharding(mesh, P(None, axes or None, "model"))
    )
    moved = reorder_experts(value, order.tolist(), 1)
    assert moved.sharding == value.sharding
    np.testing.assert_array_equal(np.asarray(moved).view(np.uint32), bits[:, order])


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_moving_expert_is_sent_once(devices, each, random):
    order = list(range(devices * each))
    random.shuffle(order)
    held = np.arange(devices * each).reshape(devices, each)
    sent = 0
    for one in plan_rounds(order, devices):
        assert len({sender for sender, _ in one.pairs}) == len(one.pairs)
        assert len({receiver for _, receiver in one.pairs}) == len(one.pairs)
        for sender, receiver in one.pairs:
            assert order[receiver * each + one.fill[receiver]] == held[sender, one.send[sender]]
            sent += 1
    assert sent == sum(place // each != expert // each for place, expert in enumerate(order))


def test_a_placement_shows_itself():
    placement = balance_experts([8.0, 8, 1, 1, 1, 1, 1, 1], 4)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(placement)
    assert "busiest / mean 2.91 (measured) → 1.64 (model)" in console.export_text()
    assert placement.to_dict()["imbalance_after"]["origin"] == "model"


def test_reshard_moves_between_layouts_bit_for_bit():
    wide = create_mesh(mesh_shape=(8,), axis_names=("fsdp",))
    tall = create_mesh(mesh_shape=(2, 4), axis_names=("fsdp", "expert"))
    params = moe_params()
    state = optax.adam(1e-3).init(params)
    first = shard_model(params, wide, "fsdp")
    layout = make_layout(params, tall, "fsdp+expert")
    second = reshard(first, layout)
    validate_sharding(second, tall, layout)
    jax.tree.map(np.testing.assert_array_equal, second, params)
    moments = reshard(state, layout)[0].mu
    validate_sharding(moments, tall, layout)
    third = reshard(second, make_layout(params, wide, "fsdp").shardings)
    jax.tree.map(np.testing.assert_array_equal, third, params)
    holey = {"none": None, "w": params}  # as the arrays of an equinox module are
    jax.tree.map(np.testing.assert_array_equal, reshard(holey, layout), holey)


def test_reshard_says_what_does_not_fit():
    mesh = create_mesh(mesh_shape=(8,), axis_names=("data",))
    with pytest.raises(ShardingError, match="got 1 shardings for 3 arrays"):
        reshard(moe_params(), [NamedSharding(mesh, P())])
    with pytest.raises(ShardingError, match="found no array with 8 experts"):
        reshard({"w": jnp.zeros((4, 4))}, balance_experts(np.arange(8.0), 4))
