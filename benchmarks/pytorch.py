"""PyTorch modules through tpukit on the CPU: speed, overhead, equality with eager torch.

python benchmarks/pytorch.py cpu
python benchmarks/pytorch.py integration
python benchmarks/pytorch.py modules
"""

import copy
import logging
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from harness import (
    HELD_TO_TARGET,
    MEASURED,
    Result,
    Subcommand,
    read_command_line,
    report,
    run_command,
)

CPU = {"JAX_PLATFORMS": "cpu"}
COMMAND_LINE = read_command_line(
    __name__,
    __doc__,
    Subcommand(
        "cpu",
        "a fused step of a small GPT beside eager torch",
        options={"--steps": 12},
        needs=("torch",),
        environment=CPU | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
    ),
    Subcommand(
        "integration",
        "overhead of pools, allocations and compiled calls",
        needs=("torch",),
        # Otherwise the second run compiles nothing.
        environment={"JAX_ENABLE_COMPILATION_CACHE": "false"},
    ),
    Subcommand(
        "modules",
        "modules that equal eager torch, forward and backward",
        options={"words": {"nargs": "*", "help": "words of a module's name; all by default"}},
        needs=("torch",),
        environment=CPU,
    ),
)

import torch
import torch.nn.functional as functional
from torch import nn
from torch_models import Gpt, flat_cross_entropy
from torch_zoo import ZOO, compare

from tpukit.torch import KernelPyTorchConfig, TPUBackend, TPUMemoryManager, XLACompiler

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


def run_cpu(options):
    """Compare a torch module's training step: eager torch, the ordinary loop, and a fused step.

    The same models and batches in turns, in one process with one thread for either, as medians of
    the processor time of a step: torch's threads spin while they wait, so that on a machine that
    does anything else a clock on the wall flatters whoever is compared with it. A CPU is where
    people try things, not what the programs are made for.
    """
    steps = options.steps
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
                Result(
                    f"{name} on one core, {which} against eager torch",
                    speed,
                    "×",
                    at_least=TARGET,
                    key=f"{name}_{which}".replace(" ", "_"),
                    form=".3f",
                    **MEASURED,
                )
            )
    report(*claims)


ROUNDS = 7


@dataclass(frozen=True)
class Row:
    """One row: what the document says, what is measured here, and how."""

    what: str
    document: str
    measured_ms: float
    how: str


def best_ms(call: Callable[[], object], calls: int) -> float:
    return min(timeit.repeat(call, number=calls, repeat=ROUNDS)) / calls * 1e3


def seconds_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 10))


def backend_rows() -> list[Row]:
    config, model = KernelPyTorchConfig(), small_model()
    backend = TPUBackend(config)
    backend.prepare_model(model)(torch.randn(32, 512))
    backend.synchronize()
    # That there is no TPU here was said by the first; to print it again is no part of the cost.
    logging.getLogger("tpukit.torch").setLevel(logging.ERROR)
    creation = best_ms(lambda: TPUBackend(config), 200)
    preparation = best_ms(lambda: backend.prepare_model(model), 20_000)
    waiting = best_ms(backend.synchronize, 20_000)
    return [
        Row("backend creation", "~0.13 ms", creation, "TPUBackend(config), its warning not shown"),
        Row("model preparation, cached", "<0.001 ms", preparation, "prepare_model of a known one"),
        Row("synchronization, idle", "<0.01 ms", waiting, "synchronize() with nothing under way"),
    ]


def compile_rows() -> list[Row]:
    model, sample = small_model(), torch.randn(32, 512)
    XLACompiler().compile_model(nn.Identity(), torch.ones(1))  # torchax and jax are loaded
    compiler = XLACompiler()
    first = seconds_ms(lambda: compiler.compile_model(model, sample))
    again = best_ms(lambda: compiler.compile_model(model, sample), 20)
    stats = compiler.get_compilation_stats()
    assert (stats["compilations"], stats["from_disk"]) == (1, 0)
    return [
        Row(
            "XLA compilation, first",
            "1-10 s",
            first,
            "compile_model of a 512-256-10 MLP",
        ),
        Row("XLA compilation, kept", "(cached)", again, "the same again: a hit, weights copied"),
    ]


