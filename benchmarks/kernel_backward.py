"""The backward passes of residual norm and gated activation alone: kernel against XLA, statically.

    python benchmarks/kernel_backward.py [--chips v5e,v6e]

`tpukit kernel bench OP --backward` times both passes; here each gets what a forward pass keeps.
"""

import argparse
from typing import Any

import jax

import tpukit

CHIPS = "v5e,v5p,v6e,7x"
ROWS, WIDTH, HIDDEN = 8192, 4096, 14336


def main() -> int:
    """Print a line for each op and generation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", default=CHIPS)
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    from tpukit.kernels.ops.gated_activation import pallas_tpu as gated
    from tpukit.kernels.ops.gated_activation import reference as gated_reference
    from tpukit.kernels.ops.residual_norm import pallas_tpu as norm
    from tpukit.kernels.ops.residual_norm import reference as norm_reference
    from tpukit.kernels.timing import estimate_kernel

    rows, both, half = (
        jax.ShapeDtypeStruct((ROWS, width), "bfloat16") for width in (WIDTH, 2 * HIDDEN, HIDDEN)
    )
    scale = jax.ShapeDtypeStruct((WIDTH,), "float32")

    def of_norm(passes: Any) -> Any:
        def backward(stream: Any, scale: Any, d_stream: Any, d_normed: Any) -> Any:
            total, _, d_scale = passes.backward((stream, scale), (d_stream, d_normed), eps=1e-6)
            return total, d_scale

        return backward

    def of_gated(passes: Any) -> Any:
        return lambda both, cotangent: passes.backward(both, cotangent)

    cases = {
        "residual_norm": (of_norm, (norm, norm_reference), (rows, scale, rows, rows)),
        "gated_activation": (of_gated, (gated, gated_reference), (both, half)),
    }
    for name, (make, (kernel, reference), arguments) in cases.items():
        for chip in asked.chips.split(","):
            times = [
                estimate_kernel(make(passes), arguments, chip, kind=f"{name}_backward").time_s
                for passes in (kernel, reference)
            ]
            told = " : ".join("none" if t is None else f"{t * 1e6:.0f}" for t in times)
            print(f"{name} backward on {chip}, kernel : XLA in us (origin model): {told}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
