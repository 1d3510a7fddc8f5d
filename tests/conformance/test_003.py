"""Document 003, block by block: layouts, kernels, errors and tests of kernels.

`vishwamai.kernels.tpu` is `tpukit.kernels`. Kernels run by their references here, and one is
compiled for a TPU that is not here.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from document_blocks import conforms
from jax.sharding import NamedSharding, PartitionSpec

from tpukit.errors import ShardingError, TPUKernelError
from tpukit.kernels import PrecisionConfig, tpu_kernel


@conforms("003", 1, "the blocked layout of 4D tensors, BLOCK_SIZE, MIN_PARALLEL_SIZE")
def test_memory_layout():
    from tpukit.kernels import BLOCK_SIZE, MIN_PARALLEL_SIZE, from_blocked, to_blocked

    assert (BLOCK_SIZE, MIN_PARALLEL_SIZE) == (128, 128)
    batch, height, width, channels = 1, 256, 128, 2
    x = jnp.arange(batch * height * width * channels).reshape(batch, height, width, channels)
    blocked = to_blocked(x)
    # [batch, height // 128, width // 128, height % 128, width % 128, channels]
    assert blocked.shape == (batch, height // 128, width // 128, 128, 128, channels)
    assert blocked[0, 1, 0, 3, 5, 1] == x[0, 128 + 3, 5, 1]
    np.testing.assert_array_equal(from_blocked(blocked, height=height, width=width), x)


@conforms("003", 2, "meshes of two and three axes")
def test_sharding_strategies():
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ["data", "model"])
    sharding = PartitionSpec("data", "model")
    placed = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, sharding))
    assert placed.addressable_shards[0].data.shape == (2, 4)

    # 3D sharding for large models
    mesh = jax.sharding.Mesh(devices.reshape(2, 2, 2), ["data", "model", "expert"])
    assert mesh.size == 8


@pytest.fixture
def qkv():
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (1, 128, 2, 64), jnp.float32) for key in keys]


@conforms("003", 3, "flash_attention in a kernel of one's own, with a mask")
def test_flash_attention(qkv):
    from tpukit.kernels import flash_attention

    @tpu_kernel(use_efficient_attention=True)
    def self_attention_layer(query, key, value, mask=None):
        return flash_attention(query, key, value, mask=mask, block_size=128, use_flash=True)

    found = self_attention_layer(*qkv)
    expected = jax.nn.dot_product_attention(*qkv)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


@pytest.fixture
def efficient_matmul():
    from tpukit.kernels import gemm

    @tpu_kernel(precision=PrecisionConfig.HIGH)
    def efficient_matmul(a, b):
        return gemm(a, b, block_size=128, use_bfloat16=True)

    return efficient_matmul


@conforms("003", 4, "gemm in a kernel of high precision")
def test_matrix_multiplication(efficient_matmul):
    a, b = jnp.ones((128, 128)), jnp.ones((128, 128))
    np.testing.assert_allclose(efficient_matmul(a, b), 128.0)


@conforms("003", 5, "layer_norm with fused operations")
def test_layer_normalization():
    from tpukit.kernels import layer_norm

    @tpu_kernel
    def optimized_layer_norm(x, scale, bias):
        return layer_norm(x, scale, bias, use_fused_ops=True)

    x = jax.random.normal(jax.random.key(0), (4, 128))
    scale, bias = jnp.full(128, 2.0), jnp.ones(128)
    expected = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * 2 + 1
    found = optimized_layer_norm(x, scale, bias)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@conforms("003", 6, "out of memory: checkpoint a large layer")
def test_out_of_memory():
    from jax import checkpoint  # jax.checkpoint is a function, not a module

    from tpukit.models.remat.gradient_checkpointing import saved_residual_bytes

    def layer(x):
        return jnp.sum(jnp.sin(jnp.tanh(x)))

    large_layer = checkpoint(layer)
    x = jnp.ones((64, 64))
    assert saved_residual_bytes(large_layer, x) < saved_residual_bytes(layer, x)


@pytest.fixture
def my_tpu_kernel():
    from tpukit.kernels import gemm

    return tpu_kernel(lambda x: gemm(x, x), name="my_tpu_kernel")


@conforms("003", 7, "performance: a profile of a kernel")
def test_profile(my_tpu_kernel, tmp_path):
    data = jnp.ones((128, 128))
    with jax.profiler.trace(str(tmp_path)):  # it has to know where to
        result = my_tpu_kernel(data)
        jax.block_until_ready(result)
    assert any(tmp_path.rglob("*.xplane.pb"))


@conforms("003", 8, "validate_sharding: the spec an array should have")
def test_sharding_errors():
    from tpukit import create_mesh, validate_sharding

    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("data", "model"))
    expected = PartitionSpec("data", "model")
    array = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, expected))
    assert array.sharding.spec == expected
    validate_sharding(array, mesh)  # by default what the document expects
    whole = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(ShardingError, match="data"):
        validate_sharding(whole, mesh)


@conforms(
    "003", 9, "register_tpu_op, and custom_call over jax.ffi: a target nobody registered is named"
)
def test_custom_xla_operations():
    from tpukit.kernels import custom_call, get_tpu_op, register_tpu_op, unregister_tpu_op

    @register_tpu_op
    def custom_op(inputs):
        """Custom TPU operation."""
        return custom_call("my_custom_op", inputs, platform="tpu")

    try:
        assert get_tpu_op("custom_op").name == "custom_op"
        with pytest.raises(TPUKernelError, match="no custom call 'my_custom_op' is registered"):
            custom_op(jnp.ones((8, 128)))
    finally:
        unregister_tpu_op("custom_op")


@conforms("003", 10, "compilation hints: names in the program")
def test_compilation_hints(efficient_matmul):
    a = b = jnp.ones((128, 128))

    def block(a, b):
        with jax.named_scope("optimization_block"):
            return efficient_matmul(a, b)

    text = jax.jit(block).lower(a, b).compile().as_text()
    assert "optimization_block" in text


@conforms("003", 11, "unit tests of a kernel")
def test_tpu_kernel(my_tpu_kernel):
    # Test with different input sizes
    for size in (8, 128):
        x = jnp.ones((size, size))
        y = my_tpu_kernel(x)
        expected_shape = (size, size)
        assert y.shape == expected_shape


@conforms("003", 12, "throughput of a kernel")
def test_benchmark_kernel(my_tpu_kernel):
    data = jnp.ones((128, 128))
    my_tpu_kernel(data)

    # Measure throughput
    start = time.time()
    for _ in range(100):
        result = my_tpu_kernel(data)
    jax.block_until_ready(result)
    assert time.time() - start > 0
