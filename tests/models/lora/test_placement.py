"""Thin matrices on a mesh: cut where their weight is, and never through the rank."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tpukit.models.lora.adapter import lora_layout
from tpukit.models.lora.spec import lora_shapes
from tpukit.parallel import create_mesh
from tpukit.parallel.sharding.layout import make_layout

RANK = 4


def shapes(tree):
    return jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one, jnp.float32),
        tree,
        is_leaf=lambda one: isinstance(one, tuple),
    )


def thin_specs(weight, spec, **sizes):
    """Where `a` and `b` lie beside a weight of this shape and spec."""
    mesh = create_mesh(mesh_shape=[*sizes.values()], axis_names=[*sizes])
    base = make_layout(shapes({"w": weight}), mesh, None, rules=[("w", spec)])
    thin = shapes({"w": dict(zip("ab", lora_shapes(weight, RANK), strict=True))})
    layout = lora_layout(thin, base)
    moments = layout.for_optimizer_state({"mu": thin, "count": jax.ShapeDtypeStruct((), jnp.int32)})
    assert moments["mu"] == layout.shardings
    assert moments["count"].spec == P()
    return layout.specs["w"]["a"], layout.specs["w"]["b"]


@pytest.mark.parametrize(
    ("weight", "spec", "sizes", "a", "b"),
    [
        ((16, 8), P("fsdp"), {"fsdp": 8}, P("fsdp"), P(None, "fsdp")),
        ((16, 8), P(None, "fsdp"), {"fsdp": 8}, P("fsdp"), P(None, "fsdp")),
        ((2, 16, 8), P(None, "fsdp"), {"fsdp": 8}, P(None, "fsdp"), P(None, None, "fsdp")),
        # What a tensor axis splits of the weight, it splits of the thin one on that side alone.
        (
            (16, 8), P("fsdp", "tensor"), {"fsdp": 4, "tensor": 2},
            P("fsdp"), P(None, ("tensor", "fsdp")),
        ),
        (
            (16, 8), P("tensor", "fsdp"), {"fsdp": 4, "tensor": 2},
            P(("tensor", "fsdp")), P(None, "fsdp"),
        ),
        # Four outputs are not for eight devices.
        ((16, 4), P("fsdp"), {"fsdp": 8}, P("fsdp"), P()),
        ((16, 8), P(), {"fsdp": 8}, P(), P()),
    ],
)  # fmt: skip
def test_they_are_cut_along_what_they_share_with_their_weight(weight, spec, sizes, a, b):
    assert thin_specs(weight, spec, **sizes) == (a, b)


def test_nobody_is_warned_where_a_strategy_cuts_nothing(caplog):
    assert thin_specs((2048, 2048 * 512), P(), data=8) == (P(), P())
    assert not [one for one in caplog.records if "w/" in one.getMessage()]
