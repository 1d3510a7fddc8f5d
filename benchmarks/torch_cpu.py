"""A torch module's training step on this CPU: eager torch, the ordinary loop, and a fused step.

    python benchmarks/torch_cpu.py [--steps 12]

The same models and batches in turns, in one process with one thread for either, as medians of the
processor time of a step: torch's threads spin while they wait, so that on a machine that does
anything else a clock on the wall flatters whoever is compared with it. A CPU is where people try
things, not what the programs are made for.
"""

import argparse
import copy
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import torch
import torch.nn.functional as functional
from claims import Claim, report

from tpukit.torch import KernelPyTorchConfig, TPUBackend

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from torch_models import Gpt, flat_cross_entropy

TARGET = 0.8


def models():
    ids = torch.randint(0, 2048, (8, 65))
    yield "gpt 5 M", Gpt(2048, 256, 6), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    mlp = torch.nn.Sequential(
        torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
        torch.nn.Linear(1024, 10),
    )  # fmt: skip
    yield "mlp 1.9 M", mlp, (torch.randn(256, 784), torch.randint(0, 10, (256,)))


def loop(model, optimizer, batch, loss):
    def step():
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        return value.item()

    return step


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=12)
    steps = options.parse_args().steps
    torch.manual_seed(0)
    torch.set_num_threads(1)
    backend = TPUBackend(KernelPyTorchConfig(gradient_checkpointing=False))
    claims = []
    for name, model, batch in models():
        loss = flat_cross_entropy if batch[1].ndim > 1 else functional.cross_entropy
        own, fused = (backend.prepare_model(copy.deepcopy(model)) for _ in range(2))
        make = {id(one): torch.optim.AdamW(one.parameters()) for one in (model, own, fused)}
        one_program = backend.train_step(fused, loss, make[id(fused)])
        programs = {
            "eager torch": loop(model, make[id(model)], batch, loss),
            "ordinary loop": loop(own, make[id(own)], batch, loss),
            "fused step": lambda step=one_program, batch=batch: step(*batch).item(),
        }
        seconds = {which: [] for which in programs}
        for number in range(steps + 2):
            for which, step in programs.items():
                began = time.process_time()
                step()
                if number > 1:  # compiled, and warm
                    seconds[which].append(time.process_time() - began)
        medians = {which: statistics.median(found) for which, found in seconds.items()}
        for which, median in medians.items():
            print(f"  {name:<10} {which:<14} {median * 1e3:8.1f} ms", flush=True)
        for which in ("ordinary loop", "fused step"):
            speed = medians["eager torch"] / medians[which]
            claims.append(
                Claim(f"{name}: {which} against eager torch", speed, "x", at_least=TARGET)
            )
    report(*claims)


if __name__ == "__main__":
    main()
