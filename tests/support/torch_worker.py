"""One process of a job: join the others, run the scenes below, print JSON as a last line.

Usage: torch_worker.py NUM_PROCESSES RANK ADDRESS
"""

import json
import sys

from tpukit.errors import TPUDistributedError, TPUValidationError
from tpukit.runtime.multihost import MultiHostConfig

LEARNING_RATE = 0.1
STEPS = 3
WIDE = 1024  # so that there is a matrix worth splitting


def model_and_batches(width=8):
    """The same on every process and in a run of one: data for STEPS steps of eight rows."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 3))
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(STEPS)]
    return model, batches


def numbers(model):
    return [one for parameter in model.parameters() for one in parameter.reshape(-1).tolist()]


def collectives(distributed):
    import torch

    rank = distributed.rank
    answer = {}
    floats = torch.tensor([1.5, -2.0, 3.0]) * (rank + 1)
    for op in ("sum", "mean", "max", "min"):
        answer[op] = distributed.all_reduce(floats, op=op).tolist()
    half = torch.full((2,), 1.0 + 2.0 * rank, dtype=torch.bfloat16)
    reduced = distributed.all_reduce(half, op="mean")
    answer["bfloat16"] = [str(reduced.dtype), reduced.tolist()]
    whole = distributed.all_reduce(torch.tensor([[2**40 + rank]]), op="sum")
    answer["int64"] = [str(whole.dtype), whole.tolist()]
    wide = distributed.all_reduce(torch.tensor([1e-12 * rank], dtype=torch.float64) + 1, op="max")
    answer["float64"] = [str(wide.dtype), wide.tolist()]
    flags = torch.tensor([True, rank == 0, False])
    answer["bool"] = [distributed.all_reduce(flags, op=op).tolist() for op in ("max", "min")]
    strange = torch.tensor([[float("nan"), -0.0]], dtype=torch.bfloat16) * (rank + 1)
    gathered = distributed.all_gather(strange)
    answer["gathered"] = [list(gathered.shape), gathered.view(torch.int16).tolist()]
    answer["broadcast"] = distributed.broadcast(torch.tensor([rank, 2**40 + rank]), 1).tolist()
    local = len(distributed.device_manager.local_devices)
    pieces = [torch.tensor([10.0 * rank + number]) for number in range(local)]
    answer["devices"] = distributed.all_reduce(pieces, op="sum").tolist()
    distributed.barrier()
    return answer


def refusals(distributed):
    """Shapes that differ, calls that differ, then a process that does not come; work goes on."""
    import torch

    found = []

    def attempt(call):
        try:
            call()
        except TPUDistributedError as error:
            found.append([type(error).__name__, str(error)])

    rank = distributed.rank
    attempt(lambda: distributed.all_reduce(torch.ones(2 + rank)))
    attempt(lambda: distributed.barrier() if rank else distributed.all_gather(torch.ones(2)))
    after = distributed.all_reduce(torch.ones(1)).tolist()
    distributed.timeout_s = 1.0
    if rank == 0:
        attempt(distributed.barrier)
    return {"found": found, "after": after}


def gradients(distributed):
    """Gradients of a wrapped module: at once, in two micro-batches, and with one part unused."""
    import torch
    import torch.nn.functional as functional
    from torch import nn

    from tpukit.parallel import create_mesh

    model, batches = model_and_batches()
    inputs, targets = (one.chunk(distributed.world_size)[distributed.rank] for one in batches[0])
    if distributed.rank:
        with torch.no_grad():
            model[0].weight.add_(1.0)  # wrapping starts every process from the values of the first
    wrapped = distributed.wrap_model(model)
    answer = {"names": [*wrapped.state_dict()]}

    def grads():
        found = [one.grad.reshape(-1).tolist() for one in wrapped.parameters()]
        wrapped.zero_grad()
        return [number for one in found for number in one]

    functional.cross_entropy(wrapped(inputs), targets).backward()
    answer["whole"] = grads()
    for accumulate in ("synchronised", "local"):
        first, second = zip(inputs.chunk(2), targets.chunk(2), strict=True)
        if accumulate == "local":
            with wrapped.no_sync():
                (functional.cross_entropy(wrapped(first[0]), first[1]) / 2).backward()
        else:
            (functional.cross_entropy(wrapped(first[0]), first[1]) / 2).backward()
        (functional.cross_entropy(wrapped(second[0]), second[1]) / 2).backward()
        answer[accumulate] = grads()
    fresh, _ = model_and_batches()
    mesh = create_mesh(
        mesh_shape=(2,), axis_names=("fsdp",), devices=distributed.device_manager.local_devices
    )
    split = distributed.wrap_model(fresh, mesh=mesh, strategy="fsdp")
    functional.cross_entropy(split(inputs), targets).backward()
    found = [one.grad.reshape(-1).tolist() for one in split.parameters()]
    answer["split"] = [number for one in found for number in one]
    try:
        distributed.wrap_model(fresh, mesh=create_mesh(mesh_shape=(4,), axis_names=("fsdp",)))
    except TPUValidationError as error:
        answer["refused"] = str(error)
    parts = distributed.wrap_model(nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3)))
    parts.module[distributed.rank](torch.ones(1, 1)).sum().backward()
    answer["unused"] = [None if p.grad is None else p.grad.item() for p in parts.parameters()]
    return answer


def example_3(distributed):
    """Document 002's third example, on this process's half of every batch."""
    import torch
    from torch import nn

    from tpukit.torch import (
        KernelPyTorchConfig,
        TPUBackend,
        XLADeviceManager,
        XLADistributedTraining,
    )

    config = KernelPyTorchConfig()
    backend = TPUBackend(config)
    model, batches = model_and_batches()
    model = backend.prepare_model(model)
    branch = "single"
    if backend.is_distributed:
        branch = "distributed"
        device_manager = XLADeviceManager(config.hardware.tpu)
        distributed = XLADistributedTraining(device_manager)
        model = distributed.wrap_model(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        for batch in batches:
            data, target = (one.chunk(distributed.world_size)[distributed.rank] for one in batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            for param in model.parameters():
                if param.grad is not None:
                    param.grad = distributed.all_reduce(param.grad, op="mean")
            optimizer.step()
    return {"branch": branch, "parameters": numbers(model)}


def fused(distributed):
    """Fused steps over the devices of all processes, each of which holds the whole batch."""
    import torch
    from torch import nn

    from tpukit.torch import TPUBackend

    backend = TPUBackend()
    model, batches = model_and_batches(WIDE)
    model = backend.prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    step = backend.train_step(model, nn.functional.cross_entropy, optimizer)
    losses = [float(step(data, target)) for data, target in batches]
    split = [str(one.sharding.spec) for one in step._state.params.values()]
    step.sync()
    moment = optimizer.state[model[0].weight]["exp_avg"].reshape(-1).tolist()
    return {"losses": losses, "split": split, "bias": model[2].bias.tolist(), "moment": moment}


# Last the one in which a process stays away from a call.
SCENES = (collectives, gradients, example_3, fused, refusals)


def main():
    num_processes, rank, address = sys.argv[1:]
    config = MultiHostConfig(int(num_processes), int(rank), address, shutdown_timeout_s=20)
    with config:
        from tpukit.torch import XLADeviceManager, XLADistributedTraining

        distributed = XLADistributedTraining(XLADeviceManager(), timeout_s=60)
        answer = {scene.__name__: scene(distributed) for scene in SCENES}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
