"""What every op promises, tried on all of them: right, at any shape, mapped, split over devices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from tpukit.errors import TPUKernelError, TPUValidationError
from tpukit.hardware.target import target_chip
from tpukit.kernels import get_tpu_op, list_tpu_ops

OPS = sorted(list_tpu_ops())
# Of the largest value: rounding of results, and of sums that grow with the square root.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def test_every_op_has_an_example(examples):
    assert sorted(examples) == OPS


def with_gradients(op, function):
    """`f(*arrays)` -> its results, and the gradients of a weighted sum of their squares."""

    def total(*arrays):
        results = function(*arrays)
        floats = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((x * x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum() for x in floats)

    def both(*arrays):
        return function(*arrays), jax.grad(total, op.differentiable)(*arrays)

    return both


def kernel(op, example, **more):
    return partial(op.implementations["pallas_tpu"], **example.options, interpret=True, **more)


def exact(op, example, arrays):
    """The reference and its gradients, in float64."""
    with jax.enable_x64(True):
        wide = [
            x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arrays
        ]
        reference = partial(op.implementations["reference"], **example.options)
        return jax.tree.map(np.asarray, jax.jit(with_gradients(op, reference))(*wide))


def assert_agrees(found, wanted, tolerance):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if not jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_array_equal(one, other)
            continue
        largest = max(np.abs(other).max(), 1e-6)
        np.testing.assert_allclose(
            np.asarray(one, np.float64) / largest, other / largest, atol=tolerance, rtol=0
        )


def tolerance(example, dtype):
    return TOLERANCE[dtype if example.exact else "bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_the_kernel_and_its_gradient_agree_with_float64_at_odd_shapes(name, dtype, example):
    op = get_tpu_op(name)
    arrays = example.odd(jnp.dtype(dtype))
    found = jax.jit(with_gradients(op, kernel(op, example)))(*arrays)
    assert_agrees(found, exact(op, example, arrays), tolerance(example, dtype))


@pytest.mark.parametrize("name", OPS)
def test_what_runs_here_agrees_with_float64(name, example):
    op = get_tpu_op(name)
    arrays = example.arrays(jnp.float32)
    here = partial(op.function, **example.options)
    wanted = exact(op, example, arrays)
    assert_agrees(here(*arrays), wanted[0], tolerance(example, "float32"))
    jitted = jax.jit(with_gradients(op, here))(*arrays)
    assert_agrees(jitted, wanted, tolerance(example, "float32"))


@pytest.mark.parametrize("name", OPS)
def test_a_batch_is_each_of_its_examples(name, example):
    op = get_tpu_op(name)
    arrays = list(example.odd(jnp.float32))
    for at in example.batched:
        arrays[at] = jnp.stack([arrays[at], -arrays[at][::-1]])
    in_axes = [0 if at in example.batched else None for at in range(len(arrays))]
    found = jax.jit(jax.vmap(kernel(op, example), in_axes))(*arrays)
    alone = jax.jit(kernel(op, example))
    wanted = [
        alone(*(x if axis is None else x[one] for x, axis in zip(arrays, in_axes, strict=True)))
        for one in range(2)
    ]
    assert_agrees(found, jax.tree.map(lambda *both: np.stack(both), *wanted), 1e-6)


@pytest.mark.parametrize("name", OPS)
def test_bad_input_is_refused_by_what_was_seen(name, example):
    op = get_tpu_op(name)
    assert example.bad
    for options, change, message in example.bad:
        arrays = change(*example.arrays(jnp.float32))
        with pytest.raises((TPUKernelError, TPUValidationError), match=message):
            op.function(*arrays, **{**example.options, **options})


@pytest.mark.parametrize("name", OPS)
def test_a_program_for_a_tpu_holds_the_kernel_and_one_for_a_cpu_does_not(name, example, mesh):
    function = jax.jit(partial(get_tpu_op(name).function, **example.options))
    for arrays in (example.arrays(jnp.bfloat16), spread(example, mesh, jnp.bfloat16)):
        with target_chip("v6e"):
            traced = function.trace(*arrays)
        for platform, is_there in (("tpu", True), ("cpu", False)):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert ("tpu_custom_call" in text) is is_there, (platform, len(arrays))


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def spread(example, mesh, dtype=jnp.float32):
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(example.arrays(dtype), example.specs, strict=True)
    ]


@pytest.mark.parametrize("name", OPS)
def test_split_over_devices_the_kernel_computes_the_same_and_gathers_nothing(name, example, mesh):
    op = get_tpu_op(name)
    arrays = spread(example, mesh)
    compiled = jax.jit(with_gradients(op, kernel(op, example))).lower(*arrays).compile()
    gathered = re.findall(r"= \(?(\w+\[[\d,]+\]).*? all-gather(?:-start)?\(", compiled.as_text())
    assert set(gathered) == set(example.gathered)
    found = compiled(*arrays)
    wanted = exact(op, example, example.arrays(jnp.float32))
    assert_agrees(found, wanted, tolerance(example, "float32"))
    # A gradient lies as its argument does.
    for at, gradient in zip(op.differentiable, found[1], strict=True):
        assert gradient.sharding.is_equivalent_to(arrays[at].sharding, gradient.ndim), at
    first = jax.tree.leaves(found[0])[0]
    if first.ndim:
        assert "data" in first.sharding.spec[0]


@pytest.mark.parametrize("name", OPS)
def test_split_over_devices_what_runs_here_computes_the_same(name, example, mesh):
    op = get_tpu_op(name)
    found = jax.jit(partial(op.function, **example.options))(*spread(example, mesh))
    wanted = exact(op, example, example.arrays(jnp.float32))[0]
    assert_agrees(found, wanted, tolerance(example, "float32"))
