"""Train with torch_tpu by the plan in handover.json, which tpukit wrote beside this file.

On every host of the slice, with one process per chip:

    torchrun --nproc-per-node CHIPS --nnodes HOSTS ... train_torch_tpu.py

The same on a machine without a TPU, with fewer devices and random data:

    torchrun --nproc-per-node 2 train_torch_tpu.py --device cpu --mesh fsdp=2

It needs torch and your model, but not tpukit unless your builder does. Parameters and batch are
DTensors with the placements of the plan; replace `batches` by your own data.
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
    """Train some steps and print the loss of each."""
    options = read_options()
    plan = json.loads((HERE / "handover.json").read_text())
    if options.device == "tpu":
        for name, value in plan["environment"].items():
            os.environ.setdefault(name, value)  # before torch: torch_tpu reads them as it loads

    import torch.distributed as dist

    dist.init_process_group(BACKENDS[options.device])
    train(options, plan)
    gc.collect()  # objects that keep a process group can abort Python's exit
    dist.barrier()
    dist.destroy_process_group()


def train(options: argparse.Namespace, plan: Any) -> None:
    """Build the model on the plan's mesh, and train."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    sizes = {**plan["mesh"], **dict(options.mesh)}
    mesh = init_device_mesh(options.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(plan["train"]["seed"])
    model = prepared(built(plan["model"]), plan)
    place_parameters(model, mesh, plan)
    model.to(options.device)  # buffers, and parameters that are not in the plan
    optimizer = optimizer_of(model, plan["train"])
    losses: list[float] = []
    for step, batch in enumerate(batches(model, plan, options.steps)):
        placed = {
            name: distribute_tensor(tensor, mesh, placements(plan["batch"][name]["placements"]))
            for name, tensor in batch.items()
        }
        optimizer.zero_grad()
        with implicit_replication(), computing(options.device, plan["train"]["precision"]):
            loss = loss_of(model, placed)
            loss.backward()
        if plan["train"]["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan["train"]["clip_norm"])
        optimizer.step()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step} loss {losses[-1]:.6f}\n")
    if options.report is not None:
        shards = {name: list(param.to_local().shape) for name, param in model.named_parameters()}
        path = options.report / f"rank-{dist.get_rank()}.json"
        path.write_text(json.dumps({"losses": losses, "shards": shards}))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train with torch_tpu by a plan of tpukit.")
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
    """Apply the plan's dtype and checkpointing of layers to the model."""
    import torch
    from torch.utils.checkpoint import checkpoint

    if plan["train"]["param_dtype"]:
        model.to(getattr(torch, plan["train"]["param_dtype"]))
    if plan["remat"] not in (None, "none"):
        for layers in [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]:
            for layer in layers:
                forward = layer.forward
                layer.forward = lambda *given, forward=forward, **named: checkpoint(
                    forward, *given, use_reentrant=False, **named
                )
    return model


def place_parameters(model: Any, mesh: Any, plan: Any) -> None:
    """Turn every parameter into a DTensor with its placement; tied parameters stay tied."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    placed: dict[int, Any] = {}
    for prefix, module in model.named_modules():
        for short, param in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{short}" if prefix else short
            if id(param) not in placed:
                planned = plan["parameters"][plan["tied"].get(name, name)]
                if list(param.shape) != planned["shape"]:
                    raise SystemExit(
                        f"{name} has shape {list(param.shape)}, but {planned['shape']} was checked"
                    )
                sharded = distribute_tensor(param.detach(), mesh, placements(planned["placements"]))
                placed[id(param)] = torch.nn.Parameter(sharded, requires_grad=param.requires_grad)
            module.register_parameter(short, placed[id(param)])


def placements(texts: list[str]) -> list[Any]:
    """Parse "Shard(0)" or "Replicate()" for every mesh axis."""
    from torch.distributed.tensor import Replicate, Shard

    matches = [re.fullmatch(r"Shard\((\d+)\)", text) for text in texts]
    return [Replicate() if match is None else Shard(int(match[1])) for match in matches]


def optimizer_of(model: Any, train: Any) -> Any:
    """Build the optimizer of the plan."""
    import torch

    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    kept = [
        param
        for name, param in trained
        if param.ndim < 2 or any(re.search(text, name) for text in train["no_decay"])
    ]
    decayed = [param for _, param in trained if not any(param is other for other in kept)]
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
    """Yield random batches of the plan's shapes; replace them by your own data."""
    import torch

    below = int(getattr(getattr(model, "config", None), "vocab_size", 2))
    below = min(below, int(getattr(getattr(model, "config", None), "num_labels", below)))
    for step in range(steps):
        source = torch.Generator().manual_seed(step)
        yield {
            name: torch.randint(0, below, entry["shape"], generator=source)
            if "int" in entry["dtype"]
            else torch.randn(entry["shape"], generator=source, dtype=getattr(torch, entry["dtype"]))
            for name, entry in plan["batch"].items()
        }


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    """Return the model's loss, the cross-entropy of its logits, or the first output's mean."""
    import torch

    known = inspect.signature(model.forward).parameters
    inputs = {name: tensor for name, tensor in batch.items() if name != "targets"}
    named = {name: tensor for name, tensor in inputs.items() if name in known}
    outputs = model(*(tensor for name, tensor in inputs.items() if name not in known), **named)
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
    """Compute in the plan's dtype, with operations that DTensor supports."""
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
