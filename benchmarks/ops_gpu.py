"""Two ops on one NVIDIA GPU against XLA: the gradient of embeddings, and grouped products.

    python benchmarks/ops_gpu.py [--rounds 5] [--calls 30]

Rounds of both sides alternate and the best round of each counts: a chip that grew warm would
otherwise decide. The error is that of the whole gradient against sums in float64.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from claims import Claim, report

from tpukit.kernels import grouped_matmul
from tpukit.kernels.ops.embedding_rows.api import embedding_rows

VOCABULARY = 32768
EMBEDDINGS = ((32768, 2048), (65536, 1024))  # tokens, width
ROWS, GROUPS, WIDTH, HIDDEN = 16384, 8, 2048, 8192


def best_ms(
    functions: dict[str, Callable[..., Any]], *arrays: jax.Array, rounds: int, calls: int
) -> dict[str, float]:
    """Milliseconds of one call of each, in its best round."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        jax.block_until_ready(function(*arrays))  # compiled, and warm
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            result = None
            for _ in range(calls):
                result = function(*arrays)
            jax.block_until_ready(result)
            best[name] = min(best[name], (time.perf_counter() - started) / calls * 1e3)
    return best


def words(tokens: int, *, by_zipf: bool) -> np.ndarray:
    """Numbers of words as in text, or drawn evenly."""
    random = np.random.default_rng(0)
    if not by_zipf:
        return random.integers(0, VOCABULARY, tokens).astype(np.int32)
    share = 1.0 / np.arange(1, VOCABULARY + 1)
    return random.choice(VOCABULARY, tokens, p=share / share.sum()).astype(np.int32)


def embedding_gradient(look_up: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The gradient of a table by the way rows are looked up in it."""

    def gradient(table: jax.Array, ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        _, back = jax.vjp(lambda one: look_up(one, ids), table)
        return back(cotangent)[0]

    return jax.jit(gradient)


def embedding_claims(rounds: int, calls: int) -> list[Claim]:
    claims: list[Claim] = []
    sides = {
        "ours": embedding_gradient(embedding_rows),
        "XLA": embedding_gradient(lambda table, ids: table[ids]),
    }
    for tokens, width in EMBEDDINGS:
        table = jnp.zeros((VOCABULARY, width), jnp.bfloat16)
        cotangent = jax.random.normal(jax.random.key(1), (tokens, width), jnp.bfloat16)
        for by_zipf in (True, False):
            ids = jnp.asarray(words(tokens, by_zipf=by_zipf))
            arrays = (table, ids, cotangent)
            found = best_ms(sides, *arrays, rounds=rounds, calls=calls)
            exact = np.zeros((VOCABULARY, width))
            np.add.at(exact, np.asarray(ids), np.asarray(cotangent, np.float64))
            kind = "Zipf's law" if by_zipf else "drawn evenly"
            for name, run in sides.items():
                apart = np.asarray(run(*arrays), np.float64) - exact
                error = 100 * float(np.linalg.norm(apart) / np.linalg.norm(exact))
                what = f"embedding gradient, {tokens} x {width}, {kind}, {name}"
                claims += [Claim(what, found[name], "ms"), Claim("  its error", error, "%")]
    return claims


def grouped_gradients(product: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A grouped product with the gradients of both operands."""

    def both(rows: jax.Array, weights: jax.Array, sizes: jax.Array, cotangent: jax.Array) -> Any:
        out, back = jax.vjp(lambda a, b: product(a, b, sizes), rows, weights)
        return out, back(cotangent)

    return jax.jit(both)


def grouped_claims(rounds: int, calls: int) -> list[Claim]:
    keys = jax.random.split(jax.random.key(2), 3)
    arrays = (
        jax.random.normal(keys[0], (ROWS, WIDTH), jnp.bfloat16),
        jax.random.normal(keys[1], (GROUPS, WIDTH, HIDDEN), jnp.bfloat16),
        jnp.full((GROUPS,), ROWS // GROUPS, jnp.int32),
    )
    cotangent = jax.random.normal(keys[2], (ROWS, HIDDEN), jnp.bfloat16)
    products = {"ours": grouped_matmul, "ragged_dot": jax.lax.ragged_dot}
    forward = {name: jax.jit(product) for name, product in products.items()}
    both = {name: grouped_gradients(product) for name, product in products.items()}
    claims: list[Claim] = []
    for what, functions, operands, count in (
        ("forward", forward, arrays, 1),
        ("forward and both gradients", both, (*arrays, cotangent), 3),
    ):
        found = best_ms(functions, *operands, rounds=rounds, calls=calls)
        for name, milliseconds in found.items():
            rate = count * 2 * ROWS * WIDTH * HIDDEN / milliseconds / 1e9
            claims += [
                Claim(f"grouped products, {what}, {name}", milliseconds, "ms"),
                Claim("  their rate", rate, "TFLOP/s"),
            ]
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("no NVIDIA GPU here; run it on one (docs/performance.md has the last figures)")
        return
    report(*embedding_claims(options.rounds, options.calls))
    report(*grouped_claims(options.rounds, options.calls))


if __name__ == "__main__":
    main()
