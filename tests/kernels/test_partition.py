"""Where the shardings of an op's arguments come from, how names are split, and what is refused."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import TPUKernelError
from tpukit.kernels import Splits, get_tpu_op, rms_norm, tpu_kernel
from tpukit.kernels.ops.flash_attention.api import SPLITS as ATTENTION

# Each device may have some hidden channels: results, and gradients of x, are added up.
MLP = Splits(
    free="... hidden out",
    arguments=("... width", "width hidden", "width hidden", "hidden out"),
    result="... out",
    residuals=("... width", "width hidden", "width hidden", "hidden out"),
)
kernel = partial(get_tpu_op("rms_norm").implementations["pallas_tpu"], interpret=True)
X = np.random.default_rng(0).random(size=(16, 8, 256)).astype(np.float32)
SCALE = np.linspace(0.5, 1.5, 256, dtype=np.float32)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


@pytest.fixture
def split(mesh):
    """Rows over both axes, and a scale that must be gathered."""
    specs = (P("data", "model"), P("model"))
    return [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((X, SCALE), specs, strict=True)
    ]


def shapes(*arrays):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in arrays]


def names_of(splits, *arrays):
    arrays = shapes(*arrays)
    return splits.alone.of(tuple(arrays), arrays[:1])


def test_leading_dimensions_are_any_and_arrays_with_fewer_have_the_last():
    splits = Splits(free="... s", arguments=("... s d", "b s d"), result="... s d")
    names = names_of(splits, (2, 3, 4, 5), (4, 5))
    assert names.inputs == (("...0", "...1", "s", "d"), ("s", "d"))
    assert names.free == {"...0", "...1", "s"}


def test_earlier_arrays_decide_and_an_axis_splits_one_name():
    names = names_of(MLP, (8, 16), (16, 32), (16, 32), (32, 16))
    x, w_gate, w_up, w_down = (("data",), ()), ((), ("data", "model")), ((), ()), ((), ())
    sizes = {"data": 2, "model": 4}
    all_shapes = [(8, 16), (16, 32), (16, 32), (32, 16)]
    # The hidden channels want both axes, and the tokens have the first of them already.
    assert names.assign([x, w_gate, w_up, w_down], all_shapes, sizes) == {"...0": ("data",)}
    w_gate = ((), ("model", "data"))
    assert names.assign([x, w_gate, w_up, w_down], all_shapes, sizes) == {
        "...0": ("data",),
        "hidden": ("model",),
    }


def test_pieces_are_equal_or_there_are_none():
    queries, keys = (2, 8, 8, 64), (2, 8, 2, 64)
    names = ATTENTION.alone.of(tuple(shapes(queries, keys, keys)), shapes(queries)[0])
    heads = ((), (), ("model",), ())
    assert names.assign([heads] * 3, [queries, keys, keys], {"model": 3}) == {}
    # Each of two heads of keys is shared by queries, so that four devices have one each.
    assert names.assign([heads] * 3, [queries, keys, keys], {"model": 4}) == {"h": ("model",)}
    alone = replace(names, shared=frozenset())
    assert alone.assign([heads] * 3, [queries, keys, keys], {"model": 4}) == {}


def test_heads_of_keys_are_repeated_for_more_devices_than_there_are(mesh):
    op = get_tpu_op("flash_attention")
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(key, (2, 128, n, 64)) for key, n in zip(keys, (8, 2, 2), strict=True)
    ]
    specs = (P("data", None, "model"), P("data"), P("data"))
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]

    attend = partial(op.implementations["pallas_tpu"], interpret=True)

    def gradients(function):
        return jax.jit(jax.grad(lambda *a: (function(*a) ** 2).sum(), (0, 1, 2)))

    assert "all-gather" not in jax.jit(attend).lower(*placed).compile().as_text()
    wanted = gradients(op.implementations["reference"])(*arrays)
    for found, expected in zip(gradients(attend)(*placed), wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_names_that_do_not_fit_their_arrays_are_refused():
    with pytest.raises(TPUKernelError, match=r"named 'd', but it has 2; name all"):
        names_of(Splits(arguments=("d",), result="d"), (2, 3))
    with pytest.raises(TPUKernelError, match="tree structure of the 2 arrays"):
        Splits(arguments=("d",), result="d").alone.of(tuple(shapes((2,), (3,))), shapes((2,))[0])


def constrained(x, mesh, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def in_checkpoint(x, scale, mesh):
    return jax.checkpoint(lambda x: kernel(constrained(x, mesh, "data", "model"), scale))(x)


def in_scan(x, scale, mesh):
    def layer(x, _):
        return kernel(constrained(x, mesh, "data", "model"), scale), None

    return jax.lax.scan(layer, x, None, length=1)[0]


def in_shard_map(x, scale, mesh):
    def stage(x, scale):
        return kernel(jax.lax.with_sharding_constraint(x, P(None, "model")), scale)

    return jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )(x, scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, scale, mesh: kernel(x, scale),
        lambda x, scale, mesh: kernel(jax.nn.relu(x) - jax.nn.relu(-x), scale + 0),
        lambda x, scale, mesh: kernel(x.reshape(2, 8, 8, 256), scale).reshape(x.shape),
        lambda x, scale, mesh: jax.vmap(kernel, (0, None))(x, scale),
        lambda x, scale, mesh: kernel(jax.lax.cond(x[0, 0, 0] > 9, jnp.sin, abs, x), scale),
        in_checkpoint,
        in_scan,
        in_shard_map,
    ],
    ids=["argument", "computed", "reshaped", "mapped", "branch", "remat", "scan", "shard_map"],
)
def test_shardings_are_found_wherever_they_are_stated(function, split, mesh):
    jitted = jax.jit(lambda x, scale: function(x, scale, mesh))
    found = jitted(*split)
    np.testing.assert_allclose(found, rms_norm(X, SCALE), rtol=2e-5, atol=2e-5)
    assert found.sharding.spec[:2] == ("data", "model")
    # A device has 8 by 2 rows of 16 by 8, which the kernel reads as a matrix.
    text = jitted.lower(*split).as_text()
    assert "tensor<16x256xf32>" in text or "tensor<8x2x256xf32>" in text


def test_a_mesh_in_use_and_a_call_outside_of_jit(split, mesh):
    with jax.set_mesh(mesh):
        used = jax.jit(kernel)(*split)
    for found in (used, kernel(*split)):
        np.testing.assert_allclose(found, rms_norm(X, SCALE), rtol=2e-5, atol=2e-5)
        assert found.sharding.spec[:2] == ("data", "model")


def test_what_nobody_split_runs_whole_on_every_device(split):
    def function(x, scale):
        return kernel(jnp.ones((8, 256)), jnp.ones(256)).sum() + x.sum()

    expected = rms_norm(jnp.ones((8, 256))).sum() + X.sum()
    np.testing.assert_allclose(jax.jit(function)(*split), expected, rtol=1e-4)


def test_axes_in_types_split_too_and_gradients_have_their_arguments_types():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = (P("data", "model"), P("model"))
    arrays = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((X, SCALE), specs, strict=True)
    ]
    for function in (kernel, rms_norm):
        found = jax.jit(jax.grad(lambda *a, f=function: (f(*a) ** 2).sum(), (0, 1)))(*arrays)
        wanted = jax.grad(lambda *a: (rms_norm(*a) ** 2).sum(), (0, 1))(X, SCALE)
        for gradient, array, expected in zip(found, arrays, wanted, strict=True):
            assert jax.typeof(gradient) == jax.typeof(array)
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_inside_a_function_only_its_own_constraints_are_known(split):
    inner = jax.jit(kernel)
    with pytest.raises(TPUKernelError, match=r"rms_norm was called with a named kernel"):
        jax.jit(lambda *arrays: inner(*arrays)).lower(*split)
    # Not asked for by name, it is what the compiler can partition.
    traced = jax.jit(lambda *arrays: jax.jit(rms_norm)(*arrays)).trace(*split)
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_a_program_for_several_platforms_holds_what_all_of_them_run():
    exported = jax.export.export(jax.jit(rms_norm), platforms=["cpu", "tpu"])(X, SCALE)
    assert "tpu_custom_call" not in exported.mlir_module()
    np.testing.assert_allclose(exported.call(X, SCALE), rms_norm(X, SCALE), rtol=1e-5)


def test_an_op_of_ones_own_is_split_where_it_says_so(mesh, split):
    seen = []

    def doubled(x):
        seen.append(x.shape)
        return 2 * x

    whole = tpu_kernel(jnp.negative, on_tpu=doubled)
    by_rows = tpu_kernel(
        jnp.negative,
        on_tpu=doubled,
        splits=Splits(free="...", arguments=("... d",), result="... d"),
    )
    for op, piece in ((whole, (16, 8, 256)), (by_rows, (8, 2, 256))):
        function = jax.jit(partial(op, implementation="pallas_tpu"))
        np.testing.assert_array_equal(function(split[0]), 2 * X)
        assert seen[-1] == piece
