"""Document 001, block by block: TPU configuration of a v4 slice, sharding, memory, hotspots.

`capibara.config.tpu_config` is `tpukit.tpu_config`. What jax no longer has (`jax.pjit` with
`in_axis_resources`, named entries of a `PartitionSpec`, `jax.device_memory_allocated`) is asked
through today's interface; a mesh of 4 x 8 chips is one of 4 x 2 virtual devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from document_blocks import conforms
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpukit.errors import TPUError as RootError
from tpukit.tpu_config import TPUConfig, TPUError


@pytest.fixture
def tpu_config():
    return TPUConfig(
        num_chips=32,
        topology="2x4x4",  # v4 is a 3D torus; the document's 4x8 is refused below
        memory_per_chip=32 * 1024**3,  # 32GB HBM
        flops_per_chip=275e12,  # 275 TFLOPS
        compute_dtype="bfloat16",
        param_dtype="float32",
    )


@conforms(
    "001", 1, "TPUConfig by its figures; a shape that v4 has not is refused with those it has"
)
def test_basic_configuration(tpu_config):
    assert tpu_config.chip.name == "v4"  # the one chip with that peak
    assert tpu_config.get_total_tflops() == 32 * 275
    assert TPUError is RootError
    with pytest.raises(TPUError, match="2x4x4"):
        TPUConfig(
            num_chips=32,
            topology="4x8",
            memory_per_chip=32 * 1024**3,
            flops_per_chip=275e12,
            compute_dtype="bfloat16",
            param_dtype="float32",
        )


@conforms("001", 2, "a mesh, and get_sharding_spec of a tensor")
def test_sharding(tpu_config):
    devices = mesh_utils.create_device_mesh((4, 2))
    mesh = Mesh(devices, axis_names=("data", "model"))

    tensor = np.ones((8, 16), np.float32)
    sharding_spec = tpu_config.get_sharding_spec(tensor.shape)

    placed = jax.device_put(tensor, NamedSharding(mesh, sharding_spec))
    assert placed.addressable_shards[0].data.shape == (2, 8)


@conforms("001", 3, "mixed precision: a program with shardings of its arguments and results")
def test_mixed_precision(tpu_config):
    mesh = Mesh(mesh_utils.create_device_mesh((4, 2)), axis_names=("data", "model"))
    split = NamedSharding(mesh, PartitionSpec("data", "model"))

    assert tpu_config.use_mixed_precision
    compute = tpu_config.get_memory_config().compute_dtype
    policy = jax.jit(
        lambda x: (x.astype(compute) * 2).astype(jnp.float32),
        in_shardings=split,
        out_shardings=split,
    )
    out = policy(jnp.ones((8, 16)))
    assert out.sharding == split
    np.testing.assert_array_equal(out, 2.0)


@conforms("001", 4, "get_memory_config")
def test_memory(tpu_config):
    memory_config = tpu_config.get_memory_config()

    compute_dtype = param_dtype = None
    if memory_config["use_mixed_precision"]:
        compute_dtype = jnp.bfloat16
        param_dtype = jnp.float32

    assert jnp.dtype(memory_config["compute_dtype"]) == compute_dtype
    assert jnp.dtype(memory_config["param_dtype"]) == param_dtype


def as_in_the_document(tensor_shape):
    if len(tensor_shape) == 2:
        return PartitionSpec("data", "model")
    if len(tensor_shape) == 3:
        return PartitionSpec("data", None, "model")
    return PartitionSpec("data", *[None] * (len(tensor_shape) - 2), "model")


@conforms("001", 5, "get_sharding_spec of every rank, as the document computes it")
@pytest.mark.parametrize("shape", [(8, 16), (8, 4, 16), (8, 4, 4, 16), (8, 2, 2, 2, 16)])
def test_dynamic_sharding(tpu_config, shape):
    assert tpu_config.get_sharding_spec(shape) == as_in_the_document(shape)


@conforms("001", 6, "profile_tpu_usage: memory, peak, devices, their utilization")
def test_profiling(tmp_path):
    from tpukit import profile_tpu_usage

    with jax.profiler.trace(str(tmp_path / "tpu_trace")):
        found = profile_tpu_usage(lambda: jnp.ones((64, 64)) @ jnp.ones((64, 64)))

    assert found["device_count"] == len(jax.devices())
    assert {"memory_allocated", "memory_peak", "device_utilization"} <= set(found)


@conforms("001", 7, "detect_hotspots, exact at the threshold's neighbours")
def test_hotspots(tpu_config):
    threshold = tpu_config.scaling_config.load_threshold
    at = np.float32(threshold)
    load = jnp.array(
        [[at, np.nextafter(at, np.float32(2))], [np.nextafter(at, np.float32(0)), 0.0]],
        jnp.float32,
    )
    hotspots = []
    for i in range(load.shape[0]):
        for j in range(load.shape[1]):
            if load[i, j] > threshold:
                hotspots.append((i, j))

    assert tpu_config.detect_hotspots(load) == hotspots == [(0, 1)]


@conforms("001", 8, "optimize_sharding by where the load is")
@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (np.eye(4), PartitionSpec(("data", "model"), None)),
        (np.ones((4, 8)), PartitionSpec("data", "model")),
        (np.tile([[4.0], [1.0], [1.0], [1.0]], 8), PartitionSpec(None, ("data", "model"))),
    ],
)
def test_optimize_sharding(tpu_config, load, expected):
    assert tpu_config.optimize_sharding(load) == expected
