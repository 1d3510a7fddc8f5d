"""Gaussian weights at 2 bits: mean squared error on weights no code was fitted to.

Published rows are those of QTIP's Table 1 (arXiv 2406.11235); the bound is 4^−bits.

python benchmarks/vq_gaussian.py
"""

import jax
import jax.numpy as jnp
from claims import Claim, report

from tpukit.quantization import train_codebook
from tpukit.quantization.codebooks.nearest import nearest
from tpukit.quantization.vector_codes.trellis import RUN, gaussian_table, search_runs, windows_of

PUBLISHED = {
    "published: Lloyd-Max, 1 value": 0.118,
    "published: QuIP# E8P, 8 values": 0.089,
    "published: QTIP trellis, window of 16 bits": 0.069,
    "bound, any code": 0.0625,
}


def vectors(length: int, entries: int) -> float:
    """The error of a codebook in int8, fitted to 2^20 vectors at most."""
    count = max(2**17, min(1024 * entries, 2**19))
    book = train_codebook(
        jax.random.normal(jax.random.key(0), (count, length)),
        entries=entries,
        length=length,
        iterations=40,
        tolerance=1e-5,
    )
    held_out = jax.random.normal(jax.random.key(1), (2**18 // length, length))
    table = book.values[0]
    return float(((held_out - table[nearest(held_out, table)]) ** 2).mean())


def trellis(window: int) -> float:
    """The error of a trellis of 2 bits, its values in int8."""
    table = jnp.asarray(gaussian_table(2, window))
    scale = jnp.abs(table).max() / 127
    table = jnp.round(table / scale) * scale
    held_out = jax.random.normal(jax.random.key(1), (1024, RUN))
    found = jax.jit(search_runs, static_argnames="bits")(
        held_out, jnp.ones_like(held_out), table, bits=2
    )
    # Decoded from the new bits alone, as a file holds them.
    decoded = table[windows_of(found & 3, bits=2, window=window)]
    return float(((held_out - decoded) ** 2).mean())


def main() -> None:
    report(
        Claim("1 value × 4 entries", vectors(1, 4), ""),
        Claim("2 values × 16 entries", vectors(2, 16), ""),
        Claim("4 values × 256 entries (vq2)", vectors(4, 256), "", at_most=0.0990),
        Claim("trellis, window of 8 bits (trellis2:256)", trellis(8), "", at_most=0.090),
        Claim("trellis, window of 10 bits (trellis2:1024)", trellis(10), ""),
        Claim("trellis, window of 12 bits (trellis2)", trellis(12), "", at_most=0.090),
        *(Claim(name, value, "") for name, value in PUBLISHED.items()),
    )


if __name__ == "__main__":
    main()
