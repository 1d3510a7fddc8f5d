"""Bytes of optimizer state by arithmetic, against the states that optax sets up."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tpukit.errors import ConfigError
from tpukit.models import get_preset
from tpukit.step import LearningRate, OptimizerSpec, Workload, build_optimizer
from tpukit.step.optimizer_spec import (
    MOMENT_DTYPES,
    OPTIMIZERS,
    state_bytes,
    state_bytes_per_parameter,
)

RATE = LearningRate(peak=1e-3, total_steps=10)
SHAPES = [
    *((), (1,), (7,), (256,), (257,)),
    *((127, 4096), (128, 128), (4096, 128), (129, 1000), (3, 5)),
    *((2, 256, 512), (200, 300), (200, 64, 300), (8, 128, 256, 2), (300, 300, 300)),
]


def legal():
    for optimizer in OPTIMIZERS:
        for moment_dtype in MOMENT_DTYPES:
            try:
                yield OptimizerSpec(name=optimizer, moment_dtype=moment_dtype)
            except ConfigError:
                continue


SPECS = list(legal())
NAMES = [f"{one.name}-{one.moment_dtype}" for one in SPECS]


def real_bytes(spec, params):
    state = jax.eval_shape(build_optimizer(spec, RATE).init, params)
    leaves = jax.tree.leaves(state)
    counters = [leaf for leaf in leaves if leaf.dtype == jnp.int32]
    assert all(leaf.shape == () for leaf in counters)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) - 4 * len(counters)


def test_every_optimizer_has_a_format_and_adamw_all_three():
    assert [
        *("adamw-float32", "adamw-bfloat16", "adamw-int8"),
        *("lion-float32", "lion-bfloat16", "adafactor-float32", "sgd-float32", "sgd-bfloat16"),
    ] == NAMES


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shape_is_counted_to_the_byte(spec, dtype):
    for shape in SHAPES:
        params = {"w": jax.ShapeDtypeStruct(shape, dtype)}
        counted = state_bytes(spec, shape, param_bytes=jnp.dtype(dtype).itemsize)
        assert counted == real_bytes(spec, params), shape


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "small-125m", "llama3.1-8b"])
def test_a_transformer_is_counted_to_the_byte(spec, model):
    params = Workload(model, batch_size=1, sequence_length=8).state_shapes().params
    shapes = get_preset(model).parameter_shapes().values()
    counted = sum(state_bytes(spec, shape) for shape in shapes)
    assert counted == real_bytes(spec, params)
    total = get_preset(model).parameter_count().total
    assert state_bytes_per_parameter(spec, shapes) == pytest.approx(counted / total)


def test_what_one_parameter_of_a_large_matrix_takes():
    expected = [8.0, 6.0, 2 + 8 / 256, 4.0, 2.0, pytest.approx(8 / 1024, rel=0.01), 4.0, 2.0]
    assert [state_bytes_per_parameter(one) for one in SPECS] == expected


def test_what_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"moment_dtype 'float16' is not one of.*'bfloat16'"):
        OptimizerSpec(moment_dtype="float16")


def test_counting_needs_no_jax():
    code = "import sys, tpukit.step.optimizer_spec; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
