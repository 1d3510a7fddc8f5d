"""Measuring over a mesh: XᵀX, losses and quantized matrices are those of one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tpukit.errors import MeshError, TPUValidationError
from tpukit.models import get_preset
from tpukit.models.stored import calibration
from tpukit.models.stored.calibration import collect_statistics, find_matrices
from tpukit.models.stored.placement import Spread
from tpukit.parallel import create_mesh
from tpukit.quantization import quantize_model
from tpukit.quantization.subject import make_subject

SLOW = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("compile_quickly")
CONFIG = get_preset("tiny").replace(vocab_size=32, n_layers=2, max_seq_len=16)
TOKENS = [np.random.default_rng(seed).integers(0, 32, (8, 8)) for seed in range(2)]
VALUES = [np.random.default_rng(seed).normal(size=(16, 32)).astype("f") for seed in range(3)]


def mesh_of(**sizes):
    return create_mesh(mesh_shape=[*sizes.values()], axis_names=[*sizes])


def close(found, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-5)


def test_a_mesh_of_jax_s_own_will_do():
    """Its axes are explicit ones, whose shardings every product would have to state."""
    model = nnx.Linear(32, 32, use_bias=False, rngs=nnx.Rngs(0))
    batch = {"inputs": jnp.asarray(VALUES[0])}
    subject = make_subject(model, None, VALUES[0])
    arguments = (subject.apply, subject.params)
    spread = Spread.of(jax.make_mesh((8,), ("data",)), subject.adapter, subject.params, batch)
    (found,) = collect_statistics(
        *arguments, [batch], find_matrices(*arguments, batch), spread=spread
    ).values()
    close(np.asarray(found.gram), VALUES[0].T @ VALUES[0])


@pytest.fixture(scope="module")
def subject():
    from tpukit.models.adapters import TransformerAdapter

    params = TransformerAdapter(CONFIG).init(jax.random.key(0)).params
    return make_subject(CONFIG, params, TOKENS[0])


@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp": 4, "tensor": 2},
        pytest.param({"data": 8}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_devices_add_up_what_one_device_sees(subject, sizes):
    short = {"inputs": jnp.asarray(TOKENS[0][:3])}  # which no mesh can share: whole on each device
    batches = [*({"inputs": jnp.asarray(one)} for one in TOKENS), short]
    matrices = find_matrices(subject.apply, subject.params, batches[0])
    arguments = (subject.apply, subject.params, batches, matrices)
    alone = collect_statistics(*arguments)
    spread = Spread.of(mesh_of(**sizes), subject.adapter, subject.params, batches[0])
    placed = spread.params(subject.params)
    split = [leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed)]
    assert all(split) == (sizes == {"data": 8})
    assert not spread.batch(batches[0])["inputs"].sharding.is_fully_replicated
    found = collect_statistics(*arguments, spread=spread)
    assert list(found) == list(alone)
    for name, one in found.items():
        close(one.gram, alone[name].gram)
        assert one.rows == alone[name].rows == 8 * 8 * 2 + 3 * 8


class Own(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.second = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


def plain_apply(params, x):
    return jax.nn.relu(x @ params["a"]) @ params["b"]


PLAIN = {
    "a": jax.random.normal(jax.random.key(1), (32, 64)) / 6,
    "b": jax.random.normal(jax.random.key(2), (64, 8)) / 8,
}


@pytest.mark.parametrize("kind", [pytest.param("nnx", marks=SLOW), "equinox", "plain"])
def test_whole_models_lose_the_same(kind):
    model, params = {
        "nnx": lambda: (Own(nnx.Rngs(0)), None),
        "equinox": lambda: (eqx.nn.MLP(32, 8, 64, 1, key=jax.random.key(0)), None),
        "plain": lambda: ((lambda rng: PLAIN, plain_apply), PLAIN),
    }[kind]()

    def quantized(mesh):
        rules = [("", "int4")]
        return quantize_model(
            model, VALUES, params=params, rules=rules, activations="int8", mesh=mesh
        )

    alone, shared = quantized(None), quantized(mesh_of(fsdp=8))
    assert {row.format for row in shared.report.matrices} == {"int4"}
    pairs = zip(alone.report.matrices, shared.report.matrices, strict=True)
    for one, other in pairs:
        assert one.error == pytest.approx(other.error, rel=1e-3)
    kept = [one.report.evaluation.retention.value for one in (alone, shared)]
    assert kept[0] == pytest.approx(kept[1], abs=1e-3)
    close(np.asarray(shared.model(VALUES[0])), np.asarray(alone.model(VALUES[0])))


LAYERS = np.random.default_rng(0).normal(size=(16, 64, 64)).astype("f") / 8


def many_layers(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]


def bytes_by_device(before):
    """Bytes that each device holds of arrays that were not there before."""
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards if id(array) not in before else ():
            held[shard.device] += shard.data.nbytes
    return held


def test_a_model_that_no_device_holds_is_calibrated(monkeypatch):
    """Weights from the host go to their shards; what a device holds at any time is a part."""
    model, data = (lambda rng: None, many_layers), [np.tile(one, (1, 2)) for one in VALUES]
    how = {"params": {"layers": LAYERS}, "sequential": 2, "rules": [("", "int4")]}
    alone = quantize_model(model, data, **how)
    before, most, programs = {id(one) for one in jax.live_arrays()}, [], []

    def look(line):
        most.append(max(bytes_by_device(before).values()))

    def compiled(function):
        keys = []

        def values(params, batch):
            found = function(params, batch)
            keys[:] = list(found)
            return list(found.values())

        def run(params, batch):
            if not keys:
                programs.append(jax.jit(values).lower(params, batch).compile())
            return dict(zip(keys, programs[-1](params, batch), strict=True))

        return run

    monkeypatch.setattr(calibration, "_compiled", compiled)
    shared = quantize_model(model, data, **how, mesh=mesh_of(fsdp=8), progress=look)
    assert len(most) == 2
    assert max(most) < LAYERS.nbytes / 2
    assert len(programs) == 2
    for one in (program.memory_analysis() for program in programs):
        used = one.argument_size_in_bytes + one.output_size_in_bytes + one.temp_size_in_bytes
        assert used < LAYERS.nbytes / 2
    parts = zip(
        alone.model.params["layers"].parts, shared.model.params["layers"].parts, strict=True
    )
    for one, other in parts:
        assert len(other.data.sharding.device_set) == 8
        np.testing.assert_array_equal(one.data, other.data)
        np.testing.assert_allclose(one.scales, other.scales, rtol=1e-5)
    close(np.asarray(shared.model(data[0])), np.asarray(alone.model(data[0])))


@pytest.mark.slow
@pytest.mark.parametrize(("format", "tolerance"), [("int4", 5e-3), ("vq2", 0.1)])
def test_a_transformer_in_shards_is_quantized_as_on_one_device(subject, format, tolerance):
    host = jax.device_get(subject.params)
    how = {"params": host, "format": format, "sequential": 2}
    alone = quantize_model(CONFIG, TOKENS, **how)
    shared = quantize_model(CONFIG, TOKENS, **how, mesh=mesh_of(fsdp=4, tensor=2))
    # What rounds sums another way may cluster vectors another way: neither is better.
    one, other = (
        sum(row.error for row in made.report.matrices if row.error is not None)
        for made in (alone, shared)
    )
    assert one == pytest.approx(other, rel=0.1)
    kept = [one.report.evaluation.retention.value for one in (alone, shared)]
    assert kept[0] == pytest.approx(kept[1], abs=tolerance)
    assert shared.report.generation is not None


def test_what_cannot_be_shared_is_said():
    model = (lambda rng: PLAIN, plain_apply)
    three = create_mesh(mesh_shape=[3], axis_names=["data"], devices=jax.devices()[:3])
    with pytest.raises(
        TPUValidationError, match=r"16 rows, which 3 devices \(data\) do not divide"
    ):
        quantize_model(model, VALUES, params=PLAIN, mesh=three)
    ring = mesh_of(context=8)
    with pytest.raises(MeshError, match="the mesh has the axis 'context'"):
        quantize_model(model, VALUES, params=PLAIN, mesh=ring)
