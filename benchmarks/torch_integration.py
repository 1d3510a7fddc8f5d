"""What `tpukit.torch` costs beside the model: document 002's table of overheads, and ours.

Each short row is the best of seven rounds of many calls, divided by their number, because a busy
machine only ever adds to it. Compiling is one first compile in this process, with jax's cache on
disk turned off, and the same again from memory. Backend, preparation and synchronization are those
of `TPUBackend` on the CPU, which the document calls its fallback mode.

Usage: JAX_PLATFORMS=cpu python benchmarks/torch_integration.py
"""

import logging
import os
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = (
    "false"  # or the second run of this file compiles nothing
)

import torch
from claims import Claim, report
from torch import nn

from tpukit.torch import KernelPyTorchConfig, TPUBackend, TPUMemoryManager, XLACompiler

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


def main() -> None:
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
    claims = [Claim(name, by_name[name] * 1e3, "µs", at_most=bar) for name, bar in bars_us.items()]
    report(*claims)


if __name__ == "__main__":
    main()
