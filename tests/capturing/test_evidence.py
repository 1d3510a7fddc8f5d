"""What a trace shows of defects, and what it must not take for one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from recorded_programs import exporting, recorded

HEADS = jnp.zeros((2, 4, 1024, 64))
WEIGHTS = jnp.zeros((256, 256))


def attention(q):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, q)
    scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -1e30)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), q).sum()


def test_scores_are_found_in_gradients_and_loops_with_their_lines():
    def looped(q):
        return jax.lax.scan(lambda total, q: (total + attention(q), None), 0.0, q[None])[0]

    for function in (attention, jax.grad(attention), jax.grad(looped)):
        (found,) = exporting.find_evidence(recorded(function, HEADS))["scores"]
        line = attention.__code__.co_firstlineno
        assert found["type"] == "f32[2,4,1024,1024]"
        assert found["line"] == f"{__file__}:{line + 1}"
        # The three lines of scores, mask and softmax, the last of which multiplies by values.
        assert set(found["lines"]) >= {f"{__file__}:{line + offset}" for offset in (1, 2, 3)}


def experts(x):
    return jax.nn.softmax(jnp.einsum("ecd,edf->ecf", x, x)).sum()


def logits(x):
    return jax.nn.log_softmax(x @ jnp.zeros((64, 4096))).sum()


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (attention, jnp.zeros((2, 4, 512, 64))),  # short
        (experts, jnp.zeros((2, 1024, 1024))),  # sums over more than a head
        (logits, jnp.zeros((2, 1024, 64))),  # no batch dimension
        (lambda x: jnp.einsum("bhqd,bhkd->bhqk", x, x).sum(), HEADS),  # no softmax
    ],
    ids=["short", "experts", "logits", "no softmax"],
)
def test_other_products_are_no_scores(function, x):
    assert exporting.find_evidence(recorded(function, x))["scores"] == []


def step_of(change):
    def step(state, batch):
        grads = jax.grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
        return change({**state, "w": state["w"] - grads}), grads.mean()

    return step


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda state: state, None),
        (lambda state: {**state, "n": state["n"] + 1}, None),
        (lambda state: {**state, "n": jnp.int32(state["n"])}, ("n", "a Python number")),
        (lambda state: {**state, "w": state["w"].astype(jnp.bfloat16)}, ("w", "f32[256,256]")),
    ],
    ids=["same", "counted", "typed", "narrower"],
)
def test_state_that_changes_its_type(change, expected):
    state = {"n": 0, "w": WEIGHTS}
    program = recorded(step_of(change), state, jnp.zeros((4096, 256)))
    program.kind = "training step"
    found = [
        (one["argument"], one["before"]) for one in exporting.find_evidence(program)["changes"]
    ]
    assert found == ([] if expected is None else [(f"state['{expected[0]}']", expected[1])])


def test_shardings_that_change():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data", None)), NamedSharding(mesh, P())

    def changes(given, returned):
        outs = [None, returned, None]
        program = recorded(step_of(lambda s: s), {"n": 0, "w": WEIGHTS}, BATCH, out_shardings=outs)
        program.kind, program.in_shardings = "training step", [None, given, rows]
        return [one["after"] for one in exporting.find_evidence(program)["changes"]]

    assert changes(rows, NamedSharding(mesh, P("data"))) == []
    assert changes(whole, rows) == ["sharded over ['data']"]
    assert changes(None, rows) == ["on the devices of the mesh"]


BATCH = jnp.zeros((4096, 256))


def test_numpy_arguments_and_callbacks():
    def step(w, batch):
        jax.debug.callback(print, batch.mean())
        return w - batch.sum()

    found = exporting.find_evidence(recorded(step, WEIGHTS, np.zeros((8, 256), np.float32)))
    assert found["from_host"] == [1]
    (callback,) = found["callbacks"]
    assert callback["line"] == f"{__file__}:{step.__code__.co_firstlineno + 1}"
