"""Arguments typed with mesh axes: `bf16[8@fsdp,128]`, as jax itself writes such types."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpukit.compiler.program.entry import sharded_arguments
from tpukit.compiler.program.lowered import lower_program
from tpukit.errors import MeshError, TPUValidationError
from tpukit.hardware import Slice

ON = Slice.parse("v6e-8")


def test_without_axes_and_mesh_there_is_no_sharding():
    (found,) = sharded_arguments(["bf16[8,128]"], ON)
    assert (found.shape, found.dtype.name, found.sharding) == ((8, 128), "bfloat16", None)


@pytest.mark.parametrize(
    ("text", "mesh", "spec", "shard"),
    [
        ("f32[16@fsdp,4]", None, ("fsdp", None), (2, 4)),
        ("f32[16, 8 @ x]", None, (None, "x"), (16, 1)),
        ("s32[16@data,4@tensor]", {"data": 4, "tensor": 2}, ("data", "tensor"), (4, 2)),
        ("bf16[16@(data,tensor),4]", {"data": 4, "tensor": -1}, (("data", "tensor"), None), (2, 4)),
        ("f32[16,4]", {"data": 8}, (None, None), (16, 4)),
        ("f32[]", {"data": 8}, (), ()),
    ],
)
def test_axes_split_the_dimensions_they_stand_behind(text, mesh, spec, shard):
    (found,) = sharded_arguments([text], ON, mesh)
    assert tuple(found.sharding.spec) == spec
    assert found.sharding.shard_shape(found.shape) == shard


def test_the_notation_is_that_of_jax():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        spec = PartitionSpec(("x", "y"), None)
        typed = jax.typeof(
            jax.eval_shape(
                lambda: jax.lax.broadcast(1.0, (16, 4), out_sharding=NamedSharding(mesh, spec))
            )
        )
        written = str(jax.core.ShapedArray((16, 4), "float32", sharding=typed.sharding))
    assert written == "float32[16@(x,y),4]"
    (found,) = sharded_arguments([written], ON, {"x": 4, "y": 2})
    assert found.sharding.shard_shape(found.shape) == (2, 4)


def test_a_lowered_program_knows_its_mesh_and_copies():
    args = sharded_arguments(["f32[16@x,8]", "f32[8,8]"], ON)
    facts = lower_program(lambda a, b: a @ b, *args).facts
    assert facts.mesh_axes == (("x", 8),)
    assert facts.argument_copies == (1, 8)


@pytest.mark.parametrize(
    ("texts", "mesh", "error", "words"),
    [
        (["f32[16@a,8@b]"], None, MeshError, "not their sizes; write --mesh a=…,b=…"),
        (["f32[16@a]", "f32[8@b]"], None, MeshError, "axes a, b"),
        (["f32[16@fdsp]"], {"fsdp": 8}, MeshError, "Did you mean 'fsdp'"),
        (["f32[16@a]"], {"a": 4}, MeshError, "v6e-8 has 8"),
        (["f32[12@a]"], None, TPUValidationError, "a dimension of 12 into 8 parts"),
        (["f32[8@a,8@a]"], None, TPUValidationError, "name each axis once"),
        (["f32[8@]"], None, TPUValidationError, "'8@' that cannot be parsed"),
        (["f32[8@()]"], None, TPUValidationError, "cannot be parsed"),
        (["f32[8@a@b]"], None, TPUValidationError, "cannot be parsed"),
        (["f32[8"], None, TPUValidationError, "is not an array"),
        (["f32[@a]"], None, TPUValidationError, "cannot be parsed"),
    ],
)
def test_what_cannot_be_split_is_told_how(texts, mesh, error, words):
    with pytest.raises(error, match=words):
        sharded_arguments(texts, ON, mesh)
