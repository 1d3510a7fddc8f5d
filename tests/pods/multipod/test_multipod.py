"""Several pods that train one model: exact steps, lost pods, time limits, both kinds of calls."""

import asyncio
import time
from dataclasses import replace
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpukit.errors import (
    CommunicationTimeout,
    ConfigError,
    MeshError,
    PodUnavailable,
    TPUValidationError,
)
from tpukit.pods import (
    AllReduceStrategy,
    MultiPodManager,
    Pod,
    PodConfig,
    PodState,
    PodTopology,
)
from tpukit.pods.multipod.mesh import devices_by_pod, mesh_over

CONFIG = PodConfig(tpu_type="v6e-8")
ZONES = ("us-central1-a", "europe-west4-a", "us-central1-b", "us-east5-a")
PARAMS = {"w": np.arange(12.0, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}


def pods_of(count, **changes):
    configs = [CONFIG.in_zone(zone) for zone in ZONES[:count]]
    settings = {"optimizer": optax.sgd(0.5), **changes}
    return replace(MultiPodManager(), **settings).with_pods(configs)


def gradients_of(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {name: rng.integers(-8, 8, leaf.shape).astype(np.float32) for name, leaf in PARAMS.items()}
        for _ in range(count)
    ]


def stepped(gradients, weights=None):
    """The truth: the weighted mean, and one step of gradient descent."""
    mean = {
        name: np.average([one[name] for one in gradients], axis=0, weights=weights)
        for name in PARAMS
    }
    return {name: PARAMS[name] - 0.5 * mean[name] for name in PARAMS}


def assert_equal(found, truth):
    for name in truth:
        assert np.array_equal(np.asarray(found[name]), truth[name].astype(np.float32))


@pytest.mark.parametrize("topology", PodTopology)
@pytest.mark.parametrize("strategy", ["flat", "ring", "hierarchical"])
def test_every_strategy_takes_the_same_step(strategy, topology):
    pods = pods_of(4, strategy=AllReduceStrategy(strategy), topology=topology).build()
    pods.distribute_model(PARAMS)
    gradients = gradients_of(4)
    result = pods.step_synchronized(gradients).with_timeout(300)
    assert_equal(result.parameters, stepped(gradients))
    assert_equal(pods.parameters, stepped(gradients))
    assert (result.step, len(result.pods), result.dropped) == (1, 4, {})
    shards = result.parameters["w"].addressable_shards
    assert len(shards) == 8
    assert all(np.array_equal(shard.data, shards[0].data) for shard in shards)


def test_gradients_come_in_every_form():
    gradients = gradients_of(2)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)
    # Each device holds what its pod computed: the mean over devices is the mean over pods.
    each = jax.tree.map(lambda leaf: np.repeat(leaf, 4, axis=0), stacked)
    for form in (gradients, stacked, each):
        pods = pods_of(2).build()
        pods.distribute_model(PARAMS)
        assert_equal(pods.step_synchronized(form).result().parameters, stepped(gradients))
    pods = pods_of(2).build()
    pods.distribute_model(PARAMS)
    assert_equal(pods.step_synchronized(gradients[0]).result().parameters, stepped(gradients[:1]))


def test_pods_count_by_their_weights():
    pods = pods_of(2).build()
    pods.distribute_model(PARAMS)
    gradients = gradients_of(2)
    result = pods.step_synchronized(gradients, weights=[3, 1]).result()
    assert_equal(result.parameters, stepped(gradients, weights=[3, 1]))
    with pytest.raises(TPUValidationError, match="3 weights were given for 2 pods"):
        pods.step_synchronized(gradients, weights=[1, 1, 1]).result()


def test_strange_gradients_are_refused():
    pods = pods_of(2).build()
    pods.distribute_model(PARAMS)
    with pytest.raises(TPUValidationError, match="a list of 2 such trees"):
        pods.step_synchronized({"w": np.ones((3, 5)), "b": np.ones(5)}).result()
    with pytest.raises(TPUValidationError, match="a list of 2 such trees"):
        pods.step_synchronized(gradients_of(3)).result()


def test_it_can_be_awaited():
    gradients = gradients_of(2)

    async def main():
        pods = await pods_of(2).build()
        await pods.distribute_model(PARAMS)
        first = await pods.step_synchronized(gradients).with_timeout(timedelta(seconds=300))
        second = await pods.step_synchronized(gradients)
        return first, second

    first, second = asyncio.run(main())
    assert_equal(first.parameters, stepped(gradients))
    assert second.step == 2


