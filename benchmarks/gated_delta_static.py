"""The gated delta rule at Qwen3-Next's shape: our kernel beside the same chunks made by XLA.

    python benchmarks/gated_delta_static.py [--chips v5p,v6e,7x] [--cases 1x4096,1x8192,4x4096]
        [--passes forward,backward,both]

Static times of one device (origin model). XLA gets the better of chunks of 64 and 128 tokens. Its
backward pass computes the chunks again, as ours does; where both passes are timed as one program,
without recomputation of layers, XLA shares what they have in common and the kernel does not.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import tpukit

CHIPS = "v5p,v6e,7x"
CASES = "1x4096,1x8192,4x4096"
PASSES = "forward,backward,both"
KEY_HEADS, HEADS = 16, 32
CHUNKS = (64, 128)


def main() -> int:
    """Print a line for each case, pass and generation; 1 where XLA is the faster one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chips", default=CHIPS)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--passes", default=PASSES)
    asked = parser.parse_args()
    tpukit.configure_tpu_environment()
    from tpukit.kernels.ops.gated_delta import pallas_tpu, reference, specs, xla

    def backward(passes: Any, **options: Any) -> Callable[..., Any]:
        def run(d_out: Any, d_state: Any, *arrays: Any) -> Any:
            return passes.backward(xla.DeltaResiduals(*arrays), (d_out, d_state), **options)[:5]

        return run

    def both(passes: Any, **options: Any) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            result, residuals = passes.forward(*arrays, **options)
            return result, passes.backward(residuals, result, **options)[:5]

        return run

    is_slower = False
    for name in asked.cases.split(","):
        batch, tokens = map(int, name.split("x"))
        case = specs.case(batch, tokens, KEY_HEADS, HEADS)
        for chip in asked.chips.split(","):
            passes = {
                "forward": (
                    lambda *arrays: pallas_tpu.forward(*arrays)[0],
                    [partial(xla.gated_delta, chunk=chunk) for chunk in CHUNKS],
                ),
                "backward": (
                    backward(pallas_tpu),
                    [backward(xla, chunk=chunk) for chunk in CHUNKS],
                ),
                "both": (both(pallas_tpu), [both(xla, chunk=chunk) for chunk in CHUNKS]),
            }
            results = jax.eval_shape(reference.gated_delta, *case.arguments)
            for label in asked.passes.split(","):
                kernel, others = passes[label]
                arguments = (*results, *case.arguments) if label == "backward" else case.arguments
                ours = time_us(kernel, arguments, chip)
                theirs = [time_us(other, arguments, chip) for other in others]
                shown = ", ".join(
                    f"{us:.0f} ({chunk})" for us, chunk in zip(theirs, CHUNKS, strict=True)
                )
                ratio = ours / min(theirs)
                is_slower = is_slower or ratio > 1
                print(
                    f"{name} {label} on {chip}: kernel {ours:.0f} us, XLA {shown} us (origin "
                    f"model): {ratio:.2f}",
                    flush=True,
                )
    return int(is_slower)


def time_us(function: Callable[..., Any], arguments: tuple[Any, ...], chip: str) -> float:
    """The static time of one call.

    Raises:
        SystemExit: The compiler gave nothing to time.
    """
    from tpukit.kernels.timing import estimate_kernel

    estimate = estimate_kernel(function, arguments, chip)
    if estimate.time_s is None:
        sys.exit(f"{chip}: {estimate.reason}")
    return estimate.time_s * 1e6


if __name__ == "__main__":
    raise SystemExit(main())
