"""Attention on one NVIDIA GPU, forward and backward: `flash_attention` against the fastest others.

    python benchmarks/attention_gpu.py [--rounds 6] [--shape 4x4096x16/16x128] [--window 1024]

The others are cuDNN called by hand through jax, torch's SDPA with cuDNN and with flash attention
(in a process of their own), and tokamax. All get arrays of (batch, tokens, heads, width) and the
same cotangent; both passes run once a call. Rounds alternate, and the best counts: a chip that
grew warm would otherwise decide.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from claims import Claim, report

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
ROUND_S = 0.25
# A program of a few ops is not recorded as a CUDA graph, as every training step is; outside of one
# XLA sets as many bytes as cuDNN's results and workspace have, for jax's own call too: 216 of
# 2591 us at the first shape (measured by the profiler, jax 0.11.2).
AS_IN_A_STEP = {"xla_gpu_graph_min_graph_size": 1}


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    width: int
    window: int | None = None

    @classmethod
    def parse(cls, text: str, window: int | None) -> "Shape":
        batch, tokens, heads, width = text.split("x")
        q, _, kv = heads.partition("/")
        return cls(int(batch), int(tokens), int(q), int(kv or q), int(width), window)

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}"
        text = f"{self.batch}x{self.tokens}x{heads}x{self.width}"
        return text if self.window is None else f"{text} window {self.window}"


SHAPES = (
    Shape(16, 2048, 16, 8, 128),
    Shape(4, 4096, 32, 8, 128),
    Shape(2, 8192, 16, 16, 128, 1024),
    Shape(8, 2048, 16, 16, 64),
)


def timed(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Milliseconds of one call, over a round of them."""
    began = time.perf_counter()
    wait(call())
    calls = max(5, int(ROUND_S / (time.perf_counter() - began)))
    began = time.perf_counter()
    for _ in range(calls):
        last = call()
    wait(last)
    return (time.perf_counter() - began) / calls * 1e3


def jax_contestants(shape: Shape) -> dict[str, Callable[[], float]]:
    import jax
    import jax.numpy as jnp

    from tpukit.kernels.ops.flash_attention.api import flash_attention

    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    arrays = [
        jax.random.normal(
            jax.random.key(seed), (shape.batch, shape.tokens, n, shape.width), jnp.bfloat16
        )
        for seed, n in enumerate(heads)
    ]
    seen = None if shape.window is None else (shape.window - 1, 0)
    by_hand = partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        local_window_size=seen,
        implementation="cudnn",
    )
    ours = partial(flash_attention, causal=True, window=shape.window)
    attends = {"tpukit": ours, "jax cuDNN": by_hand}
    try:
        attends["tokamax"] = partial(
            importlib.import_module("tokamax").dot_product_attention,
            is_causal=True,
            local_window_size=seen,
        )
    except (ImportError, AttributeError) as error:
        print(f"  tokamax does not run on jax {jax.__version__} here: {str(error)[:120]}")

    def both_passes(attend: Any) -> Callable[[], Any]:
        def step(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(cotangent)

        lowered = jax.jit(step).lower(*arrays)
        compiled = lowered.compile(compiler_options=AS_IN_A_STEP)
        jax.block_until_ready(compiled(*arrays))
        return lambda: compiled(*arrays)

    found = {}
    for name, attend in attends.items():
        try:
            found[name] = partial(timed, both_passes(attend), jax.block_until_ready)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            print(f"  {name} cannot do this shape: {str(error).splitlines()[0][:120]}")
    return found


def serve_torch(shape: Shape) -> None:
    """Time torch's ways on request: a name in, milliseconds out."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def array(heads: int) -> Any:
        made = torch.randn(
            shape.batch, shape.tokens, heads, shape.width, device="cuda", dtype=torch.bfloat16
        )
        return made.transpose(1, 2).requires_grad_()

    q, k, v, cotangent = map(array, (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads))
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}

    def both_passes(backend: SDPBackend) -> Any:
        with sdpa_kernel(backend):
            grouped = shape.heads != shape.kv_heads
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return torch.autograd.grad(out, (q, k, v), cotangent)

    for line in sys.stdin:
        call = partial(both_passes, backends[line.strip()])
        call()
        print(timed(call, lambda _: torch.cuda.synchronize()), flush=True)


def compare(shape: Shape, rounds: int) -> list[Claim]:
    print(shape, flush=True)
    best: dict[str, float] = {}
    contestants = jax_contestants(shape)
    command = [sys.executable, __file__, "--torch", repr(shape)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        # torch's SDPA has no window.
        if child.stdin and child.stdout and shape.window is None:
            out, back = child.stdin, child.stdout

            def ask(name: str) -> float:
                print(name, file=out, flush=True)
                return float(back.readline())

            for name in ("cuDNN", "flash"):
                contestants[f"torch {name}"] = partial(ask, name)
        for _ in range(rounds):
            for name, run in contestants.items():
                best[name] = min(best.get(name, float("inf")), run())
        if child.stdin:
            child.stdin.close()
    for name, ms in best.items():
        print(f"  {name:<12} {ms:8.3f} ms (measured)")
    rest = {name: ms for name, ms in best.items() if name != "tpukit"}
    fastest = min(rest, key=lambda name: rest[name])
    ratio = rest[fastest] / best["tpukit"]
    return [Claim(f"{shape}: speed against {fastest}", ratio, "x", at_least=0.98)]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--shape", help="BATCHxTOKENSxHEADS/KV_HEADSxWIDTH")
    options.add_argument("--window", type=int)
    options.add_argument("--torch", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.torch:
        fields = asked.torch.removeprefix("Shape(").removesuffix(")").split(", ")
        pairs = (field.split("=") for field in fields)
        serve_torch(Shape(**{name: int(value) for name, value in pairs if value != "None"}))
        return
    del sys.argv[1:]  # tokamax reads them as its own flags
    import jax

    if jax.default_backend() != "gpu":
        raise SystemExit(f"this benchmark needs a GPU, and jax runs on {jax.default_backend()}.")
    shapes = (Shape.parse(asked.shape, asked.window),) if asked.shape else SHAPES
    report(*(claim for shape in shapes for claim in compare(shape, asked.rounds)))


if __name__ == "__main__":
    main()