def test_a_lost_pod_is_dropped_and_the_rest_go_on():
    lost = {}
    pods = pods_of(3).with_watch(lambda: lost).build()
    pods.distribute_model(PARAMS)
    first = gradients_of(3)
    pods.step_synchronized(first).result()
    before = jax.device_get(pods.parameters)
    lost["pod1-europe-west4-a"] = "preempted"
    second = gradients_of(3, seed=1)
    result = pods.step_synchronized(second).result()
    assert result.dropped == {"pod1-europe-west4-a": "preempted"}
    assert result.pods == ("pod0-us-central1-a", "pod2-us-central1-b")
    assert result.step == 2
    for name in PARAMS:
        mean = (second[0][name] + second[2][name]) / 2
        assert np.array_equal(np.asarray(result.parameters[name]), before[name] - 0.5 * mean)
    # The next step is asked of those that are left.
    assert pods.step_synchronized(gradients_of(2)).result().step == 3


def test_the_last_pod_cannot_be_dropped():
    pods = pods_of(1).with_watch(lambda: {"pod0-us-central1-a": "gone"}).build()
    pods.distribute_model(PARAMS)
    with pytest.raises(PodUnavailable, match="was the last pod"):
        pods.step_synchronized(gradients_of(1)).result()


def slow_optimizer(seconds):
    def wait(updates):
        time.sleep(seconds)
        return updates

    def update(updates, state, params=None):
        held = jax.tree.map(
            lambda leaf: jax.pure_callback(
                wait, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaf
            ),
            updates,
        )
        return held, state

    return optax.GradientTransformation(lambda params: (), update)


def test_a_step_that_takes_too_long_is_given_up():
    pods = pods_of(1, optimizer=slow_optimizer(0.5)).build()
    pods.distribute_model({"b": np.ones(5, np.float32)})
    began = time.monotonic()
    with pytest.raises(CommunicationTimeout, match=r"not completed within 0\.2 s"):
        pods.step_synchronized([{"b": np.ones(5, np.float32)}]).with_timeout(0.2)
    assert pods.step == 0
    assert np.array_equal(np.asarray(pods.parameters["b"]), np.ones(5))
    assert time.monotonic() - began < 30


def test_a_pod_found_lost_after_the_time_was_up_is_dropped():
    answers = iter([{}, {"pod1-europe-west4-a": "stuck"}])
    pods = pods_of(2).with_watch(lambda: next(answers, {})).build()
    pods.distribute_model(PARAMS)

    def waits_for_the_lost(*arguments):
        raise CommunicationTimeout("a collective waited too long")

    pods._stepper.step = waits_for_the_lost
    gradients = gradients_of(2)
    result = pods.step_synchronized(gradients).result()
    assert result.dropped == {"pod1-europe-west4-a": "stuck"}
    assert_equal(result.parameters, stepped(gradients[:1]))


def test_the_last_common_step_survives_a_new_start_with_fewer_pods(tmp_path):
    pods = pods_of(4).with_checkpoints(tmp_path / "common").build()
    pods.distribute_model(PARAMS)
    for seed in range(3):
        pods.step_synchronized(gradients_of(4, seed=seed)).result()
    pods.close()
    again = pods_of(2).with_checkpoints(tmp_path / "common").build()
    again.distribute_model(jax.tree.map(np.zeros_like, PARAMS))
    again.close()
    assert again.step == 3
    assert_equal(again.parameters, jax.device_get(pods.parameters))


class Keeper:
    """Gives pods and knows how they are."""

    def __init__(self, capacity=9):
        self.capacity, self.pods, self.released = capacity, {}, []

    def allocate_pod(self, config):
        if len(self.pods) >= self.capacity:
            raise PodUnavailable("no more")
        pod = Pod(
            name=f"job-a{len(self.pods)}",
            provider="local",
            slice=config.slice,
            zone=config.zones[0],
            state=PodState.READY,
        )
        self.pods[pod.name] = pod
        return pod

    def release(self, pod):
        self.released.append(pod.name)

    def list(self):
        return list(self.pods.values())


def test_a_manager_gives_the_pods_and_says_which_are_lost():
    keeper = Keeper()
    pods = pods_of(3).with_manager(keeper).build()
    pods.distribute_model(PARAMS)
    keeper.pods["job-a0"] = keeper.pods["job-a0"].in_state(PodState.SUSPENDED, "preempted")
    del keeper.pods["job-a2"]
    result = pods.step_synchronized(gradients_of(3)).result()
    assert result.dropped == {"job-a0": "preempted", "job-a2": "it no longer exists"}
    assert result.pods == ("job-a1",)


def test_pods_that_were_given_are_given_back_when_one_is_not():
    keeper = Keeper(capacity=2)
    with pytest.raises(PodUnavailable, match="no more"):
        pods_of(3).with_manager(keeper).build()
    assert keeper.released == ["job-a0", "job-a1"]


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="No pods are set"):
        MultiPodManager().build()
    with pytest.raises(ConfigError, match="need the same slice"):
        MultiPodManager().with_pods([CONFIG, PodConfig(tpu_type="v6e-16")]).build()
    with pytest.raises(ConfigError, match="no stage between pods"):
        pods_of(2).with_allreduce_strategy("flat").with_compression().build()
    with pytest.raises(TPUValidationError, match="call distribute_model"):
        pods_of(2).build().step_synchronized(PARAMS).result()
    with pytest.raises(MeshError, match="9 pods cannot be made of 8 devices"):
        devices_by_pod(9)
    with pytest.raises(ConfigError, match=r"no all reduce strategy 'flatt'.*'flat'"):
        MultiPodManager().with_allreduce_strategy("flatt")


