"""An optimizer on a pod of this machine: exact steps, other sizes, errors with a way out."""

import asyncio
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpukit.errors import (
    CommunicationTimeout,
    ConfigError,
    OutOfMemory,
    PodUnavailable,
    TPUValidationError,
    XLARuntimeError,
)
from tpukit.hardware import Slice
from tpukit.hardware.missing import Missing
from tpukit.pods import AutoScaler, Pod, PodConfig, PodState, TpuOptimizer, WorkloadMetrics
from tpukit.pods.failures import pod_errors, within

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(64, 32)).astype(np.float32)
TARGETS = RNG.normal(size=(64, 256)).astype(np.float32)


def pod(on="v6e-8", state=PodState.READY, provider="local"):
    return Pod(name="job-a1", provider=provider, slice=Slice.parse(on), zone="here", state=state)


def squares(params, batch):
    inputs, targets = batch
    return ((jnp.tanh(inputs @ params) - targets) ** 2).mean()


def optimizer(on="v6e-8", **changes):
    made = TpuOptimizer(pod(on)).with_optimizer(optax.adam(1e-2)).with_loss(squares)
    return made._with(**changes).build() if changes else made.build()


def reference(steps, *, size=64):
    """The same on one device, without any of ours: plain optax."""
    params = jnp.zeros((32, 256))
    adam = optax.adam(1e-2)
    state, losses = adam.init(params), []
    for _ in range(steps):
        loss, gradients = jax.value_and_grad(squares)(params, (INPUTS[:size], TARGETS[:size]))
        updates, state = adam.update(gradients, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return np.asarray(params), losses


def test_steps_are_those_of_optax_on_one_device():
    ours = optimizer()
    params = ours.create_distributed_tensor([32, 256])
    data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
    losses = [ours.step_distributed(params, data).loss for _ in range(5)]
    truth, expected = reference(5)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert np.asarray(params) == pytest.approx(truth, abs=5e-5)
    assert {shard.data.shape for shard in params.value.addressable_shards} == {(32, 32)}
    assert params.sharding.num_devices == 8


def test_gradients_of_elsewhere_are_averaged():
    ours = TpuOptimizer(pod()).with_optimizer(optax.sgd(1.0)).build()
    params = {"w": ours.create_distributed_tensor([64, 8]), "b": jnp.zeros(3)}
    each = [{"w": np.full((64, 8), n, np.float32), "b": np.full(3, n)} for n in (1.0, 3.0)]
    metrics = ours.step_distributed(params, ours.load_gradients_from_dataset(each))
    assert (np.asarray(params["w"]) == -2).all()
    assert (np.asarray(metrics.params["b"]) == -2).all()
    assert metrics.loss == Missing("gradients were given, so no loss was computed")
    assert metrics.gradient_norm == pytest.approx(2 * np.sqrt(64 * 8 + 3))
    with pytest.raises(TPUValidationError, match=r"with_loss\(lambda"):
        ours.step_distributed(params, [np.ones(4)])


def test_all_calls_can_be_awaited():
    async def main():
        ours = optimizer()
        params = ours.create_distributed_tensor([32, 256])
        data = await ours.load_gradients_from_dataset((INPUTS, TARGETS))
        first = await ours.step_distributed(params, data)
        smaller = await ours.reduce_batch_size()
        await ours.enable_gradient_checkpointing()
        second = await ours.step_distributed(params, data)
        return first, smaller, second

    first, smaller, second = asyncio.run(main())
    assert (first.examples, smaller, second.examples) == (64, 32, 32)
    assert second.step == 2


def test_operation_by_operation_gives_the_same():
    losses = []
    for enabled in (True, False):
        ours = TpuOptimizer(pod()).with_loss(squares).with_xla_optimization(enabled).build()
        params = ours.create_distributed_tensor([32, 256])
        data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
        losses.append([ours.step_distributed(params, data).loss for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_another_size_leaves_the_losses_unbroken():
    ours = optimizer()
    params = ours.create_distributed_tensor([32, 256])
    data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
    losses = []
    for on in ("v6e-8", "v6e-4", "v6e-1", "v6e-8"):
        ours.scale_to_config(PodConfig(tpu_type=on))
        losses += [ours.step_distributed(params, data).loss for _ in range(2)]
        assert ours.mesh.size == params.sharding.num_devices == Slice.parse(on).devices
    assert losses == pytest.approx(reference(8)[1], rel=1e-5)


def test_a_pod_elsewhere_is_not_pretended():
    with pytest.raises(PodUnavailable, match="does not run on the pod"):
        TpuOptimizer(pod("v6e-16", provider="gcp")).build()
    assert TpuOptimizer(pod("v6e-16")).build().mesh.size == 8  # local: what is here stands for it
    with pytest.raises(PodUnavailable, match="is suspended"):
        TpuOptimizer(pod(state=PodState.SUSPENDED)).build()
    with pytest.raises(ConfigError, match=r"call build\(\)"):
        TpuOptimizer(pod()).create_distributed_tensor([8])


def test_smaller_batches_go_through_all_examples():
    ours = optimizer()
    params = ours.create_distributed_tensor([32, 256])
    data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
    ours.step_distributed(params, data)
    assert ours.reduce_batch_size(4) == 16
    seen = [np.asarray(data.take(16)[0]) for _ in range(4)]
    assert np.array_equal(np.concatenate(seen), INPUTS)
    ours.batch_size = 1
    with pytest.raises(ConfigError, match="cannot be divided by 2"):
        ours.reduce_batch_size()


def test_an_iterable_of_batches_ends():
    ours = optimizer()
    params = ours.create_distributed_tensor([32, 256])
    batches = [(INPUTS[at : at + 32], TARGETS[at : at + 32]) for at in (0, 32)]
    assert ours.load_gradients_from_dataset(batches).examples == 32  # a list is one of batches
    data = ours.load_gradients_from_dataset(batch for batch in batches)
    first, second = (ours.step_distributed(params, data) for _ in range(2))
    assert (first.examples, second.examples) == (32, 32)
    with pytest.raises(TPUValidationError, match="used up"):
        ours.step_distributed(params, data)


def test_checkpointing_changes_the_program_and_not_the_numbers():
    losses, programs = [], []
    for checkpointing in (False, True):
        ours = optimizer()
        params = ours.create_distributed_tensor([32, 256])
        data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
        if checkpointing:
            ours.enable_gradient_checkpointing()
        losses.append([ours.step_distributed(params, data).loss for _ in range(3)])
        (program,) = ours._runner._compiled
        arguments = program.arguments(params.value, (INPUTS, TARGETS), ours.mesh)
        programs.append(str(jax.make_jaxpr(program)(*arguments)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "remat" in programs[1]
    assert "remat" not in programs[0]
    with pytest.raises(ConfigError, match="no backward pass"):
        TpuOptimizer(pod()).build().enable_gradient_checkpointing()


def test_a_lost_pod_is_said_before_the_step():
    lost = {}
    ours = TpuOptimizer(pod()).with_loss(squares).with_watch(lambda: lost).build()
    params = ours.create_distributed_tensor([32, 256])
    data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
    ours.step_distributed(params, data)
    lost["job-a1"] = "preempted"
    with pytest.raises(PodUnavailable, match="request_alternate_pod"):
        ours.step_distributed(params, data)
    assert ours.step == 1


def test_a_step_that_hangs_is_given_up_and_changes_nothing():
    def stuck(params, batch):
        def wait(x):
            time.sleep(1.0)
            return x

        held = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
        return (params**2).sum() + jax.lax.stop_gradient(held)

    ours = TpuOptimizer(pod("v6e-1")).with_loss(stuck).with_timeout(0.3).build()
    params = ours.create_distributed_tensor([4], init=jax.nn.initializers.ones)
    with pytest.raises(CommunicationTimeout, match=r"reduce_batch_size\(\)"):
        ours.step_distributed(params, ours.load_gradients_from_dataset(np.ones((2, 2))))
    assert ours.step == 0
    assert (np.asarray(params) == 1).all()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes", OutOfMemory),
        ("UNKNOWN: Gloo AllGather failed: Connection closed by peer", PodUnavailable),
        ("DEADLINE_EXCEEDED: Barrier timed out", CommunicationTimeout),
        ("UNAVAILABLE: Socket closed", PodUnavailable),
        ("INTERNAL: something else", XLARuntimeError),
    ],
)
def test_what_the_runtime_says_becomes_an_error_with_a_way_out(text, kind):
    with pytest.raises(kind), pod_errors("a step"):
        raise jax.errors.JaxRuntimeError(text)


def test_errors_come_out_of_the_thread_they_happened_in():
    with pytest.raises(ZeroDivisionError):
        within(lambda: 1 // 0, 5, what="a division")
    assert within(lambda: 7, None, what="seven") == 7


def test_a_real_lack_of_memory_is_out_of_memory():
    def too_large(params, batch):
        # 4 EiB, more than any address space has; sorted, so that it is made.
        held = jnp.sin(params[0] + jax.lax.broadcasted_iota(jnp.float32, (2**30, 2**30), 1))
        return jax.lax.stop_gradient(jnp.sort(held, axis=1)).sum() + params.sum()

    ours = TpuOptimizer(pod("v6e-1")).with_loss(too_large).build()
    params = ours.create_distributed_tensor([4])
    with pytest.raises(OutOfMemory, match="does not fit"):
        ours.step_distributed(params, ours.load_gradients_from_dataset(np.ones((2, 2))))


def test_other_parameters_are_refused():
    ours = optimizer()
    data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
    ours.step_distributed(ours.create_distributed_tensor([32, 256]), data)
    with pytest.raises(TPUValidationError, match="another TpuOptimizer"):
        ours.step_distributed({"w": ours.create_distributed_tensor([32, 256])}, data)


def test_it_measures_itself_for_the_scaler():
    ours = optimizer()
    params = ours.create_distributed_tensor([32, 256])
    data = ours.load_gradients_from_dataset((INPUTS, TARGETS))
    with pytest.raises(TPUValidationError, match="take some steps first"):
        ours.workload_metrics()
    for _ in range(4):
        ours.step_distributed(params, data)
    metrics = WorkloadMetrics.from_current_training(ours)
    assert metrics.step_s.origin == "measured"
    assert 0 < metrics.utilization.value <= 1
    scaler = AutoScaler(max_cores=8, minimum_lifetime_s=0.0, resize_s=0.0, least_goodput=0.0)
    decision = scaler.build().evaluate_scaling(metrics)
    assert decision.reason
    if decision:
        assert ours.scale_to_config(decision) == decision.config
    else:
        with pytest.raises(ConfigError, match="change nothing"):
            ours.scale_to_config(decision)


def test_hosts_are_timed_by_themselves():
    found = optimizer().find_stragglers()
    assert len(found.step_s) == 8
    assert all(seconds > 0 for seconds in found.step_s.values())
    assert "mean step (measured)" in found.__rich__()
