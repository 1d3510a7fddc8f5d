"""Every op through the real TPU compiler with arrays split over eight chips, in one program.

What is split stays so: each kernel is called on the shapes of one device's pieces, which are those
that it is called on where these pieces are whole arrays, and no operand is gathered.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpukit.compiler.aot import compile_for
from tpukit.hardware.target import target_chip
from tpukit.kernels import get_tpu_op, list_tpu_ops, rms_norm

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
OPS = sorted(list_tpu_ops())
SIZES = {"data": 2, "model": 4}
MESH = AbstractMesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)


def on_mesh(x, spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, spec))


def piece(x, spec):
    shape = list(x.shape)
    for at, axes in enumerate(spec):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            shape[at] //= SIZES[axis]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def both_passes(name, example):
    op = get_tpu_op(name)
    function = partial(op.implementations["pallas_tpu"], **example.options)

    def total(*arrays):
        floats = [
            x for x in jax.tree.leaves(function(*arrays)) if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return sum((x.astype(jnp.float32) ** 2).sum() for x in floats)

    return lambda *arrays: (function(*arrays), jax.grad(total, op.differentiable)(*arrays))


@pytest.fixture(scope="module")
def compiled(examples):
    """All ops, both passes, in one program for eight chips."""

    def every_op(*arguments):
        pairs = zip(OPS, arguments, strict=True)
        return [both_passes(name, examples[name])(*arrays) for name, arrays in pairs]

    arguments = [
        tuple(map(on_mesh, examples[name].arrays(jnp.bfloat16), examples[name].specs))
        for name in OPS
    ]
    return compile_for(every_op, "v6e-8", *arguments, until="schedule")


def kernels_of_pieces(name, example):
    """What the op's kernels are called on where one device's pieces are all there is."""
    pieces = map(piece, example.arrays(jnp.bfloat16), example.specs)
    with target_chip("v6e"):
        traced = jax.jit(both_passes(name, example)).trace(*pieces)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    calls = re.findall(r'@tpu_custom_call.*kernel_name = "(\w+)".* -> (.*)', text)
    return {
        (
            kernel,
            tuple(shape.replace("x", ",") for shape in re.findall(r"<((?:\d+x)*\d+)x\w+>", out)),
        )
        for kernel, out in calls
    }


def kernels_in(hlo):
    calls = re.findall(r'%([\w.]+) = (.*?) custom-call\(.*target="tpu_custom_call"', hlo)
    return {(name.split(".")[0], tuple(re.findall(r"\w\[([\d,]+)\]", out))) for name, out in calls}


@pytest.mark.parametrize("name", OPS)
def test_kernels_are_called_on_the_shapes_of_pieces(name, example, compiled):
    wanted = kernels_of_pieces(name, example)
    assert wanted
    assert wanted <= kernels_in(compiled.hlo)


def test_no_operand_is_gathered(examples, compiled):
    found = re.findall(r"= \(?(\w+\[[\d,]+\]).*? all-gather(?:-start)?\(", compiled.hlo)
    meant = {shape for one in examples.values() for shape in one.gathered}
    assert set(found) <= meant


def test_what_cannot_be_split_is_gathered_and_nothing_else():
    x = jax.ShapeDtypeStruct((64, 8, 512), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((512,), jnp.float32)
    arguments = (
        on_mesh(x, PartitionSpec("data", None, "model")),
        on_mesh(scale, PartitionSpec("model")),
    )
    compiled = compile_for(
        partial(rms_norm, implementation="pallas_tpu"), "v6e-8", *arguments, until="schedule"
    )
    assert kernels_in(compiled.hlo) == {("rms_norm", ("256,512",))}