def test_pods_are_made_of_this_processs_devices():
    groups = devices_by_pod(3)
    assert [len(group) for group in groups] == [2, 2, 2]
    mesh = mesh_over(groups)
    assert dict(mesh.shape) == {"dcn": 3, "ici": 2}


def test_rounded_gradients_with_feedback_reach_the_same_minimum():
    """Least squares over four pods, against float64 without any rounding."""
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(4, 64, 48))
    targets = inputs @ rng.normal(size=48) + 0.1 * rng.normal(size=(4, 64))
    best = np.linalg.lstsq(inputs.reshape(-1, 48), targets.reshape(-1), rcond=None)[0]

    def final(**changes):
        pods = pods_of(4, **changes).with_optimizer(optax.sgd(0.2)).build()
        pods.distribute_model({"w": np.zeros(48, np.float32)})
        for _ in range(200):
            w = np.asarray(pods.parameters["w"], np.float64)
            gradients = [
                {"w": (x.T @ (x @ w - y) / len(y)).astype(np.float32)}
                for x, y in zip(inputs, targets, strict=True)
            ]
            pods.step_synchronized(gradients).result()
        return np.abs(np.asarray(pods.parameters["w"]) - best).max()

    assert final() < 1e-5
    assert final(compress=True) < 1e-4


def test_local_steps_are_those_of_the_paper():
    """Against the algorithm written out in float64."""
    rng = np.random.default_rng(4)
    goals = rng.normal(size=(4, 6))
    pods = pods_of(4).with_optimizer(optax.sgd(0.1)).with_local_steps(3).build()
    pods.distribute_model({"w": np.zeros(6, np.float32)})
    common, velocity = np.zeros(6), np.zeros(6)
    own = np.tile(common, (4, 1))
    for step in range(1, 10):
        local = np.asarray(pods.own_parameters["w"], np.float64)
        assert local == pytest.approx(own, abs=1e-5)
        gradients = [{"w": (local[pod] - goals[pod]).astype(np.float32)} for pod in range(4)]
        pods.step_synchronized(gradients).result()
        own = own - 0.1 * (own - goals)
        if step % 3 == 0:
            moved = (common - own).mean(0)
            velocity = 0.9 * velocity + moved
            common = common - 0.7 * (moved + 0.9 * velocity)
            own = np.tile(common, (4, 1))
        assert np.asarray(pods.parameters["w"]) == pytest.approx(common, abs=1e-5)


def test_pods_that_meet_at_every_step_and_take_the_mean_are_synchronous():
    together = pods_of(4).build()
    meeting = pods_of(4).with_local_steps(1, outer=optax.sgd(1.0)).build()
    for pods in (together, meeting):
        pods.distribute_model(PARAMS)
        for seed in range(3):
            pods.step_synchronized(gradients_of(4, seed=seed)).result()
    for name in PARAMS:
        found, truth = (np.asarray(pods.parameters[name]) for pods in (meeting, together))
        assert found == pytest.approx(truth, abs=1e-6)


def test_a_lost_pod_sends_local_steps_back_to_the_last_meeting():
    lost = {}
    pods = pods_of(2).with_local_steps(2).with_watch(lambda: lost).build()
    pods.distribute_model(PARAMS)
    for seed in range(3):
        pods.step_synchronized(gradients_of(2, seed=seed)).result()
    met = jax.device_get(pods.parameters)
    lost["pod1-europe-west4-a"] = "preempted"
    gradient = gradients_of(2, seed=9)
    pods.step_synchronized(gradient).result()
    for name in PARAMS:
        own = np.asarray(pods.own_parameters[name])
        assert own.shape == (1, *PARAMS[name].shape)
        assert np.allclose(own[0], met[name] - 0.5 * gradient[0][name])


def test_a_step_prints_what_it_sent():
    pods = pods_of(2).build()
    pods.distribute_model({"w": jnp.zeros((1024, 256))})
    result = pods.step_synchronized({"w": np.ones((1024, 256), np.float32)}).result()
    assert result.sent.value == 1024 * 256 * 4
    assert "1 MiB sent by each pod (model)" in result.__rich__()
    compressed = pods_of(2).with_compression().build()
    compressed.distribute_model({"w": jnp.zeros((1024, 256))})
    small = compressed.step_synchronized({"w": np.ones((1024, 256), np.float32)}).result()
    assert small.sent.value < 0.26 * result.sent.value
    assert compressed.to_dict()["compress"] is True
