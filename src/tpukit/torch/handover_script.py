"""Train with torch_tpu by the plan that tpukit checked: handover.json, beside this file.

On every host of the slice, with one process a chip:

    torchrun --nproc-per-node CHIPS --nnodes HOSTS ... train_torch_tpu.py

The same on a machine without a TPU, with fewer devices and random data:

    torchrun --nproc-per-node 2 train_torch_tpu.py --device cpu --mesh fsdp=2

It needs torch and your model, and nothing of tpukit unless your builder does. Parameters and batch
are DTensors with the placements of the plan; replace `batches` by your own data.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BACKENDS = {"tpu": "tpu_dist", "cpu": "gloo", "cuda": "nccl"}


def main() -> None:
    """Train some steps and say the loss of each."""
    asked = arguments()
    plan = json.loads((HERE / "handover.json").read_text())
    if asked.device == "tpu":
        for name, value in plan["environment"].items():
            os.environ.setdefault(name, value)  # before torch: torch_tpu reads them as it loads

    import torch.distributed as dist

    dist.init_process_group(BACKENDS[asked.device])
    train(asked, plan)
    gc.collect()  # what still holds a group when Python ends can abort it
    dist.barrier()
    dist.destroy_process_group()


def train(asked: argparse.Namespace, plan: Any) -> None:
    """Build the model on the plan's mesh, and take the steps."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    sizes = {**plan["mesh"], **dict(asked.mesh)}
    mesh = init_device_mesh(asked.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(plan["train"]["seed"])
    model = prepared(built(plan["model"]), plan)
    place_parameters(model, mesh, plan)
    model.to(asked.device)  # buffers, and what the plan does not know
    optimizer = optimizer_of(model, plan["train"])
    losses: list[float] = []
    for step, batch in enumerate(batches(model, plan, asked.steps)):
        placed = {
            name: distribute_tensor(one, mesh, placements(plan["batch"][name]["placements"]))
            for name, one in batch.items()
        }
        optimizer.zero_grad()
        with implicit_replication(), computing(asked.device, plan["train"]["precision"]):
            loss = loss_of(model, placed)
            loss.backward()
        if plan["train"]["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan["train"]["clip_norm"])
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} loss {losses[-1]:.6f}\n")
    if asked.report is not None:
        shards = {name: list(one.to_local().shape) for name, one in model.named_parameters()}
        path = asked.report / f"rank-{dist.get_rank()}.json"
        path.write_text(json.dumps({"losses": losses, "shards": shards}))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train with torch_tpu by a plan of tpukit's.")
    parser.add_argument("--device", choices=BACKENDS, default="tpu")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument(
        "--mesh", type=axis, nargs="*", default=[], help="other sizes of axes: fsdp=2"
    )
    parser.add_argument("--report", type=Path, help="folder for each rank's loss and shards")
    return parser.parse_args()


def axis(text: str) -> tuple[str, int]:
    """Read "fsdp=2"."""
    name, _, size = text.partition("=")
    return name, int(size)


def built(reference: str) -> Any:
    """Call the builder of the model, as tpukit did."""
    where, _, name = reference.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, HERE / where)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{where} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    made = getattr(module, name)()
    made = made[0] if isinstance(made, tuple) else made  # sample inputs are in the plan
    return made.model if hasattr(made, "jit_train_step") else made


def prepared(model: Any, plan: Any) -> Any:
    """Put the plan's format into the model, and checkpoint its layers where the plan does."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if plan["train"]["param_dtype"]:
        model.to(getattr(torch, plan["train"]["param_dtype"]))
    if plan["remat"] not in (None, "none"):
        for layers in [one for one in model.modules() if isinstance(one, torch.nn.ModuleList)]:
            for layer in layers:
                whole = layer.forward
                layer.forward = lambda *given, whole=whole, **named: checkpoint(
                    whole, *given, use_reentrant=False, **named
                )
    return model


def place_parameters(model: Any, mesh: Any, plan: Any) -> None:
    """Turn every parameter into a DTensor with its placement; tied ones stay tied."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    placed: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for short, one in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{short}" if prefix else short
            if id(one) not in placed:
                found = plan["parameters"][plan["tied"].get(name, name)]
                if list(one.shape) != found["shape"]:
                    raise SystemExit(
                        f"{name} has shape {list(one.shape)}, and {found['shape']} was checked"
                    )
                whole = distribute_tensor(one.detach(), mesh, placements(found["placements"]))
                placed[id(one)] = torch.nn.Parameter(whole, requires_grad=one.requires_grad)
            module.register_parameter(short, placed[id(one)])


def placements(texts: list[str]) -> list[Any]:
    """Read "Shard(0)" or "Replicate()" for every axis of the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    found = [re.fullmatch(r"Shard\((\d+)\)", text) for text in texts]
    return [Replicate() if match is None else Shard(int(match[1])) for match in found]


def optimizer_of(model: Any, train: Any) -> Any:
    """Build the optimizer of the plan."""
    import torch

    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    kept = [
        one
        for name, one in trained
        if one.ndim < 2 or any(re.search(text, name) for text in train["no_decay"])
    ]
    decayed = [one for _, one in trained if not any(one is other for other in kept)]
    groups = [
        {"params": decayed, "weight_decay": train["weight_decay"]},
        {"params": kept, "weight_decay": 0.0},
    ]
    rate, betas = train["learning_rate"], (train["beta1"], train["beta2"])
    if train["optimizer"] == "adamw":
        return torch.optim.AdamW(groups, lr=rate, betas=betas)
    if train["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=train["beta1"])
    if train["optimizer"] == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    raise SystemExit(f"torch has no optimizer {train['optimizer']}; choose one in optimizer_of")


def batches(model: Any, plan: Any, steps: int) -> Iterator[dict[str, Any]]:
    """Make batches of random numbers in the plan's shapes: put your own data here."""
    import torch

    below = int(getattr(getattr(model, "config", None), "vocab_size", 2))
    below = min(below, int(getattr(getattr(model, "config", None), "num_labels", below)))
    for step in range(steps):
        source = torch.Generator().manual_seed(step)
        yield {
            name: torch.randint(0, below, one["shape"], generator=source)
            if "int" in one["dtype"]
            else torch.randn(one["shape"], generator=source, dtype=getattr(torch, one["dtype"]))
            for name, one in plan["batch"].items()
        }


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    """Return the loss: the model's own, of logits against targets, or the first output's mean."""
    import torch

    known = inspect.signature(model.forward).parameters
    inputs = {name: one for name, one in batch.items() if name != "targets"}
    named = {name: one for name, one in inputs.items() if name in known}
    outputs = model(*(one for name, one in inputs.items() if name not in known), **named)
    for name in ("loss", "logits", "last_hidden_state"):
        if (
            not isinstance(outputs, torch.Tensor | tuple)
            and getattr(outputs, name, None) is not None
        ):
            outputs = getattr(outputs, name)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    if first.ndim and "targets" in batch:
        flat = first.reshape(-1, first.shape[-1])
        return torch.nn.functional.cross_entropy(flat, batch["targets"].reshape(-1))
    return first.float().mean()


@contextlib.contextmanager
def computing(device: str, precision: str | None) -> Generator[None]:
    """Compute in the plan's format, by operations that DTensor knows."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.ExitStack() as stack:
        if device == "cpu":  # DTensor has no rule for the fused attention of CPUs
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if precision == "bfloat16":
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        yield


if __name__ == "__main__":
    main()
