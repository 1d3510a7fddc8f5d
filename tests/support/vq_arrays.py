"""Quantized matrices of any codes, which no codec had to make."""

import jax.numpy as jnp
import numpy as np

from tpukit.quantization import VQArray, parse_vq_format
from tpukit.quantization.vector_codes.trellis import padded_width


def made_up(name: str, shape: tuple[int, int] = (16, 24), *, rotated: bool = False) -> VQArray:
    """A matrix in a format, of random codes, entries and scales."""
    format = parse_vq_format(name)
    random = np.random.default_rng(0)
    width = padded_width(shape[1]) * format.trellis // 8 if format.trellis else shape[1]
    sizes = (format.stages, -(-shape[0] // format.length), width)
    most = 256 if format.trellis else format.entries
    table = random.integers(-127, 128, (format.stages, format.entries, format.length))
    return VQArray(
        jnp.asarray(random.integers(0, most, sizes), jnp.uint8 if most <= 256 else jnp.uint16),
        jnp.asarray(table, jnp.int8),
        jnp.asarray(random.uniform(0.01, 0.02, shape[1]), jnp.bfloat16),
        jnp.asarray(random.choice([-1, 1], shape[0]), jnp.int8) if rotated else None,
        shape,
        format.layout,
    )
