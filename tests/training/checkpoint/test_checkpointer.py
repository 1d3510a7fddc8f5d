"""What is saved comes back bit for bit, wherever it shall go, and nothing good is overwritten."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import TPUCheckpointError
from tpukit.training.checkpoint import TPUCheckpointer


def mesh(*shape, names=("fsdp", "tensor")):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names[: len(shape)])


def place(tree, on, spec):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(on, spec)), tree)


def weights(seed=0, *, width=16):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "embed": jax.random.normal(keys[0], (32, width)),
        "layers": [
            {"w": jax.random.normal(keys[1], (width, width), jnp.bfloat16)},
            {"w": jax.random.normal(keys[2], (width, width))},
        ],
    }


def abstract(tree, on, spec):
    sharding = NamedSharding(on, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def checkpointer(tmp_path):
    with TPUCheckpointer(tmp_path / "checkpoints", max_to_keep=3) as open_one:
        yield open_one


def test_as_in_the_requirements(tmp_path):
    params = weights()
    opt_state = optax.adamw(1e-3).init(params)
    checkpointer = TPUCheckpointer(
        checkpoint_dir=str(tmp_path), max_to_keep=3, async_checkpointing=True
    )
    checkpointer.save(step=1000, params=params, opt_state=opt_state)
    restored = checkpointer.restore(step=1000)
    assert restored.step == 1000
    assert_same(restored.params, params)
    assert restored.opt_state[0]["mu"]["embed"].shape == (32, 16)
    checkpointer.close()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((4, 2), P("fsdp", "tensor")), ((2,), P("fsdp")), ((1,), P()), ((2, 4), P(None, "tensor"))],
)
def test_a_state_of_eight_devices_goes_onto_any_mesh(checkpointer, shape, spec):
    params = place(weights(), mesh(8), P("fsdp"))
    opt_state = optax.adamw(1e-3).init(params)
    checkpointer.save(7, params=params, opt_state=opt_state)
    target = mesh(*shape)
    like = {"params": abstract(params, target, spec), "opt_state": opt_state}
    restored = checkpointer.restore(like=like)
    assert_same(restored.params, params)
    assert_same(restored.opt_state, opt_state)
    assert restored["params"]["embed"].sharding == NamedSharding(target, spec)


def test_arrays_may_be_donated_as_soon_as_save_returns(checkpointer):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)
    params = place({"w": jnp.arange(1 << 20, dtype=jnp.float32)}, mesh(8), P("fsdp"))
    checkpointer.save(1, params=params)
    for _ in range(4):
        params = step(params)
    jax.block_until_ready(params)
    restored = checkpointer.restore()
    np.testing.assert_array_equal(restored.params["w"], np.arange(1 << 20, dtype=np.float32))


def test_host_arrays_may_be_overwritten_as_soon_as_save_returns(checkpointer):
    counts = np.arange(1 << 18)
    checkpointer.save(1, counts=counts)
    counts[:] = -1
    np.testing.assert_array_equal(checkpointer.restore().counts, np.arange(1 << 18))


def test_random_keys_numbers_and_empty_trees_come_back_as_they_were(checkpointer):
    key = jax.random.key(5)
    saved = {
        "rng": {"dropout": key, "many": jax.random.split(jax.random.key(1, impl="rbg"), (2, 3))},
        "schedule": {"scale": 0.1, "count": 3, "on": True},
        "model_state": {},
        "none": {"nothing": np.zeros((0, 4), np.int8)},
    }
    checkpointer.save(2, **saved)
    for restored in (checkpointer.restore(), checkpointer.restore(like=saved)):
        assert restored.schedule == {"scale": 0.1, "count": 3, "on": True}
        assert restored.model_state == {}
        assert restored.none["nothing"].shape == (0, 4)
        assert restored.rng["many"].shape == (2, 3)
        draws = [jax.random.normal(k, (4,)) for k in (restored.rng["dropout"], key)]
        np.testing.assert_array_equal(*draws)
        assert jax.random.key_impl(restored.rng["many"]) == "rbg"


def test_a_flax_module_is_restored_into_a_module(checkpointer):
    model, other = (nnx.Linear(4, 8, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    checkpointer.save(1, params=model)
    restored = checkpointer.restore(like={"params": other}).params
    x = jnp.ones((2, 4))
    np.testing.assert_array_equal(restored(x), model(x))
    assert not np.array_equal(other(x), model(x))


def test_only_the_items_asked_for_are_read(checkpointer):
    params = weights()
    checkpointer.save(1, params=params, opt_state=weights(1), metadata={"model": "tiny"})
    restored = checkpointer.restore(like={"params": params})
    assert list(restored.items) == ["params"]
    with pytest.raises(AttributeError, match="no 'opt_state'; it has params"):
        _ = restored.opt_state
    assert restored.metadata == {"model": "tiny"}
    assert list(checkpointer.restore(like={}).items) == []


def test_data_position_and_metadata_are_those_of_the_moment(checkpointer):
    data = {"index": 17, "inner": {"epoch": 2}}
    checkpointer.save(1, params=weights(), data=data, metadata={"loss": 2.5})
    data["index"] = 99
    restored = checkpointer.restore()
    assert restored.data == {"index": 17, "inner": {"epoch": 2}}
    assert restored.metadata == {"loss": 2.5}
    assert json.loads(json.dumps(restored.to_dict()))["step"] == 1


def test_the_newest_are_kept(checkpointer):
    for step in (10, 20, 30, 40, 50):
        checkpointer.save(step, params={"w": jnp.full(3, step)})
    checkpointer.wait()
    assert checkpointer.steps() == [30, 40, 50]
    assert checkpointer.latest_step() == 50
    assert checkpointer.restore(40).params["w"].tolist() == [40, 40, 40]
    assert checkpointer.restore().step == 50
    assert checkpointer.blocked_s > 0


def test_a_synchronous_save_is_complete_when_it_returns(tmp_path):
    with TPUCheckpointer(tmp_path, max_to_keep=None, async_checkpointing=False) as checkpointer:
        for step in range(3):
            checkpointer.save(step, params=weights())
            assert TPUCheckpointer(tmp_path).latest_step() == step
        assert checkpointer.steps() == [0, 1, 2]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            weights(width=8),
            r"params/embed is \(32, 16\) float32 in the checkpoint and \(32, 8\) float32 here",
        ),
        (
            {"embed": weights()["embed"]},
            r"params/layers/0/w \(16, 16\) bfloat16 is only in",
        ),
        (
            {**weights(), "head": jnp.ones(3)},
            r"params/head \(3,\) float32 is missing",
        ),
        (
            jax.tree.map(lambda x: x.astype(jnp.float16), weights()),
            "bfloat16 in the checkpoint and .* float16 here",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(checkpointer, other, message):
    params = weights()
    checkpointer.save(1, params=params)
    with pytest.raises(TPUCheckpointError, match=f"of another model: .*{message}"):
        checkpointer.restore(like={"params": other})
    with pytest.raises(TPUCheckpointError, match="it has no 'state', only params"):
        checkpointer.restore(like={"state": params})
    assert_same(checkpointer.restore().params, params)


def test_a_folder_of_another_run_is_not_written_to(tmp_path):
    with TPUCheckpointer(tmp_path) as first:
        first.save(5, params=weights())
    with TPUCheckpointer(tmp_path) as second:
        with pytest.raises(TPUCheckpointError, match="another run, up to step 5; restore"):
            second.save(6, params=weights(1))
        second.restore()
        second.save(6, params=weights(1))
        second.wait()
        assert second.steps() == [5, 6]


def test_what_others_wrote_is_left_alone(tmp_path):
    theirs = tmp_path / "12" / "weights.bin"
    theirs.parent.mkdir()
    theirs.write_text("precious")
    with (
        TPUCheckpointer(tmp_path) as checkpointer,
        pytest.raises(TPUCheckpointError, match=r"did not write \(12\)"),
    ):
        checkpointer.save(20, params=weights())
    assert theirs.read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["12"]


def test_two_runs_do_not_write_to_one_folder_at_once(tmp_path):
    with TPUCheckpointer(tmp_path) as first, TPUCheckpointer(tmp_path) as second:
        first.save(1, params=weights())
        with pytest.raises(TPUCheckpointError, match=r"is being written by process \d+ of .* ago"):
            second.save(1, params=weights())
        first.close()
        second.restore()
        second.save(2, params=weights())


def test_a_good_step_is_not_overwritten_until_it_is_discarded(checkpointer):
    for step in (1, 2, 3):
        checkpointer.save(step, params={"w": jnp.full(2, step)})
    with pytest.raises(TPUCheckpointError, match=r"already saved .* discard_newer\(1\)"):
        checkpointer.save(2, params={"w": jnp.zeros(2)})
    checkpointer.restore(1)
    checkpointer.discard_newer(1)
    assert checkpointer.steps() == [1]
    checkpointer.save(2, params={"w": jnp.zeros(2)})
    assert checkpointer.restore().params["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.restore(), "no checkpoint in "),
        (lambda c: c.restore(3), "Step 3 .* it does not exist"),
        (lambda c: c.save(-1), "step is -1"),
        (lambda c: c.save(1, params={"name": "x"}), "contains a str at 'name'.*metadata="),
        (lambda c: c.save(1, params={"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}), "both called"),
        (lambda c: c.save(1, params=jnp.ones(2, jnp.uint4)), "uint4 .* wider type"),
        (lambda c: c.save(1, data={"x": jnp.ones(2)}), "data= must be plain data"),
    ],
)
def test_what_cannot_be_done_says_why(checkpointer, call, message):
    with pytest.raises(TPUCheckpointError, match=message):
        call(checkpointer)
    assert checkpointer.steps() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("s3://bucket/run",), "s3://bucket/run.*gs://"),
        (("x", 0), "max_to_keep is 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(TPUCheckpointError, match=message):
        TPUCheckpointer(*arguments)


def test_positions_of_another_number_of_processes(tmp_path):
    with TPUCheckpointer(tmp_path, async_checkpointing=False) as checkpointer:
        checkpointer.save(1, w=jnp.ones(2), data={"index": 4})
        restored = checkpointer.restore()
    assert replace(restored, positions=({"index": 4},) * 3).data == {"index": 4}
    with pytest.raises(TPUCheckpointError, match=r"saved by 2 processes.*this job has 1"):
        _ = replace(restored, positions=({"index": 4}, {"index": 5})).data


def test_a_single_array_is_an_item_too(checkpointer):
    checkpointer.save(1, params=jnp.arange(4))
    like = {"params": jax.ShapeDtypeStruct((4,), jnp.int32)}
    assert isinstance(checkpointer.restore(like=like).params, np.ndarray)
    on = SingleDeviceSharding(jax.devices()[3])
    like = {"params": jax.ShapeDtypeStruct((4,), jnp.int32, sharding=on)}
    assert checkpointer.restore(like=like).params.devices() == {jax.devices()[3]}


def test_an_item_is_read_one_array_at_a_time(tmp_path):
    params = weights()
    with TPUCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(step=3, params=params, opt_state={"m": jnp.ones(4)})
        checkpointer.wait()
        found = checkpointer.open()
        assert found.step == 3
        assert (list(found.arrays), len(found.arrays["layers"])) == (["embed", "layers"], 2)
        np.testing.assert_array_equal(found.arrays["embed"], params["embed"])
        second = found.arrays["layers"]["1"]["w"]
        np.testing.assert_array_equal(second, params["layers"][1]["w"])
        np.testing.assert_array_equal(checkpointer.open(3, item="opt_state").arrays["m"], 1)
        with pytest.raises(TPUCheckpointError, match="it has no 'ema', only opt_state, params"):
            checkpointer.open(item="ema")
        with pytest.raises(TPUCheckpointError, match=r"Step 7 in .* cannot be restored"):
            checkpointer.open(7)


def test_a_restore_may_read_less_at_once_than_its_largest_array(tmp_path):
    params = weights()
    with TPUCheckpointer(tmp_path, read_at_once_bytes=1) as checkpointer:
        checkpointer.save(step=1, params=params)
        checkpointer.wait()
        found = checkpointer.restore(like={"params": params})
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
