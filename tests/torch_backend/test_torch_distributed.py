"""Collectives between real processes on loopback and between the devices of one."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch
from free_ports import free_port
from jax.sharding import NamedSharding
from torch import nn
from torch_worker import LEARNING_RATE, WIDE, model_and_batches, numbers

from tpukit.errors import TPUDistributedError, TPUValidationError
from tpukit.job.compiler_flags import flags_of
from tpukit.parallel import create_mesh
from tpukit.torch import (
    KernelPyTorchConfig,
    XLADeviceManager,
    XLADistributedTraining,
    create_xla_integration,
)

pytestmark = pytest.mark.xdist_group("test_torch_distributed")  # they share what is made once

WORKER = Path(__file__).parents[1] / "support" / "torch_worker.py"
RANKS = (0, 1)


@pytest.fixture(scope="module")
def answers():
    """What each of two processes answered in every scene."""
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(len(RANKS)), str(rank), address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in RANKS
    ]
    answers = []
    try:
        for process in started:
            output, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
            answers.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return answers


@pytest.fixture
def alone():
    return XLADistributedTraining(XLADeviceManager())


def test_collectives_of_two_processes(answers):
    first, second = (one["collectives"] for one in answers)
    assert first == second
    assert first["sum"] == [4.5, -6.0, 9.0]
    assert first["mean"] == [2.25, -3.0, 4.5]
    assert first["max"] == [3.0, -2.0, 6.0]
    assert first["min"] == [1.5, -4.0, 3.0]
    assert first["bfloat16"] == ["torch.bfloat16", [2.0, 2.0]]
    assert first["int64"] == ["torch.int64", [[2**41 + 1]]]
    assert first["float64"] == ["torch.float64", [1 + 1e-12]]
    assert first["bool"] == [[True, True, False], [True, False, False]]
    strange = torch.tensor([[float("nan"), -0.0]], dtype=torch.bfloat16)
    rows = torch.stack([strange * (rank + 1) for rank in RANKS])
    assert first["gathered"] == [[2, 1, 2], rows.view(torch.int16).tolist()]
    assert first["broadcast"] == [1, 2**40 + 1]
    assert first["devices"] == [0.0 + 1.0 + 10.0 + 11.0]


def test_processes_that_disagree_or_stay_away_get_errors(answers):
    first, second = (one["refusals"] for one in answers)
    shapes, calls = first["found"][:2]
    assert second["found"] == [shapes, calls]
    assert shapes[0] == "TPUDistributedError"
    assert "rank 0 all_reduce(sum) of float32[2], rank 1 all_reduce(sum) of float32[3]" in shapes[1]
    assert "rank 0 all_gather of float32[2], rank 1 barrier" in calls[1]
    assert first["after"] == second["after"] == [2.0]
    (away,) = first["found"][2:]
    assert away[0] == "CommunicationTimeout"
    assert "barrier: rank 1 did not call it within 1 s" in away[1]


def test_gradients_are_those_of_the_joined_batch(answers):
    first, second = (one["gradients"] for one in answers)
    assert first == second
    model, batches = model_and_batches()
    nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    joined = torch.cat([one.grad.reshape(-1) for one in model.parameters()])
    assert first["names"] == [*model.state_dict()]
    for way in ("whole", "synchronised", "local", "split"):
        torch.testing.assert_close(torch.tensor(first[way]), joined, atol=1e-6, rtol=1e-5)
    assert "devices of other processes" in first["refused"]
    assert first["unused"] == [0.5, 0.5, None]


def test_example_3_trains_as_one_process_does_on_the_joined_batch(answers):
    first, second = (one["example_3"] for one in answers)
    assert first["branch"] == second["branch"] == "distributed"
    assert first["parameters"] == second["parameters"]
    model, batches = model_and_batches()
    before = numbers(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for data, target in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()
    found, expected = torch.tensor(first["parameters"]), torch.tensor(numbers(model))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (expected - torch.tensor(before)).abs().max() > 0.1


def test_fused_steps_of_two_processes_are_those_of_one(answers):
    first, second = (one["fused"] for one in answers)
    assert first == second
    assert any("fsdp" in spec for spec in first["split"]), "four devices of two processes share it"
    model, batches = model_and_batches(WIDE)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for data, target in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert first["losses"] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(torch.tensor(first["bias"]), model[2].bias, atol=1e-5, rtol=0)
    moment = optimizer.state[model[0].weight]["exp_avg"].reshape(-1)
    torch.testing.assert_close(torch.tensor(first["moment"]), moment, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 28.0), ("mean", 3.5), ("max", 7.0), ("min", 0.0)]
)
def test_devices_of_one_process_reduce_a_list(alone, op, expected):
    pieces = [torch.full((2, 3), float(number)) for number in range(len(jax.local_devices()))]
    reduced = alone.all_reduce(pieces, op=op)
    assert torch.equal(reduced, torch.full((2, 3), expected))
    assert torch.equal(alone.all_gather(pieces), torch.stack(pieces))


def test_one_process_gives_tensors_back(alone):
    tensor = torch.randn(3, requires_grad=True)
    for found in (alone.all_reduce(tensor, op="mean"), alone.broadcast(tensor)):
        assert torch.equal(found, tensor.detach())
        assert not found.requires_grad
        assert found.data_ptr() != tensor.data_ptr()
    assert torch.equal(alone.all_gather(tensor), tensor.detach()[None])
    alone.barrier()
    model = nn.Linear(2, 2)
    assert alone.wrap_model(model) is model


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda d: d.all_reduce(torch.ones(2), op="avg"), "sum, mean, max, min"),
        (lambda d: d.all_reduce(torch.ones(2, dtype=torch.bool)), "use 'max' for any"),
        (lambda d: d.all_reduce(torch.ones(2).int(), op="mean"), "pass tensor.float"),
        (
            lambda d: d.all_reduce(torch.ones(2) * 1j, op="max"),
            "not defined for complex64",
        ),
        (lambda d: d.all_reduce([torch.ones(2)] * 3), "3 tensors were given for 8 local devices"),
        (
            lambda d: d.all_reduce([*[torch.ones(2)] * 7, torch.ones(3)]),
            "one shape and dtype",
        ),
        (lambda d: d.all_reduce([]), "a collective expects a tensor"),
        (lambda d: d.all_gather(3.0), "got float"),
        (lambda d: d.all_reduce(torch.ones(2, device="meta")), "meta device"),
        (lambda d: d.broadcast([torch.ones(2)] * 8), "expects a tensor, got list"),
        (lambda d: d.broadcast(torch.ones(2), source=1), "expected 0 to 0"),
        (lambda d: d.wrap_model(lambda x: x), "expects an nn.Module, got function"),
        (lambda d: d.wrap_model(nn.Linear(2, 2), strategy="fsdp"), "none was given; pass mesh="),
        (lambda d: XLADistributedTraining(d.device_manager, timeout_s=0), "seconds above 0"),
    ],
)
def test_wrong_calls_are_refused(alone, call, said):
    with pytest.raises(TPUValidationError, match=said):
        call(alone)


def test_hosts_that_nobody_joined_are_named(monkeypatch):
    for name, value in {"NUM_HOSTS": "2", "HOST_ID": "1", "COORDINATOR": "localhost:9"}.items():
        monkeypatch.setenv(f"TPUKIT_{name}", value)
    with pytest.raises(TPUDistributedError, match=r"host 1 of 2.*from_environment\(\).setup\(\)"):
        XLADistributedTraining(XLADeviceManager())


def test_integration_gives_the_three_parts():
    devices, distributed, optimizations = create_xla_integration(KernelPyTorchConfig().hardware.tpu)
    assert devices.devices == jax.devices()
    assert distributed.device_manager is devices
    assert not distributed.is_distributed
    assert torch.equal(distributed.all_reduce(torch.ones(2), op="sum"), torch.ones(2))
    optimizations.mark_step()
    optimizations.synchronize()


def test_flags_are_those_of_the_level_and_set_where_a_chip_is_named():
    config = KernelPyTorchConfig(version="v6e", xla_optimization_level=2)
    optimizations = create_xla_integration(config)[2]
    assert optimizations.level == 2
    assert optimizations.flags == flags_of(config.hardware.tpu, generation="v6e")
    assert optimizations.flags
    environment = {}
    report = optimizations.apply(environment)
    assert report.platform == "cpu"
    for name in optimizations.flags:
        assert f"--{name}=" in environment["LIBTPU_INIT_ARGS"]
    assert create_xla_integration(KernelPyTorchConfig(xla_optimization_level=0))[2].flags == {}


@pytest.mark.parametrize(
    ("axes", "strategy", "share"),
    [
        ({"fsdp": 8}, None, (2, 64)),
        ({"fsdp": 8}, "data", (16, 64)),
        ({"fsdp": 4, "tensor": 2}, "fsdp", (4, 64)),
    ],
)
def test_a_mesh_splits_a_model_and_gives_whole_gradients(alone, axes, strategy, share):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    eager = copy.deepcopy(model)
    mesh = create_mesh(mesh_shape=tuple(axes.values()), axis_names=tuple(axes))
    wrapped = alone.wrap_model(model, mesh=mesh, strategy=strategy)
    data, target = torch.randn(8, 16), torch.randint(0, 16, (8,))
    losses = []
    shares = set()

    def look(gradient):
        # What the backward pass needs is held since the forward: the second weight, say.
        held = [one for one in jax.live_arrays() if one.shape == (16, 64)]
        shares.update(one.sharding.shard_shape(one.shape) for one in held if is_on(one, mesh))

    for one in (wrapped, eager):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(one(data), target)
            if one is wrapped:
                loss.register_hook(look)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)
    for ours, theirs in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert shares == {share}


def is_on(array, mesh):
    return isinstance(array.sharding, NamedSharding) and array.sharding.mesh == mesh
