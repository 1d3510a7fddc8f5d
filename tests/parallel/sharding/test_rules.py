"""Rules by regular expression: first match wins, and what matched nothing is reported."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tpukit.errors import ShardingError
from tpukit.parallel import create_mesh, make_layout
from tpukit.parallel.sharding.rules import entries_spec, spec_entries

TREE = {
    "embed": {"table": jax.ShapeDtypeStruct((32, 16), jnp.float32)},
    "layers": [{"w": jax.ShapeDtypeStruct((16, 64), jnp.float32)} for _ in range(2)],
}


@pytest.fixture(scope="module")
def mesh():
    return create_mesh(mesh_shape=(2, 4), axis_names=("data", "model"))


def test_the_first_match_wins_and_the_rest_goes_to_the_strategy(mesh):
    rules = [(r"layers/0/w", P(None, "model")), (r"layers/.*", (("data", "model"),))]
    layout = make_layout(TREE, mesh, "fsdp", rules=rules)
    assert layout.specs["layers"][0]["w"] == P(None, "model")
    assert layout.specs["layers"][1]["w"] == P(("data", "model"))
    assert layout.report.without_rule == ("embed/table",)
    by_path = {one.path: one.decided_by for one in layout.report.placements}
    assert by_path == {
        "embed/table": "replicated",
        "layers/0/w": "rule layers/0/w",
        "layers/1/w": "rule layers/.*",
    }


def test_a_rule_that_matches_nothing_is_reported(mesh, caplog):
    rules = {r"layers/\d/w": ("data",), r"layers/0/w": ("model",), "attention": ("model",)}
    report = make_layout(TREE, mesh, None, rules=rules).report
    # The second rule is shadowed by the first, which is as dead as one that matches nothing.
    assert report.unused_rules == (r"layers/0/w", "attention")
    assert "Rules that matched no parameter: layers/0/w, attention." in caplog.text


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("w", P("modle")), r"names the axis 'modle'.*axes are data, model\. Did you mean 'model'"),
        (("w", ("data", "data")), r"uses the axis 'data' twice"),
        (("(w", ("data",)), r"'\(w' is not a regular expression"),
        (
            ("table", (None, None, "data")),
            r"'embed/table' has 3 entries, but its shape is \(32, 16\)",
        ),
    ],
)
def test_a_wrong_rule_teaches(mesh, rule, message):
    with pytest.raises(ShardingError, match=message):
        make_layout(TREE, mesh, None, rules=[rule])


def test_a_rule_that_does_not_divide_names_the_divisors(mesh):
    tree = {"w": jnp.zeros((6, 10))}
    with pytest.raises(
        ShardingError,
        match=r"w: dimension 1=10 does not divide over model=4; sizes that would: 1, 2, 5, 10\.",
    ):
        make_layout(tree, mesh, None, rules=[("w", (None, "model"))])


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, ("a", "b")), P("a", None, "b")])
def test_entries_round_trip(spec):
    assert entries_spec(spec_entries(spec, 4)) == spec