def memory_rows() -> list[Row]:
    manager = TPUMemoryManager(KernelPyTorchConfig(version="v6e"))
    pool = manager.create_memory_pool(10, (512, 512))

    def lend_and_return() -> None:
        manager.return_tensor_to_pool(pool, manager.get_tensor_from_pool(pool))

    allocate = best_ms(lambda: manager.allocate_tensor((100, 100)), 5_000)
    bare = best_ms(lambda: torch.empty((100, 100)), 5_000)
    lend = best_ms(lend_and_return, 20_000)
    return [
        Row("memory allocation", "~0.001 ms", allocate, "allocate_tensor((100, 100)), and its end"),
        Row("  torch.empty alone", "", bare, "the same tensor, counted by nobody"),
        Row("pool get and return", "", lend, "both, of a pool of ten"),
    ]


def run_integration(options):
    """What `tpukit.torch` costs beside the model: document 002's table of overheads, and ours.

    Each short row is the best of seven rounds of many calls, divided by their number, because a
    busy machine only ever adds to it. Compiling is one first compile in this process, with jax's
    cache on disk turned off, and the same again from memory. Backend, preparation and
    synchronization are those of `TPUBackend` on the CPU, which the document calls its fallback
    mode.
    """
    rows = [*backend_rows(), *compile_rows(), *memory_rows()]
    print(f"{'operation':<28}{'document 002':>13}{'measured':>14}  how")
    for row in rows:
        print(f"{row.what:<28}{row.document:>13}{row.measured_ms:>11.4g} ms  {row.how}")
    by_name = {row.what: row.measured_ms for row in rows}
    bars_us = {
        "backend creation": 130.0,
        "model preparation, cached": 1.0,
        "synchronization, idle": 10.0,
        "pool get and return": 5.0,
    }
    bars_us["memory allocation"] = 1.0
    for name, bar in bars_us.items():
        key = name.replace(",", "").replace(" ", "_")
        figure = by_name[name] * 1e3
        report(Result(f"torch: {name}", figure, "µs", bar, key=key, form=".2g", **HELD_TO_TARGET))


def run_modules(options):
    """Every module of the zoo, forward and backward, against eager torch on the CPU in float32."""
    chosen = [
        one
        for one in ZOO
        if all(word.lower() in f"{one.kind}: {one.name}".lower() for word in options.words)
    ]
    verdicts: Counter[str] = Counter()
    kind = ""
    for entry in chosen:
        if entry.kind != kind:
            kind = entry.kind
            print(f"\n{kind}")
        outcome = compare(entry)
        verdicts[outcome.verdict] += 1
        told = outcome.note if outcome.verdict != "equal" or outcome.error > 1e-5 else ""
        print(f"  {entry.name:<50} {outcome.verdict:<13} {outcome.error:8.1e}  {told}", flush=True)
    print()
    for verdict, count in verdicts.most_common():
        print(f"{verdict:<14} {count:4}")
    rate = 100 * verdicts["equal"] / max(len(chosen), 1)
    report(
        Result(
            f"torch modules equal to eager torch forward and backward, of {len(chosen)}",
            rate,
            "%",
            at_least=98,
            key="modules_percent",
            form=".1f",
            **MEASURED,
        ),
        Result(
            f"torch modules equal to eager torch forward and backward, of {len(chosen)}",
            verdicts["equal"],
            key="modules",
            form=".0f",
            **MEASURED,
        ),
        Result(
            "silently wrong or with an unnamed error", verdicts["WRONG"], "modules", at_most=0.5
        ),
    )
    return verdicts["WRONG"]


if __name__ == "__main__":
    run_command(
        COMMAND_LINE,
        cpu=run_cpu,
        integration=run_integration,
        modules=run_modules,
    )
