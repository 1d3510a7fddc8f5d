"""Dispatch follows the platform of the lowering, and a name asked for is never replaced."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels.ops.flash_attention.api import CUDNN, XLA
from tpukit.kernels.ops.flash_attention.cudnn_gpu import cudnn_is_here
from tpukit.kernels.registry.dispatch import (
    Passes,
    dispatch,
    dispatch_with_gradient,
    recomputed,
    with_gradient,
)
from tpukit.kernels.registry.registry import builtin_ops, get_tpu_op

X = jnp.arange(1.0, 4.0)


def doubled(x, *, shift=0.0):
    return 2 * x + shift


def tripled(x, *, shift=0.0, blocks=None):
    return 3 * x + shift + (0 if blocks is None else blocks)


IMPLEMENTATIONS = {"reference": doubled, "pallas_tpu": tripled, "blocked": lambda x: 5 * x}


def lowered(function, platform):
    return jax.jit(function).trace(X).lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_of_the_lowering_decides():
    def call(x):
        return dispatch("op", IMPLEMENTATIONS, x, options={"shift": 1.0})

    assert "dense<3.0" in lowered(call, "tpu")
    assert "dense<2.0" not in lowered(call, "tpu")
    assert "dense<2.0" in lowered(call, "cpu")
    assert "dense<2.0" in lowered(call, "cuda")
    assert jax.jit(call)(X).tolist() == call(X).tolist() == [3.0, 5.0, 7.0]


def test_a_name_is_taken_anywhere_and_blocks_go_to_the_kernel_alone():
    named = dispatch("op", IMPLEMENTATIONS, X, implementation="pallas_tpu")
    assert named.tolist() == [3.0, 6.0, 9.0]
    blocks = {"pallas_options": {"blocks": 10}}
    assert dispatch("op", IMPLEMENTATIONS, X, **blocks).tolist() == [2.0, 4.0, 6.0]
    kernel = dispatch("op", IMPLEMENTATIONS, X, implementation="pallas_tpu", **blocks)
    assert kernel.tolist() == [13.0, 16.0, 19.0]


def test_an_unknown_name_is_refused_with_what_there_is():
    with pytest.raises(TPUKernelError, match=r"op has no implementation 'cuda'; it has reference,"):
        dispatch("op", IMPLEMENTATIONS, X, implementation="cuda")


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_a_kernel_that_cannot_run_here_says_so_and_nothing_else_runs(name):
    op = get_tpu_op(name)
    case = op.cases[0]
    arrays = [jnp.ones(array.shape, array.dtype) for array in case.arguments]
    with pytest.raises(TPUKernelError, match=f"{name} was called with implementation='pallas_tpu'"):
        op.function(*arrays, implementation="pallas_tpu", **case.options)


@pytest.mark.parametrize("name", builtin_ops())
def test_kernels_say_themselves_how_exact_their_products_are(name):
    op = get_tpu_op(name)
    case = op.cases[0]
    bound = op.bind(case, direction="backward" if op.differentiable else "forward")

    def kernel_for(precision):
        with jax.default_matmul_precision(precision), target_chip("v6e"):
            traced = jax.jit(bound).trace(*case.arguments)  # Mosaic refuses "high" when it lowers
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        return re.findall(r'backend_config = "[^"]*"', text)

    assert kernel_for("high") == kernel_for(None) != []


def test_both_passes_choose_and_share_residuals():
    passes = {
        "reference": recomputed(lambda x: x**2),
        "pallas_tpu": Passes(lambda x: (x**2, (x,)), lambda kept, g: (7 * kept[0] * g,)),
    }

    def loss(x):
        return dispatch_with_gradient("op", passes, x).sum()

    assert jax.grad(loss)(X).tolist() == [2.0, 4.0, 6.0]
    assert "dense<7.0" in lowered(jax.grad(loss), "tpu")
    assert "dense<7.0" not in lowered(jax.grad(loss), "cpu")
    kernel = with_gradient("op", passes, "pallas_tpu")
    assert jax.grad(lambda x: kernel(x).sum())(X).tolist() == [7.0, 14.0, 21.0]


def test_the_scope_carries_the_name():
    text = jax.jit(lambda x: dispatch("my_op", IMPLEMENTATIONS, x)).trace(X).lower()
    assert "my_op" in text.as_text(debug_info=True)


@pytest.mark.parametrize("name", builtin_ops())
def test_on_a_gpu_an_op_is_what_its_specs_say(name):
    op = get_tpu_op(name)
    # Without a GPU here cuDNN cannot be had, and attention does without it.
    named = XLA if op.on_gpu == CUDNN and not cudnn_is_here() else op.on_gpu

    def operations(case, implementation):
        function = partial(op.function, **case.options, implementation=implementation)
        traced = jax.jit(function).trace(*case.arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return Counter(re.findall(r"stablehlo\.(?!constant|return)[a-z_]+", text))

    for case in op.cases:
        try:
            by_name = operations(case, named)
        except TPUKernelError:  # a kernel of whole tiles refuses shapes that dispatch gives to XLA
            continue
        assert operations(case, None) == by_name
        return
    pytest.fail(f"{named} takes no case of {name}")
