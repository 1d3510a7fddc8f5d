"""Grouped products in fp8 without a TPU: our kernels beside XLA's ragged products, and bfloat16.

    python benchmarks/grouped_float8.py [--chips 7x] [--cases deepseek_v3_16_experts]

The three products of one projection of a layer's experts, even groups: rows and weights in e4m3,
gradients in e5m2, results in bfloat16. Static times of one device (origin model). What the program
says of XLA's is FLOPs too, since its ragged products were measured far faster than the schedule of
this libtpu lets them be (docs/kernels.md).
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import tpukit

CHIPS = "7x"
CASES = "mixtral_8x7b,qwen3_30b_a3b,deepseek_v3_16_experts"
FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
BFLOAT16 = (jnp.bfloat16, jnp.bfloat16)
KERNEL, XLA = "pallas_tpu", "xla"


def products(shape: tuple[int, int, int, int], formats: tuple[Any, Any]) -> dict[str, Any]:
    """For each product its function of an implementation, and its arrays."""
    from tpukit.kernels.ops.grouped_matmul.narrow import multiply_groups, sum_groups

    rows, width, columns, groups = shape
    values, gradients = formats
    x = jax.ShapeDtypeStruct((rows, width), values)
    w = jax.ShapeDtypeStruct((groups, width, columns), values)
    dy = jax.ShapeDtypeStruct((rows, columns), gradients)
    sizes = jnp.full(groups, rows // groups, jnp.int32)
    multiply = partial(multiply_groups, dtype=jnp.bfloat16)
    return {
        "forward": (multiply, (x, w, sizes)),
        "gradient of rows": (partial(multiply, transposed=True), (dy, w, sizes)),
        "gradient of weights": (partial(sum_groups, dtype=jnp.bfloat16), (x, dy, sizes)),
    }


def time_us(function: Callable[..., Any], arguments: tuple[Any, ...], chip: str) -> float:
    """The static time of one call.

    Raises:
        SystemExit: The compiler gave nothing to time.
    """
    from tpukit.kernels.timing import estimate_kernel

    estimate = estimate_kernel(function, arguments, chip, kind="grouped_matmul")
    if estimate.time_s is None:
        sys.exit(f"{chip}: {estimate.reason}")
    return estimate.time_s * 1e6


def main() -> int:
    """Print a line for each case and product; 1 where XLA is the faster one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", default=CHIPS)
    parser.add_argument("--cases", default=CASES)
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    from tpukit.kernels import get_tpu_op

    is_slower = False
    for name in asked.cases.split(","):
        case = get_tpu_op("grouped_matmul").case(name)
        (rows, width), (groups, _, columns) = (one.shape for one in case.arguments[:2])
        shape = rows, width, columns, groups
        for chip in asked.chips.split(","):
            wide = products(shape, BFLOAT16)
            for label, (function, arrays) in products(shape, FLOAT8).items():
                ours = time_us(partial(function, implementation=KERNEL), arrays, chip)
                theirs = time_us(partial(function, implementation=XLA), arrays, chip)
                in_wide, wide_arrays = wide[label]
                bfloat16 = time_us(partial(in_wide, implementation=KERNEL), wide_arrays, chip)
                is_slower = is_slower or ours > theirs
                print(
                    f"{name} {label} on {chip}: fp8 kernel {ours:.0f} us, fp8 XLA {theirs:.0f} us: "
                    f"{ours / theirs:.2f}; bfloat16 kernel {bfloat16:.0f} us: "
                    f"{ours / bfloat16:.2f} (origin model)",
                    flush=True,
                )
    return int(is_slower)


if __name__ == "__main__":
    raise SystemExit(main())
