"""Attention on a GPU, forward and backward: `flash_attention` against cuDNN called by hand.

Run `python benchmarks/attention_gpu.py` on a machine with one.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from claims import Claim, report

from tpukit.kernels.flash_attention.api import flash_attention

# batch, tokens, heads, key heads, head width, window
SHAPES = (
    (4, 4096, 16, 16, 128, None),
    (4, 4096, 32, 8, 128, None),
    (2, 8192, 16, 16, 128, 1024),
    (8, 2048, 16, 16, 64, None),
)
ROUNDS, CALLS = 5, 10


def best_ms(attend: Callable[..., Any], arrays: list[jax.Array]) -> float:
    """Of both passes, the best of several rounds."""

    def loss(*arrays: jax.Array) -> jax.Array:
        return attend(*arrays).astype(jnp.float32).sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2)))
    jax.block_until_ready(step(*arrays))
    rounds: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        last = [step(*arrays) for _ in range(CALLS)][-1]
        jax.block_until_ready(last)
        rounds.append((time.perf_counter() - started) / CALLS)
    return min(rounds) * 1e3


def main() -> None:
    """Time both at each shape and show the ratio."""
    if jax.default_backend() != "gpu":
        raise SystemExit(f"this benchmark needs a GPU, and jax runs on {jax.default_backend()}.")
    for batch, tokens, heads, kv_heads, width, window in SHAPES:
        arrays = [
            jax.random.normal(jax.random.key(seed), (batch, tokens, n, width), jnp.bfloat16)
            for seed, n in enumerate((heads, kv_heads, kv_heads))
        ]
        by_hand = partial(
            jax.nn.dot_product_attention,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
        theirs = best_ms(by_hand, arrays)
        mine = best_ms(partial(flash_attention, window=window), arrays)
        name = f"{batch}x{tokens}x{heads}/{kv_heads}x{width} window {window}"
        report(
            Claim(f"cuDNN {name}", theirs, "ms"),
            Claim(f"flash_attention {name}", mine, "ms"),
            Claim("speed relative to cuDNN", theirs / mine, "x", at_least=0.98),
        )


if __name__ == "__main__":
    main()
